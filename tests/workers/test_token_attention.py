"""The C kernels of one token's attention, in every variant that runs here, equal the formula in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from attention_cases import (
    EPS,
    as_cached,
    cos_sin,
    grouped_inputs,
    normed,
    numbers,
    read,
    softmax,
    tables,
    turned,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import OtherThreads

from workers.kernels.attention import NORMS, SHARED_BYTES, GroupedHeads, LatentHeads, RMSNorm
from workers.kernels.native import Library, Team, best

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[1, 3])
def team(request: pytest.FixtureRequest, library: Library) -> Iterator[Team | None]:
    made = library.team(request.param)
    yield made
    if made is not None:
        made.close()


def check_stored(
    cache: np.ndarray, position: tuple[object, ...], before: np.ndarray, new: np.ndarray
) -> None:
    """Nothing but the token's numbers was written."""
    rtol = 1e-5 if cache.dtype == np.float32 else 2**-8
    np.testing.assert_allclose(read(cache)[position], new, rtol=rtol, atol=1e-5)
    before[position] = cache[position]
    np.testing.assert_array_equal(cache, before)


def grouped(
    library, team, qkv, turns, caches, position, spin_ns, window=None, norm="", weights=None, clip=None
) -> np.ndarray:
    """The kernel's result [heads, width] for one token's `qkv` [heads + 2 * kv_heads, width]."""
    kv_heads, capacity, width = caches[0].shape
    heads = len(qkv) - 2 * kv_heads
    norms = (None, None) if weights is None else tuple(weight.ctypes.data for weight in weights)
    shape = {"bits": 8 * caches[0].itemsize, "heads": heads, "kv_heads": kv_heads, "width": width}
    norms = {"norm": norm, "query_norm": norms[0], "key_norm": norms[1], "eps": EPS}
    kernel = GroupedHeads(library, team, **shape, **norms, window=window, clip=clip)
    out = np.full((heads, width), np.nan, np.float32)
    addresses = tuple(cache.ctypes.data for cache in caches)
    where = (addresses, capacity, position, out.ctypes.data)
    kernel.attend(qkv.ctypes.data, cos_sin(turns), *where, spin_ns=spin_ns)
    return out


