"""Counters of the engine: the time of its steps by part, tiles computed on host and device, tiles fetched,
and the routed weight that an approximation left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import PHASES, IntArray, Phase
from pipeline.policies.view import Gated
from shm.mask import Tally

Part = Literal[
    "attention", "read", "plan", "submit", "shared", "device", "link", "disk", "wait", "combine", "head"
]
PARTS: tuple[Part, ...] = get_args(Part)
WINDOW = 16  # steps after which predictions are judged
LEAST = 64  # tiles that must have landed for a judgement
USEFUL_SHARE = 0.5  # of those tiles, that must have been used
PAUSE, LONGEST_PAUSE = 256, 8192  # steps until the next trial, doubled after each trial that fails


@dataclass
class Fidelity:
    """Sums of routed weight: all that the routers gave, and how much of it an approximation changed."""

    weight: float = 0.0
    skipped: float = 0.0  # of experts that were skipped
    substituted: float = 0.0  # of experts that another expert replaced
    stale: float = 0.0  # computed by the host from the layer before's hidden state
    predicted: float = 0.0  # routed by a prediction; the layer's own router was not run
    left: float = 0.0  # of each layer the share of |u|'s sum that belongs to channels which were left out

    def book(self, gated: Gated, cut: IntArray, tiles: int, stale: bool) -> None:
        """Add one layer's rows. `cut` [E]: tiles of each expert computed on the device."""
        routed, done = gated.router_routing, gated.routing
        total = routed.total_weight
        self.weight += total
        if gated.predicted:
            self.predicted += total
        if done is not routed:
            dropped = done.weights == 0
            self.skipped += float(routed.weights[dropped].sum())
            self.substituted += float(routed.weights[~dropped & (done.experts != routed.experts)].sum())
        if stale:
            on_host = 1 - cut[done.experts] / tiles
            self.stale += float((done.weights * on_host).sum())


def fidelity(exact: bool, counted: dict[str, Any], kv_cache: str = "") -> dict[str, Any]:
    """An answer's fidelity: `exact`, for an approximate policy each kind's share of all routed weight, and
    the format of the KV cache where it is an approximation. `exact`: the policy is; `counted`: both phases of
    a snapshot, or a difference of two."""
    if kv_cache:
        return {**fidelity(exact, counted), "exact": False, "kv_cache": kv_cache}
    if exact:
        return {"exact": True}
    sums = [phase["fidelity"] for phase in counted.values()]
    whole = sum(phase["weight"] for phase in sums)
    kinds = [kind for kind in sums[0] if kind != "weight"]
    shares = {kind: sum(phase[kind] for phase in sums) / whole if whole else 0.0 for kind in kinds}
    return {"exact": False} | shares


@dataclass
class ChannelCounters:
    """Counts channels that were moved to the device, and how well they were predicted."""

    moved: int = 0
    wasted: int = 0  # of them, predicted for experts that their layer did not need
    guessed: int = 0  # landed for a prediction when their expert was needed
    right: int = 0  # of them, kept by its mask


@dataclass
class PrefetchedTiles:
    """Resident tiles [lo, hi) of one expert that predictions fetched and that were not used yet. They follow
    those that were resident before."""

    lo: int = 0
    hi: int = 0

    def __len__(self) -> int:
        return self.hi - self.lo

    def land(self, tile: int) -> None:
        """The next tile of the expert has landed."""
        if self.lo == self.hi:
            self.lo = tile
        self.hi = tile + 1

    def use(self, tiles: int) -> int:
        """The device computes with the expert's first `tiles` tiles. Returns how many of them it uses for the
        first time."""
        used = max(0, min(self.hi, tiles) - self.lo)
        self.lo += used
        return used

    def evict(self, keep: int) -> int:
        """The expert's tiles from `keep` on are evicted. Returns how many of them were not used."""
        unused = max(0, self.hi - max(self.lo, keep))
        self.hi -= unused
        return unused


