"""The scheduler on a real engine, round by round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from thread_engine import CONTEXT as LONGEST
from thread_engine import engine_in_threads

from launch.equality import Verdict, compare
from pipeline import fairness
from pipeline.backbone.kv_cache import KVCache
from pipeline.config import KV_BLOCK
from pipeline.errors import NumberInUse, RequestError, ShardFailed
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.scheduling.job_factory import JobFactory
from pipeline.scheduling.jobs import JOB_BYTES
from pipeline.scheduling.scheduler import Scheduler
from pipeline.scheduling.suspects import Suspects
from protocol.messages import Done, Generate, Queued, Score, Scores, Token
from shm.control import ControlSegment

CONTEXT = 64
BOUND = 1e-4  # between float32 results of different batches

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


class Noted:
    """What a scheduler computes, as the control segment has it, and how often that was written."""

    requests: tuple[Any, ...] = ()
    times = 0

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__.update({name: value, "times": self.times + 1})


class Harness:
    """A scheduler that records its messages; the clients in `slow` are congested."""

    def __init__(
        self,
        engine,
        budget: int = 4 * KV_BLOCK,
        context: int = CONTEXT,
        slots: int = 3,
        decoder=None,
        ask=print,
        clock=lambda: 0.0,
        speculate="off",
        drafter=None,
    ) -> None:
        self.sent: list[tuple[bytes, object]] = []
        self.batches: list[int] = []  # messages that were sent together
        self.slow: set[bytes] = set()
        self.suspects = Noted()
        spec, device = engine.backbone.spec, engine.device.torch_device
        self.scheduler = Scheduler(
            engine,
            KVCache(spec, torch.float32, device, budget),
            JobFactory(
                decoder,
                frozenset({2}) if decoder is None else decoder.eos_ids,
                ask,
                vocabulary=spec.vocabulary,
                context=context,
                longest=context,
                seed=0,
            ),
            max_sequences=slots,
            chunk=8,
            send=self._send,
            congested=self.slow.__contains__,
            suspects=Suspects(cast(ControlSegment, self.suspects), {}),
            speculate=speculate,
            drafter=drafter,
            clock=clock,
        )

    def _send(self, messages: list[tuple[bytes, object]]) -> None:
        self.batches.append(len(messages))
        self.sent += messages

    def to(self, client: bytes, kind: type) -> list:
        return [m for c, m in self.sent if c == client and isinstance(m, kind)]

    def run(self, client: bytes, message: Generate) -> None:
        """One request, and all others, to their ends."""
        self.scheduler.enqueue(client, message)
        self.finish()

    def run_until(self, client: bytes, message: Generate) -> None:
        """One request to its end, while others may pause."""
        self.scheduler.enqueue(client, message)
        for _ in range(100):
            if self.to(client, Done):
                return
            self.scheduler.round()
        raise AssertionError("not served")

    def finish(self) -> None:
        for _ in range(2000):
            if self.scheduler.idle:
                return
            self.scheduler.round()
        raise AssertionError("still not idle")

    def check_empty(self) -> None:
        """Only what is kept holds KV, and it goes with its clients."""
        assert self.scheduler.stats()["kv_tokens_used"] == 0
        for client in {client for client, _ in self.sent}:
            self.scheduler.forget(client)
        assert self.scheduler.kv.used == 0

    def answered(self, request: int) -> list[Token]:
        return [m for m in self.to(b"c", Token) if m.request == request]

    def answer(self, request: int, client: bytes = b"c") -> tuple[list[Token], Done]:
        """A request's Token messages, in order and each once, and its only Done."""
        tokens = [m for m in self.to(client, Token) if m.request == request]
        assert [m.index for m in tokens] == list(range(len(tokens)))
        (done,) = [m for m in self.to(client, Done) if m.request == request]
        return tokens, done


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory) -> Iterator[object]:
    with engine_in_threads(tiny_model, tmp_path_factory.mktemp("s")) as (engine, _):
        engine.set_policy(make_policy(PolicyRequest("random", {"churn": "1"}), 1), None)
        yield engine


@pytest.fixture
def harness(engine) -> Iterator[Harness]:
    harness = Harness(engine)
    yield harness
    harness.slow.clear()
    harness.finish()
    harness.check_empty()


def ask(request: int, prompt: int, count: int, reuse: bool = True) -> Generate:
    ids = tuple(range(3, 3 + prompt))
    return Generate(request, token_ids=ids, max_tokens=count, ignore_eos=True, reuse=reuse)


