"""What an engine's steps have shown of its costs, and its form on disk, with which the next start goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, NamedTuple

from pipeline.engine.cost_updates import SIDES, SINGLE, CostUpdates, Side
from pipeline.engine.layer_times import KINDS, LONG, Kind, LayerTimes
from pipeline.policies.active_costs import SecondsTable
from pipeline.policies.costs import Costs

FIRST, SAMPLED = 64, 4  # steps of which each is measured; of later ones every so many


@dataclass(frozen=True)
class Corrections:
    """What was learned, as plain numbers."""

    # of a tile's seconds, at each row count of the costs
    factors: dict[Side, tuple[float, ...]] = field(default_factory=dict)
    # seconds of a layer beside its tiles, by the power of two of a step's rows
    beside: dict[int, dict[Kind, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The inverse of `from_json`."""
        return {"factors": self.factors, "beside": {str(rows): kinds for rows, kinds in self.beside.items()}}

    @classmethod
    def from_json(cls, data: Any, points: int) -> Corrections:
        """Of costs at so many row counts. Raises ValueError, TypeError, KeyError or AttributeError for
        anything that `to_json` does not write."""
        if not data:
            return cls()
        factors: dict[Side, tuple[float, ...]] = {
            side: tuple(data["factors"][side])
            for side in SIDES
            if data["factors"] and (side != "zero_copy" or side in data["factors"])  # which came later
        }
        beside: dict[int, dict[Kind, float]] = {
            int(rows): {kind: float(kinds[kind]) for kind in KINDS} for rows, kinds in data["beside"].items()
        }
        sizes = {side: 1 if side in SINGLE else points for side in SIDES}
        if any(len(values) != sizes[side] for side, values in factors.items()) or not all(
            0 < factor < inf for values in factors.values() for factor in values
        ):
            raise ValueError("its factors are none")
        if not all(isfinite(seconds) for kinds in beside.values() for seconds in kinds.values()):
            raise ValueError("its seconds are none")
        return cls(factors, beside)


NOTHING = Corrections()


class InForce(NamedTuple):
    """Costs with tables of a tile's seconds."""

    costs: Costs
    host: SecondsTable
    device: SecondsTable


class Learned:
    """What steps have shown of an engine's costs, under whatever policy. What a layer takes beside its tiles
    is kept apart for 1 row, 2 and 3, 4 to 7 and so on, as it grows with them. Measuring takes time itself, so
    that of short steps each is measured at first, and then every SAMPLEDth."""

    def __init__(self, measured: Costs, before: Corrections = NOTHING) -> None:
        """`measured`: at first, per tile. `before`: what an earlier engine has learned of the same costs."""
        self.updates = CostUpdates(measured, before.factors)
        self._layers = {  # by the power of two
            power: LayerTimes(1 << power >> 1, found) for power, found in before.beside.items()
        }
        self._found: dict[int, InForce] = {}
        self._steps: dict[int, int] = {}

    @classmethod
    def of(cls, measured: Costs | None, before: Learned | None) -> Learned | None:
        """What was learned `before`, where that is about these costs or there are none now."""
        if measured is None or (before is not None and before.updates.measured == measured):
            return before
        return cls(measured)

    def begin_step(self, rows: int) -> bool:
        """Whether this step is measured."""
        count = self._steps[rows.bit_length()] = self._steps.get(rows.bit_length(), 0) + 1
        return rows >= LONG or count < FIRST or not count % SAMPLED

    def layers(self, rows: int) -> LayerTimes:
        """Of steps of so many rows."""
        found = self._layers.get(rows.bit_length())
        if found is None:
            found = self._layers[rows.bit_length()] = LayerTimes(rows)
        return found

    def in_force(self, rows: int) -> InForce:
        """In a step of so many rows."""
        found = self._found.get(rows.bit_length())
        if found is None:
            found = self._found[rows.bit_length()] = tables(self.layers(rows).corrected(self.updates.costs))
        return found

    def tiles_changed(self, rows: int) -> None:
        """Of `updates`, after a step of so many rows: what was measured beyond them then does not count."""
        self._found.clear()
        self.layers(rows).restart()

    def layers_changed(self, rows: int) -> None:
        """Of `layers`."""
        self._found.pop(rows.bit_length(), None)

    @property
    def corrections(self) -> Corrections:
        """For the next engine of these costs."""
        beside = {power: layers.corrections for power, layers in self._layers.items()}
        return Corrections(self.updates.factors, beside)

    def report(self) -> dict[str, Any]:
        """For stats: what changed, of tiles, and of one row's layers beside them. May be called by other
        threads."""
        beside = self._layers.get(1)
        return self.updates.report() | {"beside": beside.corrections if beside else {}}


def tables(costs: Costs) -> InForce:
    return InForce(costs, SecondsTable(costs.host_seconds, 1), SecondsTable(costs.device_seconds, 1))