@dataclass
class PhaseCounters:
    """Sums over the steps of one phase. A tile counts once for each step in which it is computed. Counts by
    layer are of what steps used and found resident when their layers were planned, also where the host
    computed it."""

    layers: int
    # what was moved to the device for predictions, and what became of it
    wanted_experts: int = 0  # that predictions named and that were neither resident nor under way
    issued_experts: int = 0  # of those, ordered from the link
    paused_steps: int = 0  # without predictions, because too few of their tiles had been used
    predicted_tiles: int = 0  # landed, fetched for a prediction of this phase
    useful_tiles: int = 0  # of those, computed before they were evicted
    wasted_tiles: int = 0  # of those, evicted unused
    late_tiles: int = 0  # demanded while their predicted fetch was under way
    placed_tiles: int = 0  # landed in the background, for no prediction
    channels: ChannelCounters = field(default_factory=ChannelCounters)
    # what was computed
    steps: int = 0
    rows: int = 0  # and of guesses those that came true
    host_tiles: int = 0
    resident_tiles: int = 0
    fetched_tiles: int = 0  # over the link
    host_busy: float = 0.0  # seconds, of each layer's longest Work
    link_busy: float = 0.0  # seconds of copies to the device
    masked_channels: int = 0  # of the tiles in layers with a mask
    kept_channels: int = 0  # of those, read: some row keeps them
    fidelity: Fidelity = field(default_factory=Fidelity)

    def __post_init__(self) -> None:
        self.active: NDArray[np.int64] = np.zeros(self.layers, np.int64)  # experts used
        self.hits: NDArray[np.int64] = np.zeros(self.layers, np.int64)  # of them, wholly resident
        self.active_tiles: NDArray[np.int64] = np.zeros(self.layers, np.int64)  # of the experts used
        self.hit_tiles: NDArray[np.int64] = np.zeros(self.layers, np.int64)  # of them, resident
        # the same memory, in which Python changes single numbers sooner
        self._counts = self.active.data, self.active_tiles.data, self.hits.data, self.hit_tiles.data
        # by part and layer; the last number of each part: outside layers
        self.seconds: dict[Part, list[float]] = {part: [0.0] * (self.layers + 1) for part in PARTS}

    def book_hits(self, layer: int, resident: Sequence[int], tiles: int) -> None:
        """Count one step of a layer. `resident`: the resident tiles, of `tiles`, of each expert used."""
        active, active_tiles, hits, hit_tiles = self._counts
        active[layer] += len(resident)
        active_tiles[layer] += tiles * len(resident)
        if any(resident):
            hits[layer] += resident.count(tiles)
            hit_tiles[layer] += sum(resident)

    def of_layers(self) -> tuple[dict[str, Any], list[NDArray[np.int64]]]:
        """Returns a copy of what is counted of a step's layers, but for time and what was moved."""
        numbers = ("host_tiles", "resident_tiles", "masked_channels", "kept_channels")
        counts = {name: getattr(self, name) for name in numbers} | {"fidelity": replace(self.fidelity)}
        return counts, [np.array(count) for count in self._counts]

    def set_layers(self, counts: dict[str, Any], by_layer: Sequence[NDArray[np.int64]]) -> None:
        """Set what `of_layers` has returned."""
        vars(self).update(counts)
        for count, value in zip(self._counts, by_layer, strict=True):
            np.asarray(count)[:] = value

    @property
    def prefetched(self) -> tuple[int, int]:
        """Tiles and channels that predictions moved, and those of them that were used. A policy predicts
        either tiles or channels."""
        c = self.channels
        return self.predicted_tiles + c.guessed + c.wasted, self.useful_tiles + c.right

    def book_mask(self, weight: float, tally: Tally) -> None:
        """Count a layer's mask. `weight`: what was routed there."""
        self.masked_channels += tally.channels
        self.kept_channels += tally.kept
        if tally.mass > 0:
            self.fidelity.left += weight * tally.left / tally.mass


def pause_note(paused: int, steps: int) -> str:
    """One line for a report, where prefetching paused in some of the decode steps; otherwise ""."""
    if not paused:
        return ""
    return (
        f"prefetching paused in {paused} of {steps} decode steps, because too few of the tiles that it"
        " fetched were used (with the option pause=0 it never pauses)"
    )


class Elsewhere(NamedTuple):
    """Another machine's share of a layer."""

    busy: float  # seconds that it computed
    way: float | None  # seconds of the way there and back; None where the layer has not waited for it