def test_all_tokens_of_a_step_are_sent_together(harness) -> None:
    """And the Dones of those that end with it. What is computed is written once, and that it has ended."""
    for request in range(3):
        harness.scheduler.enqueue(b"c", ask(request, 4, 9))
    while not all(harness.answered(request) for request in range(3)):
        harness.scheduler.round()
    harness.batches.clear()
    ended, written = len(harness.to(b"c", Done)), harness.suspects.times
    harness.scheduler.round()
    assert harness.batches == [3 + len(harness.to(b"c", Done)) - ended]
    assert harness.suspects.times - written == 2
    harness.finish()
    assert len(harness.to(b"c", Done)) == 3


def test_congested_client_pauses_and_delays_no_other(engine) -> None:
    harness = Harness(engine, 3 * KV_BLOCK)
    harness.slow.add(b"slow")
    for message in (ask(0, 4, 5), ask(1, 60, 4), ask(2, 60, 4)):  # the last one waits
        harness.scheduler.enqueue(b"slow", message)
    harness.scheduler.enqueue(b"fast", ask(0, 4, 5))
    while not harness.to(b"fast", Done):
        assert harness.scheduler.round()
    assert harness.scheduler.stats()["waiting"] == 1
    assert [m for client, m in harness.sent if client == b"slow"] == []
    assert not harness.scheduler.round()  # no request can run
    assert not harness.scheduler.idle
    harness.slow.clear()
    assert harness.scheduler.round()
    assert harness.to(b"slow", Token)


def test_number_in_use_and_too_many_tokens_are_refused(harness, monkeypatch) -> None:
    monkeypatch.setattr(fairness, "CLIENT_BYTES", 3 * JOB_BYTES)
    for i in range(2):
        harness.scheduler.enqueue(b"a", ask(i, 4, 3))
    with pytest.raises(NumberInUse, match="request 1 is already being served"):
        harness.scheduler.enqueue(b"a", ask(1, 4, 3))
    with pytest.raises(RequestError, match="too many requests are already queued"):
        harness.scheduler.enqueue(b"a", ask(2, 4, 3))
    harness.scheduler.enqueue(b"b", ask(1, 4, 3))
    harness.finish()
    harness.run(b"a", ask(1, 4, 3))  # the number is free again
    assert [m.request for m in harness.to(b"a", Done)] == [0, 1, 1]


def test_answers_of_an_approximate_policy_say_so(harness, monkeypatch) -> None:
    monkeypatch.setattr(harness.scheduler.engine.policy, "exact", False)
    harness.run(b"c", ask(0, 4, 3))
    harness.scheduler.enqueue(b"c", ask(1, 4, 3))
    harness.scheduler.cancel(b"c", 1)
    computed, waiting = (harness.answer(i)[1].stats["fidelity"] for i in range(2))
    kinds = {"skipped": 0, "substituted": 0, "stale": 0, "predicted": 0, "left": 0}
    assert computed == {"exact": False} | kinds
    assert waiting == {"exact": False}


def test_request_that_has_not_begun_keeps_nothing(harness) -> None:
    harness.slow.add(b"slow")
    harness.scheduler.enqueue(b"slow", ask(0, 4, 5))
    harness.scheduler.round()
    assert harness.scheduler.stats()["running"] == 1
    harness.scheduler.cancel(b"slow", 0)
    stats = harness.scheduler.stats()
    assert (stats["kv_tokens_used"], stats["kv_tokens_kept"]) == (0, 0)


def test_score_that_is_alone_has_usual_chunks(harness) -> None:
    """It has the logits of every row."""
    harness.scheduler.chunk_alone = 16
    harness.run(b"c", Score(0, token_ids=tuple(range(20))))
    assert [m.start for m in harness.to(b"c", Scores)] == [0, 8, 16]


def test_request_that_is_alone_has_longer_chunks(harness) -> None:
    harness.scheduler.chunk_alone = 16
    harness.scheduler.enqueue(b"a", ask(0, 40, 1))
    harness.scheduler.round()
    harness.scheduler.enqueue(b"b", ask(0, 40, 20))  # neither has its first token: a has 24 to prefill
    for round_ in range(6):  # 3 chunks of 8 each
        assert not harness.to(b"a", Token) or round_ > 3, round_
        harness.scheduler.round()
    assert harness.to(b"a", Done)
    assert not harness.to(b"b", Token)
    harness.scheduler.round()  # b has 16 to prefill, and is alone
    assert harness.to(b"b", Token)


