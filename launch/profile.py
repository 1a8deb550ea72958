"""Figures derived from a phase's counters: time by cause, bytes moved by cause, hit rates, approximation. The
counters (`pipeline/counters.py`) are those of one request, or of all steps since the engine started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import isnan
from typing import Any

from launch.terminal.format import percent
from pipeline.counters import fidelity
from pipeline.energy import modelled_watts
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest

NOT_APPLICABLE = "n/a"

# What a step spends its time on, as sums of the counters' parts.
CAUSES: dict[str, tuple[str, ...]] = {
    "workers": ("wait",),  # waiting for the workers' partial sums
    "link": ("link",),  # waiting for tiles to be copied to the device
    "disk": ("disk",),  # waiting for experts to be read into memory
    "device": ("device", "shared"),  # computing experts on the device
    "attention": ("attention", "read"),  # an asynchronous device computes it until its result is read
    "planning": ("plan",),
    "messages": ("submit", "combine"),
    "head": ("head",),
}
COPIES = ("predicted", "useful", "late", "wasted", "placed")
COMPUTING = ("device", "attention", "head")  # causes during which the device computes

Tree = Mapping[str, Any]


@dataclass(frozen=True)
class LayerTime:
    """Mean seconds of one MoE layer in a step, in all and by cause."""

    layer: int
    seconds: float
    causes: dict[str, float]


@dataclass(frozen=True)
class PhaseProfile:
    """`tree`: the counters of a phase. `tile_bytes`: bytes of one tile."""

    tree: Tree
    tile_bytes: int

    @property
    def steps(self) -> int:
        return int(self.tree["steps"])

    @property
    def rows(self) -> int:
        """Returns the tokens that were computed."""
        return int(self.tree["rows"])

    @property
    def tiles(self) -> int:
        """Tiles computed on host and device; those of an expert that several rows use count once."""
        return int(self.tree["host_tiles"] + self.tree["resident_tiles"] + self.tree["fetched_tiles"])

    @property
    def seconds(self) -> float:
        """Returns the seconds of all steps."""
        return float(sum(self.tree["seconds"].values()))

    @property
    def tok_s(self) -> float | None:
        """Tokens a second of the steps' time."""
        return self.rows / self.seconds if self.seconds else None

    @property
    def host_share(self) -> float:
        """Share of the tiles that the host computed."""
        return self.tree["host_tiles"] / self.tiles if self.tiles else 0.0

    @property
    def causes(self) -> dict[str, float]:
        """Seconds by cause, in the order of CAUSES."""
        return _by_cause(self.tree["seconds"])

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the time by cause."""
        whole = self.seconds
        return {cause: spent / whole if whole else 0.0 for cause, spent in self.causes.items()}

    @property
    def host_busy(self) -> float:
        """Share of the time in which workers computed: of each layer, the worker that took longest. A worker
        has its own clock, so the sum may be a little above the coordinator's time; the share is not."""
        return min(1.0, float(self.tree["host_busy_s"]) / self.seconds) if self.seconds else 0.0

    @property
    def device_busy(self) -> float:
        """Share of the time in which the device computed, as seen from the host."""
        return sum(self.shares[cause] for cause in COMPUTING)

    def modelled_energy(self, gpu: bool) -> float | None:
        """Joules a token by the model of pipeline/energy.py."""
        watts = modelled_watts(self.host_busy, self.device_busy, gpu)
        return watts * self.seconds / self.rows if self.rows else None

    @property
    def link_busy(self) -> float:
        """Share of the time in which tiles were copied to the device; some are between steps."""
        return min(1.0, float(self.tree["link_busy_s"]) / self.seconds) if self.seconds else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of the needed experts that were wholly resident when their layer was planned, if any."""
        layers = self.tree["layers"]
        active = sum(layers["active"])
        return sum(layers["hits"]) / active if active else None

    @property
    def tile_hit_rate(self) -> float | None:
        """Share of the needed experts' tiles that were resident when their layer was planned, if any."""
        layers = self.tree["layers"]
        active = sum(layers["active_tiles"])
        return sum(layers["hit_tiles"]) / active if active else None

    @property
    def hit_rates(self) -> list[float | None]:
        """`hit_rate` of each layer."""
        layers = self.tree["layers"]
        return [a / b if b else None for a, b in zip(layers["hits"], layers["active"], strict=True)]

    @property
    def moved(self) -> dict[str, int]:
        """Bytes copied to the device. `demanded`: a step needed them; `late`, part of those: being
        prefetched. `predicted`: prefetched, of which `useful`: used, and `wasted`: evicted unused. `placed`:
        in the background, by placement and replacement."""
        sizes = {kind: int(self.tree[f"{kind}_tiles"]) * self.tile_bytes for kind in COPIES}
        return {"demanded": int(self.tree["fetched_bytes"])} | sizes

    @property
    def copied(self) -> int:
        """Bytes copied to the device."""
        return sum(self.moved[kind] for kind in ("demanded", "predicted", "placed"))

    @property
    def copied_per_token(self) -> float:
        """Returns the bytes that were copied, for each token."""
        return self.copied / max(self.rows, 1)

    @property
    def issued_share(self) -> float | None:
        """Share of the wanted prefetches (experts that predictions named and that were neither resident nor
        under way) that were ordered from the link, if any was wanted."""
        wanted = int(self.tree["wanted_experts"])
        return int(self.tree["issued_experts"]) / wanted if wanted else None

    @property
    def fidelity(self) -> dict[str, float | None]:
        """Shares of the routed weight: skipped, substituted, stale, predicted, left out by channel; None for
        an unknown one."""
        shares = fidelity(False, {"": dict(self.tree)})
        return {kind: None if isnan(share) else share for kind, share in shares.items() if kind != "exact"}

    @property
    def kept_share(self) -> float | None:
        """Share of the channels that were read in layers with a mask, if there were any."""
        channels = int(self.tree["masked_channels"])
        return int(self.tree["kept_channels"]) / channels if channels else None

    def to_map(self) -> dict[str, Any]:
        """Returns shares, and bytes a token, for JSON."""
        rows, tree = max(self.rows, 1), self.tree
        return {
            "hit_rate": self.hit_rate,
            "hit_rate_by_layer": self.hit_rates,
            "tile_hit_rate": self.tile_hit_rate,
            "bytes_per_token": {kind: size / rows for kind, size in self.moved.items()},
            "prefetches": {
                "wanted": tree["wanted_experts"],
                "issued": tree["issued_experts"],
                "share": self.issued_share,
                "paused_steps": tree["paused_steps"],
            },
        }

    @property
    def layers(self) -> list[LayerTime]:
        """Each layer's time in a step, the slowest first."""
        by_part = self.tree["layers"]["seconds"]
        steps = max(self.steps, 1)
        times = []
        for layer in range(len(self.tree["layers"]["active"])):
            spent = _by_cause({part: values[layer] / steps for part, values in by_part.items()})
            times.append(LayerTime(layer, sum(spent.values()), spent))
        return sorted(times, key=lambda layer: -layer.seconds)


def shown_hits(rate: float | None, policy: PolicyRequest) -> str | None:
    """Returns a hit rate for a table: n/a under a policy that keeps nothing on the device."""
    if rate is None:
        return None
    return percent(rate) if make_policy(policy, 0).uses_device else NOT_APPLICABLE


def added(trees: Iterable[Tree]) -> Tree:
    """The sum of the counters of one or more runs."""
    return reduce(_plus, trees)


def _plus(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping):
        return {key: _plus(value, b[key]) for key, value in a.items()}
    if isinstance(a, list):
        return [_plus(x, y) for x, y in zip(a, b, strict=True)]
    return a + b


def _by_cause(seconds: Mapping[str, float]) -> dict[str, float]:
    return {cause: float(sum(seconds[part] for part in parts)) for cause, parts in CAUSES.items()}
