"""A calibration from the first token to the last: what is read, what is learnt from it, what is checked.

1. The training windows are read: counts, residuals, pairs for the first gate.
2. The first gate is trained, the layers' sensitivities are computed.
3. The validation windows are read: counts again, and what each predictor would have said.
4. The threshold is searched on them, by decoding them again and again under AdapMoE's gate.

The engine computes everything as the model says, by its workers; only step 4 leaves experts out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from pipeline.backbone.kv_cache import KVCache
from pipeline.calibration.collector import Needs, TrainPass, ValidationPass
from pipeline.calibration.first_gate import train_first_gate
from pipeline.calibration.lanes import lanes
from pipeline.calibration.sensitivity import sensitivities
from pipeline.calibration.threshold import largest_threshold, perturbations
from pipeline.calibration.windows import LANES, Division, Window
from pipeline.counters import Counters
from pipeline.engine.engine import Engine
from pipeline.engine.observer import Observer
from pipeline.errors import RequestError, UsageError
from pipeline.policies.calibration import Calibration, Floats
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from shm.store import Store

PAIR_BYTES = 64 << 20  # of what the first gate learns from
SENSITIVITY_WINDOWS = 4  # spread over the training part: each layer is differentiated for each of them
BOUND = 0.005  # share of the loss that AdapMoE's gate may add on the validation part
EVALUATIONS = 8  # thresholds that are tried
FEW_ANSWERS = 200  # tokens on which losses differ by chance more than by the gate
EXACT = PolicyRequest("all-host")

Tell = Callable[[str, int, int], None]  # stage, done, total; what it raises ends the calibration


@dataclass(frozen=True)
class CalibrationContext:
    """What a calibration works with. `chunk`: prefill tokens of a step; `lanes`: sequences that are decoded
    together at most."""

    engine: Engine
    store: Store
    kv: KVCache
    chunk: int
    lanes: int
    context: int
    seed: int


@dataclass
class Findings:
    """What is worth saying beside the arrays."""

    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    notes: list[str] = field(default_factory=list)  # what could not be measured, and what to do
    losses: dict[str, float] = field(default_factory=dict)  # nats a token: "exact", "gated"


def calibrate(shop: CalibrationContext, tokens: Sequence[int], tell: Tell) -> tuple[Calibration, Findings]:
    """Of the text's tokens. The engine's policy afterwards is the exact one; its counters are as before.
    Raises RequestError for a text that is too short and where the KV cache has no room, ShardFailed, and what
    `tell` raises."""
    return _Measurement(shop, Division.of(tokens, shop.context), tell).run()


class _Measurement:
    def __init__(self, shop: CalibrationContext, division: Division, tell: Tell) -> None:
        self._shop, self._division, self._tell = shop, division, tell
        self._spec = shop.engine.backbone.spec
        self._findings = Findings()
        self._width = min(LANES, shop.lanes, len(division.training))
        self._check_room()

    def _check_room(self) -> None:
        windows = self._division.training + self._division.validation
        longest, free = max(len(window.tokens) for window in windows), self._shop.kv.free
        self._width = min(self._width, free // longest)
        if self._width < 1:
            raise RequestError(
                f"the KV cache has {free} tokens free of the {longest} that calibrating needs: requests and"
                " kept conversations of other clients hold them; ask again when those have ended"
            )

    def run(self) -> tuple[Calibration, Findings]:
        with _aside(self._shop.engine):
            self._shop.engine.set_policy(make_policy(EXACT, self._shop.seed), None, None)
            learner, learnt = self._learn()
            checked, checker = self._check(learner, learnt)
            return self._find_threshold(checked, checker), self._findings

    def _learn(self) -> tuple[TrainPass, Calibration]:
        """Steps 1 and 2."""
        engine, windows = self._shop.engine, self._division.training
        shape, hidden = engine.shape, self._spec.hidden
        pair = 4 * (hidden + shape.experts)
        count = sum(len(window.tokens) for window in windows)
        learner = TrainPass(shape, hidden, every=1 + count * pair // PAIR_BYTES)
        with self._timed("reading"):
            self._read(windows, learner, done=0)
        residuals = learner.residuals()
        with self._timed("first gate"):
            self._tell("training the first gate", 0, 1)
            gate = train_first_gate(*learner.pairs(), self._spec.router, self._shop.seed)
        return learner, Calibration(
            prefill_counts=learner.counts("prefill"),
            decode_counts=learner.counts("decode"),
            residuals=residuals,
            residual_logits=_next_logits(engine, residuals),
            accuracy={},
            similarity=np.zeros(shape.layers, np.float32),
            needed=None,
            sensitivity=self._sensitivity(),
            threshold=None,
            first_gate=gate.matrix,
        )

    def _sensitivity(self) -> Floats | None:
        windows, shop = self._division.training, self._shop
        places = np.linspace(0, len(windows) - 1, min(SENSITIVITY_WINDOWS, len(windows))).round().astype(int)
        chosen = [windows[place].tokens for place in places]
        engine, tell = shop.engine, self._tell
        try:
            with self._timed("sensitivities"):
                far = partial(tell, "sensitivities")
                return sensitivities(engine.backbone, engine.device, shop.store, chosen, far)
        except UsageError as e:
            self._findings.notes.append(f"no sensitivities, and so no threshold of AdapMoE's gate: {e}")
            return None

    def _check(self, learner: TrainPass, learnt: Calibration) -> tuple[Calibration, ValidationPass]:
        """Step 3."""
        shape = self._shop.engine.shape
        checker = ValidationPass(shape, self._spec.router, learnt.residual_logits, learnt.first_gate)
        with self._timed("reading"):
            read = sum(len(window.tokens) for window in self._division.training)
            self._read(self._division.validation, checker, done=read)
        similarity = np.concatenate((learner.similarities(), checker.similarities()))
        checked = replace(
            learnt,
            prefill_counts=learnt.prefill_counts + checker.counts("prefill"),
            decode_counts=learnt.decode_counts + checker.counts("decode"),
            accuracy=checker.accuracy(),
            similarity=similarity.mean(axis=0).astype(np.float32),
        )
        return checked, checker

    def _find_threshold(self, checked: Calibration, checker: ValidationPass) -> Calibration:
        """Step 4."""
        sensitivity = checked.sensitivity
        if sensitivity is None:
            return checked
        weights = [np.concatenate(layer) for layer in checker.weights]
        candidates = [perturbations(w, float(s)) for w, s in zip(weights, sensitivity, strict=True)]
        engine, shop = self._shop.engine, self._shop
        windows = self._division.validation[: self._width]
        if engine.shape.top_k == 1:  # a gate has nothing to leave out
            only = np.tile(np.array([0, 1], np.float32), (engine.shape.layers, 1))
            return replace(checked, threshold=0.0, needed=only)
        answers = sum(len(window.tokens) - window.prefill for window in windows)
        needs: dict[float, Floats] = {}
        with self._timed("threshold"), lanes(engine, shop.kv, windows, shop.chunk) as held:
            held.read_prompts(lambda _: self._tell("threshold", 0, EVALUATIONS * answers))
            done = _Running(self._tell, "threshold", 0, EVALUATIONS * answers)

            def loss(threshold: float) -> float:
                gated = PolicyRequest(EXACT.name, {"gate": "adaptive", "threshold": repr(float(threshold))})
                engine.set_policy(make_policy(gated, shop.seed), None, checked)
                seen = Needs(engine.shape)
                with _observed(engine, seen):
                    found = held.loss(done.more)
                needs[threshold] = seen.shares()
                return found

            try:
                best = largest_threshold(np.concatenate(candidates), loss, BOUND, EVALUATIONS)
            except ValueError as e:
                self._findings.notes.append(f"no threshold of AdapMoE's gate: {e}")
                return checked
            finally:
                engine.set_policy(make_policy(EXACT, shop.seed), None, None)
        self._findings.losses = {"exact": best.exact, "gated": best.loss}
        if len(windows) < len(self._division.validation):
            several = f"{len(windows)} of {len(self._division.validation)} validation windows"
            self._findings.notes.append(f"the threshold was found on {several}")
        if answers < FEW_ANSWERS:
            self._findings.notes.append(
                f"the threshold was found on {answers} tokens alone; give a text of some thousand tokens"
            )
        return replace(checked, threshold=best.value, needed=needs[best.value])

    def _read(self, windows: Sequence[Window], observer: Observer, done: int) -> None:
        """All windows, a few at a time."""
        engine, shop = self._shop.engine, self._shop
        every = self._division.training + self._division.validation
        total = sum(len(window.tokens) for window in every)
        passed = _Running(self._tell, "reading the text", done, total).more
        with _observed(engine, observer):
            for start in range(0, len(windows), self._width):
                with lanes(engine, shop.kv, windows[start : start + self._width], shop.chunk) as held:
                    held.read_prompts(passed)
                    held.read_answers(passed)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds = self._findings.seconds
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began


class _Running:
    """A stage's tokens, counted."""

    def __init__(self, tell: Tell, stage: str, done: int, total: int) -> None:
        self._tell, self._stage, self._done, self._total = tell, stage, done, total

    def more(self, tokens: int) -> None:
        self._done += tokens
        self._tell(self._stage, self._done, self._total)


@torch.inference_mode()
def _next_logits(engine: Engine, residuals: Floats) -> Floats:
    """[L - 1, E]: each layer's residual through the router of the next."""
    logits = np.zeros((len(residuals), engine.shape.experts), np.float32)
    for layer, residual in enumerate(residuals):
        x = torch.from_numpy(residual[None]).to(engine.device.torch_device)
        logits[layer] = engine.backbone.router(layer + 1, x).cpu().numpy()[0]
    return logits


@contextmanager
def _aside(engine: Engine) -> Iterator[None]:
    """What is counted and recorded of the engine's requests is none of what it computes in the block."""
    counters, observers = engine.counters, engine.observers
    engine.counters = Counters(engine.layout.tile_bytes, engine.shape.layers)
    engine.observers = []
    try:
        yield
    finally:
        engine.counters, engine.observers = counters, observers


@contextmanager
def _observed(engine: Engine, observer: Observer) -> Iterator[None]:
    engine.observers.append(observer)
    try:
        yield
    finally:
        engine.observers.remove(observer)