def test_decoding_continues_beside_a_chunked_prefill(harness) -> None:
    a, b = b"a", b"b"
    harness.scheduler.enqueue(a, ask(0, 2, 20))
    harness.scheduler.round()
    harness.scheduler.enqueue(b, ask(0, 40, 2))  # 5 chunks of 8
    for round_ in range(5):
        assert not harness.to(b, Token)
        before = len(harness.to(a, Token))
        harness.scheduler.round()
        assert len(harness.to(a, Token)) == before + 1, round_
    assert [m.index for m in harness.to(b, Token)] == [0, 1]  # the last chunk's, and the same round's step
    (done,) = harness.to(b, Done)
    assert (done.stats["prompt_tokens"], done.stats["decode_tokens"]) == (40, 1)
    assert done.stats["engine"]["prefill"]["rows"] == 40
    assert done.stats["prefill_tok_s"] == pytest.approx(40 / done.stats["prefill_s"])


@pytest.mark.parametrize(("decoding", "rounds"), [(b"a", 17), (b"b", 5), (b"", 5)])
def test_next_chunk_waits_until_others_have_decoded_as_long(engine, decoding: bytes, rounds: int) -> None:
    """A chunk takes as long as four decode steps. A client's own answers do not count."""

    def clock() -> float:
        counted = engine.counters.snapshot()
        return float(4 * counted["prefill"]["steps"] + counted["decode"]["steps"])

    harness = Harness(engine, clock=clock)
    if decoding:
        harness.scheduler.enqueue(decoding, ask(1, 2, 40))
        harness.scheduler.round()
    harness.scheduler.enqueue(b"b", ask(0, 40, 1))  # 5 chunks of 8
    for passed in range(rounds):
        assert not [m for m in harness.to(b"b", Token) if m.request == 0], passed
        harness.scheduler.round()
    assert [m for m in harness.to(b"b", Token) if m.request == 0]
    harness.finish()
    harness.check_empty()


def test_clients_take_turns_with_prefill_chunks(harness) -> None:
    """A prompt does not wait for both long prompts of another client."""
    for i in range(2):
        harness.scheduler.enqueue(b"a", ask(i, 40, 2))  # 5 chunks each
    harness.scheduler.enqueue(b"b", ask(0, 8, 2))
    for _ in range(3):
        harness.scheduler.round()
    assert [m.reason for m in harness.to(b"b", Done)] == ["length"]
    assert not harness.to(b"a", Token)


def test_waiting_requests_are_sent_their_positions_in_fair_order(engine) -> None:
    """Capacity for one: of five requests of one client one runs; another client's request comes before the
    other four."""
    harness = Harness(engine, CONTEXT)
    for i in range(5):
        harness.scheduler.enqueue(b"a", ask(i, 1, 60))
    harness.scheduler.enqueue(b"b", ask(0, 1, 60))
    harness.scheduler.round()
    stats = harness.scheduler.stats()
    assert (stats["waiting"], stats["running"], stats["kv_tokens_used"]) == (5, 1, KV_BLOCK)
    assert [(m.request, m.position) for m in harness.to(b"a", Queued)] == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert [(m.request, m.position) for m in harness.to(b"b", Queued)] == [(0, 1)]
    for i in (0, 2, 3):
        harness.scheduler.cancel(b"a", i)
    harness.scheduler.cancel(b"other", 1)
    assert sorted(m.request for m in harness.to(b"a", Done)) == [0, 2, 3]
    assert harness.scheduler.stats()["ended"] == 3
    harness.scheduler.round()
    assert harness.to(b"b", Token)
    harness.scheduler.cancel_all()
    ends = {m.request: m for m in harness.to(b"a", Done)}
    assert {m.reason for m in ends.values()} == {"cancelled"}
    assert list(ends) == [0, 2, 3, 1, 4]
    for request, done in ends.items():
        assert (done.stats["policy"], done.stats["fidelity"]) == ("random", {"exact": True})
        assert ("engine" in done.stats) == (request == 0)  # the others have not begun
    harness.check_empty()


