"""PrefixCache: sequences begin with what is computed of their tokens. As its "keys" each token has its own
id, so what a sequence begins with can be read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_models import GOOD

from pipeline.arrays import FloatArray
from pipeline.backbone.batch import StepInput
from pipeline.backbone.kv_cache import KVCache
from pipeline.config import KV_BLOCK, SNAPSHOTS
from pipeline.models.registry import model_spec
from pipeline.models.spec import GatedDelta
from pipeline.scheduling.jobs import Job
from pipeline.scheduling.prefix_cache import OPENING, PrefixCache
from pipeline.scheduling.prefix_tree import Tokens

BLOCKS = 10
SWITCH = 4 * KV_BLOCK  # tokens beyond which the other rotary embedding is used
SPEC = model_spec(GOOD)


class Asked(Job):
    """A request for the next token."""

    shares = True

    def __init__(self, tokens: Tokens, client: bytes = b"a") -> None:
        super().__init__(client, 0, tokens.tolist(), len(tokens), len(tokens), print)

    def step_input(self, chunk: int) -> StepInput:
        raise NotImplementedError

    def take_logits(self, logits: FloatArray) -> None:
        raise NotImplementedError


class Requests:
    """A cache, and requests computed with it."""

    def __init__(self, kv: KVCache) -> None:
        self.kv, self.cache = kv, PrefixCache(kv)

    def begin(self, tokens: Tokens, client: bytes = b"a", room: int = 0, spare: int = 0) -> Asked | None:
        job = Asked(tokens, client)
        job.max_kv_tokens = room or len(tokens)
        growing = SimpleNamespace(grows=True, kv=SimpleNamespace(capacity=0), max_kv_tokens=1)
        job.kv = self.cache.begin(job, [growing] * spare)
        if job.kv is None:
            return None
        if job.filled:
            begun = job.kv.read(0, 0, 0, job.filled, torch.float32)
            assert begun[0, :, 0].tolist() == job.tokens[: job.filled]
        return job

    def compute(self, job: Asked, end: int | None = None) -> None:
        """The job's tokens up to this one, or all."""
        rest = torch.tensor(job.tokens[job.filled : end], dtype=torch.float32)
        _, heads, _, width = job.kv.pool.slabs[0][0].numbers.shape
        if len(rest):
            job.kv.store(0, 0, rest[None, :, None].expand(heads, -1, width))
        job.kv.advance(len(rest))

    def end(self, job: Asked, **how: bool) -> None:
        kv, job.kv = job.kv, None
        self.cache.end(job, kv, **how)

    def run(self, tokens: Tokens, client: bytes = b"a") -> int:
        """A whole request; returns how many tokens it begins with."""
        job = self.begin(tokens, client)
        assert job is not None
        found = job.filled
        self.compute(job)
        self.end(job)
        return found


@pytest.fixture
def requests() -> Requests:
    spec = replace(SPEC, rope=replace(SPEC.rope, switch=SWITCH))
    return Requests(KVCache(spec, torch.float32, torch.device("cpu"), BLOCKS * KV_BLOCK))


@pytest.fixture
def recurrent() -> Requests:
    spec = replace(SPEC, recurrent=GatedDelta(1, 1, 2, 2, 4), recurrent_layers=(1,))
    return Requests(KVCache(spec, torch.float32, torch.device("cpu"), BLOCKS * KV_BLOCK, sequences=2))


def text(blocks: float, *more: int, first: int = 100) -> Tokens:
    """So many blocks of tokens, and more."""
    return np.array([*range(first, first + int(KV_BLOCK * blocks)), *more], np.int32)


def test_a_request_begins_with_the_common_prefix_and_copies_its_last_part(requests) -> None:
    assert requests.run(text(2.5)) == 0
    assert requests.cache.stats()["kv_tokens_kept"] == requests.kv.used == 3 * KV_BLOCK
    for tokens, found in (
        (text(2.5), 2.5 * KV_BLOCK - 1),  # the last token must be computed
        (text(2.5, 7, 8), 2.5 * KV_BLOCK),
        (text(2.25, 7, 8), 2.25 * KV_BLOCK),
        (text(1.5, 7, 8), 1.5 * KV_BLOCK),  # the first tokens of a whole block
        (text(0, 7, 8), 0),
    ):
        job = requests.begin(tokens)
        assert job.filled == found
        assert requests.kv.used == 3 * KV_BLOCK + job.kv.capacity - found // KV_BLOCK * KV_BLOCK
        requests.kv.release(job.kv)
    assert requests.begin(text(2.5, 7), b"b").filled == 0  # another client's
    assert (requests.cache.stats()["kv_hits"], requests.cache.stats()["kv_reused_tokens"]) == (4, 559)


def test_sequences_of_the_other_rotary_embedding_have_their_own_prefixes(requests) -> None:
    assert [requests.run(text(blocks)) for blocks in (3.5, 4.25, 4)] == [0, 0, 3.5 * KV_BLOCK]
    assert requests.begin(text(4.5)).filled == 4.25 * KV_BLOCK


def test_a_running_request_s_blocks_are_shared_at_once_and_last_until_the_last_holder_ends(requests) -> None:
    first = requests.begin(text(3.5))
    requests.compute(first, 2 * KV_BLOCK + 9)
    requests.cache.publish(first)
    second = requests.begin(text(3.5))
    assert second.filled == 2 * KV_BLOCK
    assert requests.cache.stats()["kv_shared_blocks"] == 2
    assert requests.cache.stats()["kv_tokens_kept"] == 0
    requests.compute(first)
    requests.end(first)
    assert requests.kv.used == 6 * KV_BLOCK  # 2 shared, 2 of each alone
    requests.compute(second)
    requests.cache.publish(second)
    assert requests.kv.used == 5 * KV_BLOCK  # equal blocks become one
    requests.cache.forget(b"a")
    assert (requests.kv.used, requests.cache.available) == (4 * KV_BLOCK, BLOCKS - 4)
    requests.kv.release(second.kv)
    assert requests.kv.used == 0