@FEW
@given(
    seed=st.integers(0, 1000),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 6),
    half=st.integers(1, 40),
    position=st.integers(0, 40),
    window=st.none() | st.integers(1, 50),
    bits=st.sampled_from([16, 32]),
    norm=st.sampled_from(NORMS),
    clip=st.none() | st.floats(0.1, 2.0),
)
def test_grouped_heads(
    library, team, seed, kv_heads, shared, half, position, window, bits, norm, clip
) -> None:
    random, width, heads = np.random.default_rng(seed), 2 * half, kv_heads * shared
    capacity = position + 3
    qkv = numbers(random, heads + 2 * kv_heads, width)
    caches = [as_cached(numbers(random, kv_heads, capacity, width), bits) for _ in range(2)]
    before = [cache.copy() for cache in caches]
    sizes = {"": (1, 1), "head": (width, width), "all": (heads * width, kv_heads * width)}[norm]
    weights = [numbers(random, size) for size in sizes]
    angles = random.uniform(0, 6, half)
    turns = tables(angles)

    q, k, v = grouped_inputs(qkv, angles, kv_heads, norm, weights, clip)
    out = grouped(library, team, qkv, turns, caches, position, 1000, window, norm, weights, clip)
    for cache, old, new in zip(caches, before, (k, v), strict=True):
        check_stored(cache, (slice(None), position), old, new)
    seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
    for head in range(heads):
        keys, values = (read(cache)[head // shared, seen] for cache in caches)
        wanted = softmax(keys @ q[head] * width**-0.5) @ values
        np.testing.assert_allclose(out[head], wanted, rtol=2e-4, atol=2e-5)


@FEW
@given(
    seed=st.integers(0, 1000),
    heads=st.integers(1, 5),
    rank=st.integers(1, 150),
    nope=st.integers(1, 40),
    half=st.integers(1, 20),
    value=st.integers(1, 40),
    position=st.integers(0, 40),
    bits=st.sampled_from([16, 32]),
)
def test_latent_heads(library, team, seed, heads, rank, nope, half, value, position, bits) -> None:
    """As it is defined: keys and values expanded from every cached latent."""
    random, rope = np.random.default_rng(seed), 2 * half
    q, latent = numbers(random, heads, nope + rope), numbers(random, rank + rope)
    cache = as_cached(numbers(random, position + 2, rank + rope), bits)
    before, weight = cache.copy(), numbers(random, rank)
    expansion = as_cached(numbers(random, heads, nope + value, rank) * np.float32(rank**-0.5), bits)
    angles, scale = random.uniform(0, 6, half), float((nope + rope) ** -0.5)
    turns = tables(angles)
    new = latent.astype(np.float64)
    new = np.concatenate((normed(new[:rank], weight), turned(new[rank:], angles)))
    queries = q.astype(np.float64)

    out = np.full((heads, value), np.nan, np.float32)
    shape = {"bits": bits, "heads": heads, "rank": rank, "nope": nope, "rope": rope, "value": value}
    data = {"norm": weight.ctypes.data, "expansion": expansion.ctypes.data}
    kernel = LatentHeads(library, team, **shape, **data, eps=EPS, scale=scale)
    addresses = q.ctypes.data, latent.ctypes.data, cos_sin(turns), cache.ctypes.data
    kernel.attend(*addresses, len(cache), position, out.ctypes.data, spin_ns=1000)
    check_stored(cache, (position,), before, new)
    cached, expanded = read(cache)[: position + 1], read(expansion)
    for head in range(heads):
        both = cached[:, :rank] @ expanded[head].T  # [tokens, nope + value]
        keys = np.concatenate((both[:, :nope], cached[:, rank:]), axis=1)
        query = np.concatenate((queries[head, :nope], turned(queries[head, nope:], angles)))
        wanted = softmax(keys @ query * scale) @ both[:, nope:]
        np.testing.assert_allclose(out[head], wanted, rtol=5e-4, atol=5e-5)


@FEW
@given(rows=st.integers(0, 5), width=st.integers(1, 300), seed=st.integers(0, 100))
def test_rms_norm(library, rows, width, seed) -> None:
    random = np.random.default_rng(seed)
    x, weight = numbers(random, rows, width), numbers(random, width)
    out = np.full_like(x, np.nan)
    norm = RMSNorm(library, weight.ctypes.data, width, EPS)
    norm(x.ctypes.data, rows, out.ctypes.data)
    np.testing.assert_allclose(out, normed(x.astype(np.float64), weight), rtol=1e-5, atol=1e-6)
    norm(x.ctypes.data, rows, x.ctypes.data)
    np.testing.assert_array_equal(x, out)


def test_many_tokens_are_shared_and_give_the_same_bits(library) -> None:
    """From as many bytes on as a sleeping team is worth waking for; always if its threads spin."""
    random, width, worth = np.random.default_rng(0), 64, SHARED_BYTES // (2 * 2 * 64 * 2)  # tokens
    qkv = numbers(random, 12, width)
    caches = [as_cached(numbers(random, 2, 3000, width), 16) for _ in range(2)]
    turns = tables(random.uniform(0, 6, width // 2))
    found = []
    for threads in (1, 2, 4):
        others = OtherThreads()
        made = library.team(threads)

        def attended(tokens: int, spin_ns: int = 0, window: int | None = None, made=made) -> np.ndarray:
            fresh = [cache.copy() for cache in caches]
            return grouped(library, made, qkv.copy(), turns, fresh, tokens - 1, spin_ns, window)

        found.append(attended(3000))
        if threads == 2 and library is best():
            assert others.are_woken(lambda: attended(worth))
            assert others.are_woken(lambda: attended(1, spin_ns=1))
            assert not others.are_woken(lambda: attended(worth - 1))
            assert not others.are_woken(lambda: attended(3000, window=worth - 1))
        if made is not None:
            made.close()
    assert all(np.array_equal(out, found[0]) for out in found)


def test_positions_outside_the_cache_are_refused(library) -> None:
    caches = np.zeros((2, 1, 3, 4), np.float32)
    latents, ones, turns = np.zeros((3, 6), np.float32), np.ones(16, np.float32), tables(np.zeros(1))
    kernel = LatentHeads(
        library, None, bits=32, heads=1, rank=4, nope=1, rope=2, value=1,
        norm=ones.ctypes.data, expansion=ones.ctypes.data, eps=EPS, scale=1.0,
    )  # fmt: skip
    out, addresses = np.zeros(1, np.float32), (ones.ctypes.data, ones.ctypes.data, cos_sin(turns))
    for position in (-1, 3, 1000):
        with pytest.raises(IndexError, match="outside the KV cache"):
            grouped(library, None, numbers(np.random.default_rng(0), 3, 4), turns, caches, position, 0)
        with pytest.raises(IndexError, match="outside the KV cache"):
            kernel.attend(*addresses, latents.ctypes.data, 3, position, out.ctypes.data, spin_ns=0)
    assert not caches.any()
    assert not latents.any()


def test_many_latents_are_shared() -> None:
    """From as many bytes on, of latents and expansion, as a sleeping team is worth waking for."""
    library, heads, rank, rope = best(), 2, 62, 2
    if library is None:
        pytest.skip("no C kernels were compiled")
    tokens = -(-(SHARED_BYTES - heads * 2 * rank * 2) // ((rank + rope) * 2))
    random, others = np.random.default_rng(0), OtherThreads()
    cache, expansion = (as_cached(numbers(random, n), 16) for n in (tokens * (rank + rope), heads * 2 * rank))
    q, latent, weight = numbers(random, heads, 1 + rope), numbers(random, rank + rope), numbers(random, rank)
    turns, out, team = tables(random.uniform(0, 6, 1)), np.empty(heads, np.float32), library.team(2)
    kernel = LatentHeads(
        library, team, bits=16, heads=heads, rank=rank, nope=1, rope=rope, value=1,
        norm=weight.ctypes.data, expansion=expansion.ctypes.data, eps=EPS, scale=1.0,
    )  # fmt: skip
    addresses = q.ctypes.data, latent.ctypes.data, cos_sin(turns), cache.ctypes.data, tokens
    assert others.are_woken(lambda: kernel.attend(*addresses, tokens - 1, out.ctypes.data, spin_ns=0))
    assert not others.are_woken(lambda: kernel.attend(*addresses, tokens - 2, out.ctypes.data, spin_ns=0))
    assert team is not None
    team.close()
