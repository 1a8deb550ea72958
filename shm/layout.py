"""The bytes of expert weights: tiles, formats, and where each tile lies in the store.

An expert has gate [I, H], up [I, H] and down [H, I], or no gate, and perhaps biases of gate and up [I];
`shm/expert_math.py` says what it computes. Its intermediate axis I is padded to `tiles * tile` channels (zero
weights: the result is exact) and cut into equal tiles. A tile is one contiguous range of bytes holding its
channels' rows of gate and up, their columns of down, and their biases. An expert is its tiles in order; in
the store each expert starts on a page.

A format may put a part of each tile, its head, elsewhere (`shm/floe.py`). Then a layer begins with the heads
of all of its experts, one range that a device can keep as a whole; an expert's heads are its tiles' in order,
then up's biases (float32 [tiles * tile]) if it has any, and start on a page:

    layer:  | heads of expert 0 | heads of expert 1 | ... | tiles of expert 0 | tiles of expert 1 | ...

Only a format class knows a tile's bytes: `shm/formats.py` draws those of the plain formats, `shm/fp8.py` and
`shm/blocks.py` those of the quantized ones, `shm/floe.py` those that are read by channel. A format has two
consumers, the host kernels and the device; both read those bytes. Adding a format is adding its class to
FORMATS and its kernel to `workers/kernels`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np

from shm.blocks import FILE_FORMATS, BlockFormat, FileFormat, Int2, Int4, Int8
from shm.errors import UnknownFormat
from shm.expert_math import SWIGLU, ExpertMath, math_of
from shm.floe import FLOE_FORMATS, FloeFormat
from shm.formats import BF16, F32, NO_HEAD, Bytes, Float32, MatrixFormat, TileFormat, there
from shm.fp8 import FP8

__all__ = [  # beside what is defined here
    "BF16",
    "FP8",
    "NO_HEAD",
    "BlockFormat",
    "Bytes",
    "FileFormat",
    "Float32",
    "FloeFormat",
    "Int4",
    "MatrixFormat",
    "TileFormat",
]

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
    math: ExpertMath = SWIGLU

    def __post_init__(self) -> None:
        if min(self.layers, self.experts, self.hidden, self.intermediate, self.tile) < 1:
            raise ValueError(f"an expert shape needs positive sizes, not {self}")

    def plain(self) -> dict[str, Any]:
        """A dict of plain values, for `shape_of`."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return sizes | {"math": self.math.plain()}

    @property
    def tiles(self) -> int:
        """Returns n, the number of tiles of one expert."""
        return -(-self.intermediate // self.tile)

    @property
    def padded(self) -> int:
        """Returns I, an expert's channels, rounded up to whole tiles."""
        return self.tiles * self.tile


def shape_of(plain: Mapping[str, Any]) -> ExpertShape:
    """The shape that `ExpertShape.plain` describes. Raises KeyError, TypeError or ValueError for others."""
    sizes = {name: int(value) for name, value in plain.items() if name != "math"}
    return ExpertShape(**sizes, math=math_of(plain["math"]))


DENSE: dict[str, TileFormat] = {  # no heads
    f.name: f for f in (F32(), BF16(), FP8(), Int8(), Int4(64), Int4(128), Int2(64), *FILE_FORMATS)
}
FORMATS: dict[str, TileFormat] = DENSE | {f.name: f for f in FLOE_FORMATS}


def format_named(name: str) -> TileFormat:
    """Raises UnknownFormat, which lists the known names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnknownFormat(f"unknown format {name!r} (supported: {', '.join(FORMATS)})") from None


def suitable_tile(hidden: int, intermediate: int, tile_format: TileFormat, math: ExpertMath = SWIGLU) -> int:
    """Channels of a tile that suit experts of H = hidden and I = intermediate: enough of them, up to three
    times as many or down to a third where that leaves less padding."""

    def nbytes(tile: int) -> int:
        return tile_format.head_bytes(hidden, tile) + tile_format.tile_bytes(hidden, tile, math)

    step = lcm(TILE_STEP, tile_format.granularity)
    if intermediate % (2 * step) == 0:
        half = nbytes(intermediate // 2)
        if HALF_BYTES <= half < TILE_BYTES // 2:
            return intermediate // 2
    whole = -(-intermediate // tile_format.granularity) * tile_format.granularity
    least = TILE_BYTES * step // nbytes(step)
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
        """Bytes of a tile, without its head."""
        return self.format.tile_bytes(self.shape.hidden, self.shape.tile, self.shape.math)

    @property
    def head_bytes(self) -> int:
        """Bytes of a tile's head; 0 for a format without heads."""
        return self.format.head_bytes(self.shape.hidden, self.shape.tile)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert without the padding between experts: its tiles and their heads."""
        return self.tile_bytes * self.shape.tiles + self.heads_bytes

    @property
    def heads_bytes(self) -> int:
        """Bytes of an expert's heads and of up's biases behind them; 0 for a format without heads."""
        return self.up_biases + (4 * self.shape.padded if self.head_bytes and self.shape.math.bias else 0)

    @property
    def up_biases(self) -> int:
        """The offset in bytes of up's biases behind the beginning of an expert's heads."""
        return self.head_bytes * self.shape.tiles

    @property
    def head_stride(self) -> int:
        """Bytes from one expert's heads to the next's, in whole pages; 0 for a format without heads."""
        return -(-self.heads_bytes // PAGE) * PAGE

    @property
    def expert_stride(self) -> int:
        """Bytes from one expert's tiles to the next's, in whole pages."""
        return -(-self.tile_bytes * self.shape.tiles // PAGE) * PAGE

    @property
    def layer_stride(self) -> int:
        return self.expert_pages * self.shape.experts

    @property
    def total_bytes(self) -> int:
        return self.layer_stride * self.shape.layers

    def offset(self, layer: int, expert: int, tile: int = 0) -> int:
        """Byte offset of a tile. Raises IndexError outside the shape."""
        self._check(layer, expert, tile)
        first = layer * self.layer_stride + self.head_stride * self.shape.experts
        return first + expert * self.expert_stride + tile * self.tile_bytes

    def head_offset(self, layer: int, expert: int, tile: int = 0) -> int:
        """Byte offset of a tile's head. Raises IndexError outside the shape."""
        self._check(layer, expert, tile)
        return layer * self.layer_stride + expert * self.head_stride + tile * self.head_bytes

    def ranges(self, layer: int, expert: int) -> tuple[tuple[int, int], ...]:
        """Where all of an expert lies, in whole pages that are its own: its heads, if it has any, and its
        tiles; the byte offset and the size of each. Raises IndexError outside the shape."""
        heads = (self.head_offset(layer, expert), self.head_stride)
        tiles = (self.offset(layer, expert), self.expert_stride)
        return (heads, tiles) if self.head_stride else (tiles,)

    @property
    def expert_pages(self) -> int:
        """Bytes of all pages of one expert."""
        return self.head_stride + self.expert_stride

    def before(self, layer: int, expert: int) -> int:
        """Bytes of the store that the experts before this one have, their heads included: how far a loader
        has come that does one expert after the other."""
        self._check(layer, expert, 0)
        return layer * self.layer_stride + expert * self.expert_pages

    def _check(self, layer: int, expert: int, tile: int) -> None:
        s = self.shape
        if not (0 <= layer < s.layers and 0 <= expert < s.experts and 0 <= tile <= s.tiles):
            raise IndexError(f"no tile {tile} of expert {expert} in layer {layer}")

    def encode_expert(
        self,
        gate: Float32 | None,
        up: Float32,
        down: Float32,
        out: Bytes,
        heads: Bytes = NO_HEAD,
        biases: Sequence[Float32] = (),
    ) -> None:
        """Write all tiles of one expert. gate (None: ungated), up [I, H]; down [H, I]; out uint8
        [expert_stride], heads uint8 [head_stride]; biases [I] of gate, unless ungated, and of up."""
        s = self.shape
        if (gate is not None, len(biases)) != (s.math.gated, s.math.biases):
            raise ValueError(f"these are no matrices of {s.math}")
        self.clear_padding(out, heads)
        if isinstance(self.format, BlockFormat):
            factors = [self.format.factor_of(w) for w in there(gate, up, down)]
        for tile in range(s.tiles):
            lo, hi = tile * s.tile, min((tile + 1) * s.tile, s.intermediate)
            padding = ((0, s.tile - (hi - lo)), (0, 0))
            of_gate = None if gate is None else np.pad(gate[lo:hi], padding)
            of_up, of_down = np.pad(up[lo:hi], padding), np.pad(down[:, lo:hi].T, padding)
            body, head = self.tile_of(out, heads, tile)
            if isinstance(self.format, BlockFormat):
                self.format.encode_tile(there(of_gate, of_up, of_down.T), factors, body)
            else:
                self.format.encode(of_gate, of_up, of_down, body, head)
            for part, numbers in zip(self.biases_of(out, heads, tile), biases, strict=True):
                part[: hi - lo] = numbers[lo:hi]

    def biases_of(self, out: Bytes, heads: Bytes, tile: int) -> tuple[Float32, ...]:
        """The biases of a tile's channels, gate's, unless ungated, and up's: views float32 [T] of an expert's
        uint8 [expert_stride] and [head_stride]; none without biases."""
        s = self.shape
        if not s.math.bias:
            return ()
        body, _ = self.tile_of(out, heads, tile)
        in_tile = tuple(self.format.biases(body, s.hidden, s.tile, s.math))
        if not self.head_bytes:
            return in_tile
        up = heads[self.up_biases : self.heads_bytes].view("<f4")
        return (*in_tile, up[tile * s.tile : (tile + 1) * s.tile])

    def tile_of(self, out: Bytes, heads: Bytes, tile: int) -> tuple[Bytes, Bytes]:
        """Returns a tile and its head, as views of an expert's uint8 [expert_stride] and [head_stride]."""
        begin, head = tile * self.tile_bytes, tile * self.head_bytes
        return out[begin : begin + self.tile_bytes], heads[head : head + self.head_bytes]

    def clear_padding(self, out: Bytes, heads: Bytes) -> None:
        """Zero what is no matrix's: the factors, the biases, and the expert's end."""
        self.clear_end(out, heads)
        for tile in range(self.shape.tiles):
            self.clear_tile(self.tile_of(out, heads, tile)[0])

    def clear_end(self, out: Bytes, heads: Bytes) -> None:
        """Zero what follows an expert's tiles, and their heads, up to the next expert's."""
        out[self.tile_bytes * self.shape.tiles :] = 0
        heads[self.head_bytes * self.shape.tiles :] = 0

    def clear_tile(self, tile: Bytes) -> None:
        """Zero a tile's factors and biases."""
        s = self.shape
        if s.math.bias or self.format.factors:
            self.format.beside_matrices(tile, s.hidden, s.tile, s.math)[:] = 0


# ----------------------------------------------------------------------------------------------------------
# A part of a model's experts: the lanes that one machine of several holds.
#
# A lane is a fixed slice of every expert: its tiles [bounds[k], bounds[k + 1]). A part is a store of
# narrower experts, whose tiles are those of its lanes, the lowest first; everything that computes on stores
# computes on parts. Their bytes are those of the whole store's tiles.


@dataclass(frozen=True)
class Part:
    """The lanes that a store holds."""

    bounds: tuple[int, ...]  # of all lanes, in tiles: from 0 to the tiles of an expert
    held: tuple[int, ...]  # lanes, ascending

    def __post_init__(self) -> None:
        rising = len(self.bounds) > 1 and all(low < high for low, high in pairwise(self.bounds))
        if self.bounds[:1] != (0,) or not rising:
            raise ValueError(f"lanes need ascending bounds that begin with 0, not {self.bounds}")
        known = all(0 <= lane < len(self.bounds) - 1 for lane in self.held)
        if not self.held or not known or list(self.held) != sorted(set(self.held)):
            raise ValueError(f"{self.held} are no lanes of {len(self.bounds) - 1}, ascending, at least one")

    @property
    def whole(self) -> bool:
        """Returns whether every lane is held."""
        return len(self.held) == len(self.bounds) - 1

    def tiles(self, lane: int) -> int:
        """Returns the tiles of a lane, held or not."""
        return self.bounds[lane + 1] - self.bounds[lane]

    def first(self, lane: int) -> int:
        """Returns the first tile of a held lane in this part's store."""
        return sum(self.tiles(other) for other in self.held if other < lane)

    def tile_in_model(self, tile: int) -> int:
        """Returns which tile of the whole expert a tile of this part's store is. Raises IndexError."""
        for lane in self.held:
            if tile < self.tiles(lane):
                return self.bounds[lane] + tile
            tile -= self.tiles(lane)
        raise IndexError("no such tile in this part")

    def channels(self, shape: ExpertShape) -> list[tuple[int, int]]:
        """Returns the channels [begin, end) of each held lane among those of a whole expert. `shape`: of this
        part's store, which has no padding but behind its last channel."""
        ranges, left = [], shape.intermediate
        for lane in self.held:
            begin, count = self.bounds[lane] * shape.tile, min(self.tiles(lane) * shape.tile, left)
            ranges.append((begin, begin + count))
            left -= count
        return ranges

    def narrowed(self, shape: ExpertShape) -> ExpertShape:
        """Returns the shape of this part's store, of a model's whole experts. Raises ValueError where the
        lanes do not cover them exactly."""
        if self.bounds[-1] != shape.tiles:
            raise ValueError(f"lanes of {self.bounds[-1]} tiles for experts of {shape.tiles}")
        ends = [min(bound * shape.tile, shape.intermediate) for bound in self.bounds]
        return replace(shape, intermediate=sum(ends[lane + 1] - ends[lane] for lane in self.held))

    def fingerprint(self, whole: str) -> str:
        """Returns the fingerprint of this part's store, of the whole store's: 64 hex digits."""
        if self.whole:
            return whole
        facts = f"{whole} {self.bounds} {self.held}".encode()
        return hashlib.blake2b(facts, digest_size=32).hexdigest()

    def plain(self) -> dict[str, Any]:
        """Returns a dict of plain values, for `part_of`."""
        return {"bounds": list(self.bounds), "held": list(self.held)}


def part_of(plain: Any) -> Part | None:
    """Returns the part that `Part.plain` describes; None of None. Raises KeyError, TypeError or ValueError
    for others."""
    if plain is None:
        return None
    bounds, held = (tuple(int(number) for number in plain[name]) for name in ("bounds", "held"))
    return Part(bounds, held)
