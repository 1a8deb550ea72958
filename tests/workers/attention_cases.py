"""Attention's parts as formulas in float64, and numbers as a cache holds them, in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.kernels.c_types import Kept
from workers.kernels.layer import KV_BLOCK, Heads, TokenAttention
from workers.kernels.native import Library, Team

EPS = 1e-6
SPARE = 2  # blocks of a slab that no sequence has
UNTOUCHED = 77
RUN = 128  # numbers that share a scale
# Relative and absolute, of what attention gives, by bits of the cached numbers; weights are rounded to bf16,
# but for float32.
TOLERANCES = {8: (2**-7, 2**-8), 16: (2**-7, 2**-8), 32: (2e-4, 2e-5)}


def numbers(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def stored(x: np.ndarray, bits: int) -> list[np.ndarray]:
    """Float32 numbers [.., width] as streams of a cache hold them: numbers, and in int8 their scales."""
    if bits != 8:
        return [as_cached(x, bits)]
    starts = range(0, x.shape[-1], RUN)
    parts = [x[..., at : at + RUN] for at in starts]
    scales = np.stack([np.abs(part).max(axis=-1) / np.float32(127) for part in parts], axis=-1)
    codes = [np.rint(part / scales[..., n, None]).astype(np.int8) for n, part in enumerate(parts)]
    return [np.concatenate(codes, axis=-1), scales]


def restored(streams: list[np.ndarray]) -> np.ndarray:
    """Float64 numbers of `stored`."""
    if len(streams) == 1:
        return read(streams[0])
    codes, scales = streams
    return codes * np.repeat(scales.astype(np.float64), RUN, axis=-1)[..., : codes.shape[-1]]


def by_stream(caches: list[np.ndarray], bits: int) -> list[np.ndarray]:
    """Float64 numbers of each of the streams, one `stored` after the other."""
    each = 2 if bits == 8 else 1
    return [restored(caches[at : at + each]) for at in range(0, len(caches), each)]


def storing_error(x: np.ndarray, bits: int) -> float:
    """How far numbers may be from those stored."""
    return float(np.abs(x).max(initial=0)) * {8: 0.51 / 127, 16: 2**-8, 32: 1e-5}[bits]


def multiplied(q: np.ndarray, bits: int) -> np.ndarray:
    """Queries as they are multiplied by such cached numbers: not float32 are by queries in bf16."""
    return q if bits == 32 else read(as_cached(q.astype(np.float32), 16))


def as_cached(x: np.ndarray, bits: int) -> np.ndarray:
    """Float32 numbers rounded to a type."""
    if bits == 32:
        return x.copy()
    word = x.view(np.uint32)
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)


def read(cached: np.ndarray) -> np.ndarray:
    """float64 numbers of a cache."""
    if cached.dtype == np.float32:
        return cached.astype(np.float64)
    return (cached.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclass
class Paged:
    """Caches [heads, tokens, width] of one stream of some sequences, in a slab of blocks in random order, of
    which a few belong to nobody."""

    slab: np.ndarray
    tables: list[np.ndarray]  # of each sequence
    lengths: list[int]

    @classmethod
    def of(cls, caches: list[np.ndarray], tables: list[np.ndarray]) -> Paged:
        heads, _, width = caches[0].shape
        number = sum(map(len, tables)) + SPARE
        slab = np.full((number, heads, KV_BLOCK, width), UNTOUCHED, caches[0].dtype)
        for cache, table in zip(caches, tables, strict=True):
            for n, block in enumerate(table):
                part = cache[:, n * KV_BLOCK : (n + 1) * KV_BLOCK]
                slab[block, :, : part.shape[1]] = part
        return cls(slab, tables, [cache.shape[1] for cache in caches])

    def caches(self) -> list[np.ndarray]:
        """Raises AssertionError where anything else was written."""
        found = [
            np.concatenate(list(self.slab[table]), axis=1)[:, :length]
            for table, length in zip(self.tables, self.lengths, strict=True)
        ]
        assert np.array_equal(Paged.of(found, self.tables).slab, self.slab)
        return found


def tables_of(random: np.random.Generator, lengths: list[int]) -> list[np.ndarray]:
    """Block tables of sequences with room for so many tokens, each int32."""
    counts = [-(-length // KV_BLOCK) for length in lengths]
    order = random.permutation(sum(counts) + SPARE).astype(np.int32)
    return [part.copy() for part in np.split(order, np.cumsum(counts))[:-1]]


def attended(
    library: Library, team: Team | None, heads: Heads, q: np.ndarray, slabs: list[Paged], position: int
) -> np.ndarray:
    """The kernel's result [heads, value_width] for a sequence that the slabs are of alone."""
    table = slabs[0].tables[0]
    streams = np.array([paged.slab.ctypes.data for paged in slabs], np.uint64)
    out = np.full((len(q), heads.value_width), np.nan, np.float32)
    places = streams.ctypes.data, table.ctypes.data, len(table) * KV_BLOCK, position
    TokenAttention(library, team, heads, Kept())(q.ctypes.data, *places, out.ctypes.data)
    return out


def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """The first numbers are rotated, two by each angle; the others stay."""
    half = len(angles)
    a, b, rest = np.split(x, [half, 2 * half], axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin, rest), axis=-1)


def opened(heads: np.ndarray, gates: np.ndarray) -> np.ndarray:
    """Outputs of heads by their gates."""
    return heads / (1 + np.exp(-gates.astype(np.float64)))


def tables(angles: np.ndarray) -> np.ndarray:
    """Cosines and sines."""
    cos, sin = np.cos(angles), np.sin(angles)
    return np.array((np.concatenate((cos, cos)), np.concatenate((-sin, sin))), np.float32)


def normed(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    if bias is not None:
        x = x - x.mean(axis=-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * weight
    return y if bias is None else y + bias


def softmax(x: np.ndarray, sink: float | None = None) -> np.ndarray:
    """`sink`: one more score, whose weight is left out."""
    if sink is not None:
        return softmax(np.append(x, sink))[:-1]
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def grouped_inputs(
    qkv: np.ndarray,
    angles: np.ndarray,
    kv_heads: int,
    norm: str,
    weights: list[np.ndarray],
    clip: float | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A token's queries, keys and values as they are multiplied, from qkv [heads + 2 kv_heads, width]."""
    x, heads = qkv.astype(np.float64), len(qkv) - 2 * kv_heads
    q, k, v = x[:heads], x[heads : heads + kv_heads], x[heads + kv_heads :]
    if norm == "head":
        q, k = normed(q, weights[0]), normed(k, weights[1])
    elif norm == "all":
        q = normed(q.reshape(-1), weights[0]).reshape(q.shape)
        k = normed(k.reshape(-1), weights[1]).reshape(k.shape)
    if clip is not None:
        q, k, v = (np.clip(one, -clip, clip) for one in (q, k, v))
    return turned(q, angles), turned(k, angles), v
