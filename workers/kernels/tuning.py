"""Measures what is the fastest on this machine: the kernels' variant, how it prefetches, from how many rows
on matrix units compute, and what carries work to other processes (`workers/round_trips.py`).

One row is what decoding computes, and its speed is that of reading weights. Another variant or prefetch than
the default must also be as fast with more rows. Every candidate computes tiles of the formats in FORMATS, in
turns, from memory that no cache holds, on one core; what counts is the median of its times over another
one's in the same round, because a processor's pace changes meanwhile. The default stays unless a candidate is
clearly faster. This module imports no torch.

Process entry too, because the supervisor must neither compute nor end with a fault of what it tries out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shm.floe import FloeFormat
from shm.formats import Bytes, Float32
from shm.huge import private
from shm.kernel_files import contents, entries
from shm.layout import FORMATS as ALL_FORMATS
from shm.segment import available_memory
from workers.kernels.channels import ChannelKernel
from workers.kernels.choice import HINTS, MOST_ROWS, Choice, Prefetch
from workers.kernels.geometry import Geometry
from workers.kernels.native import VARIANTS, Library, chosen, load
from workers.kernels.reading import walk
from workers.round_trips import round_trips

FORMATS = ("int4", "int8", "bf16", "floe-int4")
HIDDEN, CHANNELS = 4096, 256  # of a tile
MASKED_CHANNELS, KEPT = 1024, 5  # of a tile by channel, of which one channel in KEPT is computed
PART = 1 << 23  # bytes from one computation to the next, and the most of one
AHEAD = (1024, 2048, 4096, 8192, 16384)  # bytes
SMALLEST, LARGEST = 1 << 27, 1 << 29  # bytes of the memory
SHARE = 8  # it takes at most 1 / SHARE of what is available
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
ROUNDS = 31
SECONDS = 0.3  # for each comparison; then fewer rounds have to do
UNIT_SECONDS = 0.03  # for each number of rows of matrix units
FEWEST = 2  # rounds
# Of the default's time: the best candidate replaces it if it takes less in a comparison of these two. A
# prefetch changes no bit, so that all that counts is that this does not come by chance.
CLEARLY, CLEARLY_PREFETCHED = 0.95, 0.98
MORE_ROWS = (4, 32)  # of a batch and of an expert in a prompt: another choice must not be slower there ...
AS_FAST = 1.03  # ... by more than two choices of the same speed differ in a measurement
MATRIX_UNITS = ("amx",)  # variants
UNIT_ROWS = (2, 4, 6, 8, 9, 12, 16, 17, 24, 32)  # rows of products for which units and vectors are compared
FILL = 0x3C  # of all bytes: in every format numbers of usual size

Compute = Callable[[Bytes], object]


def main(config: dict[str, Any]) -> None:
    """Writes a Tuning as JSON, or null."""
    trips = round_trips()
    found = tune()
    if found is not None:
        found = replace(found, round_trips=trips)
    print(json.dumps(None if found is None else asdict(found)), flush=True)


@dataclass(frozen=True)
class Tuning:
    """A choice, and bytes a second of one core at one row, by format: with it and with the default one.
    `round_trips`: seconds, by the name of the exchange; empty where they were not measured."""

    choice: Choice
    rates: dict[str, float]
    default: dict[str, float]
    round_trips: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for round trips that are not of both exchanges, and for rates that are none."""
        rates = (*self.rates.values(), *self.default.values(), *self.round_trips.values())
        if self.round_trips.keys() not in (set(), {"zmq", "shm"}) or not all(map(math.isfinite, rates)):
            raise ValueError("it has no valid rates or round trips")


