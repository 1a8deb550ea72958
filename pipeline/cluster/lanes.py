"""Lanes: how a layer's routing is cut for them, and how those that this machine holds are computed.

A lane's sum is that of its pieces, in their order; a piece is a run of equal cost of the lane's tiles
(`division.py`). Pieces are cut by the routing and the number of the lane's tiles alone. So a lane's sum has
the same bits on every machine that holds it, whatever its workers are, and lanes of equally many tiles have
the same descriptors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.arrays import FloatArray, IntArray, sum_on_host
from pipeline.config import WorkerCores
from pipeline.experts.division import Divider, Split, all_tiles
from pipeline.experts.pool import HostPool, Ticket
from shm.descriptor import HEADER, ITEMS, Descriptor, head_of
from shm.layout import Part

Pieces = Sequence[Descriptor]  # of one lane, with tiles counted from the lane's first


class LaneDivider:
    """Cuts lanes into pieces."""

    def __init__(self, part: Part, experts: int, pieces: int) -> None:
        """Raises NotCompiled."""
        self.part = part
        most = max(part.tiles(lane) for lane in range(len(part.bounds) - 1))
        self._divider = Divider(WorkerCores.equal(pieces), experts, most)
        self._all = np.zeros(experts, np.int32)

    def cut(self, split: Split) -> Cut:
        """Returns what cuts a layer's lanes. Raises PlanError, as do its methods."""
        return Cut(self, split)

    def pieces(self, split: Split, tiles: int, lo: IntArray | None = None) -> Pieces:
        """Returns the pieces of a lane of so many tiles, without each expert's first `lo`."""
        of_lane = split._replace(lo=self._all if lo is None else lo, hi=all_tiles(len(self._all), tiles))
        return [descriptor for _, descriptor in self._divider.divide(of_lane, 0).parts]


class Cut:
    """A layer's lanes, cut into pieces. Lanes of equally many tiles have the same pieces, unless a device has
    some of them."""

    def __init__(self, divider: LaneDivider, split: Split) -> None:
        self._divider, self._split = divider, split
        self._by_tiles: dict[int, Pieces] = {}

    def whole(self, lanes: Sequence[int]) -> dict[int, Pieces]:
        """Returns the pieces of whole lanes."""
        part, by_tiles = self._divider.part, self._by_tiles
        for tiles in {part.tiles(lane) for lane in lanes} - by_tiles.keys():
            by_tiles[tiles] = self._divider.pieces(self._split, tiles)
        return {lane: by_tiles[part.tiles(lane)] for lane in lanes}

    def own(self, lanes: Sequence[int]) -> dict[int, Pieces]:
        """Returns the pieces of lanes that this machine holds, without the tiles that its device computes."""
        part, split = self._divider.part, self._split
        if not split.lo.any():
            return self.whole(lanes)
        return {
            lane: self._divider.pieces(split, tiles, np.clip(split.lo - part.first(lane), 0, tiles))
            for lane in lanes
            for tiles in (part.tiles(lane),)
        }


@dataclass
class LaneTicket:
    """Lanes that are being computed here."""

    ticket: Ticket
    pieces: dict[int, int]  # of each lane, in the ticket's order

    def sums(self) -> dict[int, FloatArray]:
        """Wait for the sum of each lane, float32 [R, H]. Raises as `Ticket.result`."""
        parts = iter(self.ticket.parts())
        shape = self.ticket.x.shape
        sums = {
            lane: sum_on_host([next(parts) for _ in range(count)], shape)
            for lane, count in self.pieces.items()
        }
        self.ticket.pool.release(self.ticket)
        return sums


class HeldLanes:
    """The lanes of a store, and the pool that computes them."""

    def __init__(self, pool: HostPool, part: Part) -> None:
        self.pool, self._part = pool, part

    def begin(self, lanes: Mapping[int, Pieces], x: FloatArray, waits: bool = True) -> LaneTicket:
        """Begin lanes that are held here, and return at once. x: float32 [R, H], unchanged until their
        sums."""
        descriptors = [
            moved(piece, self._part.first(lane)) for lane, pieces in lanes.items() for piece in pieces
        ]
        ticket = self.pool.submit_in_turn(descriptors, x, waits)
        return LaneTicket(ticket, {lane: len(pieces) for lane, pieces in lanes.items()})


def moved(descriptor: Descriptor, tiles: int) -> Descriptor:
    """Returns a copy of a descriptor whose items lie so many tiles further on."""
    copy = descriptor.copy()
    if not tiles:
        return copy
    items = copy[HEADER : HEADER + 3 * head_of(copy)[ITEMS]].reshape(-1, 3)
    items[:, 1:] += np.int32(tiles)
    return copy
