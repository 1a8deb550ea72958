"""The bytes of expert weights: tiles, formats, and where each tile lies in the store.

An expert is a SwiGLU block: gate [I, H], up [I, H], down [H, I]; y = down @ (silu(gate x) * (up x)).
Its intermediate axis I is padded to `tiles * tile` channels (zero weights: the result is exact) and cut
into equal tiles. A tile is one contiguous range of bytes holding its channels' rows of gate and up and
their columns of down. An expert is its tiles in order; in the store each expert starts on a page.

Only a format class knows a tile's bytes: `shm/formats.py` draws those of the plain formats, `shm/blocks.py`
those of the quantized ones. A format has two consumers, the host kernels and the device; both read those
bytes. Adding a format is adding its class to FORMATS and its kernel to `workers/kernels`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shm.blocks import BlockFormat, Int4, Int8
from shm.errors import UnknownFormat
from shm.formats import BF16, F32, Bytes, Float32, TileFormat

__all__ = ["BF16", "BlockFormat", "Bytes", "Float32", "Int4", "TileFormat"]  # beside what is defined here

PAGE = 4096
# A tile should be large enough that starting its kernel or its copy costs little, small enough that one
# expert can be shared by all cores and computed while the rest of it is still being copied.
TILE_BYTES = 1 << 20  # at least
TILES_PER_EXPERT = 16  # at most
TILE_STEP = 32  # channels; an automatic tile is a multiple of it
# An expert of less than one tile is halved, so that it can be resident in part, unless a half's kernel would
# mostly be its start.
HALF_BYTES = 1 << 15
PADDING = 0.03  # of an expert that may be padding
REACH = 3  # times too large or too small a tile is still better than padding


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


FORMATS: dict[str, TileFormat] = {f.name: f for f in (F32(), BF16(), Int8(), Int4(64), Int4(128))}


def format_named(name: str) -> TileFormat:
    """Raises UnknownFormat, which lists the known names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnknownFormat(f"unknown format {name!r} (supported: {', '.join(FORMATS)})") from None


def suitable_tile(hidden: int, intermediate: int, tile_format: TileFormat) -> int:
    """Channels of a tile that suit experts of H = hidden and I = intermediate: enough of them, up to three
    times as many or down to a third where that leaves less padding."""
    step = math.lcm(TILE_STEP, tile_format.granularity)
    if intermediate % (2 * step) == 0:
        half = tile_format.tile_bytes(hidden, intermediate // 2)
        if HALF_BYTES <= half < TILE_BYTES // 2:
            return intermediate // 2
    whole = -(-intermediate // tile_format.granularity) * tile_format.granularity
    least = TILE_BYTES * step // tile_format.tile_bytes(hidden, step)
    enough = min(max(least, -(-intermediate // TILES_PER_EXPERT)), whole)
    first, last = (-(-size // step) * step for size in (-(-enough // REACH), enough))
    sizes = {min(size, whole) for size in range(first, max(last, REACH * enough) + 1, step)}
    # A larger one is suitable only without padding, and cuts an expert into few tiles.
    sizes |= {whole // n for n in range(1, TILES_PER_EXPERT) if n == 1 or whole % (n * step) == 0}

    def unsuited(size: int) -> tuple[bool, bool, bool, int]:
        padding = -(-whole // size) * size - whole
        far = not enough <= REACH * size <= REACH * REACH * enough
        return far or padding > PADDING * whole, padding > 0, size < enough, abs(size - enough)

    return min(sorted(size for size in sizes if REACH * size >= enough), key=unsuited)


@dataclass(frozen=True)
class StoreLayout:
    """The offset of every tile, relative to the first byte after the store's header and manifest."""

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