def memory_size() -> int:
    """Bytes to measure with: twice what the caches of a core hold; 0 where memory is short."""
    caches = [contents(path).removesuffix("K") for path in entries(CACHES, "index*/size")]
    largest = max((int(size) << 10 for size in caches if size.isdigit()), default=0)
    size = min(max(SMALLEST, 2 * largest), LARGEST, available_memory() // SHARE)
    return size if size >= SMALLEST // 2 else 0


def tune() -> Tuning | None:
    """Takes about a second. None where no library was compiled or memory is short."""
    first, size = chosen(Choice()), memory_size()
    if first is None or not size:
        return None
    memory = private(size)
    memory[:] = FILL
    parts = walk(memory, PART)
    default = first.choice
    ways = [default.prefetch, Prefetch("none", 0)]
    ways += [way for hint in HINTS[1:] for ahead in AHEAD if (way := Prefetch(hint, ahead)) not in ways]
    prefetched = _confirmed(parts, [replace(default, prefetch=way) for way in ways], CLEARLY_PREFETCHED)
    usable = [name for name in VARIANTS if isinstance(load(name), Library)]
    choice = _confirmed(parts, [replace(prefetched, variant=name) for name in usable], CLEARLY)
    if choice.variant in MATRIX_UNITS:
        choice = replace(choice, matrix_rows=matrix_rows(parts, choice))
    compared = _times(parts, [default, choice])
    rates, before = (
        {name: 1 / seconds for name, seconds in compared[each].items()} for each in (choice, default)
    )
    return Tuning(choice, rates, before)


Times = dict[str, float]  # by format, seconds for a byte


def _confirmed(parts: Iterator[Bytes], candidates: Sequence[Choice], clearly: float) -> Choice:
    """The candidate that computes all formats in the least time; the first one unless that takes less than
    `clearly` of its time, in a comparison with it alone."""
    times = _relative(parts, candidates)
    first, best = candidates[0], min(candidates, key=times.__getitem__)
    if best == first or _relative(parts, [first, best])[best] >= clearly:
        return first
    # One row waits for memory; with more rows the candidates differ by what they compute.
    return best if all(_as_fast(parts, best, first, rows) for rows in MORE_ROWS) else first


def _as_fast(parts: Iterator[Bytes], choice: Choice, other: Choice, rows: int) -> bool:
    return _relative(parts, [other, choice], rows)[choice] <= AS_FAST


def matrix_rows(parts: Iterator[Bytes], choice: Choice) -> int:
    """The least number of rows in UNIT_ROWS from which on matrix units are faster than vectors at every
    number; one more than the largest where there is none."""
    units, vectors = replace(choice, matrix_rows=1), replace(choice, matrix_rows=MOST_ROWS)
    least = UNIT_ROWS[-1] + 1
    for rows in reversed(UNIT_ROWS):
        if _relative(parts, [vectors, units], rows, UNIT_SECONDS)[units] > 1:
            break
        least = rows
    return least


def _relative(
    parts: Iterator[Bytes], candidates: Sequence[Choice], rows: int = 1, seconds: float | None = None
) -> dict[Choice, float]:
    """The time of each for a byte, over all formats, of the first one's in the same round."""
    rounds = [
        {choice: sum(each.values()) for choice, each in times.items()}
        for times in _rounds(parts, candidates, rows, seconds)
    ]
    return {choice: median(times[choice] / times[candidates[0]] for times in rounds) for choice in candidates}


def _times(parts: Iterator[Bytes], candidates: Sequence[Choice]) -> dict[Choice, Times]:
    """The shortest ones at one row, because other programs only ever add to them."""
    rounds = list(_rounds(parts, candidates))
    return {
        choice: {name: min(times[choice][name] for times in rounds) for name in FORMATS}
        for choice in candidates
    }


def _rounds(
    parts: Iterator[Bytes], candidates: Sequence[Choice], rows: int = 1, seconds: float | None = None
) -> Iterator[dict[Choice, Times]]:
    """Each candidate computes each format once in a round. `seconds`: of all; by default SECONDS."""
    limit = SECONDS if seconds is None else seconds
    works = {(choice, name): _compute(choice, name, rows) for choice in candidates for name in FORMATS}
    for compute, _ in works.values():
        compute(next(parts))  # allocates scratch
    began = time.perf_counter()
    for done in range(ROUNDS):
        if done >= FEWEST and time.perf_counter() - began > limit:
            return
        times: dict[Choice, Times] = {choice: {} for choice in candidates}
        for (choice, name), (compute, size) in works.items():
            data = next(parts)
            started = time.perf_counter()
            compute(data)
            times[choice][name] = (time.perf_counter() - started) / size
        yield times


def _compute(choice: Choice, name: str, rows: int) -> tuple[Compute, int]:
    """Returns what computes tiles of this format for so many rows, and the bytes that it reads: for one row
    as many tiles as are in PART, because its call takes about as long as 100 KB."""
    library, format = chosen(choice), ALL_FORMATS[name]
    assert library is not None
    x, every = np.full((rows, HIDDEN), 0.5, np.float32), np.arange(rows, dtype=np.int32)
    if isinstance(format, FloeFormat):
        return _compute_channels(library, format, x, every)
    kernel = library.kernel(Geometry(format, HIDDEN, HIDDEN, CHANNELS))
    quantized, size = kernel.quantize(x), format.tile_bytes(HIDDEN, CHANNELS)
    size *= PART // size if rows == 1 else 1
    return lambda data: kernel.tiles(data[:size], quantized, every), size


def _compute_channels(
    library: Library, format: FloeFormat, x: Float32, every: NDArray[np.int32]
) -> tuple[Compute, int]:
    """The same with few channels: they lie among others that are not read."""
    kernel = ChannelKernel(library, format, HIDDEN, None)
    inputs, u = kernel.activations(x), np.zeros((len(x), MASKED_CHANNELS), np.float32)
    u[:, ::KEPT] = 1
    head, channel = format.head_bytes(HIDDEN, MASKED_CHANNELS), format.channel_bytes(HIDDEN)
    end = head + MASKED_CHANNELS * channel

    def compute(data: Bytes) -> object:
        kernel.up(data[:head], inputs, every)
        return kernel.channels(data[head:end], u, inputs, every)

    return compute, head + -(-MASKED_CHANNELS // KEPT) * channel
