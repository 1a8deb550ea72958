"""The strongest settings of approximations that a validation text allows: AdapMoE's threshold, and where the
added perplexity is bounded (--max-loss) the largest contextual sparsity. Both are searched by decoding the
text repeatedly.

AdapMoE's gate (section 4.2) drops a token's smallest weights as long as (their normalised sum)^2 * s_l <= T.
For two experts this is equation 8, (1 - alpha)^2 * s_l <= T. So only finitely many T differ: those from which
on a token of the text loses another expert in a layer. The search bisects their ranks, not their values,
which span many powers of ten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp, isfinite, log, log1p

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.calibration.reading import CalibrationContext, Findings, Progress, TokenCount, Window, lanes
from pipeline.policies.calibration import Calibration
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


@dataclass(frozen=True)
class Threshold:
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
    candidates: FloatArray, loss: Callable[[float], float], bound: float = 0.005, evaluations: int = 8
) -> Threshold:
    """The largest candidate T with a loss of at most (1 + bound) times the loss at 0.

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
    most = exact + bound * abs(exact)
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
        """Add AdapMoE's threshold, if the sensitivities are known. `weights`: of decoded tokens, [R, k]
        each, by layer."""
        sensitivity, max_loss = validated.sensitivity, self._ctx.max_loss
        if sensitivity is None:
            return validated
        candidates = [
            perturbations(np.concatenate(w), float(s)) for w, s in zip(weights, sensitivity, strict=True)
        ]
        if self._ctx.engine.shape.top_k == 1:  # a gate cannot skip the only expert
            return replace(validated, threshold=0.0)
        with self._approximated("threshold", validated) as loss_under:

            def loss(threshold: float) -> float:
                nats = loss_under({"gate": "adaptive", "threshold": repr(float(threshold))})
                return nats if max_loss is None else exp(nats)

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
        return replace(validated, threshold=best.value)

    def find_sparsity(self, validated: Calibration) -> Calibration:
        """Add the largest sparsity within the bound, if there is one."""
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
        with lanes(engine, ctx.kv, self._windows, ctx.chunk) as held:
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
        """Search the `largest_threshold`; None with a note where it cannot be searched."""
        try:
            return largest_threshold(candidates, loss, bound, EVALUATIONS)
        except ValueError as e:
            self._findings.notes.append(f"no {what}: {e}")
            return None

    def _note(self, what: str) -> None:
        """Note by how little text it was found."""
        notes = self._findings.notes
        if len(self._windows) < self._of:
            notes.append(f"the {what} was found on {len(self._windows)} of {self._of} validation windows")
        if self._answers < FEW_ANSWERS:
            notes.append(
                f"the {what} was found on {self._answers} tokens alone; give a text of some thousand tokens"
            )
