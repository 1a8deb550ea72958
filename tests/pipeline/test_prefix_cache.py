"""PrefixCache: kept sequences are found again by their prefix, and evicted when the capacity is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_models import GOOD

from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.models.registry import model_spec
from pipeline.models.spec import GatedDelta
from pipeline.scheduling.prefix_cache import PrefixCache

BUDGET = 100


@pytest.fixture
def kv() -> KVCache:
    return KVCache(model_spec(GOOD), torch.float32, torch.device("cpu"), BUDGET)


def computed(kv: KVCache, tokens: int, capacity: int) -> SequenceKV:
    sequence = kv.allocate(capacity)
    sequence.advance(tokens)
    return sequence


def test_next_turn_starts_from_the_common_prefix(kv) -> None:
    kept = PrefixCache(kv)
    sequence = computed(kv, 5, 20)
    kept.keep((b"a", "x"), [1, 2, 3, 4, 5, 6], sequence)
    assert (len(kept), kept.tokens, kv.used) == (1, 20, 20)
    assert kept.take((b"a", "y"), [1, 2, 3]) is None
    assert kept.take((b"b", "x"), [1, 2, 3]) is None  # names are separate for each client
    found = kept.take((b"a", "x"), [1, 2, 3, 9, 9])
    assert found is sequence
    assert found.length == 3
    assert (len(kept), kept.tokens, kv.used) == (0, 0, 20)


def test_last_token_is_always_computed_and_a_sequence_without_common_prefix_released(kv) -> None:
    kept = PrefixCache(kv)
    for prompt, common in (([1, 2, 3], 2), ([2, 2], None)):
        kept.keep((b"a", "x"), [1, 2, 3], computed(kv, 3, 8))
        found = kept.take((b"a", "x"), prompt)
        assert (None if found is None else found.length) == common
        assert (len(kept), kv.used) == (0, 0 if found is None else 8)
        if found is not None:
            kv.release(found)


def test_least_recently_used_is_evicted_first_and_none_needlessly(kv) -> None:
    kept = PrefixCache(kv)
    for name in "abc":
        kept.keep((b"c", name), [1, 2], computed(kv, 2, 20))
    again = kept.take((b"c", "a"), [1, 2, 3])
    kept.keep((b"c", "a"), [1, 2, 3], again)
    live = kv.allocate(30)  # 10 are free, 60 kept
    assert not kept.evict_for(71)
    assert len(kept) == 3
    assert kept.evict_for(25)
    assert (kv.free, len(kept)) == (30, 2)
    assert kept.take((b"c", "b"), [1, 2]) is None  # the least recently used
    assert kept.evict_for(70)
    assert (kv.free, len(kept), kept.tokens) == (70, 0, 0)
    kv.release(live)
    assert kv.used == 0


def test_forgotten_client_s_conversations_are_released(kv) -> None:
    kept = PrefixCache(kv)
    for client in (b"a", b"b"):
        for name in ("x", "y"):
            kept.keep((client, name), [1], computed(kv, 1, 10))
    kept.keep((b"a", "x"), [2], computed(kv, 1, 15))  # replaces the first
    assert (len(kept), kv.used) == (4, 45)
    kept.forget(b"a")
    assert (len(kept), kept.tokens, kv.used) == (2, 20, 20)


def test_allocate_reuses_the_kept_sequence_at_the_new_capacity(kv) -> None:
    """Its own capacity counts as available; other kept sequences are evicted for the rest."""
    kept = PrefixCache(kv)
    kept.keep((b"a", "x"), [1, 2, 3], computed(kv, 3, 40))
    kept.keep((b"a", "y"), [1, 2, 3], computed(kv, 3, 50))
    assert kept.available == BUDGET
    found = kept.allocate(80, (b"a", "x"), [1, 2, 9])
    assert (found.length, found.capacity, kv.used, len(kept)) == (2, 80, 80, 0)
    assert not kept.grow(found, BUDGET + 1)
    assert kept.grow(found, BUDGET)
    assert (found.length, found.capacity, kv.used, kept.available) == (2, BUDGET, BUDGET, 0)


def test_allocate_without_a_kept_sequence_is_empty(kv) -> None:
    kept = PrefixCache(kv)
    kept.keep((b"a", "x"), [1, 2, 3], computed(kv, 3, 40))
    for key in (None, (b"a", "y")):
        found = kept.allocate(30, key, [1, 2, 3])
        assert (found.length, found.capacity) == (0, 30)
        assert len(kept) == 1
    assert kept.allocate(40, None, [1, 2, 3]).length == 0  # evicts
    assert (len(kept), kv.free) == (0, 0)


def test_recurrent_turn_starts_from_the_longest_snapshot_in_the_common_prefix() -> None:
    """Places are freed by evicting, as tokens are."""
    spec = replace(model_spec(GOOD), recurrent=GatedDelta(1, 1, 2, 2, 4), recurrent_layers=(1,))
    kv = KVCache(spec, torch.float32, torch.device("cpu"), BUDGET, sequences=2)
    kept = PrefixCache(kv)
    prompt = list(range(9))
    for common, reused in ((9, 8), (7, 6), (6, 6), (5, 3)):
        sequence = kv.allocate(20)
        for tokens in (3, 3, 2):
            sequence.advance(tokens)
            sequence.snapshot() if tokens == 3 else None
        kept.keep((b"a", "x"), prompt, sequence)
        found = kept.allocate(20, (b"a", "x"), [*prompt[:common], 77, 77])
        assert (found is sequence, found.length, kept.has_place) == (True, reused, True)
        kept.keep((b"a", "x"), prompt, found)
        assert kept.take((b"a", "x"), [0, 1, 77]) is None  # shorter than every snapshot
        assert kv.used == 0
    kept.keep((b"a", "x"), prompt, kv.allocate(20))
    running = [kept.allocate(20, None, prompt) for _ in range(2)]  # the second evicts
    assert (kept.has_place, len(kept)) == (False, 0)
    assert kept.grow(running[0], 40)