def test_preempted_request_resumes_with_the_same_tokens(engine) -> None:
    """Four answers of up to 200 tokens each in a cache of 256: all begin; those admitted last are preempted,
    wait, and continue. No token is sent twice."""
    asked = [ask(i, 4 + i, 120 + 20 * i) for i in range(4)]
    alone = []
    for message in asked:
        harness = Harness(engine, LONGEST, LONGEST)
        harness.run(b"c", message)
        alone.append(harness.answer(message.request)[0])
    harness = Harness(engine, LONGEST, LONGEST)
    for message in asked:
        harness.scheduler.enqueue(b"c", message)
    harness.finish()
    ends = [harness.answer(i)[1] for i in range(4)]
    assert [done.reason for done in ends] == ["length"] * 4
    assert harness.scheduler.stats()["preemptions"] == sum(d.stats["preemptions"] for d in ends) > 0
    assert ends[0].stats["preemptions"] == 0  # the oldest is never preempted
    for i, reference in enumerate(alone):
        tokens = [token.token for token in harness.answer(i)[0]]
        assert compare(tokens, reference, BOUND).verdict is not Verdict.MISMATCH
    harness.check_empty()


def test_steps_name_the_live_sequences(engine, monkeypatch) -> None:
    """Those of admitted requests, preempted ones too, until they end; one that goes on behind another one's
    tokens is another sequence."""
    seen: list[tuple[set[int], list[int]]] = []
    step = engine.step

    def watched(inputs, phase, live):
        seen.append(({item.span.kv.id for item in inputs}, list(live)))
        return step(inputs, phase, live)

    monkeypatch.setattr(engine, "step", watched)
    harness = Harness(engine, LONGEST, LONGEST)
    for i in range(4):
        harness.scheduler.enqueue(b"c", ask(i, 4 + i, 120 + 20 * i))
    preempted = False
    while not harness.scheduler.idle:
        harness.scheduler.round()
        stats = harness.scheduler.stats()
        preempted = preempted or (stats["preemptions"] > 0 and len(seen[-1][1]) > stats["running"])
    assert preempted
    assert all(rows <= set(live) for rows, live in seen)
    assert max(len(live) for _, live in seen) == 2
    seen.clear()
    for request in (4, 5):
        harness.run(b"c", ask(request, 8, 2))
    assert [len(live) for _, live in seen] == [1] * len(seen)
    assert len({live[0] for _, live in seen}) == 2
    harness.scheduler.forget(b"c")


def test_backbone_that_takes_one_sequence_gets_one_a_step(harness, monkeypatch) -> None:
    engine, seen = harness.scheduler.engine, list[int]()
    monkeypatch.setattr(engine.backbone, "several", False, raising=False)
    step = engine.step
    monkeypatch.setattr(
        engine, "step", lambda inputs, *more: (seen.append(len(inputs)), step(inputs, *more))[1]
    )
    for request, client in enumerate((b"a", b"b")):
        harness.scheduler.enqueue(client, ask(request, 9, 5))
    harness.finish()
    assert [len(harness.answer(*of)[0]) for of in ((0, b"a"), (1, b"b"))] == [5, 5]
    assert set(seen) == {1}


def test_backbone_that_needs_whole_prompts_goes_on_behind_no_prefix(harness, monkeypatch) -> None:
    monkeypatch.setattr(harness.scheduler.engine.backbone, "chunks", False, raising=False)
    for request in (0, 1):
        harness.run(b"c", ask(request, 20, 6))
    assert [harness.answer(n)[1].stats["kv_reused_tokens"] for n in (0, 1)] == [0, 0]
    assert harness.scheduler.kv.used == 0
    harness.scheduler.forget(b"c")


def test_next_turn_prefills_only_new_tokens(harness) -> None:
    harness.run(b"c", ask(0, 20, 6))
    first, done = harness.answer(0)
    assert done.stats["kv_reused_tokens"] == 0
    stats = harness.scheduler.stats()
    assert (stats["kv_tokens_used"], stats["kv_tokens_kept"]) == (0, KV_BLOCK)
    longer = (*range(3, 23), *(token.token for token in first), 50, 51, 52)
    harness.run(b"c", Generate(1, token_ids=longer, max_tokens=6, ignore_eos=True))
    again, done = harness.answer(1)
    assert done.stats["kv_reused_tokens"] == 25  # the last token's KV was never needed
    assert done.stats["engine"]["prefill"]["rows"] == 4
    harness.run(b"c", Generate(2, token_ids=longer, max_tokens=6, ignore_eos=True, reuse=False))
    fresh, done = harness.answer(2)
    verdict = compare([token.token for token in again], fresh, BOUND).verdict
    assert verdict is not Verdict.MISMATCH
    assert done.stats["engine"]["prefill"]["rows"] == 29
    stats = harness.scheduler.stats()
    assert (stats["kv_reused_tokens"], stats["kv_hits"]) == (25, 1)
    harness.run(b"d", Generate(0, token_ids=longer, max_tokens=1))
    assert harness.answer(0, b"d")[1].stats["kv_reused_tokens"] == 0  # another client's


