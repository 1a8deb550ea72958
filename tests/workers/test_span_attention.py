"""The C kernels of many tokens' attention, in every variant that runs here, equal the formula in float64; a
token's bits do not depend on the tokens that come with it."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import (
    EPS,
    TOLERANCES,
    Paged,
    by_stream,
    grouped_inputs,
    multiplied,
    numbers,
    opened,
    softmax,
    stored,
    storing_error,
    tables,
    tables_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.kernels.c_types import Kept
from workers.kernels.layer import KV_BLOCK, QK_NORMS, Grouped, SpanKernel
from workers.kernels.native import Library, Team

FEW = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def spans(
    library: Library,
    team: Team | None,
    qkv: np.ndarray,
    turns: np.ndarray,
    caches: list[np.ndarray],
    position: int,
    counts: list[int],
    **facts: object,
) -> np.ndarray:
    """The kernel's result [tokens, heads, width] for qkv [tokens, heads + 2 kv_heads, width], after as many
    gates as queries where the facts say so, in calls of so many tokens each. The caches [kv_heads, tokens,
    width] are changed."""
    kv_heads, room, width = caches[0].shape
    table = tables_of(np.random.default_rng(0), [room])
    slabs = [Paged.of([cache], table) for cache in caches]
    streams = np.array([paged.slab.ctypes.data for paged in slabs], np.uint64)
    heads = (qkv.shape[1] - 2 * kv_heads) // (2 if facts.get("gated") else 1)
    shape = {"bits": 8 * caches[0].itemsize, "heads": heads, "kv_heads": kv_heads, "width": width}
    shape["rope"] = turns.shape[2]
    kernel = SpanKernel(library, team, Grouped(**shape, eps=EPS, scale=width**-0.5, **facts), Kept())
    out = np.full((len(qkv), heads, width), np.nan, np.float32)
    capacity, done = len(table[0]) * KV_BLOCK, 0
    try:
        for count in counts:
            where = turns[0, done:].ctypes.data, turns[1, done:].ctypes.data
            places = streams.ctypes.data, table[0].ctypes.data, capacity, position + done
            kernel(qkv[done:].ctypes.data, where, *places, count, out[done:].ctypes.data)
            done += count
    finally:
        for cache, paged in zip(caches, slabs, strict=True):
            cache[:] = paged.caches()[0]
    return out


@FEW
@given(
    seed=st.integers(0, 1000),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 6),
    half=st.integers(1, 40),
    still=st.sampled_from([0, 0, 1, 40]),  # numbers of a head that are not rotated
    gated=st.booleans(),
    position=st.integers(0, 150),
    counts=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 150),
    bits=st.sampled_from([8, 16, 32]),
    norm=st.sampled_from(QK_NORMS),
    clip=st.none() | st.floats(0.1, 2.0),
    sink=st.none() | st.sampled_from([0.0, -40.0, 30.0]),
)
def test_spans(
    library, seed, kv_heads, shared, half, still, gated, position, counts, window, bits, norm, clip, sink
) -> None:
    random, heads, tokens = np.random.default_rng(seed), kv_heads * shared, sum(counts)
    width = 2 * half + still
    qkv = numbers(random, tokens, heads * (1 + gated) + 2 * kv_heads, width)
    gates = qkv[:, : heads * gated].copy()
    drawn = [numbers(random, kv_heads, position + tokens + 3, width) for _ in range(2)]
    caches = [part for x in drawn for part in stored(x, bits)]
    before = [cache.copy() for cache in caches]
    sizes = {"": (1, 1), "head": (width, width), "all": (heads * width, kv_heads * width)}[norm]
    weights = [numbers(random, size) for size in sizes]
    angles = random.uniform(0, 6, (tokens, half))
    turns = np.ascontiguousarray(np.stack([tables(each) for each in angles], axis=1))
    facts = {"normed": QK_NORMS.index(norm), "clip": clip or 0, "window": window or 0, "gated": gated}
    facts |= {"query_norm": weights[0].ctypes.data, "key_norm": weights[1].ctypes.data}
    sinks = None if sink is None else sink + numbers(random, heads)
    facts |= {"sinks": None if sinks is None else sinks.ctypes.data}
    inputs = [
        grouped_inputs(x[heads * gated :], each, kv_heads, norm, weights, clip)
        for x, each in zip(qkv, angles, strict=True)
    ]

    team = library.team(3)
    whole = spans(library, team, qkv.copy(), turns, [c.copy() for c in caches], position, [tokens], **facts)
    if team is not None:
        team.close()
    found = spans(library, None, qkv, turns, caches, position, counts, **facts)
    np.testing.assert_array_equal(whole, found)
    placed = slice(position, position + tokens)
    for cache, old in zip(caches, before, strict=True):
        old[:, placed] = cache[:, placed]
        np.testing.assert_array_equal(cache, old)
    keys, values = by_stream(caches, bits)
    for stream, new in ((keys, 1), (values, 2)):
        wanted = np.stack([each[new] for each in inputs], axis=1)  # [kv_heads, tokens, width]
        if bits == 8:
            np.testing.assert_allclose(stream[:, placed], wanted, atol=storing_error(wanted, bits))
        else:
            rtol = 1e-5 if bits == 32 else 2**-8
            np.testing.assert_allclose(stream[:, placed], wanted, rtol=rtol, atol=1e-5)
    for token in range(0, tokens, 7):
        end = position + token + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for head in range(heads):
            scores = keys[head // shared, seen] @ multiplied(inputs[token][0][head], bits) * width**-0.5
            wanted = softmax(scores, None if sinks is None else sinks[head]) @ values[head // shared, seen]
            wanted = opened(wanted, gates[token, head]) if gated else wanted
            np.testing.assert_allclose(found[token, head], wanted, *TOLERANCES[bits])


def test_tokens_outside_the_cache_are_refused(library) -> None:
    random = np.random.default_rng(0)
    caches = [np.zeros((1, KV_BLOCK, 4), np.float32) for _ in range(2)]
    turns = np.stack([tables(np.zeros(2))] * 4, axis=1)
    for position, count in ((-1, 2), (KV_BLOCK - 3, 4), (KV_BLOCK, 1), (1000, 1)):
        with pytest.raises(IndexError, match="outside the KV cache"):
            spans(library, None, numbers(random, 4, 3, 4), turns, caches, position, [count])
    assert not any(cache.any() for cache in caches)


def test_what_is_not_a_number_stays_in_its_token(library) -> None:
    """Infinite scores give NaN, as the formula does, and only where they are seen."""
    random, width = np.random.default_rng(0), 8
    qkv = numbers(random, 70, 3, width)
    turns = np.stack([tables(np.zeros(width // 2))] * 70, axis=1)
    caches = [np.zeros((1, 70, width), np.float32) for _ in range(2)]
    qkv[66, 0] = np.nan
    found = spans(library, None, qkv, turns, caches, 0, [70])
    assert np.isnan(found[66]).all()
    assert np.isfinite(np.delete(found, 66, axis=0)).all()
