"""Attention of one token on given queries in C, in every variant that runs here, equals the formula in
float64, and its bits do not depend on the number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import (
    TOLERANCES,
    Paged,
    attended,
    by_stream,
    multiplied,
    numbers,
    softmax,
    stored,
    tables_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.kernels.layer import KV_BLOCK, Heads

FEW = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(
    seed=st.integers(0, 1000),
    kv_heads=st.integers(1, 3),
    shared=st.sampled_from([1, 2, 5, 8, 37]),
    widths=st.tuples(st.integers(1, 200), st.integers(1, 150) | st.sampled_from([64, 128])),
    latent=st.booleans(),
    position=st.integers(0, 700),
    window=st.none() | st.integers(1, 300),
    bits=st.sampled_from([8, 16, 32]),
    sink=st.none() | st.sampled_from([0.0, -40.0, 30.0]),
)
def test_a_token(library, seed, kv_heads, shared, widths, latent, position, window, bits, sink) -> None:
    random, heads, scale = np.random.default_rng(seed), kv_heads * shared, widths[0] ** -0.5
    widths = (widths[0], min(widths)) if latent else widths
    q, room = numbers(random, heads, widths[0]), position + 3
    given_widths = widths[: 2 - latent]
    caches = [part for n in given_widths for part in stored(numbers(random, kv_heads, room, n), bits)]
    table = tables_of(random, [room])
    slabs = [Paged.of([cache], table) for cache in caches]
    sinks = None if sink is None else sink + numbers(random, heads)
    address = None if sinks is None else sinks.ctypes.data
    facts = Heads(bits, heads, kv_heads, *widths, latent, window or 0, address, scale)
    found = attended(library, None, facts, q, slabs, position)
    for threads in (2, 3):
        team = library.team(threads)
        shared_out = attended(library, team, facts, q, slabs, position)
        if team is not None:
            team.close()
        assert shared_out.tobytes() == found.tobytes()
    streams = by_stream(caches, bits)
    keys, values, q = streams[0], streams[-1][..., : widths[1]], multiplied(q, bits)
    seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
    for head in range(heads):
        scores = keys[head // shared, seen] @ q[head] * scale
        wanted = softmax(scores, None if sinks is None else sinks[head]) @ values[head // shared, seen]
        np.testing.assert_allclose(found[head], wanted, *TOLERANCES[bits])


def test_tokens_outside_the_cache_are_refused(library) -> None:
    random = np.random.default_rng(0)
    slabs = [Paged.of([numbers(random, 1, 5, 4)], tables_of(random, [5])) for _ in range(2)]
    facts = Heads(32, 1, 1, 4, 4, 0, 0, None, 1.0)
    for position in (-1, KV_BLOCK, 1000):
        with pytest.raises(IndexError, match="outside the KV cache"):
            attended(library, None, facts, numbers(random, 1, 4), slabs, position)
