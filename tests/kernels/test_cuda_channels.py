"""up of the formats whose gate and down lie by channel, by the emulated CUDA kernels: the host's bits, and so
its masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_layers import host, same
from emulated_cuda import EmulatedLauncher, library
from quantized_cases import KINDS

from shm.floe import FloeFormat
from shm.layout import ExpertShape, StoreLayout, format_named
from shm.mask import Mask
from workers.kernels.channels import ChannelKernel
from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.matrix import CudaChannels
from workers.kernels.reference import ReferenceChannels


@pytest.mark.parametrize(
    ("name", "kind"), [("floe-int4", "swiglu"), ("floe-u4", "swiglu"), ("floe-u4", "clamped")]
)
def test_up_and_masks_are_those_of_the_host(name: str, kind: str) -> None:
    random, form = np.random.default_rng(1), format_named(name)
    assert isinstance(form, FloeFormat)
    layout = StoreLayout(ExpertShape(1, 1, 100, 96, 48, KINDS[kind]), form)
    biases = random.standard_normal(96).astype(np.float32) if layout.shape.math.bias else None
    of_up = None if biases is None else torch.from_numpy(biases)
    heads = np.empty(2 * layout.head_bytes, np.uint8)
    records = np.zeros(2 * layout.tile_bytes, np.uint8)
    for tile in range(2):
        gate, up, down = (random.standard_normal((48, 100)).astype(np.float32) for _ in range(3))
        of_head, of_body = (part.reshape(2, -1)[tile] for part in (heads, records))
        form.encode(gate, up, down, of_body, of_head)
    x = random.standard_normal((12, 100)).astype(np.float32)
    gpu = CudaChannels(EmulatedLauncher(library(Program.of_blocks(form.up, fused=True))), layout)
    reference, cpu = ReferenceChannels(layout), ChannelKernel(host("fused"), form, 100, None)
    on_gpu, in_torch, on_host = gpu.activations(torch.from_numpy(x)), torch.from_numpy(x), cpu.activations(x)
    for rows in ([3], [0, 1, 5], list(range(12))):
        chosen = torch.tensor(rows)
        u = gpu.up(torch.from_numpy(heads), on_gpu, chosen, of_up)
        same(u.numpy(), cpu.up(heads, on_host, np.array(rows, np.int32), biases))
        for mask in (Mask(0.5, 1), Mask(0, 0.3)):
            assert torch.equal(gpu.keeps(u, mask), reference.keeps(u, mask))
        y = gpu.channels(torch.from_numpy(records), u, on_gpu, chosen)
        assert torch.equal(
            y, reference.channels(torch.from_numpy(records), u, reference.activations(in_torch), chosen)
        )
