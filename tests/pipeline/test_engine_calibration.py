"""Calibrate in the engine's thread: what its messages do meanwhile, how it ends, what is written."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from whole_engine import CONTEXT, Inbox, WholeEngine, whole_engine

from pipeline.arrays import Phase
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_blocks import blocks_for
from pipeline.calibration import LANES, measure
from pipeline.calibration.file import NAME, calibration_path, read
from pipeline.calibration.measure import BOUND, calibrate
from pipeline.calibration.observers import TokenOrder
from pipeline.calibration.reading import CalibrationContext, Division, Window, lanes
from pipeline.calibration.sensitivity import sensitivities
from pipeline.config import KV_BLOCK
from pipeline.errors import RequestError, ShardFailed
from pipeline.experts.pool import Ticket
from pipeline.serving import calibration_service, engine_service
from pipeline.text.logprobs import log_softmax
from protocol.messages import Calibrate, Calibrated, Calibrating, Done, SetPolicy

IDS = tuple(np.random.default_rng(0).integers(3, 4000, 400).tolist())
CALIBRATE = Calibrate(1, token_ids=IDS, tokens=256)


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


def no_space(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_unchanged(whole: WholeEngine, policy: str = "on-demand") -> None:
    """No file, no KV, and a service that serves."""
    engine = whole.parts.engine
    path = calibration_path(whole.config.cache, whole.parts.source)
    assert not path.parent.is_dir() or not list(path.parent.glob("*.safetensors"))
    assert (engine.policy.name, whole.parts.kv.used) == (policy, 0)
    assert (engine.popularity.sum(), engine.counters.phases["prefill"].rows) == (0, 0)


def test_calibration_says_how_it_was_measured(whole: WholeEngine) -> None:
    inbox = Inbox()
    service = whole.service(inbox, link_gbps=2.0)
    inbox.put(b"c", Calibrate(1, token_ids=IDS, tokens=300))
    service.serve()
    *stages, found = whole.sent()
    path = calibration_path(whole.config.cache, whole.parts.source)
    assert (found.request, found.path) == (1, str(path))
    calibration, about = read(path)
    assert calibration.decode_counts.sum() > 0
    when, machine = datetime.fromisoformat(about.pop("when")), about.pop("machine")
    assert abs((datetime.now(when.tzinfo) - when).total_seconds()) < 60
    assert machine.startswith(f"{platform.node()}: ")
    assert machine.endswith(whole.parts.device.describe())
    loss = about.pop("loss")
    assert loss["gated"] <= loss["exact"] * (1 + BOUND)
    assert about == {
        "model": "tiny",
        "format": "f32",
        "backbone_dtype": "f32",
        "emulation": "link paced to 2 GB/s",
        "tokens": 300,
        "notes": ["the threshold was found on 30 tokens alone; give a text of some thousand tokens"],
        "sparsities": [],
    }
    assert found.summary.items() >= about.items()
    assert found.summary["threshold"] == calibration.threshold
    assert all(isinstance(far, Calibrating) and far.request == 1 for far in stages)
    names = list(dict.fromkeys(far.stage for far in stages))
    trained = ["training the first gate", "training the MLPs of the next gate"]
    assert names == ["reading the text", *trained, "sensitivities", "threshold"]


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
        patch.setattr(Ticket, "parts", fail)
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


def context_of(whole: WholeEngine, **changes: Any) -> CalibrationContext:
    parts = whole.parts
    plain = {"chunk": 20, "lanes": 3, "context": CONTEXT, "seed": 5}
    return CalibrationContext(parts.engine, parts.store, parts.kv, **plain | changes)


def calibrated(whole: WholeEngine, ids: Sequence[int] = IDS, most: int = 320, **changes: Any):
    """The calibration, its findings, and the rows of each step by phase."""
    engine, rows = whole.parts.engine, []
    step = engine.step

    def counted(inputs: Sequence[StepInput], phase: Phase) -> Any:
        rows.append((phase, sum(len(each.span.tokens) for each in inputs), len(inputs)))
        return step(inputs, phase)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", counted)
        found, findings = calibrate(context_of(whole, **changes), ids, most, lambda *_: None)
    return found, findings, rows


def test_arrays_of_a_calibration_are_of_both_parts_of_its_text(whole: WholeEngine) -> None:
    whole.policies()
    found, findings, rows = calibrated(whole)
    division = Division.of(IDS, CONTEXT, 320)
    windows = division.training + division.validation
    prompts = sum(window.prefill for window in windows)
    assert (found.decode_counts.sum(axis=1) == 2 * (320 - prompts)).all()
    assert findings.tokens == 320
    assert all(((shares > 0) & (shares <= 1))[1:].all() for shares in (found.accuracy["raw"],))
    assert found.accuracy["raw"][0] == found.accuracy["residual"][0] == 0
    assert found.accuracy["first"][0] > 0
    assert {phase: max(count for p, count, _ in rows if p == phase) for phase in ("prefill", "decode")} == {
        "prefill": 20,  # a chunk
        "decode": 3,  # lanes
    }
    assert all(inputs == 1 for phase, _, inputs in rows if phase == "prefill")


@pytest.mark.parametrize("last", ["reading the text", "threshold"])
def test_engine_counts_nothing_of_a_calibration(whole: WholeEngine, last: str) -> None:
    """Also after one that failed: its counters and observers are its own again."""
    whole.policies()
    engine = whole.parts.engine
    watching = [TokenOrder(engine.shape)]
    engine.observers[:] = watching
    counters = engine.counters

    def stop(stage: str, done: int, total: int) -> None:
        if stage == last:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        calibrate(context_of(whole), IDS, 256, stop)
    assert engine.counters is counters
    assert engine.observers == watching
    assert whole.parts.kv.used == 0
    calibrated(whole)
    assert engine.counters is counters
    assert engine.observers == watching
    assert (counters.phases["prefill"].rows, counters.phases["decode"].rows) == (0, 0)
    assert not watching[0].decode_counts().any()
    assert engine.popularity.sum() == 0
    assert engine.policy.name == "all-host"


@pytest.mark.parametrize(("lanes", "widest"), [(1, 1), (2, 2), (9, LANES)])
def test_windows_that_are_decoded_together(whole: WholeEngine, lanes: int, widest: int) -> None:
    """As many as the sequences of a step, four at most, and as the KV cache holds."""
    whole.policies()
    rows = calibrated(whole, lanes=lanes)[2]
    assert max(count for phase, count, _ in rows if phase == "decode") == widest


def test_kv_of_other_requests_narrows_a_calibration_or_refuses_it(whole: WholeEngine) -> None:
    whole.policies()
    kv = whole.parts.kv
    longest = max(len(w.tokens) for w in Division.of(IDS, CONTEXT, 320).training)
    blocks = blocks_for(longest)
    others = kv.allocate(KV_BLOCK * (kv.free - 2 * blocks))
    rows = calibrated(whole, lanes=9)[2]
    assert max(count for phase, count, _ in rows if phase == "decode") == 2
    kv.release(others)
    others = kv.allocate(KV_BLOCK * (kv.free - blocks + 1))
    left = KV_BLOCK * (blocks - 1)
    with pytest.raises(RequestError, match=f"has {left} tokens free of the {longest} that"):
        calibrated(whole)
    kv.release(others)
    assert kv.used == 0


def test_threshold_is_found_on_some_windows_of_many(whole: WholeEngine) -> None:
    """One lane of two validation windows, with too few tokens for a note on their number."""
    whole.policies()
    ids = np.random.default_rng(2).integers(3, 4000, 640).tolist()
    found, findings, _ = calibrated(whole, ids, most=640, lanes=1)
    assert findings.notes == [
        "the threshold was found on 1 of 2 validation windows",
        "the threshold was found on 32 tokens alone; give a text of some thousand tokens",
    ]
    assert findings.losses.keys() == {"exact", "gated"}
    assert found.threshold is not None
    assert found.needed is not None
    np.testing.assert_allclose(found.needed.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("ends", [1, 7])
def test_loss_of_answers_is_that_of_each_next_token(whole: WholeEngine, ends: int) -> None:
    """Of lanes of different lengths; reading them again changes nothing."""
    whole.policies()
    engine, kv = whole.parts.engine, whole.parts.kv
    windows = [Window(list(IDS[:30]), 21), Window(list(IDS[40:53]), 13 - ends)]
    losses, tokens = [], 0
    for window in windows:
        sequence = kv.allocate(len(window.tokens))
        (logits,) = engine.step([StepInput(TokenSpan(sequence, window.tokens), "all")], "prefill")
        kv.release(sequence)
        rows = log_softmax(logits)
        losses += [-rows[at - 1, window.tokens[at]] for at in range(window.prefill + 1, len(window.tokens))]
        tokens += len(window.tokens) - window.prefill
    passed: list[int] = []
    with lanes(engine, kv, windows, 8) as held:
        held.read_prompts(passed.append)
        assert passed == [8, 8, 5, 8, 5 - ends] if ends < 5 else [8, 8, 5, 6]
        passed.clear()
        first = held.loss(passed.append)
        assert (sum(passed), max(passed), passed[0], passed[-1]) == (tokens, 2, 2, 1)
        assert first == pytest.approx(np.mean(losses), rel=1e-4)
        held.read_answers(lambda _: None)
        assert held.loss(lambda _: None) == pytest.approx(first, rel=1e-6)
    assert kv.used == 0


def test_lanes_that_do_not_fit_hold_no_kv(whole: WholeEngine) -> None:
    kv = whole.parts.kv
    windows = [Window(list(IDS[:CONTEXT]), 40)] * (kv.budget // CONTEXT + 1)
    with pytest.raises(RequestError), lanes(whole.parts.engine, kv, windows, 8):
        pass
    assert kv.used == 0


def test_sensitivities_are_of_windows_of_all_the_text(
    whole: WholeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Sequence[Sequence[int]]] = []

    def spied(*arguments: Any) -> Any:
        read.append(arguments[3])
        return sensitivities(*arguments)

    monkeypatch.setattr(measure, "sensitivities", spied)
    whole.policies()
    ids = np.random.default_rng(2).integers(3, 4000, 640).tolist()
    calibrated(whole, ids, most=640)
    training = Division.of(ids, CONTEXT, 640).training
    assert len(training) == 8
    assert read == [[training[place].tokens for place in (0, 2, 5, 7)]]


@pytest.mark.parametrize("full", [False, True])
def test_calibration_that_cannot_be_written_is_an_error_before_it_begins(
    whole: WholeEngine, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    if full:
        monkeypatch.setattr(os, "posix_fallocate", no_space)
    else:
        whole.config.cache.write_text("")
    monkeypatch.delattr("pipeline.serving.calibration_service.calibrate")
    whole.serve(CALIBRATE)
    done = answer_of(whole)
    assert (done.request, done.reason, done.usage) == (1, "error", False)
    start, end = "the calibration /", f"{NAME} cannot be written: "
    assert done.error.startswith(start)
    assert done.error.endswith(f"{end}{'No space left on device' if full else 'Not a directory'}")
    assert "Errno" not in done.error
