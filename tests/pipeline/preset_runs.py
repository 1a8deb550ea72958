"""The embedded model's engine in threads of this process, with its own experts in two tiles each, a cache for
half of them and a calibration of its own: what a preset does while it reads a few texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mover_parts import model_store
from numpy.typing import NDArray
from thread_engine import CONTEXT, engine_in_threads

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.assets import heldout, model_dir
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.calibration import measure
from pipeline.calibration.reading import CalibrationContext
from pipeline.checkpoint.open import open_model
from pipeline.counters import difference
from pipeline.engine.driver import LayerDecision
from pipeline.engine.engine import Engine
from pipeline.models.facts import expert_shape
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest, Target
from pipeline.text.tokenizer import Tokenizer
from shm.layout import format_named

TILES = 2  # of an expert
CAPACITY = 64  # tiles, of 128
# Of a missing expert a fetch takes longer than its host's time with one row, and less than with two.
COSTS = Costs(rows=(1, 4), host=(1.0, 4.0), device=(0.1, 0.2), link=1.5, round_trip=0.1)
PROMPT, LENGTH = 16, 32  # tokens of each text; those after the prompt are decoded, all texts together
CALIBRATED = 256  # tokens


@dataclass(frozen=True)
class Decided:
    """A layer's decision, with copies of its arrays."""

    phase: Phase
    layer: int
    active: list[int]
    cut: list[int]  # of the active experts
    rows: list[int]  # that use them


NOTHING = Decided("decode", 0, [], [], [])


@dataclass(frozen=True)
class Predicted:
    """Experts that a prediction has ordered, by layer and index."""

    at: int  # place of the layer that was being computed in `PresetRun.decided`
    experts: list[tuple[int, int]]


@dataclass(repr=False)
class PresetRun:
    """`targets` [L, E]: the experts to keep when the policy was set, after the prompts, and at the end;
    `kept`: behind each step."""

    decided: list[Decided] = field(default_factory=list)
    predicted: list[Predicted] = field(default_factory=list)
    targets: list[IntArray] = field(default_factory=list)
    kept: list[IntArray] = field(default_factory=list)
    counted: dict[str, Any] = field(default_factory=dict)  # by phase

    @property
    def decode(self) -> dict[str, Any]:
        return dict(self.counted["decode"])

    @property
    def decoded(self) -> list[Decided]:
        return [decision for decision in self.decided if decision.phase == "decode"]

    def distances(self) -> Counter[int]:
        """Decode's predicted experts by how many layers ahead they were; of the next token's layers less than
        0."""
        made = [(self.decided[p.at], p.experts) for p in self.predicted]
        return Counter(layer - d.layer for d, found in made if d.phase == "decode" for layer, _ in found)

    def came_true(self, distance: int) -> int:
        """Decode's predicted experts so many layers ahead that were active when their layer came."""
        count = 0
        for p in self.predicted:
            now = self.decided[p.at]
            for layer, expert in p.experts:
                if now.phase == "decode" and layer - now.layer == distance:
                    later = (d for d in self.decided[p.at + 1 :] if d.layer == layer)
                    count += expert in next(later, NOTHING).active
        return count

    def swapped(self, start: int) -> int:
        """Experts that were replaced between `targets[start]` and the next one; no layer's number of experts
        changed."""
        before, after = (targets > 0 for targets in self.targets[start : start + 2])
        assert (before.sum(axis=1) == after.sum(axis=1)).all()
        return int((after & ~before).sum())


