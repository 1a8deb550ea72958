"""Who looks on while the engine computes: traces and calibration are made from what it shows.

An observer changes nothing that is computed. It may ask for probes beside the policy's own: routers of other
layers applied to a layer's x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.policies.view import Gated, Signals


@dataclass(frozen=True)
class Seen:
    """One layer of a step, as it was decided. The arrays are valid during the call alone."""

    layer: int
    x: FloatArray  # [R, H], the input of the layer's router and experts
    signals: Signals  # with the probes that the observer asked for; `logits` None where no router was run
    gated: Gated
    cut: IntArray  # [E], read only where active
    resident: IntArray  # [E], tiles resident when it was planned
    stale: bool  # the host's share was computed from the layer before


class Observer(Protocol):
    """Called by the engine's thread."""

    def probes(self, layer: int) -> tuple[int, ...]:
        """As `Policy.probes`."""

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        """A step begins; the sequence of each of its rows [R]."""

    def layer(self, seen: Seen) -> None:
        """A layer was decided and is being computed."""

    def end(self) -> None:
        """The step was computed; one that failed has no end."""
