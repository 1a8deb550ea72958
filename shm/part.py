"""A part of a model's experts: the lanes that one machine of several holds.

A lane is a fixed slice of every expert: its tiles [bounds[k], bounds[k + 1]). A part is a store of narrower
experts, whose tiles are those of its lanes, the lowest first; everything that computes on stores computes on
parts. Their bytes are those of the whole store's tiles."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from shm.layout import ExpertShape


@dataclass(frozen=True)
class Part:
    """The lanes that a store holds."""

    bounds: tuple[int, ...]  # of all lanes, in tiles: from 0 to the tiles of an expert
    held: tuple[int, ...]  # lanes, ascending

    def __post_init__(self) -> None:
        rising = len(self.bounds) > 1 and all(low < high for low, high in pairwise(self.bounds))
        if self.bounds[:1] != (0,) or not rising:
            raise ValueError(f"lanes need ascending bounds that begin with 0, not {self.bounds}")
        known = all(0 <= lane < len(self.bounds) - 1 for lane in self.held)
        if not self.held or not known or list(self.held) != sorted(set(self.held)):
            raise ValueError(f"{self.held} are no lanes of {len(self.bounds) - 1}, ascending, at least one")

    @property
    def whole(self) -> bool:
        """Returns whether every lane is held."""
        return len(self.held) == len(self.bounds) - 1

    def tiles(self, lane: int) -> int:
        """Returns the tiles of a lane, held or not."""
        return self.bounds[lane + 1] - self.bounds[lane]

    def first(self, lane: int) -> int:
        """Returns the first tile of a held lane in this part's store."""
        return sum(self.tiles(other) for other in self.held if other < lane)

    def tile_in_model(self, tile: int) -> int:
        """Returns which tile of the whole expert a tile of this part's store is. Raises IndexError."""
        for lane in self.held:
            if tile < self.tiles(lane):
                return self.bounds[lane] + tile
            tile -= self.tiles(lane)
        raise IndexError("no such tile in this part")

    def channels(self, shape: ExpertShape) -> list[tuple[int, int]]:
        """Returns the channels [begin, end) of each held lane among those of a whole expert. `shape`: of this
        part's store, which has no padding but behind its last channel."""
        ranges, left = [], shape.intermediate
        for lane in self.held:
            begin, count = self.bounds[lane] * shape.tile, min(self.tiles(lane) * shape.tile, left)
            ranges.append((begin, begin + count))
            left -= count
        return ranges

    def narrowed(self, shape: ExpertShape) -> ExpertShape:
        """Returns the shape of this part's store, of a model's whole experts. Raises ValueError where the
        lanes do not cover them exactly."""
        if self.bounds[-1] != shape.tiles:
            raise ValueError(f"lanes of {self.bounds[-1]} tiles for experts of {shape.tiles}")
        ends = [min(bound * shape.tile, shape.intermediate) for bound in self.bounds]
        return replace(shape, intermediate=sum(ends[lane + 1] - ends[lane] for lane in self.held))

    def fingerprint(self, whole: str) -> str:
        """Returns the fingerprint of this part's store, of the whole store's: 64 hex digits."""
        if self.whole:
            return whole
        facts = f"{whole} {self.bounds} {self.held}".encode()
        return hashlib.blake2b(facts, digest_size=32).hexdigest()

    def plain(self) -> dict[str, Any]:
        """Returns a dict of plain values, for `part_of`."""
        return {"bounds": list(self.bounds), "held": list(self.held)}


def part_of(plain: Any) -> Part | None:
    """Returns the part that `Part.plain` describes; None of None. Raises KeyError, TypeError or ValueError
    for others."""
    if plain is None:
        return None
    bounds, held = (tuple(int(number) for number in plain[name]) for name in ("bounds", "held"))
    return Part(bounds, held)