def test_room_is_made_by_evicting_and_only_for_what_then_fits(requests) -> None:
    for number in range(3):
        requests.run(text(3, first=1000 * number))  # 9 of 10 blocks
    assert requests.begin(text(8, first=5000), spare=3) is None
    assert requests.begin(text(1, 9, first=1000), room=4 * KV_BLOCK, spare=7) is None
    assert requests.cache.stats()["kv_evicted_blocks"] == 0
    running = requests.begin(text(1, 9, first=1000), room=4 * KV_BLOCK, spare=6)
    assert (running.filled, requests.cache.stats()["kv_evicted_blocks"]) == (KV_BLOCK, 2)
    assert requests.cache.available == 6
    assert not requests.cache.grow(running.kv, 11 * KV_BLOCK)
    assert requests.cache.grow(running.kv, 10 * KV_BLOCK)
    assert (requests.cache.available, requests.kv.free) == (0, 0)


def test_a_request_that_fits_only_without_the_copied_part_begins_without_it(requests) -> None:
    requests.run(text(4.5))
    job = requests.begin(text(4.5, 7), room=BLOCKS * KV_BLOCK)
    assert (job.filled, requests.kv.free) == (4 * KV_BLOCK, 0)


def test_a_failed_request_takes_all_that_begins_as_it_does(requests) -> None:
    requests.run(text(2))
    requests.run(text(1, 7, 8))
    requests.run(text(2, first=1000))
    failed = requests.begin(text(2, 9))
    requests.compute(failed)
    requests.end(failed, doubtful=True)
    assert requests.kv.used == 2 * KV_BLOCK
    found = [requests.begin(tokens).filled for tokens in (text(2), text(2, 9, first=1000))]
    assert found == [0, 2 * KV_BLOCK]


@pytest.mark.parametrize("before", [text(0.5), text(2)], ids=["a short prompt", "part of a block"])
def test_a_failed_request_takes_also_what_it_has_copied_its_first_tokens_from(requests, before) -> None:
    """Else each further try would begin with the same numbers, and fail."""
    requests.run(before)
    requests.run(text(2, first=1000))
    failed = requests.begin(text(0.5, 7, 8))
    assert failed.filled == KV_BLOCK // 2
    requests.compute(failed)
    requests.end(failed, doubtful=True)
    found = [requests.begin(tokens).filled for tokens in (before, text(2, 9, first=1000))]
    assert found == [0, 2 * KV_BLOCK]


def test_a_recurrent_request_begins_where_the_states_are_known(recurrent) -> None:
    """At its stops, of which one is where others have gone on otherwise, and at the ends of others."""
    cache, tokens = recurrent.cache, text(3, 7)

    def run(tokens: Tokens) -> tuple[int, set[int]]:
        job = recurrent.begin(tokens)
        found = job.filled
        for state in job.kv.states[1]:  # in place of a sum, the last token
            assert (state == (tokens[found - 1] if found else 0)).all()
        for end in [*sorted(job.stops), len(tokens)]:
            recurrent.compute(job, end)
            for state in job.kv.states[1]:
                state.fill_(int(tokens[end - 1]))
            cache.publish(job)
        recurrent.end(job)
        return found, job.stops

    assert run(tokens) == (0, {2 * KV_BLOCK})
    assert run(text(3, 7, 8)) == (len(tokens), set())  # the end of the first
    assert run(text(2.5, 9)) == (2 * KV_BLOCK, set())
    assert run(text(1.5, 9)) == (0, {KV_BLOCK})  # a branch: two have the first block
    assert run(text(1.25, 9, 9)) == (KV_BLOCK, set())
    assert cache.stats()["kv_snapshots"] == SNAPSHOTS * 2
    assert run(text(0.5)) == (0, set())
    assert cache.stats()["kv_snapshots"] == SNAPSHOTS * 2
    assert len(text(3, 7)) - OPENING < 3 * KV_BLOCK


def test_a_recurrent_request_waits_for_a_place(recurrent) -> None:
    jobs = [recurrent.begin(text(1)) for _ in range(2)]
    assert recurrent.begin(text(1)) is None
    recurrent.end(jobs[0])
    assert recurrent.begin(text(1)) is not None


@pytest.mark.parametrize(
    ("running", "until", "of_states"),
    [
        (text(3), 192, 128),
        (text(2.75), 128, 128),  # its last block is not shared while it is written
        (text(2), 128, 128),
        (text(2.25, 7), 128, 128),
        (text(0.5, 7), None, None),  # less than a block
    ],
)
def test_what_has_to_be_prefilled_before_another_request_goes_on(
    requests, recurrent, running: Tokens, until: int | None, of_states: int | None
) -> None:
    for given, expected in ((requests, until), (recurrent, of_states)):
        first, second = given.begin(running), Asked(text(2.5, 9))
        assert given.cache.awaits(second, [first]) == (expected is not None)
        assert not given.cache.awaits(Asked(text(2.5, 9), b"b"), [first])  # another client's
        assert not given.cache.awaits(second, [])  # it has ended, or was preempted
        for end in range(8, len(running), 8):
            waits = given.cache.awaits(second, [first])
            assert waits == (expected is not None and first.filled < expected), end
            given.compute(first, end)
            given.cache.publish(first)
        assert (of_states in first.stops) == (given is recurrent and of_states is not None)
