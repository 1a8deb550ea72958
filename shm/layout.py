"""The bytes of expert weights: tiles, formats, and where each tile lies in the store.

An expert is a SwiGLU block: gate [I, H], up [I, H], down [H, I]; y = down @ (silu(gate x) * (up x)).
Its intermediate axis I is padded to `tiles * tile` channels (zero weights: the result is exact) and cut
into equal tiles. A tile is one contiguous range of bytes holding its channels' rows of gate and up and
their columns of down. An expert is its tiles in order; in the store each expert starts on a page.

    plain formats (f32, bf16), one tile of T channels:

        byte 0               T*H*s                2*T*H*s              3*T*H*s
        | gate rows [T, H]   | up rows [T, H]     | down columns [T, H] |     s = bytes of one number

    all row-major, down transposed so that the tile's part of y is `a @ D`, a = silu(gate x) * (up x).

Only a format class knows these bytes. A format has two consumers, the host kernels and the device; both
read the layout drawn above. Adding a format is adding a class here and its kernel in `workers/kernels`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shm.errors import UnknownFormat

PAGE = 4096
ENCODED_ROWS = 8  # rounded at a time, so that the steps in between stay in the processor's cache

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of one model, and the tile they are cut into."""

    layers: int
    experts: int  # a layer
    hidden: int  # H
    intermediate: int  # I, unpadded
    tile: int  # channels of one tile

    def __post_init__(self) -> None:
        if min(self.layers, self.experts, self.hidden, self.intermediate, self.tile) < 1:
            raise ValueError(f"an expert shape needs positive sizes, not {self}")

    @property
    def tiles(self) -> int:
        """n: tiles of one expert."""
        return -(-self.intermediate // self.tile)

    @property
    def padded(self) -> int:
        """I padded to whole tiles."""
        return self.tiles * self.tile


class TileFormat(ABC):
    """How one tile's numbers become bytes. Stateless."""

    name: str

    @abstractmethod
    def tile_bytes(self, hidden: int, tile: int) -> int:
        """Bytes of one tile of `tile` channels."""

    @abstractmethod
    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes) -> None:
        """Write one tile. gate and up [T, H], down [T, H] (already transposed), out uint8 [tile_bytes]."""

    @abstractmethod
    def decode(self, data: Bytes, hidden: int, tile: int) -> Float32:
        """The tile's numbers as float32 [3, T, H]: gate, up, down transposed. For tests and tools; the
        kernels read the bytes themselves."""


class F32(TileFormat):
    """IEEE binary32, little endian, drawn above with s = 4."""

    name = "f32"

    def tile_bytes(self, hidden: int, tile: int) -> int:
        return 3 * tile * hidden * 4

    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes) -> None:
        np.stack((gate, up, down), out=out.view("<f4").reshape(3, *gate.shape))

    def decode(self, data: Bytes, hidden: int, tile: int) -> Float32:
        return data.view("<f4").reshape(3, tile, hidden)


class BF16(TileFormat):
    """bfloat16 (the upper half of binary32, rounded to nearest even), little endian, s = 2."""

    name = "bf16"

    def tile_bytes(self, hidden: int, tile: int) -> int:
        return 3 * tile * hidden * 2

    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes) -> None:
        target = out.view("<u2").reshape(3, *gate.shape)
        for part, values in zip(target, (gate, up, down), strict=True):
            for lo in range(0, len(values), ENCODED_ROWS):
                part[lo : lo + ENCODED_ROWS] = round_to_bf16(values[lo : lo + ENCODED_ROWS])

    def decode(self, data: Bytes, hidden: int, tile: int) -> Float32:
        halves = data.view("<u2").reshape(3, tile, hidden)
        return (halves.astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: Float32) -> NDArray[np.uint16]:
    """The bfloat16 bit patterns of float32 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    rounded = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    return rounded.astype(np.uint16)


FORMATS: dict[str, TileFormat] = {f.name: f for f in (F32(), BF16())}


def format_named(name: str) -> TileFormat:
    """Raises UnknownFormat, naming those there are."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnknownFormat(f"unknown format {name!r}; there are {', '.join(FORMATS)}") from None


@dataclass(frozen=True)
class StoreLayout:
    """Where every tile lies, relative to the first byte after the store's header and manifest."""

    shape: ExpertShape
    format: TileFormat

    @property
    def tile_bytes(self) -> int:
        return self.format.tile_bytes(self.shape.hidden, self.shape.tile)

    @property
    def expert_stride(self) -> int:
        """Bytes from one expert to the next: its tiles, padded to a page."""
        return -(-self.tile_bytes * self.shape.tiles // PAGE) * PAGE

    @property
    def layer_stride(self) -> int:
        return self.expert_stride * self.shape.experts

    @property
    def total_bytes(self) -> int:
        return self.layer_stride * self.shape.layers

    def offset(self, layer: int, expert: int, tile: int = 0) -> int:
        """Byte offset of a tile. Raises IndexError outside the shape."""
        s = self.shape
        if not (0 <= layer < s.layers and 0 <= expert < s.experts and 0 <= tile <= s.tiles):
            raise IndexError(f"no tile {tile} of expert {expert} in layer {layer}")
        return layer * self.layer_stride + expert * self.expert_stride + tile * self.tile_bytes

    def encode_expert(self, gate: Float32, up: Float32, down: Float32, out: Bytes) -> None:
        """Write all tiles of one expert. gate, up [I, H]; down [H, I]; out uint8 [expert_stride]."""
        s = self.shape
        out[self.tile_bytes * s.tiles :] = 0
        for tile in range(s.tiles):
            lo, hi = tile * s.tile, min((tile + 1) * s.tile, s.intermediate)
            parts = (gate[lo:hi], up[lo:hi], down[:, lo:hi].T)
            if hi - lo < s.tile:
                padding = ((0, s.tile - (hi - lo)), (0, 0))
                parts = (np.pad(parts[0], padding), np.pad(parts[1], padding), np.pad(parts[2], padding))
            start = tile * self.tile_bytes
            self.format.encode(*parts, out[start : start + self.tile_bytes])
