"""The contextual sparsity of a policy (FloE): which channels of an expert a token leaves out.

A format that keeps the up matrices apart (docs/checkpoints.md) lets a token compute u = up x first, and then
only the channels whose |u| is large. A layer's threshold is the quantile of |u| that a calibration measured
with the same up matrices; without one, the largest |u| of each tile are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pipeline.arrays import Phase
from pipeline.errors import PolicyError
from pipeline.policies.calibration import Calibration, quantiles
from pipeline.policies.options import AUTO, Choice, Option, Real, Value
from protocol.program import COMMAND
from shm.mask import DENSE, Mask

MOST = 0.95  # of the channels that are left out
SPARSITY = Real(
    name="sparsity",
    help="share of an expert's channels that a token leaves out, with a floe format; auto: the largest"
    " within the calibration's --max-loss",
    default=0.0,
    low=0.0,
    high=MOST,
    auto=True,
)
MASKED = Choice(
    name="masked",
    help="where channels are left out: while one token at a time is decoded, or in prompts too",
    default="decode",
    choices=("decode", "all"),
)
SPARSITY_OPTIONS: tuple[Option, ...] = (SPARSITY, MASKED)


@dataclass(frozen=True)
class Sparsity:
    """Options of every preset. `wished`: the share of the channels that is left out, None: the calibration's
    largest within its bound."""

    wished: float | None = 0.0
    prompts_too: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Self:
        """From the values of SPARSITY_OPTIONS."""
        wished = values[SPARSITY.name]
        return cls(None if wished == AUTO else float(wished or 0), values[MASKED.name] == "all")

    @property
    def dense(self) -> bool:
        """No channel is ever left out."""
        return self.wished == 0

    def acts_in(self, phase: Phase) -> bool:
        return self.prompts_too or phase == "decode"

    def check(self, policy: str, calibration: Calibration | None) -> None:
        """Raises PolicyError where the share is the calibration's, and it has none."""
        if self.wished is not None or (calibration is not None and calibration.sparsity):
            return
        if calibration is not None and calibration.sparsity is not None:
            raise PolicyError(
                f"policy {policy}: the calibration found no sparsity that adds at most"
                f" {calibration.max_loss:g} % to the perplexity; give --set {policy}.sparsity=X, or calibrate"
                " with a larger --max-loss"
            )
        raise PolicyError(
            f"policy {policy}: sparsity=auto needs a calibration with a bound: run {COMMAND} calibrate"
            " --text FILE --format floe-int4 --max-loss 2 (and --model, if given)"
        )

    def masks(self, policy: str, layers: int, up: str, calibration: Calibration | None) -> list[Mask]:
        """The mask of each layer. `up`: as in View. Raises PolicyError, one line with the remedy, where the
        experts' format or the calibration does not allow it."""
        if self.dense:
            return [DENSE] * layers
        if not up:
            asked = AUTO if self.wished is None else f"{self.wished:g}"
            raise PolicyError(
                f"policy {policy}: sparsity={asked} leaves channels out, which needs a format that keeps up"
                f" apart: start with --format floe-int4, or give --set {policy}.sparsity=0"
            )
        self.check(policy, calibration)
        known, wished = _measured(up, calibration), self.share(calibration)
        if known is None or known.magnitudes is None:
            return [Mask(0.0, round(1 - wished, 6))] * layers
        return [Mask(threshold, 1.0) for threshold in quantiles(known.magnitudes, wished).tolist()]

    def share(self, calibration: Calibration | None) -> float:
        """Of the channels, left out; the calibration has passed `check`."""
        if self.wished is not None:
            return self.wished
        assert calibration is not None
        assert calibration.sparsity is not None
        return calibration.sparsity

    def left(self, up: str, calibration: Calibration | None) -> list[float] | None:
        """By layer: the share of the sum of |u| that the calibration's text would leave out; None where it
        was not measured."""
        known = _measured(up, calibration)
        if known is None or known.left_mass is None:
            return None
        found: list[float] = quantiles(known.left_mass, self.share(calibration)).tolist()
        return found

    def notes(self, policy: str, up: str, calibration: Calibration | None) -> tuple[str, ...]:
        """A line where no threshold was measured."""
        if self.dense or _measured(up, calibration) is not None:
            return ()
        return (
            f"{policy}: no calibration has |u| of this format's up matrices, so the largest of each tile are"
            f" kept instead of those above a threshold ({COMMAND} calibrate --text FILE)",
        )


def _measured(up: str, calibration: Calibration | None) -> Calibration | None:
    """The calibration, where it has |u| of these up matrices."""
    known = calibration is not None and calibration.magnitudes is not None and calibration.up == up
    return calibration if known else None
