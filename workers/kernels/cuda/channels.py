"""Formats whose gate and down lie by channel (`shm/floe.py`) on a GPU: up by the CUDA kernels, so with the
host's bits, and with them its masks; the rest by torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shm.floe import FloeFormat
from shm.layout import StoreLayout
from shm.mask import Mask
from workers.kernels.cuda.buffers import Uploaded
from workers.kernels.cuda.launcher import Launcher
from workers.kernels.cuda.matrix import row_items
from workers.kernels.cuda.products import BlockProducts, Codes
from workers.kernels.reference_channels import ChannelInputs, ReferenceChannels


class CudaInputs(NamedTuple):
    """Rows of x as up takes them, on the device, and as the reference does."""

    codes: Tensor  # int8 [R, H in whole groups]
    factors: Tensor  # float32 [R, groups, 2]
    reference: ChannelInputs


class CudaChannels:
    """Computes heads and channels on the device."""

    def __init__(self, launcher: Launcher, layout: StoreLayout) -> None:
        """`launcher` has the program of the format's up matrices."""
        assert isinstance(layout.format, FloeFormat)
        self._launcher, self._format, self._hidden = launcher, layout.format, layout.shape.hidden
        self._reference = ReferenceChannels(layout)

    def activations(self, x: Tensor) -> CudaInputs:
        """x float32 [R, H]."""
        x, products, group = x.contiguous(), self._up(0), self._format.up.group
        groups = products.units(self._hidden)
        codes = torch.empty((len(x), groups * group), dtype=torch.int8, device=x.device)
        factors = torch.empty((len(x), groups, 2), dtype=torch.float32, device=x.device)
        to = Codes(codes.data_ptr(), factors.data_ptr(), groups)
        products.quantize(x.data_ptr(), len(x), self._hidden, to)
        return CudaInputs(codes, factors, self._reference.activations(x))

    def up(self, heads: Tensor, x: CudaInputs, rows: Tensor) -> Tensor:
        """u of all channels of consecutive heads, float32 [n, channels]. rows: int64 [n]."""
        channels = len(heads) // self._format.head_bytes(self._hidden, 16) * 16
        codes, factors = x.codes[rows], x.factors[rows]
        u = torch.empty((len(rows), channels), dtype=torch.float32, device=heads.device)
        if u.numel():
            items, limit = row_items(len(rows))
            upload = Uploaded(self._launcher, items, np.array([heads.data_ptr()], np.int64))
            of_items, table = upload.addresses
            of_x = Codes(codes.data_ptr(), factors.data_ptr(), factors.shape[1])
            self._up(channels).down(of_items, len(items), limit, table, of_x, u.data_ptr())
        return u

    def keeps(self, u: Tensor, mask: Mask) -> Tensor:
        """bool [n, channels]: `Mask.keeps` of each tile."""
        return self._reference.keeps(u, mask)

    def channels(self, records: Tensor, u: Tensor, x: CudaInputs, rows: Tensor) -> Tensor:
        """As of ReferenceChannels."""
        return self._reference.channels(records, u, x.reference, rows)

    def _up(self, channels: int) -> BlockProducts:
        return BlockProducts(self._launcher, self._format.up, (channels, self._hidden), tiles=False)
