"""The strongest settings of approximations that a validation text allows: AdapMoE's threshold, and where the
added perplexity is bounded (--max-loss) the largest contextual sparsity. Both are searched by decoding the
text repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import exp, log, log1p

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.calibration.collector import Needs
from pipeline.calibration.context import CalibrationContext, Findings, Progress
from pipeline.calibration.lanes import TokenCount, lanes, observed
from pipeline.calibration.threshold import Threshold, largest_threshold, perturbations
from pipeline.calibration.windows import Window
from pipeline.policies.calibration import Calibration, Floats
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest

BOUND = 0.005  # share of the loss that AdapMoE's gate may add, where no other bound is given
EVALUATIONS = 8  # settings that are tried
FEW_ANSWERS = 200  # decoded tokens below which chance changes a loss more than an approximation does
SPARSITIES = 20  # even steps from 0 to 1: the sparsities that are tried
EXACT = PolicyRequest("all-host")
UNBOUNDED = {  # approximate presets without a setting that a bound could choose
    "daop": "its loss depends on the resident experts, so on the cache; bench --ppl-tokens measures it",
    "pre-gated": "it has no setting of its strength",
}

LossUnder = Callable[[dict[str, str]], float]  # options of all-host -> nats a token


class Approximations:
    """`windows`: those that settings are judged by, of so many (`of`) held-out ones. Leaves the engine with
    the exact policy."""

    def __init__(
        self,
        ctx: CalibrationContext,
        findings: Findings,
        windows: Sequence[Window],
        of: int,
        progress: Progress,
    ) -> None:
        self._ctx, self._findings, self._progress = ctx, findings, progress
        self._windows, self._of = windows, of
        self._answers = sum(len(window.tokens) - window.prefill for window in windows)

    def find_threshold(self, validated: Calibration, weights: Sequence[Sequence[FloatArray]]) -> Calibration:
        """With AdapMoE's threshold, if the sensitivities are known. `weights`: of decoded tokens, [R, k]
        each, by layer."""
        sensitivity, max_loss = validated.sensitivity, self._ctx.max_loss
        if sensitivity is None:
            return validated
        candidates = [
            perturbations(np.concatenate(w), float(s)) for w, s in zip(weights, sensitivity, strict=True)
        ]
        engine = self._ctx.engine
        if engine.shape.top_k == 1:  # a gate cannot skip the only expert
            only = np.tile(np.array([0, 1], np.float32), (engine.shape.layers, 1))
            return replace(validated, threshold=0.0, needed=only)
        needs: dict[float, Floats] = {}
        with self._approximated("threshold", validated) as loss_under:

            def loss(threshold: float) -> float:
                seen = Needs(engine.shape)
                with observed(engine, seen):
                    found = loss_under({"gate": "adaptive", "threshold": repr(float(threshold))})
                needs[threshold] = seen.shares()
                return found if max_loss is None else exp(found)

            bound = BOUND if max_loss is None else max_loss / 100
            best = self._largest("threshold of AdapMoE's gate", np.concatenate(candidates), loss, bound)
        if best is None:
            return validated
        losses = {"exact": best.exact, "gated": best.loss}
        if max_loss is not None:
            losses = {name: log(perplexity) for name, perplexity in losses.items()}
            bound = log1p(bound) / losses["exact"]
            self._findings.bounded["adapmoe"] = f"threshold={best.value:.3g}"
        self._findings.losses = losses | {"bound": bound}
        self._note("threshold")
        return replace(validated, threshold=best.value, needed=needs[best.value])

    def find_sparsity(self, validated: Calibration) -> Calibration:
        """With the largest sparsity within the bound, if there is one."""
        max_loss, bounded = self._ctx.max_loss, self._findings.bounded
        if max_loss is None:
            return validated
        bounded |= UNBOUNDED
        if validated.magnitudes is None:
            bounded["floe"] = "no sparsity: the format keeps no up matrices apart (--format floe-int4)"
            return validated
        with self._approximated("sparsity", validated) as loss_under:
            best = self._largest(
                "sparsity",
                (np.arange(1, SPARSITIES) / SPARSITIES).astype(np.float32),
                lambda sparsity: exp(loss_under({"sparsity": f"{sparsity:.2f}"})),
                max_loss / 100,
            )
        if best is None:
            return validated
        largest = round(best.value, 2)
        self._findings.sparsities = [[round(s, 2), perplexity] for s, perplexity in sorted(best.tried)]
        self._note("sparsity")
        if largest:
            bounded["floe"] = f"sparsity={largest:g}"
        else:
            least, perplexity = self._findings.sparsities[1]
            added = 100 * (perplexity / best.exact - 1)
            bounded["floe"] = f"no sparsity is within {max_loss:g} %: {least:g} adds {added:.2f} %"
        return replace(validated, sparsity=largest)

    @contextmanager
    def _approximated(self, stage: str, validated: Calibration) -> Iterator[LossUnder]:
        """A function that decodes the windows under an approximation and returns their loss; it is called
        EVALUATIONS times at most."""
        engine, ctx = self._ctx.engine, self._ctx
        total = EVALUATIONS * self._answers
        with self._findings.timed(stage), lanes(engine, ctx.kv, self._windows, ctx.chunk) as held:
            held.read_prompts(lambda _: self._progress(stage, 0, total))
            done = TokenCount(self._progress, stage, 0, total)

            def loss(options: dict[str, str]) -> float:
                policy = make_policy(PolicyRequest(EXACT.name, options), ctx.seed)
                engine.set_policy(policy, None, validated, counted=False)
                return held.loss(done.more)

            try:
                yield loss
            finally:
                engine.set_policy(make_policy(EXACT, ctx.seed), None, None, counted=False)

    def _largest(
        self, what: str, candidates: FloatArray, loss: Callable[[float], float], bound: float
    ) -> Threshold | None:
        """As `largest_threshold`; None with a note where it cannot be searched."""
        try:
            return largest_threshold(candidates, loss, bound, EVALUATIONS)
        except ValueError as e:
            self._findings.notes.append(f"no {what}: {e}")
            return None

    def _note(self, what: str) -> None:
        """By how little text it was found."""
        notes = self._findings.notes
        if len(self._windows) < self._of:
            notes.append(f"the {what} was found on {len(self._windows)} of {self._of} validation windows")
        if self._answers < FEW_ANSWERS:
            notes.append(
                f"the {what} was found on {self._answers} tokens alone; give a text of some thousand tokens"
            )
