"""PrefixCache: kept sequences are found again by their prefix, and evicted when the capacity is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_models import GOOD

from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.config import KV_BLOCK
from pipeline.models.registry import model_spec
from pipeline.models.spec import GatedDelta
from pipeline.scheduling.prefix_cache import PrefixCache

BUDGET = 10 * KV_BLOCK


@pytest.fixture
def kv() -> KVCache:
    return KVCache(model_spec(GOOD), torch.float32, torch.device("cpu"), BUDGET)


def computed(kv: KVCache, tokens: int) -> SequenceKV:
    sequence = kv.allocate(tokens)
    sequence.advance(tokens)
    return sequence


def text(blocks: int, *last: int) -> list[int]:
    """So many blocks of tokens, and a few more."""
    return [*range(100, 100 + KV_BLOCK * blocks), *last]


def test_next_turn_starts_from_the_common_prefix(kv) -> None:
    kept = PrefixCache(kv)
    sequence = computed(kv, 2 * KV_BLOCK + 5)
    kept.keep((b"a", "x"), text(2, 1, 2, 3, 4, 5, 6), sequence)
    assert (len(kept), kept.tokens, kv.used) == (1, 3 * KV_BLOCK, 3 * KV_BLOCK)
    assert kept.take((b"a", "y"), text(2, 1)) is None
    assert kept.take((b"b", "x"), text(2, 1)) is None  # names are separate for each client
    found = kept.take((b"a", "x"), text(1, 9, 9))
    assert found is sequence
    assert found.length == KV_BLOCK
    assert (len(kept), kept.tokens, kv.used) == (0, 0, KV_BLOCK)


def test_last_token_is_always_computed_and_a_sequence_without_common_prefix_released(kv) -> None:
    kept = PrefixCache(kv)
    for prompt, common in (([1, 2, 3], 2), ([2, 2], None)):
        kept.keep((b"a", "x"), [1, 2, 3], computed(kv, 3))
        found = kept.take((b"a", "x"), prompt)
        assert (None if found is None else found.length) == common
        assert (len(kept), kv.used) == (0, 0 if found is None else KV_BLOCK)
        if found is not None:
            kv.release(found)


def test_least_recently_used_is_evicted_first_and_none_needlessly(kv) -> None:
    kept = PrefixCache(kv)
    for name in "abc":
        kept.keep((b"c", name), text(2), computed(kv, 2 * KV_BLOCK))
    again = kept.take((b"c", "a"), text(2, 3))
    kept.keep((b"c", "a"), text(2, 3), again)
    live = kv.allocate(3 * KV_BLOCK)  # 1 is free, 6 are kept
    assert not kept.evict_for(8)
    assert len(kept) == 3
    assert kept.evict_for(2)
    assert (kv.free, len(kept)) == (3, 2)
    assert kept.take((b"c", "b"), text(2)) is None  # the least recently used
    assert kept.evict_for(7)
    assert (kv.free, len(kept), kept.tokens) == (7, 0, 0)
    kv.release(live)
    assert kv.used == 0


def test_forgotten_client_s_conversations_are_released(kv) -> None:
    kept = PrefixCache(kv)
    for client in (b"a", b"b"):
        for name in ("x", "y"):
            kept.keep((client, name), [1], computed(kv, 1))
    kept.keep((b"a", "x"), text(1, 2), computed(kv, KV_BLOCK + 1))  # replaces the first
    assert (len(kept), kv.used) == (4, 5 * KV_BLOCK)
    kept.forget(b"a")
    assert (len(kept), kept.tokens, kv.used) == (2, 2 * KV_BLOCK, 2 * KV_BLOCK)


def test_allocate_reuses_the_kept_sequence_and_evicts_others_for_the_rest(kv) -> None:
    kept = PrefixCache(kv)
    kept.keep((b"a", "x"), text(4), computed(kv, 4 * KV_BLOCK))
    kept.keep((b"a", "y"), text(5), computed(kv, 5 * KV_BLOCK))
    assert kept.available == 10
    found = kept.allocate(8 * KV_BLOCK, (b"a", "x"), text(1, 2, 9))
    assert (found.length, found.capacity, kv.free, len(kept)) == (KV_BLOCK, 8 * KV_BLOCK, 2, 0)
    assert not kept.grow(found, BUDGET + 1)
    assert kept.grow(found, BUDGET)
    assert (found.length, found.capacity, kept.available) == (KV_BLOCK, BUDGET, 0)


def test_allocate_without_a_kept_sequence_is_empty(kv) -> None:
    kept = PrefixCache(kv)
    kept.keep((b"a", "x"), text(4), computed(kv, 4 * KV_BLOCK))
    for key in (None, (b"a", "y")):
        found = kept.allocate(3 * KV_BLOCK, key, text(2))
        assert (found.length, found.capacity) == (0, 3 * KV_BLOCK)
        assert len(kept) == 1
    assert kept.allocate(4 * KV_BLOCK, None, text(2)).length == 0  # evicts
    assert (len(kept), kv.free) == (0, 0)


def test_recurrent_turn_starts_from_the_longest_snapshot_in_the_common_prefix() -> None:
    """Places are freed by evicting, as tokens are."""
    spec = replace(model_spec(GOOD), recurrent=GatedDelta(1, 1, 2, 2, 4), recurrent_layers=(1,))
    kv = KVCache(spec, torch.float32, torch.device("cpu"), BUDGET, sequences=2)
    kept = PrefixCache(kv)
    prompt = list(range(9))
    for common, reused in ((9, 8), (7, 6), (6, 6), (5, 3)):
        sequence = kv.allocate(2 * KV_BLOCK)
        for tokens in (3, 3, 2):
            sequence.advance(tokens)
            sequence.snapshot() if tokens == 3 else None
        kept.keep((b"a", "x"), prompt, sequence)
        found = kept.allocate(2 * KV_BLOCK, (b"a", "x"), [*prompt[:common], 77, 77])
        assert (found is sequence, found.length, kept.has_place) == (True, reused, True)
        kept.keep((b"a", "x"), prompt, found)
        assert kept.take((b"a", "x"), [0, 1, 77]) is None  # shorter than every snapshot
        assert kv.used == 0
    kept.keep((b"a", "x"), prompt, kv.allocate(2 * KV_BLOCK))
    running = [kept.allocate(2 * KV_BLOCK, None, prompt) for _ in range(2)]  # the second evicts
    assert (kept.has_place, len(kept)) == (False, 0)
    assert kept.grow(running[0], 4 * KV_BLOCK)