class PrefetchMeter:
    """Judges whether one policy's predictions are worth their transfers; where not, prefetching pauses and is
    tried again later.

    A wrongly predicted tile takes the memory's and the link's time from demanded tiles. So over a window of
    steps, at least USEFUL_SHARE of the prefetched tiles that landed must have been used before they were
    evicted. The same holds where single channels are predicted. `landed`, `useful`: prefetched tiles that had
    landed and been used when the policy was set."""

    def __init__(self, landed: int = 0, useful: int = 0) -> None:
        self.on = True
        self.status = ""  # one line for a person, while prefetching pauses or is tried again
        self._pause = PAUSE  # after the next failure
        self._pausing = 0  # steps of this pause
        self._steps = 0  # of this window or of this pause
        self._landed, self._useful = landed, useful  # when the window began

    def step(self, landed: int, useful: int) -> bool:
        """Count a step; `landed`, `useful`: all prefetched tiles so far that landed and that were used. True
        where the step switched prefetching off or on."""
        self._steps += 1
        if not self.on:
            if self._steps < self._pausing:
                return False
            self.on, self.status = True, "prefetching is being tried again"
            self._begin(landed, useful)
            return True
        arrived, used = landed - self._landed, useful - self._useful
        if self._steps < WINDOW or arrived < LEAST:  # too few to judge: the window continues
            return False
        self.on = used >= USEFUL_SHARE * arrived
        if self.on:
            self._pause, self.status = PAUSE, ""
        else:
            self.status = (
                f"prefetching pauses for {self._pause} steps: of {arrived} tiles or channels fetched in"
                f" {self._steps} steps, {used} were used"
            )
            self._pausing, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._begin(landed, useful)
        return not self.on

    def _begin(self, landed: int, useful: int) -> None:
        self._steps, self._landed, self._useful = 0, landed, useful


class StepClock:
    """Divides a step's time: `mark(part)` adds the time since the previous mark to that part. On an
    asynchronous device a part counts the host's time; the device's own appears where the host waits for it
    ("read")."""

    def __init__(
        self,
        counters: PhaseCounters,
        copied: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
        again: bool = False,
    ) -> None:
        """`copied`: the tiles that were moved so far, and the seconds of that. `again`: the step may be begun
        again."""
        self._layers = counters.of_layers() if again else None
        self._copied, (_, self._before) = copied, copied()
        self.counters, self._seconds = counters, counters.seconds
        self._last = time.perf_counter()
        self.layer = 0  # to which the time is added

    def mark(self, part: Part) -> None:
        now = time.perf_counter()
        self._seconds[part][self.layer] += now - self._last
        self._last = now

    def fail(self) -> None:
        """The step has failed. Where it is begun again, its layers have not been counted."""
        if self._layers is not None:
            self.counters.set_layers(*self._layers)

    def finish(self, part: Part) -> None:
        """End the step, of which all that was launched was waited for; the rest is as `mark`."""
        self.mark(part)
        self.counters.link_busy += self._copied()[1] - self._before


class Counters:
    """All counters since the engine started."""

    def __init__(self, tile_bytes: int, layers: int, channel_bytes: float = 0) -> None:
        """`channel_bytes`: of what is moved of a single channel."""
        self._bytes = tile_bytes, channel_bytes
        self.phases: dict[Phase, PhaseCounters] = {phase: PhaseCounters(layers) for phase in PHASES}

    def snapshot(self) -> dict[str, Any]:
        """The counters as a JSON-like tree; the differences of two snapshots are a request's own."""
        return {name: _tree(counters, *self._bytes) for name, counters in self.phases.items()}


def _tree(c: PhaseCounters, tile_bytes: int, channel_bytes: float) -> dict[str, Any]:
    return {field.name: getattr(c, field.name) for field in fields(c) if field.type == "int"} | {
        "fetched_bytes": c.fetched_tiles * tile_bytes + c.channels.moved * channel_bytes,
        "channels": dict(vars(c.channels)),
        "host_busy_s": c.host_busy,
        "link_busy_s": c.link_busy,
        "seconds": {part: sum(seconds) for part, seconds in c.seconds.items()},
        "layers": {
            "seconds": {part: seconds[:-1] for part, seconds in c.seconds.items()},
            "active": c.active.tolist(),
            "hits": c.hits.tolist(),
            "active_tiles": c.active_tiles.tolist(),
            "hit_tiles": c.hit_tiles.tolist(),
        },
        "fidelity": dict(vars(c.fidelity)),
    }


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """after - before, number by number; both from `snapshot`."""
    return {key: _minus(value, before[key]) for key, value in after.items()}


def _minus(after: Any, before: Any) -> Any:
    if isinstance(after, dict):
        return difference(after, before)
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before, strict=True)]
    return after - before
