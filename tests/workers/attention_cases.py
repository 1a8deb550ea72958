"""Attention's parts as formulas in float64, and numbers as a cache holds them."""

from __future__ import annotations

import numpy as np

EPS = 1e-6


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
