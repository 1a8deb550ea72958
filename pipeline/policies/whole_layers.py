"""Whether whole layers on the device are faster than the most useful tiles of all layers.

With experts by use most layers have work on both sides, and each of these takes the exchange with the workers
and what the sides cost each other (`Costs.both`). A layer that is resident as a whole takes neither, and the
others then have the host to themselves. Where those parts are large beside the experts, whole layers win.
Both arrangements are counted over the same steps, by the costs in force, which what runs corrects. A prompt
uses nearly all experts, and loses by whole layers, in which host and link have nothing to do; so prompts
count too. They come seldom and at once, so their seconds are spread over all tokens that were decoded since.
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
        self.status = ""  # one line; empty before the first comparison
        self._layers = shape.layers
        self._period = WINDOW
        self._prompts = [0.0, 0.0]  # seconds by use and by layer, and
        self._decoded = 0  # steps of decode since
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._seconds = [0.0, 0.0]  # of the steps of decode that are compared, by use and by layer
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
        """Whether to change now: `used` is then the other one. `decoded`: a step of decode, else of a prompt.
        `moved`: about as many tiles would have to move, in `tile` seconds each."""
        if not self.possible or self._noted != self._layers:
            return False
        sums = self._seconds if decoded else self._prompts
        sums[0] += self._used
        sums[1] += self._whole
        self._steps += decoded
        self._decoded += decoded
        if self._steps < self._period:
            return False
        by_use, by_layer = (
            step / self._steps + prompt / self._decoded
            for step, prompt in zip(self._seconds, self._prompts, strict=True)
        )
        present, other = (by_layer, by_use) if self.used else (by_use, by_layer)
        pays = other < (1 - LEAST) * present and (present - other) * PAYS_WITHIN > moved * tile
        if pays:
            self.used = not self.used
            self._period = min(2 * self._period, LONGEST)
        self.status = self._words(by_use, by_layer)
        if self._decoded > LONGEST:
            self._decoded //= 2
            self._prompts = [seconds / 2 for seconds in self._prompts]
        self._begin()
        return pays

    def _words(self, by_use: float, by_layer: float) -> str:
        """`by_use`, `by_layer`: seconds of a step of decode, with its share of the prompts."""
        whole = f"the first {self.count} of {self._layers} layers whole"
        used = "the most used experts of every layer"
        found, other = (f"{whole}, the others on the host", used) if self.used else (used, whole)
        least, more = (by_layer, by_use) if self.used else (by_use, by_layer)
        return (
            f"resident: {found}; by the costs a step's experts take {1e3 * least:.3g} ms so, and"
            f" {1e3 * more:.3g} ms with {other}"
        )
