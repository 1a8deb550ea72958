"""Calibrate in the engine's thread: what its messages do meanwhile, how it ends, what is written."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from whole_engine import Inbox, WholeEngine, whole_engine

from pipeline.calibration.file import calibration_path, read
from pipeline.calibration.measure import BOUND
from pipeline.errors import ShardFailed
from pipeline.experts.inline_pool import InlineExpertPool
from pipeline.policies.costs import Costs
from pipeline.serving import calibration_service, engine_service
from pipeline.serving.engine_inbox import ClientGone, EngineMessage
from pipeline.serving.engine_service import CALIBRATING
from protocol.messages import (
    Calibrate,
    Calibrated,
    Calibrating,
    Cancel,
    Done,
    Error,
    Generate,
    SetPolicy,
    Token,
)

IDS = tuple(np.random.default_rng(0).integers(3, 4000, 400).tolist())
CALIBRATE = Calibrate(1, token_ids=IDS, tokens=256)
COSTS = Costs((1,), (1e-4,), (2e-5,), 3e-5, 4e-5)


@pytest.fixture
def whole(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WholeEngine]:
    """It takes all waiting messages at a calibration's first report."""
    monkeypatch.setattr(calibration_service, "PROGRESS_SECONDS", -1.0)
    monkeypatch.setattr(engine_service, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    with whole_engine(tiny_model, tmp_path) as whole:
        yield whole


def answer_of(whole: WholeEngine) -> Any:
    """The only answer to client "c" but progress."""
    (answer,) = (m for m in whole.sent() if not isinstance(m, Calibrating))
    return answer


def check_unchanged(whole: WholeEngine, policy: str = "on-demand") -> None:
    """No file, no KV, and a service that serves."""
    engine = whole.parts.engine
    path = calibration_path(whole.config.cache, whole.parts.source)
    assert not path.parent.is_dir() or not list(path.parent.glob("*.safetensors"))
    assert (engine.policy.name, whole.parts.kv.used) == (policy, 0)
    assert (engine.popularity.sum(), engine.counters.phases["prefill"].rows) == (0, 0)


def test_other_messages_are_served_during_a_calibration(whole: WholeEngine) -> None:
    """A request waits, a policy and a second calibration are refused; only its own client cancels it."""
    inbox = Inbox()
    service = whole.service(inbox, policy="on-demand")
    first = whole.parts.engine.policy
    messages: list[EngineMessage] = [
        CALIBRATE,
        Calibrate(2, token_ids=IDS),
        SetPolicy(3, "all-host"),
        Generate(4, token_ids=(5, 6), max_tokens=1),
        Cancel(9),
    ]
    for message in messages:
        inbox.put(b"c", message)
    inbox.put(b"d", Cancel(1))
    inbox.put(b"d", ClientGone())
    service.serve()
    found = [message for message in whole.sent() if not isinstance(message, Calibrating)]
    busy = "another calibration is running; try again when it has ended"
    assert found[:2] == [Done(2, "error", busy, usage=True), Error(3, CALIBRATING)]
    assert [type(message) for message in found[2:]] == [Calibrated, Token, Done]
    assert whole.sent(b"d") == []
    assert whole.parts.engine.policy is not first  # made anew with the calibration
    assert whole.parts.engine.policy.name == "on-demand"
    assert whole.parts.engine.driver.view.calibration is not None


def test_calibration_says_how_it_was_measured(whole: WholeEngine) -> None:
    inbox = Inbox()
    service = whole.service(inbox, link_gbps=2.0)
    service._policies.costs = COSTS
    inbox.put(b"c", Calibrate(1, token_ids=IDS, tokens=300, starts=(200,), share=0.5))
    service.serve()
    *stages, found = whole.sent()
    path = calibration_path(whole.config.cache, whole.parts.source)
    assert (found.request, found.path) == (1, str(path))
    calibration, about = read(path)
    assert calibration.prefill_counts.sum() + calibration.decode_counts.sum() == 2 * 2 * 300
    when, machine = datetime.fromisoformat(about.pop("when")), about.pop("machine")
    assert abs((datetime.now(when.tzinfo) - when).total_seconds()) < 60
    assert machine.startswith(f"{platform.node()}: ")
    assert machine.endswith(whole.parts.device.describe())
    seconds = about.pop("seconds")
    assert seconds.keys() == {"reading", "first gate", "sensitivities", "threshold", "all"}
    assert seconds.pop("all") >= sum(seconds.values())
    loss, hits, windows = about.pop("loss"), about.pop("hits"), about.pop("windows")
    assert loss["bound"] == BOUND
    assert loss["gated"] <= loss["exact"] * (1 + BOUND)
    assert windows == 5  # of 64 tokens at most
    assert (hits["tokens"], hits["own"]) == (0, None)
    assert about == {
        "model": "tiny",
        "format": "f32",
        "backbone_dtype": "f32",
        "emulation": "link paced to 2 GB/s",
        "tokens": 300,
        "experts_of_a_token": 2,
        "notes": ["the threshold was found on 30 tokens alone; give a text of some thousand tokens"],
        "share": 0.5 * 300 / len(IDS),
        "costs": COSTS.to_json(),
    }
    assert found.summary.items() >= about.items()
    assert found.summary["threshold"] == calibration.threshold
    assert all(isinstance(far, Calibrating) and far.request == 1 for far in stages)
    names = list(dict.fromkeys(far.stage for far in stages))
    assert names == ["reading the text", "training the first gate", "sensitivities", "threshold"]


def test_excerpts_of_a_text_are_encoded_by_themselves(whole: WholeEngine) -> None:
    """`starts` are in characters of a text, in tokens of ids."""
    tokenizer = whole.parts.tokenizer
    assert tokenizer is not None
    first, second = "def add(a, b):\n    return a + b\n" * 20, "What is a list? " * 20
    whole.serve(Calibrate(1, text=first + second, tokens=256, starts=(len(first),)))
    of_text = answer_of(whole).summary
    whole.events.clear()
    ids = [tokenizer.encode(first), tokenizer.encode(second)]
    whole.serve(Calibrate(1, token_ids=(*ids[0], *ids[1]), tokens=256, starts=(len(ids[0]),)))
    of_ids = answer_of(whole).summary
    same = ("tokens", "share", "hits", "accuracy", "similarity", "threshold", "loss")
    assert {name: of_text[name] for name in same} == {name: of_ids[name] for name in same}


@pytest.mark.parametrize("end", [Cancel(1), ClientGone()], ids=["cancelled", "gone"])
def test_its_client_ends_a_calibration(whole: WholeEngine, end) -> None:
    """The next one is not ended."""

    def until() -> bool:
        if len(inbox.waits) == 1:
            check_unchanged(whole)
            inbox.put(b"c", CALIBRATE)
        return len(inbox.waits) == 2

    inbox = Inbox(until)
    service = whole.service(inbox, policy="on-demand")
    for message in (CALIBRATE, end):
        inbox.put(b"c", message)
    service.serve()
    ended, calibrated = (message for message in whole.sent() if not isinstance(message, Calibrating))
    assert ended == Done(1, "cancelled")
    assert isinstance(calibrated, Calibrated)


def test_stopping_the_engine_ends_a_calibration(whole: WholeEngine) -> None:
    inbox = Inbox()
    service = whole.service(inbox, policy="on-demand")
    inbox.put(b"c", CALIBRATE)
    inbox.stop()
    service.serve()
    assert answer_of(whole) == Done(1, "cancelled")
    check_unchanged(whole, policy="all-host")


def test_failed_calibration_leaves_the_engine_as_it_was(
    whole: WholeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is served."""

    def fail(*_: object) -> None:
        raise ShardFailed("no")

    inbox = Inbox()
    service = whole.service(inbox, policy="on-demand")
    with monkeypatch.context() as patch:
        patch.setattr(InlineExpertPool, "result", fail)
        for message in (CALIBRATE, Calibrate(2, token_ids=IDS[:255]), SetPolicy(3, "x")):
            inbox.put(b"c", message)
        service.serve()
    failed, too_short, refused = (m for m in whole.sent() if not isinstance(m, Calibrating))
    assert failed == Done(1, "error", "no")
    assert (too_short.request, too_short.reason, too_short.usage) == (2, "error", True)
    assert refused.text.startswith("unknown policy")
    check_unchanged(whole)
    whole.events.clear()
    whole.serve(CALIBRATE)
    assert isinstance(answer_of(whole), Calibrated)


def test_calibration_that_cannot_be_written_is_an_error_of_the_engine(whole: WholeEngine) -> None:
    whole.config.cache.write_text("")
    whole.serve(CALIBRATE)
    done = answer_of(whole)
    assert (done.request, done.reason, done.usage) == (1, "error", False)
    assert done.error.startswith("the calibration cannot be written: ")
