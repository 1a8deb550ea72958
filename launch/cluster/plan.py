"""Which machine holds which tiles of every expert: by its memory, and by how fast it reads that. Only
calculates.

A decode step waits for the machine that needs longest to read its tiles. So tiles are given one by one to the
machine that would still be done first with one more, as long as it has room. A machine's tiles are one lane;
replicas are copies of whole lanes, on the machines with most room to spare."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]


def divide(
    tiles: int, tile_bytes: int, rooms: ArrayLike, rates: ArrayLike, device: tuple[int, float] = (0, 0.0)
) -> Ints | None:
    """Returns how many of an expert's tiles each machine holds, int64 [machines], the first at least one;
    None where they have no room for all. `tile_bytes`: of one tile of all experts; `rooms`: bytes; `rates`:
    bytes a second; `device`: bytes that the first machine's device keeps of its tiles, and how many times as
    fast it computes them as that machine's workers do, at the same time.

    No other division has a smaller largest time to read them: a tile that a machine gets as its n-th is done
    after n tiles' time whoever gets the others, and the tiles taken are those with the least such times."""
    most = np.maximum(0, np.asarray(rooms, np.int64) // max(1, tile_bytes))
    pace = np.asarray(rates, np.float64)
    kept, gain = device[0] / max(1, tile_bytes), device[1]
    held = np.zeros(len(most), np.int64)
    if not len(most) or most[0] < 1 or most.sum() < tiles:
        return None
    held[0] = 1
    for _ in range(tiles - 1):
        read = held + 1.0
        read[0] -= min(kept, read[0] * gain / (1 + gain))  # so that both end together, or the workers later
        time = np.where(held < most, read / pace, np.inf)
        held[int(np.argmin(time))] += 1
    return held


def replicate(
    lanes: ArrayLike, held: Sequence[int | None], tile_bytes: int, rooms: ArrayLike, copies: int
) -> list[list[int]]:
    """Returns the lanes that each machine holds, its own one first, with up to `copies` of each beside the
    first: of all lanes where there is room, else of as many as possible, each once before any twice. `lanes`:
    tiles of each; `held`: the machines' own lanes; None: a machine without one.

    The lane of the first machine, the coordinator's, needs no copies: without it there is no engine. It has
    copies of others' lanes where no other machine has room: it has most to do already."""
    size = np.asarray(lanes, np.int64) * tile_bytes
    free = np.asarray(rooms, np.int64).copy()
    parts = [[] if own is None else [own] for own in held]
    for machine, part in enumerate(parts):
        free[machine] -= sum(int(size[lane]) for lane in part)
    for _ in range(copies):
        # Small ones first: more of them fit.
        for lane in np.argsort(size, kind="stable"):
            able = [m for m, part in enumerate(parts) if lane not in part and free[m] >= size[lane]]
            if able and lane != held[0]:
                machine = max(able, key=lambda m: (m > 0, int(free[m])))
                parts[machine].append(int(lane))
                free[machine] -= size[lane]
    return parts


def coarse(rate: float) -> float:
    """Returns a measured rate in steps of a quarter of a binary order (19 %): equal machines are never
    measured equal, and hold equal parts."""
    return float(2.0 ** (round(4 * math.log2(max(rate, 1e-9))) / 4))


@dataclass(frozen=True)
class Room:
    """A machine that takes part."""

    name: str
    memory: int  # bytes that experts may take
    rate: float  # bytes a second that it reads
    device: tuple[int, float] = (0, 0.0)  # of the coordinator's, as of `divide`


@dataclass(frozen=True)
class Division:
    """Who holds what. The first machine is the coordinator's."""

    bounds: tuple[int, ...]  # of the lanes, in tiles
    parts: tuple[tuple[int, ...], ...]  # lanes of each machine, its own first, then replicas
    tile_bytes: int

    @property
    def lanes(self) -> int:
        return len(self.bounds) - 1

    def holders(self, lane: int) -> list[int]:
        """Returns the machines that hold a lane."""
        return [machine for machine, part in enumerate(self.parts) if lane in part]

    def bytes_of(self, lanes: Sequence[int]) -> int:
        """Returns what these lanes take."""
        return sum((self.bounds[lane + 1] - self.bounds[lane]) * self.tile_bytes for lane in lanes)

    def alone(self, machine: int) -> list[int]:
        """Returns the lanes that only this machine holds."""
        return [lane for lane in self.parts[machine] if self.holders(lane) == [machine]]

    def spares(self, machine: int, rooms: Sequence[Room]) -> list[int]:
        """Returns the machines with room for all that only this one holds, most room first."""
        return list(self.free(machine, rooms, self.bytes_of(self.alone(machine))))

    def free(self, machine: int, rooms: Sequence[Room], least: int) -> dict[int, int]:
        """Returns the bytes that other machines have left, if they are so many, most first."""
        left = {m: room.memory - self.bytes_of(self.parts[m]) for m, room in enumerate(rooms) if m != machine}
        return {m: left[m] for m in sorted(left, key=lambda m: -left[m]) if left[m] >= least}


def plan(tiles: int, tile_bytes: int, rooms: Sequence[Room], replicas: int) -> Division | None:
    """Returns the division among these machines, the coordinator's first; None where they have no room."""
    memory, rates = [room.memory for room in rooms], [room.rate for room in rooms]
    held = divide(tiles, tile_bytes, memory, rates, *(room.device for room in rooms[:1]))
    if held is None:
        return None
    lanes = [int(count) for count in held if count]
    own = [None if not count else int(np.count_nonzero(held[:m])) for m, count in enumerate(held)]
    parts = replicate(lanes, own, tile_bytes, memory, replicas)
    bounds = (0, *accumulate(lanes))
    return Division(bounds, tuple(map(tuple, parts)), tile_bytes)


class StandIns:
    """Who stands in for lost machines: of each the best of its spares, as long as that does not fail and is
    there itself."""

    def __init__(self, spares: Mapping[str, Sequence[str]], begun: Container[tuple[str, str]] = ()) -> None:
        """`spares`: of each machine those that could, the best first; `begun`: each that does already, behind
        the machine."""
        self._spares = spares
        # By lost machine, those that began, the latest last.
        self.begun = {name: [one for one in every if (name, one) in begun] for name, every in spares.items()}

    def now(self, name: str) -> str | None:
        """Returns the machine that stands in for a lost one, the latest that began."""
        return self.begun[name][-1] if self.begun[name] else None

    def begin(self, name: str, there: Container[str], failed: bool) -> str | None:
        """Returns the machine that begins to stand in for a lost one; None where another does, or none that
        has not tried is `there`. `failed`: the one of now does not, or is lost."""
        begun = self.begun[name]
        if begun and not failed:
            return None
        chosen = next((each for each in self._spares[name] if each in there and each not in begun), None)
        if chosen is not None:
            begun.append(chosen)
        return chosen

    def end(self, name: str) -> list[str]:
        """A lost machine is back: returns those that began to stand in for it, and may do so again."""
        begun, self.begun[name] = self.begun[name], []
        return begun