@pytest.mark.parametrize("budget", [LONGEST * 8, LONGEST])
def test_many_requests_of_one_client_do_not_block_another(engine, budget) -> None:
    """Whether the slots (three, and one for new clients) or the KV cache are taken: a new client's request
    begins at once, and the request preempted for it is still complete in the end."""
    harness = Harness(engine, budget, LONGEST)
    for i in range(6):
        harness.scheduler.enqueue(b"a", ask(i, 4, 120))
    for _ in range(100):
        harness.scheduler.round()
    for client in (b"b", b"c"):
        harness.scheduler.enqueue(client, ask(0, 4, 40))
        for _ in range(3):
            harness.scheduler.round()
        assert harness.to(client, Token)
    assert harness.scheduler.stats()["preemptions"] > 0
    harness.finish()
    for i in range(6):
        assert len(harness.answer(i, b"a")[0]) == 120
    assert harness.answer(0, b"a")[1].stats["preemptions"] == 0  # the newest are preempted
    harness.check_empty()


@pytest.mark.parametrize("stepwise", [False, True])
def test_paused_scores_leave_the_cache_to_others_and_continue_behind_their_rows(engine, stepwise) -> None:
    harness = Harness(engine, 2 * CONTEXT)
    slow = (b"s1", b"s2")  # they hold the whole cache
    for client in slow:
        score = Score(0, token_ids=tuple(range(CONTEXT)), stepwise=stepwise, prefill=3)
        harness.scheduler.enqueue(client, score)
    for _ in range(9):
        harness.scheduler.round()
    begun = [len(harness.to(client, Scores)) for client in slow]
    assert min(begun) > 1
    harness.slow.update(slow)
    harness.run_until(b"fast", ask(0, 20, 5))
    assert [len(harness.to(client, Scores)) for client in slow] == begun
    harness.slow.clear()
    harness.finish()
    harness.run(b"alone", Score(0, token_ids=tuple(range(CONTEXT)), stepwise=stepwise, prefill=3))
    alone = np.concatenate([m.chosen for m in harness.to(b"alone", Scores)])
    preemptions = 0
    for client in slow:
        blocks = harness.to(client, Scores)
        assert np.concatenate([m.tokens for m in blocks]).tolist() == list(range(CONTEXT))  # each row once
        assert np.allclose(np.concatenate([m.chosen for m in blocks]), alone, atol=BOUND)
        (done,) = harness.to(client, Done)
        assert done.reason == "stop"
        preemptions += done.stats["preemptions"]
    assert preemptions > 0
    harness.check_empty()


def test_score_is_not_preempted_while_its_client_reads(engine) -> None:
    """The cache is full while a newer Score runs: the older Generate waits for its end."""
    harness = Harness(engine, LONGEST, LONGEST)
    harness.scheduler.enqueue(b"c", ask(0, 40, 150))
    harness.scheduler.round()
    harness.scheduler.enqueue(b"c", Score(1, token_ids=tuple(range(120)), stepwise=True))
    harness.finish()
    assert harness.answer(0)[1].stats["preemptions"] > 0
    assert [m.start for m in harness.to(b"c", Scores)] == list(range(120))
    (done,) = [m for m in harness.to(b"c", Done) if m.request == 1]
    assert (done.reason, done.stats["preemptions"]) == ("stop", 0)


def test_failed_shard_ends_only_the_request_that_causes_it(harness, monkeypatch) -> None:
    """Steps with this request fail: the others of the step are computed without it."""
    for i in range(3):
        harness.scheduler.enqueue(b"c", ask(i, 4, 6))
        harness.scheduler.round()
    step, poisonous = harness.scheduler.engine.step, harness.scheduler._running[1].kv

    def failing(inputs, phase, live):
        if any(item.span.kv is poisonous for item in inputs):
            raise ShardFailed("computing this request ended 2 workers")
        return step(inputs, phase, live)

    with monkeypatch.context() as patch:
        patch.setattr(harness.scheduler.engine, "step", failing)
        harness.finish()
    ends = [harness.answer(i)[1] for i in range(3)]
    assert [done.reason for done in ends] == ["length", "error", "length"]
    assert ends[1].error == "computing this request ended 2 workers"
    assert [len(harness.answer(i)[0]) for i in (0, 2)] == [6, 6]


