"""What is kept of conversations: found again by its beginning, forgotten when the room is needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_models import GOOD

from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.models.registry import model_spec
from pipeline.scheduling.prefix_cache import PrefixCache, common_prefix

BUDGET = 100
ids = st.lists(st.integers(0, 2), max_size=12)


@pytest.fixture
def kv() -> KVCache:
    return KVCache(model_spec(GOOD), torch.float32, torch.device("cpu"), BUDGET)


def computed(kv: KVCache, tokens: int, room: int) -> SequenceKV:
    sequence = kv.allocate(room)
    sequence.advance(tokens)
    return sequence


def test_the_next_turn_starts_from_what_both_have_in_common(kv) -> None:
    kept = PrefixCache(kv)
    sequence = computed(kv, 5, 20)
    kept.keep((b"a", "x"), [1, 2, 3, 4, 5, 6], sequence)
    assert (len(kept), kept.tokens, kv.used) == (1, 20, 20)
    assert kept.take((b"a", "y"), [1, 2, 3]) is None
    assert kept.take((b"b", "x"), [1, 2, 3]) is None  # names are each client's own
    found = kept.take((b"a", "x"), [1, 2, 3, 9, 9])
    assert found is sequence
    assert found.length == 3
    assert (len(kept), kept.tokens, kv.used) == (0, 0, 20)  # it is the taker's now


def test_the_last_token_of_a_prompt_is_computed_always(kv) -> None:
    kept = PrefixCache(kv)
    kept.keep((b"a", "x"), [1, 2, 3], computed(kv, 3, 8))
    found = kept.take((b"a", "x"), [1, 2, 3])
    assert found is not None
    assert found.length == 2


def test_nothing_in_common_frees_it(kv) -> None:
    kept = PrefixCache(kv)
    kept.keep((b"a", "x"), [1, 2], computed(kv, 2, 8))
    assert kept.take((b"a", "x"), [2, 2]) is None
    assert (len(kept), kv.used) == (0, 0)


def test_the_least_recently_used_goes_first_and_none_in_vain(kv) -> None:
    kept = PrefixCache(kv)
    for name in "abc":
        kept.keep((b"c", name), [1, 2], computed(kv, 2, 20))
    again = kept.take((b"c", "a"), [1, 2, 3])
    kept.keep((b"c", "a"), [1, 2, 3], again)
    live = kv.allocate(30)  # 10 are free, 60 kept
    assert not kept.make_room(71)
    assert len(kept) == 3
    assert kept.make_room(25)
    assert (kv.free, len(kept)) == (30, 2)
    assert kept.take((b"c", "b"), [1, 2]) is None  # it was used least recently
    assert kept.make_room(70)
    assert (kv.free, len(kept), kept.tokens) == (70, 0, 0)
    kv.release(live)
    assert kv.used == 0


def test_a_client_takes_its_conversations_with_it(kv) -> None:
    kept = PrefixCache(kv)
    for client in (b"a", b"b"):
        for name in ("x", "y"):
            kept.keep((client, name), [1], computed(kv, 1, 10))
    kept.keep((b"a", "x"), [2], computed(kv, 1, 15))  # in place of the first
    assert (len(kept), kv.used) == (4, 45)
    kept.forget(b"a")
    assert (len(kept), kept.tokens, kv.used) == (2, 20, 20)


@given(ids, ids)
def test_a_common_prefix_is_common_and_the_longest(a: list[int], b: list[int]) -> None:
    count = common_prefix(a, b)
    assert a[:count] == b[:count]
    assert count == min(len(a), len(b)) or a[count] != b[count]
