"""The algorithms that divide a layer's active experts between the device and the host.

Each takes the seconds of every expert on either side and returns a list of booleans, True where the device
computes the expert (`fetched` divides experts, and returns tiles). The two sides work at the same time, so a
layer takes as long as the slower one: the aim is min max(T_device, T_host), DALI's equation 3.

`need[i]` is the device memory, in tiles, that expert i takes on the device beyond its resident tiles, and
`free_tiles` the number of free tiles (DALI's equation 9). An expert that does not fit goes to the host. Plain
Python numbers throughout: a layer of one token has a handful of experts, and a call of numpy costs as much as
the whole loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

Seconds = Sequence[float]
Tiles = Sequence[int]

EXACT = 16  # active experts up to which `optimum` searches them all
WIDE = 64  # width of the beam search that replaces it beyond


def makespan(on_device: Sequence[bool], device: Seconds, host: Seconds) -> float:
    """Seconds of an assignment: the larger of the two sides' sums."""
    device_total = sum(seconds for seconds, here in zip(device, on_device, strict=True) if here)
    host_total = sum(seconds for seconds, here in zip(host, on_device, strict=True) if not here)
    return max(device_total, host_total)


def by_difference(device: Seconds, host: Seconds) -> list[int]:
    """DALI's order: by descending difference of the two sides' seconds, ties in the order given."""
    apart = [abs(a - b) for a, b in zip(device, host, strict=True)]
    return sorted(range(len(apart)), key=apart.__getitem__, reverse=True)


def greedy(device: Seconds, host: Seconds, need: Tiles, free_tiles: int) -> list[bool]:
    """DALI's Algorithm 1: each expert in turn goes to the side that has the smaller sum with it, to the
    device where both are equal."""
    on_device = [False] * len(device)
    device_total = host_total = 0.0
    for index in by_difference(device, host):
        with_device, with_host = device_total + device[index], host_total + host[index]
        if with_device <= with_host and need[index] <= free_tiles:
            on_device[index] = True
            device_total = with_device
            free_tiles -= need[index]
        else:
            host_total = with_host
    return on_device


def beam(device: Seconds, host: Seconds, need: Tiles, free_tiles: int, width: int) -> list[bool]:
    """DALI's comparison: greedy's order, but keeping the `width` fastest assignments so far instead of one.
    Of equally fast assignments the one with more experts on the device stays."""
    # each: the layer's seconds, the device's, the host's, the free tiles, the device's experts as bits
    beams = [(0.0, 0.0, 0.0, free_tiles, 0)]
    for index in by_difference(device, host):
        longer = []
        for _, here, there, left, chosen in beams:
            more = here + device[index]
            if need[index] <= left:
                longer.append((max(more, there), more, there, left - need[index], chosen | 1 << index))
            more = there + host[index]
            longer.append((max(here, more), here, more, left, chosen))
        longer.sort(key=itemgetter(0))
        beams = longer[:width]
    return [bool(beams[0][4] >> index & 1) for index in range(len(device))]


def optimum(device: Seconds, host: Seconds, need: Tiles, free_tiles: int) -> list[bool]:
    """The fastest assignment, by branch and bound, for at most EXACT experts. With more, which would take
    too long to search, the better of greedy's answer and of a beam of width WIDE."""
    best = greedy(device, host, need, free_tiles)
    if len(device) > EXACT:
        wide = beam(device, host, need, free_tiles, WIDE)
        return min(best, wide, key=lambda answer: makespan(answer, device, host))
    limit = makespan(best, device, host)
    order = by_difference(device, host)
    # the least work of the experts from each place in the order on, on any side
    rest = [0.0] * (len(order) + 1)
    for place in reversed(range(len(order))):
        rest[place] = rest[place + 1] + min(device[order[place]], host[order[place]])
    on_device = [False] * len(order)

    def search(place: int, here: float, there: float, left: int) -> None:
        nonlocal best, limit
        # a lower bound: the work of both sides so far and the least work left, shared evenly
        if max(here, there, (here + there + rest[place]) / 2) >= limit:
            return
        if place == len(order):
            best, limit = on_device.copy(), max(here, there)
            return
        index = order[place]
        before = order[place - 1] if place else index
        # of equal experts the first ones go to the device: their other orders give the same result
        alike = place > 0 and not on_device[before] and _same(index, before, device, host, need)
        if need[index] <= left and not alike:
            on_device[index] = True
            search(place + 1, here + device[index], there, left - need[index])
            on_device[index] = False
        search(place + 1, here, there + host[index], left)

    search(0, 0.0, 0.0, free_tiles)
    return best


def _same(a: int, b: int, device: Seconds, host: Seconds, need: Tiles) -> bool:
    return device[a] == device[b] and host[a] == host[b] and need[a] == need[b]


def two_ended(link: Seconds, device: Seconds, host: Seconds, rows: Sequence[int]) -> list[bool]:
    """HybriMoE's: one queue with the resident experts at its head and the missing ones behind, each heaviest
    first. The device takes from the head, the host from the tail, each time the side that would finish its
    next expert sooner (the device where both are equal). Missing experts are moved one after the other while
    the device computes others: one that takes `link` seconds is computed once it has landed."""
    queue = sorted(range(len(rows)), key=lambda index: (link[index], -rows[index]))
    on_device = [False] * len(rows)
    landed = device_total = host_total = 0.0
    head, tail = 0, len(queue) - 1
    while head <= tail:
        first, last = queue[head], queue[tail]
        done = max(device_total, landed + link[first]) + device[first]
        if done <= host_total + host[last]:
            on_device[first] = True
            landed += link[first]
            device_total = done
            head += 1
        else:
            host_total += host[last]
            tail -= 1
    return on_device


def fetched(link: Seconds, host: Seconds, rows: Sequence[int], missing: Tiles) -> list[int]:
    """Bandwidth split: how many of each expert's missing tiles are fetched, the rest stay on the host. With
    seconds for all of an expert's missing tiles, all together take K on the link and H on the host: the share
    H / (K + H) of them, which is rate_link / (rate_link + rate_host), makes both finish together. The tiles
    of the heaviest experts are fetched: they are the slowest on the host."""
    on_link, on_host = sum(link), sum(host)
    share = on_host / (on_link + on_host) if on_link else 1.0
    left = round(share * sum(missing))
    answer = [0] * len(missing)
    for index in sorted(range(len(missing)), key=lambda index: -rows[index]):
        answer[index] = min(left, missing[index])
        left -= answer[index]
    return answer
