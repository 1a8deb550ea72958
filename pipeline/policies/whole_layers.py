"""Whether whole layers on the device are faster than the most useful tiles of all layers.

With experts by use most layers have work on both sides, and each of these takes the exchange with the workers
and what the sides cost each other (`Costs.both`). A layer that is resident as a whole takes neither, and the
others then have the host to themselves. Where those parts are large beside the experts, whole layers win.
Both arrangements are counted over the same steps, by the costs in force, which what runs corrects.
"""

from __future__ import annotations

from pipeline.policies.view import ModelShape

WINDOW = 32  # steps that are compared at first; twice as many after each change
LONGEST = 4096
LEAST = 0.02  # relative gain of a change
PAYS_WITHIN = 512  # steps in which a change saves as much time as its tiles take on the link


class WholeLayers:
    """`used`: the cache holds the first `count` layers, instead of tiles by use."""

    def __init__(self, shape: ModelShape, capacity: int) -> None:
        """`capacity`: tiles."""
        self.count = min(capacity // (shape.experts * shape.tiles), shape.layers)
        self.used = False
        self.possible = 0 < self.count < shape.layers
        self._layers = shape.layers
        self._period = WINDOW
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._by_use = self._by_layer = 0.0  # seconds of all steps that are compared
        self.begin_step()

    def begin_step(self) -> None:
        """A step counts if all its layers are noted."""
        self._noted = 0
        self._used = self._whole = 0.0  # seconds of this step

    def note(self, by_use: float, by_layer: float) -> None:
        """A layer's seconds with either arrangement."""
        self._used += by_use
        self._whole += by_layer
        self._noted += 1

    def end_step(self, decoded: bool, moved: int, tile: float) -> bool:
        """Whether to change now: `used` is then the other one. Prompts' seconds count like those of other
        steps, but only steps that `decoded` are counted. `moved`: about as many tiles would have to move, in
        `tile` seconds each."""
        if not self.possible or self._noted != self._layers:
            return False
        self._by_use += self._used
        self._by_layer += self._whole
        self._steps += decoded
        if self._steps < self._period:
            return False
        present, other = self._by_use, self._by_layer
        if self.used:
            present, other = other, present
        saved = (present - other) / self._steps
        pays = other < (1 - LEAST) * present and saved * PAYS_WITHIN > moved * tile
        if pays:
            self.used = not self.used
            self._period = min(2 * self._period, LONGEST)
        self._begin()
        return pays
