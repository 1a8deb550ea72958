"""What policies need to be given, costs or what a calibration measures, and their refusals without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pipeline.errors import PolicyError
from pipeline.policies.calibration import Calibration
from pipeline.policies.view import View
from protocol.program import COMMAND


class NeedsInputs:
    """What a policy, or a part of one, needs to be given."""

    needs_costs: bool = False
    needs_calibration: bool = False
    without: ClassVar[str] = ""  # the option that avoids the missing input, as "gate=own"

    def missing(self, calibration: Calibration | None) -> str:
        """What it needs and the model's calibration lacks, as the object of "needs"; "" where it has all."""
        if self.needs_calibration and calibration is None:
            return "a calibration of this model"
        return ""


def require(policy: str, parts: Sequence[NeedsInputs], view: View) -> None:
    """Raises PolicyError, one line with the remedy, where a part lacks an input."""
    if view.costs is None and any(part.needs_costs for part in parts):
        raise PolicyError(f"policy {policy} plans by costs, and none were measured or given (--costs)")
    require_calibration(policy, parts, view.calibration)


def require_calibration(policy: str, parts: Sequence[NeedsInputs], calibration: Calibration | None) -> None:
    """Raises PolicyError, one line with the remedy, where a part lacks what a calibration measures."""
    incomplete = [(part, missing) for part in parts if (missing := part.missing(calibration))]
    if incomplete:
        needs = " and ".join(dict.fromkeys(missing for _, missing in incomplete))
        without = " ".join(
            dict.fromkeys(f"--set {policy}.{part.without}" for part, _ in incomplete if part.without)
        )
        raise PolicyError(
            f"policy {policy} needs {needs}: run {COMMAND} calibrate --text FILE"
            " (and --model, if given)" + (f", or avoid that with {without}" if without else "")
        )