def test_a_guess_that_cannot_be_computed_ends_nothing(engine, monkeypatch) -> None:
    """Its request, alone and beside another, goes on without."""
    harness = Harness(engine, speculate=4)
    step, failures = engine.step, []

    def failing(inputs, phase, live):
        if any(item.span.drafted for item in inputs):
            failures.append(len(inputs))
            raise ShardFailed("a guess cannot be computed")
        return step(inputs, phase, live)

    monkeypatch.setattr(engine, "step", failing)
    for request, count in enumerate((50, 30)):
        ids = (5, 6, 7, 8) * 3
        harness.scheduler.enqueue(b"c", Generate(request, token_ids=ids, max_tokens=count, ignore_eos=True))
    harness.finish()
    assert {1, 2} <= {*failures}
    assert [len(harness.answer(request)[0]) for request in range(2)] == [50, 30]
    harness.check_empty()


def test_requests_go_on_alone_where_a_step_of_several_finds_no_memory(engine, monkeypatch) -> None:
    """At the first token of a block, which is given back with the step."""
    harness = Harness(engine, 8 * KV_BLOCK, 2 * KV_BLOCK)
    step, full = engine._step, []

    def failing(inputs, phase, live):
        if len(inputs) > 1 and any(item.span.kv.length == KV_BLOCK for item in inputs):
            full.append(phase)
            raise torch.OutOfMemoryError("full")
        return step(inputs, phase, live)

    monkeypatch.setattr(engine, "_step", failing)
    for request in range(2):
        harness.scheduler.enqueue(b"c", ask(request, KV_BLOCK - 4, 30))
    harness.finish()
    assert full
    assert [len(harness.answer(request)[0]) for request in range(2)] == [30, 30]
    harness.check_empty()


def test_kv_of_a_failed_request_is_not_reused(harness, monkeypatch) -> None:
    """The KV may be wrong, as the logits computed with it were not finite."""
    step = harness.scheduler.engine.step
    harness.scheduler.enqueue(b"c", ask(0, 20, 6))
    while len(harness.to(b"c", Token)) < 2:
        harness.scheduler.round()
    with monkeypatch.context() as patch:
        patch.setattr(
            harness.scheduler.engine,
            "step",
            lambda *given: [np.full_like(rows, np.nan) for rows in step(*given)],
        )
        harness.scheduler.round()
    done = harness.answer(0)[1]
    assert (done.reason, done.error) == ("error", "the model's logits are not finite")
    stats = harness.scheduler.stats()
    assert (stats["kv_tokens_kept"], stats["kv_tokens_used"]) == (0, 0)
    harness.run(b"c", ask(1, 20, 6))
    done = harness.answer(1)[1]
    assert (done.reason, done.stats["kv_reused_tokens"]) == ("length", 0)


def test_admission_takes_capacity_for_a_token_more_and_leaves_only_what_can_be_needed(engine) -> None:
    """A sequence that has the most that it can need leaves all other capacity to the next request."""
    harness = Harness(engine, 2 * KV_BLOCK, 2 * KV_BLOCK)
    harness.scheduler.enqueue(b"a", ask(0, 4, KV_BLOCK - 4))
    harness.scheduler.enqueue(b"b", ask(0, 4, 90))
    harness.scheduler.round()
    assert (harness.scheduler.stats()["running"], harness.scheduler.kv.free) == (2, 0)
    harness.scheduler.cancel_all()
    harness.scheduler.enqueue(b"a", ask(1, KV_BLOCK, 9))
    harness.scheduler.round()
    assert harness.scheduler.kv.used == 2 * KV_BLOCK
    harness.scheduler.cancel_all()


def test_admission_leaves_capacity_for_running_sequences_to_grow(engine) -> None:
    """A sequence is one token short of its capacity: a request that fits beside it only now waits, instead of
    being preempted a step later."""
    harness = Harness(engine, 2 * KV_BLOCK, 2 * KV_BLOCK)
    harness.scheduler.enqueue(b"a", ask(0, KV_BLOCK - 4, 40))
    while len(harness.to(b"a", Token)) < 4:
        harness.scheduler.round()
    (job,) = harness.scheduler._running
    assert (job.filled, job.kv.capacity) == (KV_BLOCK - 1, KV_BLOCK)
    harness.run(b"b", ask(0, 4, 40))
    assert harness.scheduler.stats()["preemptions"] == 0
    for client in (b"a", b"b"):
        tokens, done = harness.answer(0, client)
        assert (len(tokens), done.stats["preemptions"]) == (40, 0)
