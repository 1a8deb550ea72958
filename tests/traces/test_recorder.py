"""The recorder: the file holds the observed steps, is private and is never overwritten."""

from __future__ import annotations

import logging
import resource
import stat
from pathlib import Path

import numpy as np
import pytest
from trace_files import equal, make_header

from pipeline.arrays import Phase
from pipeline.engine.driver import LayerDecision
from pipeline.errors import TraceError
from pipeline.policies.view import Gated, ModelShape, Routing, Signals
from pipeline.traces.recorder import Recorder
from pipeline.traces.trace import Header, Trace, TracedStep

HEADER = make_header(ModelShape(layers=3, experts=5, tiles=2, top_k=2), depth=2)
NOTHING = np.zeros(5, np.int32)


def open_recorder(
    path: Path, first: bool = False, resumed: bool = False, header: Header = HEADER
) -> Recorder:
    return Recorder(path, header, first_gate=lambda: first, resumed=resumed)


def show_step(
    recorder: Recorder, seed: int, rows: int = 1, phase: Phase = "decode", ends: bool = True
) -> list[LayerDecision[object]]:
    """One step with three kinds of layers: the router's own routing, a changed one, a predicted and stale
    one."""
    rng = np.random.default_rng(seed)
    recorder.begin(phase, tuple(range(seed, seed + rows)))
    seen = []
    for layer in range(3):
        logits = rng.normal(size=(rows, 5)).astype(np.float32)
        probes = {t: rng.normal(size=(rows, 5)).astype(np.float32) for t in recorder.probes(layer)}
        own = HEADER.router(logits, layer)
        done = own if layer == 0 else Routing(own.experts, own.weights * np.float32(layer == 1))
        gated = Gated(done, own, predicted=layer == 2)
        signals = Signals(None if layer == 2 else logits, probes)
        x = np.zeros((rows, 4), np.float32)
        begun = object() if layer == 2 else None
        seen.append(LayerDecision(layer, signals, gated, NOTHING, NOTHING, begun=begun))
        recorder.layer(seen[-1], x)
    if ends:
        recorder.end()
    return seen


def check_step(step: TracedStep, seen: list[LayerDecision[object]]) -> None:
    for traced, shown in zip(step.layers, seen, strict=True):
        assert equal(traced.router_routing, shown.gated.router_routing)
        assert (traced.logits is None) == (shown.signals.logits is None)
        if traced.logits is not None:
            assert np.allclose(traced.logits, shown.signals.logits, rtol=1e-3, atol=1e-6)
        later = [probe for target, probe in shown.signals.probes.items() if target]
        assert all(
            np.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(traced.predictions, later, strict=True)
        )
        assert (traced.first is None) == (0 not in shown.signals.probes)


@pytest.mark.parametrize("first", [False, True])
def test_observed_layers_are_recorded(tmp_path: Path, first: bool) -> None:
    path = tmp_path / "run.trace"
    recorder = open_recorder(path, first)
    assert [recorder.probes(layer) for layer in range(3)] == [(1, 2), (2,), (0,) if first else ()]
    shown = [show_step(recorder, 0, rows=4, phase="prefill"), show_step(recorder, 7)]
    trace = Trace(path)  # each step is in the file as soon as it was computed
    steps = list(trace.steps())
    recorder.close()
    assert trace.header == HEADER
    assert [(s.number, s.phase, s.sequences) for s in steps] == [
        (0, "prefill", (0, 1, 2, 3)),
        (1, "decode", (7,)),
    ]
    for step, seen in zip(steps, shown, strict=True):
        check_step(step, seen)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


class Clock:
    """Each reading takes a millisecond."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


def test_time_that_a_replay_leaves_out_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own, and between two steps of a sequence, but not the wait for another request; without
    the recorder's own millisecond a layer."""
    spent, clock, path = 100.0, Clock(), tmp_path / "f"
    monkeypatch.setattr("pipeline.traces.recorder.time", clock)

    def of_phase(phase: Phase) -> float:
        return spent if phase == "decode" else 0.0

    recorder = Recorder(path, HEADER, first_gate=lambda: False, spent=of_phase)
    for seed, seconds in ((1, 2.0), (1, 0.5), (2, 0.5)):
        clock.now += 0.2
        show_step(recorder, seed, ends=False)
        spent += seconds
        recorder.end()
    show_step(recorder, 2, phase="prefill")
    recorder.close()
    rest = [step.rest for step in Trace(path).steps()]
    assert rest == pytest.approx([2.0 - 0.003, 0.2 + 0.001 + 0.5 - 0.003, 0.5 - 0.003, 0.0], abs=1e-6)


def test_recorder_copies_its_arrays(tmp_path: Path) -> None:
    path = tmp_path / "f"
    recorder = open_recorder(path)
    seen = show_step(recorder, 1, ends=False)
    before = seen[0].gated.router_routing.experts.copy()
    for shown in seen:
        shown.gated.router_routing.experts[:] = 0
    recorder.end()
    (step,) = Trace(path).steps()
    assert np.array_equal(step.layers[0].router_routing.experts, before)
    recorder.close()


def test_failed_step_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "f"
    recorder = open_recorder(path)
    show_step(recorder, 1, ends=False)
    shown = show_step(recorder, 2)
    (step,) = Trace(path).steps()
    assert step.number == 0
    check_step(step, shown)
    recorder.close()


def test_existing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "f", tmp_path / "link", tmp_path / "no" / "such", tmp_path):
        with pytest.raises(TraceError, match="no file can be made there"):
            open_recorder(path)
    assert (tmp_path / "f").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


def test_restarted_engine_appends_to_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "f"
    first = open_recorder(path, resumed=True)  # the engine exited before its first step
    shown = [show_step(first, 1)]
    whole = path.stat().st_size
    show_step(first, 2)
    first.close()
    with path.open("rb+") as file:
        file.truncate(whole + 30)  # the engine was killed while it wrote
    second = open_recorder(path, resumed=True)
    shown.append(show_step(second, 3))
    second.close()
    steps = list((trace := Trace(path)).steps())
    assert [step.number for step in steps] == [0, 1]
    assert [step.sequences for step in steps] == [(1,), (2 + 3,)], "the other engine's, whatever its number"
    assert not trace.cut_short
    for step, seen in zip(steps, shown, strict=True):
        check_step(step, seen)


def test_trace_of_another_model_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "f"
    open_recorder(path).close()
    before = path.read_bytes()
    other = make_header(ModelShape(2, 5, 2, 2))
    with pytest.raises(TraceError, match="another model"):
        open_recorder(path, resumed=True, header=other)
    assert path.read_bytes() == before


def test_full_disk_ends_only_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "f"
    recorder = open_recorder(path)
    shown = show_step(recorder, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        with caplog.at_level(logging.WARNING):
            show_step(recorder, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    show_step(recorder, 3)
    (line,) = caplog.messages
    assert "the 1 steps before are complete" in line
    (step,) = Trace(path).steps()
    check_step(step, shown)
    recorder.close()
