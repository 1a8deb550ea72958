"""Steps of the layer of a model that drafts: an engine stage of its own, behind the model's.

Its experts are the last layer's of the store, and the host computes all of them, whatever policy the model's
own layers have: one layer in forty or ninety is not worth a part of the device's memory. Its keys and values
are kept apart from the model's: a sequence may begin anywhere in a text, since only distances between its
tokens count, so it is begun anew where the hidden states before are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import Phase
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.draft_layer import DraftLayer
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import FEW_ROWS
from pipeline.config import DRAFT_SEQUENCES, DRAFT_TOKENS
from pipeline.counters import PhaseCounters, StepClock
from pipeline.engine.engine import Engine
from pipeline.engine.stage import EngineStage, copied
from pipeline.policies.presets import make_policy
from pipeline.policies.view import ModelShape, PolicyRequest
from pipeline.text.logprobs import Greedy


class Drafter:
    """The layer that drafts, and the keys and values of sequences in it. Used by the engine's thread."""

    def __init__(self, engine: Engine, layer: DraftLayer, recent: int) -> None:
        """`recent`: tokens of a sequence that it begins with, at most; a step of the engine may have so
        many. The engine's steps keep their hidden states from now on."""
        self.recent = recent
        self._engine, self._layer = engine, layer
        facts, at = layer.facts, layer.facts.layers - 1
        streams = ((),) * at + (facts.kv_streams[at],)
        held = DRAFT_SEQUENCES * DRAFT_TOKENS
        self.kv = KVCache(replace(facts, kv_streams=streams), layer.dtype, layer.device.torch_device, held)
        shape = ModelShape(at + 1, facts.experts, engine.shape.tiles, facts.top_k)
        self._stage = stage = EngineStage(layer, layer.layers, shape, "off")
        self._counters = PhaseCounters(shape.layers)
        popularity = np.zeros((shape.layers, shape.experts), np.int64)
        policy = make_policy(PolicyRequest("all-host"), 0)
        stage.take(stage.prepare(policy, popularity, self._counters))
        engine.keeps_hidden = True

    @torch.inference_mode()
    def step(self, spans: Sequence[TokenSpan], hidden: Tensor) -> tuple[list[int], Tensor]:
        """Run tokens, each behind one with this hidden state float32 [R, H], and advance their keys and
        values. Returns for each span the guess of the token behind its last, and that last one's hidden
        state here, float32 [spans, H], with which the guess can be run. Raises as Engine.step."""
        with self._engine.guarded([span.kv for span in spans]):
            return self._step(spans, hidden)

    def _step(self, spans: Sequence[TokenSpan], hidden: Tensor) -> tuple[list[int], Tensor]:
        engine, stages = self._engine, [self._stage]
        ends = np.cumsum([len(span.tokens) for span in spans])
        phase: Phase = "decode" if ends[-1] <= FEW_ROWS else "prefill"
        engine.begin_step(stages, spans, phase, (), self._counters, counted=False)
        clock = StepClock(self._counters, partial(copied, stages))
        step = self._layer.draft(spans, hidden)
        engine.run_layers(step, stages, phase, clock, [])
        choices = step.answers([StepInput(span, "greedy") for span in spans])
        last = step.hidden()[self._layer.device.from_host(ends - 1)]
        for span in spans:
            span.kv.advance(len(span.tokens))
        vocabulary = self._layer.spec.vocabulary
        return [Greedy.read(choice[0], vocabulary).token for choice in choices], last
