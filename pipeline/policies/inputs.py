"""Refusals of policies that lack an input: costs, or what a calibration measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.errors import PolicyError
from pipeline.policies.calibration import Calibration
from pipeline.policies.view import View

if TYPE_CHECKING:
    from pipeline.policies.composed import Part


def require(policy: str, parts: Sequence[Part], view: View) -> None:
    """Raises PolicyError, one line with the remedy, where a part lacks an input."""
    if view.costs is None and any(part.needs_costs for part in parts):
        raise PolicyError(f"policy {policy} plans by costs, and none were measured or given (--costs)")
    require_calibration(policy, parts, view.calibration)


def require_calibration(policy: str, parts: Sequence[Part], calibration: Calibration | None) -> None:
    """Raises PolicyError, one line with the remedy, where a part lacks what a calibration measures."""
    incomplete = [(part, missing) for part in parts if (missing := part.missing(calibration))]
    if incomplete:
        needs = " and ".join(dict.fromkeys(missing for _, missing in incomplete))
        without = " ".join(
            dict.fromkeys(f"--set {policy}.{part.without}" for part, _ in incomplete if part.without)
        )
        raise PolicyError(
            f"policy {policy} needs {needs}: run python launch.py calibrate --text FILE"
            " (and --model, if given)" + (f", or avoid that with {without}" if without else "")
        )
