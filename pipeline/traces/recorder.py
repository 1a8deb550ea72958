"""The observer that writes a trace."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.arrays import FloatArray, Phase
from pipeline.counters import Part
from pipeline.engine.driver import LayerDecision
from pipeline.errors import TraceError
from pipeline.policies.view import Routing
from pipeline.traces.trace import Header, LayerTrace, Trace, TracedStep, encode_step, halves
from protocol.files import sync_folder

if TYPE_CHECKING:
    from pipeline.checkpoint.model_source import ModelSource
    from pipeline.config import CoordinatorConfig
    from pipeline.engine.engine import Engine

log = logging.getLogger(__name__)

UNSIMULATED: tuple[Part, ...] = ("plan", "submit", "combine", "head")
DEPTH = 3  # layers ahead with recorded routers: as far as any preset predicts


class Recorder:
    """An Observer. Each step is one write, once it has been computed, so a killed engine leaves at most one
    incomplete step at the end."""

    def __init__(
        self,
        path: Path,
        header: Header,
        *,
        first_gate: Callable[[], bool],
        resumed: bool = False,
        spent: Callable[[Phase], float] | None = None,
    ) -> None:
        """Creates the file, mode 0600. `first_gate`: whether the engine now has a gate for the next token's
        first layer. `resumed`: the coordinator was restarted: append to its predecessor's file, behind the
        last complete step. `spent`: seconds that the engine has spent so far on what a replay does not
        simulate; None: not measured. Raises TraceError for any other existing file, and where the file cannot
        be made."""
        self._header = header
        self._first_gate = first_gate
        self._spent = spent
        self._rest = 0.0  # seconds of the present step
        self._ended = 0.0  # time at which the step before had been written
        self._path = path
        self._phase: Phase = "prefill"
        self._sequences: tuple[int, ...] = ()
        self._layers: list[LayerTrace] = []
        self._number = 0
        self._before = 0  # sequences of the previous coordinator have lower numbers
        self._fd: int | None = None
        beginning = header.encode()
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if resumed and path.exists():
                self._number, end, self._before = _resumable(path, header)
                self._fd = os.open(path, flags)
                os.ftruncate(self._fd, end)
                os.lseek(self._fd, end, os.SEEK_SET)
            else:
                self._fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                _write(self._fd, beginning)
        except OSError as e:
            self.close()
            raise TraceError(f"--record {path}: no file can be made there: {e.strerror}") from None

    def probes(self, layer: int) -> tuple[int, ...]:
        following = tuple(range(layer + 1, layer + 1 + self._header.predictions(layer)))
        last = layer == self._header.shape.layers - 1
        return (0,) if last and self._first_gate() else following

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        before = set(self._sequences)
        self._phase = phase
        self._sequences = tuple(self._before + sequence for sequence in sequences)
        self._layers.clear()
        if self._spent is not None:
            self._rest = -self._spent(phase)
            if not before.isdisjoint(self._sequences):  # otherwise the engine may have waited for a request
                self._rest += time.perf_counter() - self._ended

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        if self._fd is None:
            return
        began = time.perf_counter()
        signals = decision.signals
        probed = self.probes(decision.layer)
        last = decision.layer == self._header.shape.layers - 1
        routing = decision.gated.router_routing
        self._layers.append(
            LayerTrace(
                router_routing=Routing(routing.experts.copy(), routing.weights.copy()),
                logits=None if signals.logits is None else halves(signals.logits),
                predictions=() if last else tuple(halves(signals.probes[layer]) for layer in probed),
                first=halves(signals.probes[0]) if last and probed else None,
            )
        )
        self._rest -= time.perf_counter() - began  # part of the engine's planning, without a recorder nothing

    def end(self) -> None:
        if self._fd is None:
            return
        rest = 0.0 if self._spent is None else max(0.0, self._rest + self._spent(self._phase))
        step = TracedStep(self._number, self._phase, self._sequences, tuple(self._layers), rest)
        try:
            _write(self._fd, encode_step(step))
        except OSError as e:
            log.warning(
                "recording has ended: %s: %s; the %d steps before are complete",
                *(self._path, e.strerror, self._number),
            )
            self.close()
        self._number += 1
        self._ended = time.perf_counter()

    def close(self) -> None:
        """Close the file, once it is on the disk."""
        if self._fd is not None:
            with suppress(OSError):  # `end` reports what cannot be written
                os.fsync(self._fd)
                sync_folder(self._path.parent)
            os.close(self._fd)
            self._fd = None


def recorder_of(config: CoordinatorConfig, source: ModelSource, engine: Engine, path: Path) -> Recorder:
    """The recorder of an engine; after a restart it appends to the same file. Raises TraceError."""
    header = Header(
        str(config.model),
        source.fingerprint("calibration", 0),
        config.fingerprint,
        engine.shape,
        engine.layout.tile_bytes,
        engine.backbone.router_math,
        DEPTH,
        engine.up,
        engine.layout.head_bytes,
    )
    resumed = config.generation > 0

    def spent(phase: Phase) -> float:
        seconds = engine.counters.phases[phase].seconds
        return sum(sum(seconds[part]) for part in UNSIMULATED)

    return Recorder(
        path, header, first_gate=lambda: engine.first.probing.has_first_gate, resumed=resumed, spent=spent
    )


def _resumable(path: Path, header: Header) -> tuple[int, int, int]:
    """Return of a file with this header its number of complete steps, the offset behind them, and the first
    sequence number that they do not use."""
    trace = Trace(path)
    if trace.header != header:
        raise TraceError(f"--record {path}: the file is of another model; give another name")
    steps = [step.sequences for step in trace.steps()]
    return len(steps), trace.end, max((sequence for step in steps for sequence in step), default=-1) + 1


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