class PresetRuns:
    """Runs on one engine. Predicted tiles have always landed when the next layer is planned, so that none is
    late."""

    def __init__(self, engine: Engine, kv: KVCache, known: Calibration, texts: list[list[int]]) -> None:
        self._engine, self._kv, self._texts = engine, kv, texts
        self.costs = COSTS
        self.calibration = known
        self._runs: dict[tuple[str, Costs], PresetRun] = {}
        self._popularity: NDArray[np.int64] | None = None
        self._phase: Phase = "prefill"
        self._run = PresetRun()
        engine.observers.append(self)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        memory = self._engine.first.memory
        prefetch, mover = memory.prefetch, memory.mover
        collect = mover.collect_landings

        def wait() -> None:
            collect()
            while not mover.idle:
                mover.link.update(5)
                collect()
                mover.fetch_missing()

        def noted(targets: tuple[Target, ...]) -> None:
            experts = [(target.layer, target.expert) for target in targets if target.tiles]
            self._run.predicted.append(Predicted(len(self._run.decided) - 1, experts))
            prefetch(targets)

        patch.setattr(memory.mover, "collect_landings", wait)
        patch.setattr(memory, "prefetch", noted)

    def read(self, preset: str, **options: str) -> PresetRun:
        """Read the texts under a preset, each prompt by itself; the same run again for the same options and
        costs."""
        key = PolicyRequest(preset, options).label, self.costs
        if key not in self._runs:
            self._runs[key] = self._read(preset, options)
        return self._runs[key]

    def _read(self, preset: str, options: dict[str, str]) -> PresetRun:
        engine = self._engine
        self._run = run = PresetRun()
        if self._popularity is not None:  # each run begins with the same
            engine.popularity[:] = self._popularity
        policy = make_policy(PolicyRequest(preset, options), 0)
        engine.set_policy(policy, self.costs, self.calibration)
        run.targets.append(engine.first.memory.target.copy())
        before = engine.counters.snapshot()
        held = [self._kv.allocate(LENGTH) for _ in self._texts]
        for kv, text in zip(held, self._texts, strict=True):
            engine.step([StepInput(TokenSpan(kv, text[:PROMPT]), "none")], "prefill")
        run.targets.append(engine.first.memory.target.copy())
        for place in range(PROMPT, LENGTH):
            spans = [TokenSpan(kv, [text[place]]) for kv, text in zip(held, self._texts, strict=True)]
            engine.step([StepInput(span, "none") for span in spans], "decode")
        run.targets.append(engine.first.memory.target.copy())
        for kv in held:
            self._kv.release(kv)
        run.counted = difference(engine.counters.snapshot(), before)
        if self._popularity is None:
            self._popularity = engine.popularity.copy()
        return run

    # As an observer of the engine:

    def probes(self, layer: int) -> tuple[int, ...]:
        return ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        self._phase = phase

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        active = decision.gated.routing.active.experts
        self._run.decided.append(
            Decided(
                self._phase,
                decision.layer,
                active.tolist(),
                decision.cut[active].tolist(),
                decision.gated.routing.active.counts.tolist(),
            )
        )

    def end(self) -> None:
        self._run.kept.append(self._engine.first.memory.target.copy())


@contextmanager
def preset_runs(folder: Path, texts: list[list[int]]) -> Iterator[PresetRuns]:
    model = open_model(model_dir())
    tokenizer = Tokenizer.load(model_dir())
    assert tokenizer is not None
    words = tokenizer.encode(heldout()["english"].read_text()[:2000])[:CALIBRATED]
    assert len(words) == CALIBRATED
    shape = expert_shape(model.config, 128, format_named("f32"))
    assert shape.tiles == TILES
    with ExitStack() as stack:
        store = stack.enter_context(model_store(shape, model))
        engine, _ = stack.enter_context(engine_in_threads(model_dir(), folder, CAPACITY, store))
        kv = KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), 4 * CONTEXT)
        context = CalibrationContext(engine, store, kv, chunk=64, lanes=4, context=CONTEXT, seed=0)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(measure, "EVALUATIONS", 3)  # any threshold will do
        known, _ = measure.calibrate(context, words, CALIBRATED, lambda stage, done, total: None)
        runs = PresetRuns(engine, kv, known, texts)
        runs.patch(patch)
        runs.read("all-host")  # counts the routing that placement=popular goes by
        yield runs
