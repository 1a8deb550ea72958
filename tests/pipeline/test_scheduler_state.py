"""What the scheduler keeps between rounds: turns, reports of positions, prefixes, capacity."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clock import Clock
from test_scheduler import Harness, ask
from thread_engine import CONTEXT as LONGEST
from thread_engine import engine_in_threads

from pipeline.config import KV_BLOCK
from pipeline.engine.engine import Engine
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.scheduling import waiting_queue
from pipeline.scheduling.waiting_queue import POSITION_SECONDS
from protocol.messages import Done, Generate, Queued, Score, Token

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory) -> Iterator[Engine]:
    with engine_in_threads(tiny_model, tmp_path_factory.mktemp("s")) as (engine, _):
        engine.set_policy(make_policy(PolicyRequest("all-host"), 1), None)
        yield engine


@pytest.fixture
def harness(engine: Engine) -> Harness:
    return Harness(engine)


def kept(harness: Harness) -> int:
    """Blocks that no request uses."""
    return harness.scheduler.stats()["kv_tokens_kept"] // KV_BLOCK


def test_client_that_disconnects_ends_its_own_requests_and_frees_what_is_kept(harness: Harness) -> None:
    """One of its requests runs, one waits; another client's go on."""
    harness.run(b"a", ask(0, 8, 2))
    harness.run(b"b", ask(0, 8, 2))
    assert kept(harness) == 2
    for client in (b"a", b"b"):
        harness.scheduler.enqueue(client, ask(1, 8, 20))
    harness.scheduler.round()
    harness.scheduler.enqueue(b"a", ask(2, 8, 2))  # not admitted
    harness.scheduler.forget(b"a")
    assert [(m.request, m.reason) for m in harness.to(b"a", Done)[1:]] == [(1, "cancelled"), (2, "cancelled")]
    assert [m.request for m in harness.to(b"b", Done)] == [0]
    assert (kept(harness), harness.scheduler.kv.used) == (1, 2 * KV_BLOCK)
    harness.finish()
    assert [m.reason for m in harness.to(b"b", Done)] == ["length", "length"]
    assert (kept(harness), harness.scheduler.stats()["ended"]) == (
        1,
        5,
    )  # the longer one has the tokens of both
    harness.scheduler.forget(b"b")
    assert harness.scheduler.kv.used == 0


def test_cancelled_request_s_tokens_are_kept(harness: Harness) -> None:
    harness.scheduler.enqueue(b"c", ask(0, 20, 30))
    while len(harness.to(b"c", Token)) < 3:
        harness.scheduler.round()
    harness.scheduler.cancel(b"c", 0)
    assert kept(harness) == 1
    tokens = [m.token for m in harness.to(b"c", Token)]
    harness.run(b"c", Generate(1, token_ids=(*range(3, 23), *tokens, 9), max_tokens=1))
    done = harness.answer(1)[1]
    assert done.stats["kv_reused_tokens"] == 20 + len(tokens) - 1
    harness.scheduler.prefixes.clear()  # as for a calibration
    assert harness.scheduler.kv.used == 0


def test_positions_are_reported_again_only_after_a_while(engine: Engine, monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(waiting_queue, "time", clock)
    harness = Harness(engine, slots=1)
    for client in (b"a", b"b", b"c", b"d"):  # one slot, and one for new clients
        harness.scheduler.enqueue(client, ask(0, 4, 50))

    def positions() -> list[int]:
        return [m.position for m in harness.to(b"d", Queued)]

    harness.scheduler.round()
    assert positions() == [2]
    harness.scheduler.cancel(b"c", 0)
    clock.now += POSITION_SECONDS - 0.01
    harness.scheduler.round()
    assert positions() == [2]
    clock.now += 0.02
    harness.slow.add(b"d")
    harness.scheduler.round()  # a report, which it is not sent
    harness.slow.clear()
    harness.scheduler.round()
    assert positions() == [2]
    clock.now += POSITION_SECONDS
    harness.scheduler.round()
    assert positions() == [2, 1]
    harness.scheduler.cancel_all()
    harness.check_empty()


def test_preempted_request_goes_on_where_it_was_unless_its_blocks_were_needed(engine: Engine) -> None:
    """It counts as computed by itself."""
    for needed in (2, 4):
        harness = Harness(engine, 4 * KV_BLOCK, LONGEST)
        harness.scheduler.enqueue(b"c", ask(0, 70, 30))
        while len(harness.answered(0)) < 9:
            harness.scheduler.round()
        (job,) = harness.scheduler._running
        filled = job.filled
        harness.scheduler._preempt(job)
        stats = harness.scheduler.stats()
        assert (stats["waiting"], stats["running"], stats["preemptions"]) == (1, 0, 1)
        assert (stats["kv_tokens_used"], stats["kv_tokens_kept"]) == (0, 2 * KV_BLOCK)
        harness.scheduler._waiting.remove(job)
        harness.run(b"d", Score(0, token_ids=(5,) * (needed * KV_BLOCK)))
        harness.scheduler._waiting.add(job)
        harness.scheduler.round()
        assert (job.filled >= filled) == (needed == 2)
        harness.finish()
        tokens, done = harness.answer(0)
        assert (len(tokens), done.stats["preemptions"], done.stats["kv_reused_tokens"]) == (30, 1, 0)
        assert harness.scheduler.stats()["kv_reused_tokens"] == 0
        harness.check_empty()
