"""Requests that begin with the same tokens, on a real engine: what is computed once, and that answers are
those of requests that are computed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from families import Case, save
from test_scheduler import Harness
from thread_engine import engine_in_threads

from launch.equality import Verdict, compare
from pipeline.config import KV_BLOCK
from pipeline.engine.engine import Engine
from pipeline.errors import ShardFailed
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from protocol.messages import Done, Generate, Token

CONTEXT = 4096
BOUND = 1e-3  # between float32 results of different batches and chunks
OPENING = tuple(3 + 7 * i % 250 for i in range(3000))  # a system message with its tools

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture(scope="module", params=["mixtral", "qwen3_next"])
def family(request) -> str:
    """One of plain attention, one that is recurrent."""
    return str(request.param)


@pytest.fixture(scope="module")
def engine(family, tmp_path_factory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("s")
    save(Case(family, "plain", {"max_position_embeddings": CONTEXT}), folder)
    with engine_in_threads(folder, folder, context=CONTEXT) as (engine, _):
        engine.set_policy(make_policy(PolicyRequest("all-host"), 1), None)
        yield engine


def long_harness(engine: Engine, blocks: int) -> Harness:
    harness = Harness(engine, blocks * KV_BLOCK, CONTEXT, slots=4)
    harness.scheduler.chunk = harness.scheduler.chunk_alone = 512
    return harness


def ask(request: int, prompt: Sequence[int], count: int = 4, reuse: bool = True) -> Generate:
    return Generate(request, token_ids=tuple(prompt), max_tokens=count, ignore_eos=True, reuse=reuse)


def check_answers(harness: Harness, asked: Sequence[Generate]) -> None:
    """They are those that each request has alone."""
    for message in asked:
        prompt = message.token_ids or ()
        alone = Harness(harness.scheduler.engine, CONTEXT, CONTEXT)
        alone.scheduler.chunk = alone.scheduler.chunk_alone = 512
        alone.run(b"c", ask(0, prompt, message.max_tokens, reuse=False))
        tokens = [token.token for token in harness.answer(message.request)[0]]
        assert compare(tokens, alone.answer(0)[0], BOUND).verdict is not Verdict.MISMATCH


def reused(harness: Harness, request: int) -> int:
    return int(harness.answer(request)[1].stats["kv_reused_tokens"])


def test_four_requests_at_once_compute_their_new_opening_once(engine, family) -> None:
    harness = long_harness(engine, 80)
    asked = [ask(number, (*OPENING, *range(5 + number, 15 + number))) for number in range(4)]
    before = engine.counters.snapshot()["prefill"]["rows"]
    for message in asked:
        harness.scheduler.enqueue(b"c", message)
    harness.scheduler.enqueue(b"d", ask(0, OPENING[:20]))
    harness.scheduler.round()
    stats = harness.scheduler.stats()
    assert (stats["running"], stats["waiting"]) == (2, 3)  # another client's request is not held up
    most = 0
    while not harness.scheduler.idle:
        harness.scheduler.round()
        most = max(most, harness.scheduler.stats()["kv_shared_blocks"])
    assert most == len(OPENING) // KV_BLOCK
    found = len(OPENING) if family == "mixtral" else len(OPENING) // KV_BLOCK * KV_BLOCK
    assert [reused(harness, number) for number in range(4)] == [0, found, found, found]
    rows = engine.counters.snapshot()["prefill"]["rows"] - before
    assert rows == 20 + len(OPENING) + 10 + 3 * (len(OPENING) + 10 - found)
    check_answers(harness, asked[:2])
    harness.check_empty()


def test_whole_blocks_of_an_answer_are_shared_while_it_runs(engine, family) -> None:
    harness = long_harness(engine, 80)
    prompt = OPENING[:100]
    harness.scheduler.enqueue(b"c", ask(0, prompt, 3 * KV_BLOCK))
    while len(harness.to(b"c", Token)) < 2 * KV_BLOCK:
        harness.scheduler.round()
    said = [token.token for token in harness.answered(0)][:-10]
    other = ask(1, (*prompt, *said, 9))
    harness.scheduler.enqueue(b"c", other)
    harness.finish()
    recurrent = KV_BLOCK  # where the first one's prefill has left its states
    assert reused(harness, 1) == (3 * KV_BLOCK if family == "mixtral" else recurrent)
    check_answers(harness, [other])
    harness.check_empty()


@pytest.mark.parametrize("end", ["fails", "is cancelled", "is preempted", "gives way"])
def test_those_that_wait_for_a_prefill_go_on_without_it(engine, monkeypatch, end: str) -> None:
    """Behind what it has computed, unless that is doubtful. All counts are right in the end."""
    harness = long_harness(engine, 64)
    scheduler, opening = harness.scheduler, OPENING[: 23 * KV_BLOCK]
    asked = [ask(number, (*opening, 5 + number, 9), 2) for number in range(3)]
    for message in asked:
        scheduler.enqueue(b"c", message)
    for _ in range(2):
        scheduler.round()
    assert (scheduler.stats()["running"], scheduler.stats()["waiting"]) == (1, 2)
    (first,) = scheduler._running
    computed = first.filled
    assert computed == 2 * 512
    if end == "fails":
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", lambda *_: (_ for _ in ()).throw(ShardFailed("it ended 2 workers")))
            scheduler.round()
        assert harness.to(b"c", Done)[0].reason == "error"
        assert scheduler.kv.used == 0
    elif end == "is cancelled":
        scheduler.cancel(b"c", 0)
    elif end == "is preempted":
        scheduler._preempt(first)
    else:
        harness.slow.add(b"c")  # its client reads no more, and another one needs the whole cache
        harness.run_until(b"d", ask(0, (*OPENING, *OPENING[:900]), 20))
        harness.slow.clear()
    harness.finish()
    # The first one again, else the second one, computes the rest, and the others wait for that.
    begun = [reused(harness, number) for number in (1, 2)]
    first_of_both = {"fails": 0, "is cancelled": computed}.get(end, len(opening))
    assert begun == [first_of_both, len(opening)]
    check_answers(harness, asked[1:])
    harness.check_empty()


def test_a_hundred_conversations_answer_as_without_the_cache(engine) -> None:
    """Over a full KV cache, several at once, some cancelled: what is computed anew is bounded by what was
    evicted."""
    draws = random.Random(3)
    harness = Harness(engine, 40 * KV_BLOCK, 512)
    scheduler = harness.scheduler
    scheduler.chunk = scheduler.chunk_alone = 128
    talks = [[*OPENING[:200], 3 + number] for number in range(100)]
    asked: list[Generate] = []
    known = 0
    for _ in range(60):
        turn = sorted({min(int(draws.expovariate(1 / 8)), 99) for _ in range(3)})
        for number in turn:
            message = ask(len(asked), talks[number], 3)
            known += len(talks[number]) - 8
            asked.append(message)
            scheduler.enqueue(b"c", message)
            talks[number] = [*talks[number], *(draws.randrange(3, 250) for _ in range(8))]
        if draws.random() < 0.2:
            scheduler.round()
            scheduler.cancel(b"c", len(asked) - 1)
        harness.finish()
        assert scheduler.kv.used <= scheduler.kv.budget
        assert scheduler.stats()["kv_tokens_used"] == 0
    stats = scheduler.stats()
    assert stats["kv_evicted_blocks"] > 20
    assert stats["kv_reused_tokens"] > 0.8 * known
    whole = [m for m in asked if len(harness.answered(m.request)) == 3]
    check_answers(harness, draws.sample(whole, 8))
    harness.check_empty()
    assert len(harness.to(b"c", Token)) > 3 * len(whole) - 1


def test_an_exact_policy_goes_on_with_no_approximation(engine) -> None:
    """Nor does an approximate one with what another has computed, nor a request with what was computed in
    part by the policy before."""
    harness = long_harness(engine, 64)
    exact, other, approximate = (make_policy(PolicyRequest("all-host"), 1) for _ in range(3))
    approximate.exact = False
    found = []
    for number, policy in enumerate((exact, other, approximate, approximate, exact)):
        engine.set_policy(policy, None)
        harness.run(b"c", ask(number, OPENING[:300]))
        found.append(reused(harness, number))
    assert [kept > 0 for kept in found] == [False, True, False, True, False]
    engine.set_policy(approximate, None)
    harness.scheduler.enqueue(b"c", ask(5, OPENING[:1500]))
    harness.scheduler.round()
    engine.set_policy(exact, None)
    harness.finish()
    harness.run(b"c", ask(6, OPENING[:1500]))
    assert reused(harness, 6) == 0
    harness.check_empty()
