"""The balanced cut: which tiles of a layer's active experts the device computes, so that both sides end
together.

Three resources work at the same time. The host computes tile after tile, behind the exchange with the workers
or what they still compute; the device computes tile after tile, behind the start of its kernels; the link
moves missing tiles one after the other, and the device computes each once it has landed. Tile costs are
linear, so experts with equally many rows are alike and form one *group*, of which only totals count: the
device takes resident tiles first, then missing ones, expert after expert.

`balance` begins with everything on the host and moves tiles to the device, those first that save most host
time for a second of the device or of the link, until another one would make the device the later side. What
is left to gain is less than a tile. Where other machines end later than the host does then (`floor`), missing
tiles go back to it: moving them gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from operator import itemgetter
from typing import NamedTuple


class Fixed(NamedTuple):
    """Seconds of a layer that no cut changes."""

    host: float  # before the host's first tile, where it has any: the exchange, or earlier work
    launch: float  # before the device's first tile
    link: float  # before the first missing tile can begin to move
    tile: float  # a missing tile on the link; infinite where none can be moved
    fetch: float  # beside its tiles, for each expert with a missing tile that is moved


@dataclass(slots=True)
class Group:
    """Active experts with equally many rows, in the order in which their tiles land."""

    host: float  # seconds of a tile
    device: float
    resident: int  # tiles of all its experts
    missing: int
    lacking: int  # experts that lack a tile
    taken: int = 0  # tiles that the device computes

    @property
    def tiles(self) -> int:
        return self.resident + self.missing


class Sides(NamedTuple):
    """The end of each side of a layer, in seconds from the layer's plan; 0 without work."""

    host: float
    device: float

    @property
    def seconds(self) -> float:
        return max(self)


def balance(groups: Sequence[Group], fixed: Fixed, floor: float = 0.0) -> Sides:
    """Set each group's `taken`, so that the layer ends as early as possible, which is never before
    `floor`."""
    alone, least = _host_alone(groups, fixed)
    if alone.seconds <= max(least, floor):
        _take(groups, [0] * len(groups))
        return alone
    best = _balance(groups, fixed, alone)
    return _give_back(groups, fixed, floor) if best.host < floor else best


def _give_back(groups: Sequence[Group], fixed: Fixed, floor: float) -> Sides:
    """Give missing tiles back to the host, those that cost it least first, as long as it ends by then."""
    host = sides(groups, fixed).host or fixed.host
    for group in sorted(groups, key=lambda group: group.host):
        moved = max(0, group.taken - group.resident)
        count = min(moved, int((floor - host) / group.host)) if group.host and host < floor else 0
        group.taken -= count
        host += count * group.host
    return sides(groups, fixed)


def _balance(groups: Sequence[Group], fixed: Fixed, alone: Sides) -> Sides:
    """`alone`: without the device, which takes longer than a layer takes at least."""
    best, by_link = _in_order(groups, fixed, by_link=True)
    if len(groups) > 1:
        if not by_link:
            taken = [group.taken for group in groups]
            other, _ = _in_order(groups, fixed, by_link=False)
            if max(other) >= max(best):
                _take(groups, taken)
        best = sides(groups, fixed)
    missing = sum([group.missing for group in groups])
    # all of it on the device needs no exchange: better, unless the link alone takes longer
    if best.host and not (missing and fixed.tile * missing > best.seconds):
        taken = [group.taken for group in groups]
        _take(groups, [group.tiles for group in groups])
        whole = sides(groups, fixed)
        if max(whole) <= min(best.seconds, alone.seconds):
            return whole
        _take(groups, taken)
    if alone.seconds < best.seconds:
        _take(groups, [0] * len(groups))
        return alone
    return best


