"""The scheduler on a real engine, round by round: what only shows from inside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from thread_engine import CONTEXT, engine_in_threads

from pipeline.errors import RequestError
from pipeline.kv_cache import KVCache
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.scheduler import Scheduler
from protocol.messages import ChatMessage, Done, Generate, Score, Token

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


class Harness:
    """A scheduler whose messages are kept, and whose clients are congested as the test says."""

    def __init__(self, engine) -> None:
        self.sent: list[tuple[bytes, object]] = []
        self.slow: set[bytes] = set()
        spec, device = engine.backbone.spec, engine.device.torch_device
        self.scheduler = Scheduler(
            engine,
            KVCache(spec, torch.float32, device, 2 * CONTEXT),
            None,
            frozenset({2}),
            context=CONTEXT,
            max_sequences=3,
            chunk=8,
            seed=0,
            send=lambda client, message: self.sent.append((client, message)),
            congested=self.slow.__contains__,
        )

    def to(self, client: bytes, kind: type) -> list:
        return [m for c, m in self.sent if c == client and isinstance(m, kind)]

    def finish(self) -> None:
        for _ in range(500):
            if self.scheduler.idle:
                return
            self.scheduler.round()
        raise AssertionError("still not idle")


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
    assert harness.scheduler.kv.used == 0


def ask(request: int, prompt: int, count: int) -> Generate:
    return Generate(request, token_ids=tuple(range(3, 3 + prompt)), max_tokens=count, ignore_eos=True)


def test_who_does_not_read_pauses_and_delays_nobody(harness) -> None:
    harness.slow.add(b"slow")
    harness.scheduler.submit(b"slow", ask(0, 4, 5))
    harness.scheduler.submit(b"fast", ask(0, 4, 5))
    while not harness.to(b"fast", Done):
        assert harness.scheduler.round()
    assert not harness.to(b"slow", Token)
    assert not harness.scheduler.round()  # nothing can run
    assert not harness.scheduler.idle
    harness.slow.clear()
    assert harness.scheduler.round()
    assert harness.to(b"slow", Token)


def test_a_long_prompt_is_cut_into_chunks_and_decoding_goes_on_beside_it(harness) -> None:
    harness.scheduler.submit(b"a", ask(0, 2, 20))
    harness.scheduler.round()
    harness.scheduler.submit(b"b", ask(0, 40, 2))  # 5 chunks of 8
    for round_ in range(5):
        assert not harness.to(b"b", Token)
        before = len(harness.to(b"a", Token))
        harness.scheduler.round()
        assert len(harness.to(b"a", Token)) == before + 1, round_
    assert [m.index for m in harness.to(b"b", Token)] == [0, 1]  # the last chunk's, and the same round's step
    (done,) = harness.to(b"b", Done)
    assert (done.stats["prompt_tokens"], done.stats["decode_tokens"]) == (40, 1)
    assert done.stats["engine"]["prefill"]["rows"] == 40


def test_who_came_first_is_admitted_first(harness) -> None:
    """A small request does not overtake a large one that waits for room; a cancelled one makes way."""
    for i in range(4):
        harness.scheduler.submit(b"c", ask(i, 8, 52))
    harness.scheduler.submit(b"c", ask(4, 1, 1))
    harness.scheduler.round()
    stats = harness.scheduler.stats()
    assert (stats["running"], stats["waiting"], stats["kv_tokens_used"]) == (2, 3, 120)
    for i in (0, 2, 3):
        harness.scheduler.cancel(b"c", i)
    harness.scheduler.cancel(b"other")
    assert sorted(m.request for m in harness.to(b"c", Done)) == [0, 2, 3]
    harness.scheduler.round()
    harness.scheduler.round()  # a prompt's chunk each
    assert harness.scheduler.stats()["waiting"] == 0
    harness.scheduler.fail_all("the engine failed")
    reasons = {m.request: m.reason for m in harness.to(b"c", Done)}
    assert reasons == {0: "cancelled", 1: "error", 2: "cancelled", 3: "cancelled", 4: "length"}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Generate(0, prompt="text"), "text needs a tokenizer"),
        (Generate(0, messages=(ChatMessage("user", "hi"),)), "messages needs a tokenizer"),
        (Generate(0, token_ids=(1,), stop=("x",)), "stop strings need a tokenizer"),
        (Score(0, text="text"), "give token ids"),
    ],
)
def test_a_model_without_a_tokenizer_takes_ids_alone(harness, message, said) -> None:
    with pytest.raises(RequestError, match=said):
        harness.scheduler.submit(b"c", message)
    assert harness.scheduler.idle
