"""Channels on a replay's link: those that masks keep of tiles which are not resident, and those that were
predicted a layer earlier.

They cross the link behind whole tiles and in the order of their experts. Which channels a prediction names is
in no trace: RIGHT of them are taken to be kept, and as many are kept as are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeline.replay.compiled_cache import AnyCache
from pipeline.replay.outcome import PhaseOutcome

# As measured with `floe` on the embedded model at a sparsity of 0.8; 0.69 at 0.9, 0.80 at 0.5.
RIGHT = 0.74
NOTE = f"of the channels that a prediction names, {RIGHT:.0%} are taken to be kept by their layer"


class MaskedTile:
    """What is read of a tile with a mask, as if each row's channels were drawn independently."""

    def __init__(self, up_bytes: int, tile_bytes: int, sparsity: float) -> None:
        """`tile_bytes`: beside those of up."""
        self.up = up_bytes / (up_bytes + tile_bytes)  # of all bytes
        self._sparsity = sparsity

    def kept(self, rows: int) -> float:
        """The share of the channels that some row keeps."""
        return float(1 - self._sparsity**rows)

    def share(self, rows: int) -> float:
        """Of all bytes."""
        return self.up + self.kept(rows) * (1 - self.up)


class Chosen(NamedTuple):
    """Channels of some tiles of an expert, in tiles' worth of the link."""

    expert: int
    tiles: int
    worth: float


@dataclass
class _Guess:
    """Predicted channels of one expert, in seconds of the link."""

    ordered_at: float
    whole: float
    left: float


class ChannelLink:
    """Shares the link of a simulated cache. Times are seconds and never decrease."""

    def __init__(
        self, cache: AnyCache, tile_seconds: float, fetch_seconds: float, right: float = RIGHT
    ) -> None:
        """The seconds are those of `SimulatedCache`. `right`: of the predicted channels, kept."""
        self._right = right
        self.counters: PhaseOutcome  # of the present phase
        self._cache = cache
        self._tile = tile_seconds
        self._fetch = fetch_seconds
        self._guesses: dict[tuple[int, int], _Guess] = {}  # in the link's order

    def predict(self, layer: int, chosen: list[Chosen], now: float) -> None:
        """Order channels of a later layer behind all else."""
        for expert, _, worth in chosen:
            seconds = self._fetch + worth * self._tile
            self._guesses.setdefault((layer, expert), _Guess(now, seconds, seconds))

    def advance(self, now: float) -> None:
        """Move predicted channels until now, where the link is free."""
        for guess in self._guesses.values():
            start = max(self._cache.free, guess.ordered_at)
            if start >= now:
                return
            seconds = min(guess.left, now - start)
            guess.left -= seconds
            if seconds:
                self._occupy(start, seconds)

    def demand(self, layer: int, chosen: list[Chosen], now: float) -> list[tuple[int, float]]:
        """Move these before all predictions: each tile's (expert, landing). Predictions of this layer and
        earlier ones that name other experts are dropped; those that are right go on."""
        self.advance(now)
        known = {expert: self._guesses.get((layer, expert)) for expert, _, _ in chosen}
        self._guesses = {key: guess for key, guess in self._guesses.items() if key[0] > layer}
        landings = []
        for expert, tiles, worth in chosen:
            seconds, guess = worth * self._tile, known[expert]
            if guess is None or guess.left == guess.whole:  # none, or one that did not begin
                seconds += self._fetch
            else:
                missed = (1 - self._right) * seconds
                seconds = guess.left + missed + (self._fetch if missed else 0.0)
            start = max(self._cache.free, now)
            self._occupy(start, seconds)
            landings += [(expert, start + seconds * (tile + 1) / tiles) for tile in range(tiles)]
        return landings

    def _occupy(self, start: float, seconds: float) -> None:
        self._cache.free = start + seconds
        self.counters.link_busy += seconds
        self.counters.channel_tiles += seconds / self._tile if self._tile else 0.0
