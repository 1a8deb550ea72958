"""Attention's parts as formulas in float64, and numbers as a cache holds them, in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.kernels.layer import KV_BLOCK

EPS = 1e-6
SPARE = 2  # blocks of a slab that no sequence has
UNTOUCHED = 77


def numbers(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def as_cached(x: np.ndarray, bits: int) -> np.ndarray:
    """Float32 numbers as a cache of this type holds them."""
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
