"""The algorithms that divide a layer's active experts between the device and the host.

Each takes the seconds of every expert on either side and returns a list of booleans, True where the device
computes the expert (`bandwidth` divides experts, and returns tiles). The two sides work at the same time, so
a layer takes as long as the slower one: the aim is min max(T_device, T_host), DALI's equation 3.

`exchange` and `launch` are the seconds that a layer's host share and its device share take beside their
experts, whatever their number: that side's sum begins with it, and is 0 without an expert. An expert that the
device cannot hold (DALI's equation 9) takes infinitely long there. Plain Python numbers throughout: a layer
of one token has a handful of experts, and a call of numpy costs as much as the whole loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

Seconds = Sequence[float]

EXACT = 16  # active experts up to which `optimum` searches them all
WIDE = 64  # width of the beam search that replaces it beyond


def makespan(
    on_device: Sequence[bool], device: Seconds, host: Seconds, exchange: float, launch: float = 0.0
) -> float:
    """Seconds of an assignment: the larger of the two sides' sums."""
    device_total = sum(seconds for seconds, here in zip(device, on_device, strict=True) if here)
    host_total = sum(seconds for seconds, here in zip(host, on_device, strict=True) if not here)
    return max(
        launch + device_total if any(on_device) else device_total,
        host_total if all(on_device) else exchange + host_total,
    )


def by_difference(device: Seconds, host: Seconds) -> list[int]:
    """DALI's order: by descending difference of the two sides' seconds, ties in the order given."""
    apart = [abs(a - b) for a, b in zip(device, host, strict=True)]
    return sorted(range(len(apart)), key=apart.__getitem__, reverse=True)


def greedy(device: Seconds, host: Seconds, exchange: float, launch: float = 0.0) -> list[bool]:
    """DALI's Algorithm 1: each expert in turn goes to the side that has the smaller sum with it, to the
    device where both are equal."""
    on_device = [False] * len(device)
    device_total, host_total = launch, exchange
    for index in by_difference(device, host):
        with_device, with_host = device_total + device[index], host_total + host[index]
        if with_device <= with_host:
            on_device[index] = True
            device_total = with_device
        else:
            host_total = with_host
    return on_device


def beam(device: Seconds, host: Seconds, exchange: float, width: int, launch: float = 0.0) -> list[bool]:
    """DALI's comparison: greedy's order, but keeping the `width` fastest assignments so far instead of one.
    Of equally fast assignments the one with more experts on the device stays."""
    # each: the layer's seconds, the device's, the host's, the device's experts as bits
    beams = [(0.0, 0.0, 0.0, 0)]
    for index in by_difference(device, host):
        longer = []
        for _, here, there, chosen in beams:
            more = (here or launch) + device[index]
            longer.append((max(more, there), more, there, chosen | 1 << index))
            more = (there or exchange) + host[index]
            longer.append((max(here, more), here, more, chosen))
        longer.sort(key=itemgetter(0))
        beams = longer[:width]
    return [bool(beams[0][3] >> index & 1) for index in range(len(device))]


def optimum(device: Seconds, host: Seconds, exchange: float, launch: float = 0.0) -> list[bool]:
    """The fastest assignment, by branch and bound, for at most EXACT experts. With more, which would take
    too long to search, the better of greedy's answer and of a beam of width WIDE."""
    best = greedy(device, host, exchange, launch)
    if len(device) > EXACT:
        wide = beam(device, host, exchange, WIDE, launch)
        return min(best, wide, key=lambda answer: makespan(answer, device, host, exchange, launch))
    limit = makespan(best, device, host, exchange, launch)
    order = by_difference(device, host)
    # the least work of the experts from each place in the order on, on any side
    rest = [0.0] * (len(order) + 1)
    for place in reversed(range(len(order))):
        rest[place] = rest[place + 1] + min(device[order[place]], host[order[place]])
    on_device = [False] * len(order)

    def search(place: int, here: float, there: float) -> None:
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
        alike = place > 0 and not on_device[before] and _same(index, before, device, host)
        if not alike:
            on_device[index] = True
            search(place + 1, (here or launch) + device[index], there)
            on_device[index] = False
        search(place + 1, here, (there or exchange) + host[index])

    search(0, 0.0, 0.0)
    return best


def _same(a: int, b: int, device: Seconds, host: Seconds) -> bool:
    return device[a] == device[b] and host[a] == host[b]


def cheaper(fetched: Seconds, host: Seconds, exchange: float, launch: float = 0.0) -> list[bool]:
    """Fiddler's: each expert to the side that takes less time, `fetched` seconds with its transfer on the
    device (0: resident), to the device where both are equal. Where the host's experts gain less in all than
    the exchange takes, none goes there; otherwise none goes to the device where its experts gain less than
    the launch takes."""
    on_device = [there >= here for here, there in zip(fetched, host, strict=True)]
    gains = [here - there for here, there in zip(fetched, host, strict=True)]
    if sum(gain for gain in gains if gain > 0) <= exchange:
        return [True] * len(on_device)
    if -sum(gain for gain in gains if gain <= 0) < launch:
        return [False] * len(on_device)
    return on_device


class TwoEnded(NamedTuple):
    """HybriMoE's assignment, and the seconds that the layer takes with it."""

    on_device: list[bool]
    seconds: float


def two_ended(
    link: Seconds,
    device: Seconds,
    host: Seconds,
    rows: Sequence[int],
    exchange: float,
    launch: float = 0.0,
    queue: Sequence[int] | None = None,
) -> TwoEnded:
    """HybriMoE's: one queue with the resident experts at its head and the missing ones behind, each heaviest
    first. The device takes from the head, the host from the tail, each time the side that would finish its
    next expert sooner (the device where both are equal). Missing experts are moved one after the other while
    the device computes others: one that takes `link` seconds is computed once it has landed. `queue`: the
    experts in that order, where it is known."""
    if queue is None:
        queue = in_queue(link, rows)
    on_device = [False] * len(rows)
    landed, device_total, host_total = 0.0, launch, exchange
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
    sides = (device_total if any(on_device) else 0.0, 0.0 if all(on_device) else host_total)
    return TwoEnded(on_device, max(sides))


def in_queue(link: Seconds, rows: Sequence[int]) -> list[int]:
    """The experts in the order of `two_ended`'s queue."""
    return sorted(range(len(rows)), key=lambda index: (link[index], -rows[index]))


def bandwidth(
    link: Seconds, host: Seconds, rows: Sequence[int], missing: Sequence[int], exchange: float
) -> list[int]:
    """Bandwidth split: how many of each expert's missing tiles are fetched, the rest stay on the host. With
    seconds for all of an expert's missing tiles, all together take K on the link and H on the host: the share
    (exchange + H) / (K + H) of them, which without the exchange is rate_link / (rate_link + rate_host), makes
    both finish together. The tiles of the heaviest experts are fetched: they are the slowest on the host."""
    on_link, on_host = sum(link), sum(host)
    share = min(1.0, (exchange + on_host) / (on_link + on_host)) if on_link else 1.0
    left = round(share * sum(missing))
    answer = [0] * len(missing)
    for index in sorted(range(len(missing)), key=lambda index: -rows[index]):
        answer[index] = min(left, missing[index])
        left -= answer[index]
    return answer