def sides(groups: Sequence[Group], fixed: Fixed) -> Sides:
    """Returns the ends of both sides with the tiles that are taken."""
    begins, launch, waits, tile, fetch = fixed
    left, host, device, landed, moved = 0, 0.0, launch, waits, False
    for group in groups:
        taken, resident = group.taken, group.resident
        left += resident + group.missing - taken
        host += (resident + group.missing - taken) * group.host
        device += (taken if taken < resident else resident) * group.device
    for group in groups:
        missing = group.taken - group.resident
        if missing > 0:  # the device computes each tile once it is there and it has time
            begun = max(device, landed + fetch + tile)
            landed += fetch * ceil(missing * group.lacking / group.missing) + tile * missing
            device = max(begun + missing * group.device, landed + group.device)
            moved = True
    if not moved and device == launch:
        device = 0.0
    return Sides(begins + host if left else 0.0, device)


def _host_alone(groups: Sequence[Group], fixed: Fixed) -> tuple[Sides, float]:
    """Returns the ends of both sides without the device, and seconds that a layer takes at least where the
    device computes any tile."""
    host, computing, missing = 0.0, fixed.launch, 0
    slow = first = inf  # of a tile on the host and on the device, the fastest
    for group in groups:
        tiles = group.resident + group.missing
        host += group.host * tiles
        computing += group.device * tiles
        missing += group.missing
        slow = group.host if group.host < slow else slow
        first = group.device if group.device < first else first
    if missing:
        computing = max(computing, fixed.link + fixed.fetch + fixed.tile * missing)
    shared = max(fixed.host + slow, fixed.launch + first)
    return Sides(fixed.host + host, 0.0), min(shared, computing)


def _take(groups: Sequence[Group], taken: Sequence[int]) -> None:
    for group, count in zip(groups, taken, strict=True):
        group.taken = count


def _in_order(groups: Sequence[Group], fixed: Fixed, by_link: bool) -> tuple[Sides, bool]:
    """Move tiles to the device in the order of the host's time that each saves for a second of the device;
    with `by_link`, for a second of the link where a missing tile takes longer there. Returns what it reaches,
    and whether the link is what ends late."""
    begins, launch, waits, tile, fetch = fixed
    order = []
    left, host = 0, 0.0  # of the host
    for group in groups:
        group.taken = 0
        left += group.resident + group.missing
        host += (group.resident + group.missing) * group.host
        saved, costs = group.host, group.device
        if group.resident:
            order.append((saved / costs if costs > 0 else inf, True, group))
        if group.missing and tile < inf:
            costs = max(costs, tile) if by_link else costs
            order.append((saved / costs if costs > 0 else inf, False, group))
    order.sort(key=itemgetter(0, 1), reverse=True)
    here = moved_here = last = 0.0  # seconds on the device: of resident and of missing tiles, of the last one
    moved, fetches = 0, 0
    now_host, now_device = begins + host if left else 0.0, 0.0
    first = waits + fetch + tile  # the first missing tile's landing
    for _, resident, group in order:
        seconds, saved = group.device, group.host
        count = group.resident if resident else group.missing
        share = 0.0 if resident else group.lacking / group.missing
        later = last if resident else max(last, seconds)
        low, high, tried = 0, 0, count
        while True:  # all of them, and if that is too many, the number by interpolation
            then_host = begins + host - tried * saved if left > tried else 0.0
            if resident:
                then_device = max(launch + here + tried * seconds, first if moved else 0.0) + moved_here
                end = waits + fetch * fetches + tile * moved + last if moved else 0.0
            else:
                then_device = max(launch + here, first) + moved_here + tried * seconds
                end = waits + fetch * (fetches + ceil(tried * share)) + tile * (moved + tried) + later
            if end > then_device:
                then_device = end
            if then_device <= then_host:
                low, now_host, now_device = tried, then_host, then_device
            else:
                high, high_host, high_device, linked = tried, then_host, then_device, end == then_device
            if not high or high - low <= 1:
                break
            early, late = now_host - now_device, high_device - high_host
            tried = min(max(low + int((high - low) * early / (early + late)), low + 1), high - 1)
        if not high:
            group.taken += count
            left -= count
            host -= count * saved
            if resident:
                here += count * seconds
            else:
                moved_here += count * seconds
                moved += count
                fetches += group.lacking
                last = later
            continue
        group.taken += high if high_device < now_host else low
        better = Sides(high_host, high_device) if high_device < now_host else Sides(now_host, now_device)
        return better, linked
    return Sides(now_host, now_device), True
