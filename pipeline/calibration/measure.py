"""A whole calibration, in four stages:

1. The training windows are read: residuals, pairs for the gates that are trained.
2. The first gate is trained, and the layers' sensitivities are computed.
3. The validation windows are read: each predictor's accuracy. Of all windows follow counts and hit rates.
4. The threshold of AdapMoE's gate, and with a bound the largest sparsity, are searched by decoding validation
   windows repeatedly.

Stages 1 to 3 compute the exact model on the workers; only stage 4 approximates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import exp, isfinite, log1p
from typing import NamedTuple

import numpy as np
import torch

from pipeline.arrays import FloatArray
from pipeline.backbone.kv_blocks import blocks_for
from pipeline.calibration import LANES
from pipeline.calibration.observers import Magnitudes, TokenOrder, TrainPass, ValidationPass
from pipeline.calibration.reading import (
    CalibrationContext,
    Division,
    Findings,
    Progress,
    TokenCount,
    Window,
    lanes,
    separate_counters,
)
from pipeline.calibration.sensitivity import sensitivities
from pipeline.calibration.trained_gates import GateMlps, GatePairs, predicted_layers, train_first_gate
from pipeline.config import KV_BLOCK
from pipeline.engine.engine import Engine
from pipeline.engine.observer import Observer
from pipeline.errors import RequestError, UsageError
from pipeline.policies.calibration import Calibration, Floats
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest

EXACT = PolicyRequest("all-host")
EVALUATIONS = 8  # settings of an approximation that are tried
BOUND = 0.005  # share of the loss that AdapMoE's gate may add, where no other bound is given
FEW_ANSWERS = 200  # decoded tokens below which chance changes a loss more than an approximation does
SPARSITIES = 20  # even steps from 0 to 1: the sparsities that are tried
PAIR_BYTES = 64 << 20  # of the pairs that the first gate is trained on
MLP_BYTES = 192 << 20  # of what the MLPs of the next gate are trained on
UP_WEIGHTS = 1 << 30  # of a layer's up matrices that are multiplied to find the sizes of u
SENSITIVITY_WINDOWS = 4  # of the training windows, evenly spaced: each needs a backward pass of every layer


def calibrate(
    ctx: CalibrationContext, tokens: Sequence[int], most: int, progress: Progress
) -> tuple[Calibration, Findings]:
    """Calibrate on at most `most` tokens of a text. Leaves the engine with the exact policy, and its counters
    and counts of routing unchanged. Raises RequestError for a text that is too short or where the KV cache
    has too few free tokens, ShardFailed, and the exceptions of `progress`."""
    return _Measurement(ctx, Division.of(tokens, ctx.context, most), progress).measure()


class _Measurement:
    def __init__(self, ctx: CalibrationContext, division: Division, progress: Progress) -> None:
        ctx.engine.backbone.check_probes("calibrate")
        ctx.engine.backbone.check_choices("calibrate")
        self._ctx, self._division, self._progress = ctx, division, progress
        windows = division.training + division.validation
        self._findings = Findings(tokens=division.tokens)
        longest, free = max(len(window.tokens) for window in windows), ctx.kv.free  # of these blocks
        places = LANES if ctx.kv.places is None else ctx.kv.places
        self._width = min(LANES, ctx.lanes, places, len(division.training), free // blocks_for(longest))
        self._tokens = division.tokens
        self._order = TokenOrder(ctx.engine.shape)
        if self._width < 1:
            raise RequestError(
                f"the KV cache has {KV_BLOCK * free} tokens free of the {longest} that calibrating needs:"
                " requests of other clients hold them; try again when those have ended"
            )

    def measure(self) -> tuple[Calibration, Findings]:
        with separate_counters(self._ctx.engine):
            self._ctx.engine.set_policy(make_policy(EXACT, self._ctx.seed), None, None, counted=False)
            validated, validation = self._validate(self._train())
            bounded = self._find_threshold(validated, validation.weights)
            return self._find_sparsity(bounded), self._findings

    def _train(self) -> Calibration:
        """Read the training part of the text: stages 1 and 2."""
        engine, windows = self._ctx.engine, self._division.training
        shape, hidden = engine.shape, engine.layout.shape.hidden
        pair = 4 * (hidden + shape.experts)
        count = sum(len(window.tokens) for window in windows)
        train_pass = TrainPass(shape, hidden, every=1 + count * pair // PAIR_BYTES)
        mlp_pair = predicted_layers(engine.shape) * (pair + 4 * shape.experts)
        ahead = GatePairs(shape, every=1 + count * mlp_pair // MLP_BYTES)
        sizes = self._magnitudes()
        self._read(windows, [self._order, ahead, *([] if sizes is None else [sizes]), train_pass], done=0)
        magnitudes = None if sizes is None else sizes.quantiles()
        self._progress("training the first gate", 0, 1)
        gate = train_first_gate(*train_pass.pairs(), self._ctx.seed, engine.tick)
        self._progress("training the MLPs of the next gate", 0, 1)
        mlps = ahead.train(self._ctx.seed, engine.tick)
        return Calibration(
            decode_counts=np.zeros((0, 0), np.int64),
            residual_logits=_next_logits(engine, train_pass.residuals()),
            accuracy={},
            kept=np.zeros((0, 0, 0), np.float32),
            gated_accuracy={},
            sensitivity=self._sensitivity(),
            first_gate=gate,
            magnitudes=magnitudes,
            up="" if magnitudes is None else engine.up,
            mlp_inner=None if mlps is None else mlps.inner,
            mlp_outer=None if mlps is None else mlps.outer,
            mlp_history=None if mlps is None else mlps.history,
            hit_rates=np.zeros((0, 0), np.float32),
            max_loss=self._ctx.max_loss,
        )

    def _magnitudes(self) -> Magnitudes | None:
        """An observer of |u|; None where the format keeps no up matrices apart."""
        engine, up = self._ctx.engine, self._ctx.up
        if up is None:
            return None
        experts = engine.layout.shape
        decoded = sum(len(window.tokens) - window.prefill for window in self._division.training)
        # of so many decode steps one is multiplied with up matrices once more
        every = 1 + decoded * engine.shape.top_k * experts.padded * experts.hidden // UP_WEIGHTS
        return Magnitudes(engine.shape, up, every)

    def _sensitivity(self) -> Floats | None:
        ctx = self._ctx
        chosen = [window.tokens for window in _spread(self._division.training, SENSITIVITY_WINDOWS)]
        engine, progress = ctx.engine, self._progress
        try:
            report = partial(progress, "sensitivities")
            return sensitivities(engine.backbone, engine.device, ctx.store, chosen, report, engine.bring)
        except UsageError as e:
            self._findings.notes.append(f"no sensitivities, and so no threshold of AdapMoE's gate: {e}")
            return None

    def _validate(self, trained: Calibration) -> tuple[Calibration, ValidationPass]:
        """Read the validation part of the text: stage 3."""
        engine, division = self._ctx.engine, self._division
        mlps = None
        given = [a for a in (trained.mlp_inner, trained.mlp_outer, trained.mlp_history) if a is not None]
        if given:
            mlps = GateMlps(*given)
        router = engine.backbone.router_math
        validation = ValidationPass(engine.shape, router, trained.residual_logits, trained.first_gate, mlps)
        read = sum(len(window.tokens) for window in division.training)
        self._read(division.validation, [self._order, validation], done=read)
        validated = replace(
            trained,
            decode_counts=self._order.decode_counts(),
            accuracy=validation.accuracy(),
            kept=validation.drops.kept(),
            gated_accuracy=validation.drops.accuracy(),
            hit_rates=self._order.hit_rates(),
            mlp_accuracy=validation.mlp_accuracy(),
        )
        return validated, validation

    def _find_threshold(self, validated: Calibration, weights: Sequence[Sequence[FloatArray]]) -> Calibration:
        """Stage 4: add AdapMoE's threshold, if the sensitivities are known. `weights`: of decoded tokens, [R,
        k] each, by layer."""
        sensitivity = validated.sensitivity
        if sensitivity is None:
            return validated
        if self._ctx.engine.shape.top_k == 1:  # a gate cannot skip the only expert
            return replace(validated, threshold=0.0)
        candidates = [
            perturbations(np.concatenate(w), float(s)) for w, s in zip(weights, sensitivity, strict=True)
        ]
        found = self._strongest(
            "threshold",
            np.concatenate(candidates),
            lambda threshold: {"gate": "adaptive", "threshold": repr(float(threshold))},
            validated,
        )
        if found is None:
            return validated
        self._findings.losses = {"exact": found.exact, "gated": found.loss}
        return replace(validated, threshold=found.value)

    def _find_sparsity(self, validated: Calibration) -> Calibration:
        """Stage 4: with a bound, add the largest sparsity within it, if there is one."""
        max_loss, notes = self._ctx.max_loss, self._findings.notes
        if max_loss is None:
            return validated
        if validated.magnitudes is None:
            notes.append("no sparsity: the format keeps no up matrices apart (--format floe-int4)")
            return validated
        shares = (np.arange(1, SPARSITIES) / SPARSITIES).astype(np.float32)
        found = self._strongest("sparsity", shares, lambda share: {"sparsity": f"{share:.2f}"}, validated)
        if found is None:
            return validated
        largest = round(found.value, 2)
        self._findings.sparsities = [[round(share, 2), exp(loss)] for share, loss in sorted(found.tried)]
        if not largest:
            notes.append(f"no sparsity adds at most {max_loss:g} % to the perplexity")
        return replace(validated, sparsity=largest)

    def _strongest(
        self,
        what: str,
        candidates: FloatArray,
        options: Callable[[float], dict[str, str]],
        validated: Calibration,
    ) -> Threshold | None:
        """Search the strongest setting of an approximation, by decoding validation windows under `options` of
        the exact policy, which is set again afterwards; losses are nats. None with a note where it cannot be
        searched."""
        ctx, engine, findings = self._ctx, self._ctx.engine, self._findings
        held_out = self._division.validation
        windows = _spread(held_out, self._width)
        answers = sum(len(window.tokens) - window.prefill for window in windows)
        total = EVALUATIONS * answers
        with lanes(engine, ctx.kv, windows, ctx.chunk) as held:
            held.read_prompts(lambda _: self._progress(what, 0, total))
            done = TokenCount(self._progress, what, 0, total)

            def loss(setting: float) -> float:
                policy = make_policy(PolicyRequest(EXACT.name, options(setting)), ctx.seed)
                engine.set_policy(policy, None, validated, counted=False)
                return held.loss(done.more)

            def added(exact: float) -> float:
                return BOUND * exact if ctx.max_loss is None else log1p(ctx.max_loss / 100)

            try:
                found = largest_threshold(candidates, loss, added, EVALUATIONS)
            except ValueError as e:
                findings.notes.append(f"no {what}: {e}")
                return None
            finally:
                engine.set_policy(make_policy(EXACT, ctx.seed), None, None, counted=False)
        if len(windows) < len(held_out):
            findings.notes.append(
                f"the {what} was found on {len(windows)} of {len(held_out)} validation windows"
            )
        if answers < FEW_ANSWERS:
            findings.notes.append(
                f"the {what} was found on {answers} tokens alone; give a text of some thousand tokens"
            )
        return found

    def _read(self, windows: Sequence[Window], observers: Sequence[Observer], done: int) -> None:
        """Read all windows, a few at a time."""
        engine, ctx = self._ctx.engine, self._ctx
        passed = TokenCount(self._progress, "reading the text", done, self._tokens).more
        engine.observers = list(observers)
        for start in range(0, len(windows), self._width):
            with lanes(engine, ctx.kv, windows[start : start + self._width], ctx.chunk) as held:
                held.read_prompts(passed)
                held.read_answers(passed)
        engine.observers = []


def _spread(windows: Sequence[Window], most: int) -> list[Window]:
    """Returns at most so many, evenly spaced."""
    places = np.linspace(0, len(windows) - 1, min(most, len(windows))).round().astype(int)
    return [windows[place] for place in places]


@torch.inference_mode()
def _next_logits(engine: Engine, residuals: Floats) -> Floats:
    """[L - 1, E]: the next layer's router applied to each layer's residual."""
    logits = np.zeros((len(residuals), engine.shape.experts), np.float32)
    for layer, residual in enumerate(residuals):
        x = torch.from_numpy(residual[None]).to(engine.device.torch_device)
        logits[layer] = engine.backbone.router(layer + 1, x).cpu().numpy()[0]
    return logits


# ----------------------------------------------------------------------------------------------------------
# The search for the strongest setting of an approximation that a text allows: AdapMoE's threshold, or the
# contextual sparsity.
#
# AdapMoE's gate (section 4.2) drops a token's smallest weights as long as (their normalised sum)^2 * s_l <=
# T. For two experts this is equation 8, (1 - alpha)^2 * s_l <= T. So only finitely many T differ: those
# from which on a token of the text loses another expert in a layer. The search bisects their ranks, not
# their values, which span many powers of ten.


class Threshold(NamedTuple):
    """The result of a search. Losses are the values of `loss`."""

    value: float  # T; 0 where no other T kept the loss within the bound
    loss: float  # at T
    exact: float  # at 0
    tried: tuple[tuple[float, float], ...]  # every T with its loss, in the order tried; the first is 0


def perturbations(weights: FloatArray, sensitivity: float) -> FloatArray:
    """The thresholds from which on a token loses another of its experts: one layer's routing weights [R, k]
    and its s_l to float32 [R, k - 1], ascending in each row."""
    ascending = np.sort(weights.astype(np.float64), axis=1)
    total = ascending.sum(axis=1, keepdims=True)
    dropped = ascending[:, :-1].cumsum(axis=1) / np.where(total > 0, total, 1)
    squares: FloatArray = (dropped**2 * sensitivity).astype(np.float32)
    return squares


def largest_threshold(
    candidates: FloatArray,
    loss: Callable[[float], float],
    added: Callable[[float], float],
    evaluations: int,
) -> Threshold:
    """The largest candidate T with a loss of at most the loss at 0 and what `added` of that allows.

    `candidates`: the perturbations of the text's tokens in all layers, in any shape. `loss(T)`: the mean
    negative log-likelihood of the text under the adaptive gate with T; it is called with 0, with the largest
    candidate, and then with the middle one of those in question, at most `evaluations` times in all, at least
    2, so that 6 more leave 1/64 of the candidates undecided.

    A loss need not grow with T. The returned T was tried, keeps the bound, and is below every tried T that
    does not; a larger T that happens to keep the bound too is not searched for, except the largest. A NaN
    loss does not keep the bound. Raises ValueError without candidates, for negative or non-finite ones, and
    where the loss at 0 is not finite."""
    ranked = np.sort(np.asarray(candidates, np.float64), axis=None)
    if not len(ranked) or not np.isfinite(ranked).all() or ranked[0] < 0:
        raise ValueError("a threshold is found among one or more finite numbers from 0 on")
    exact = loss(0.0)
    if not isfinite(exact):
        raise ValueError(f"the loss without a gate is {exact}")
    most = exact + added(exact)
    tried = [(0.0, exact)]
    best = tried[0]
    kept = int(np.searchsorted(ranked, 0.0, side="right"))  # candidates up to the best T
    broken = len(ranked)  # the first candidate that breaks the bound, or is undecided from above
    rank = broken - 1
    while kept < broken and len(tried) < max(evaluations, 2):
        value = float(ranked[rank])
        tried.append((value, loss(value)))
        if tried[-1][1] <= most:
            best = tried[-1]
            kept = int(np.searchsorted(ranked, value, side="right"))
        else:
            broken = int(np.searchsorted(ranked, value, side="left"))
        rank = (kept + broken) // 2
    return Threshold(best[0], best[1], exact, tuple(tried))
