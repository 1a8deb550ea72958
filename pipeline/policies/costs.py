"""The costs of one tile on the host, on the device and on the link: the numbers that policies plan with.

They are measured at start, or read from a file (`--costs FILE`). The file is one JSON object with these keys,
of which the last five may be left out; all times are seconds:

    {"rows": [1, 4, 16, 64],                        row counts of the grid, ascending, each at least 1
     "host": [2e-5, 3e-5, 7e-5, 2.4e-4],            one tile at each row count, all workers together
     "device": [4e-6, 4e-6, 5e-6, 9e-6],            one tile at each row count, on the device
     "link": 5e-5,                                  one tile to the device
     "round_trip": 1e-4,                            an empty Work, there and back
     "other": [1e-4, 1e-4, 2e-4, 6e-4],             one layer on the device without its routed experts (0)
     "launch": 2e-5,                                a layer's device share beside its tiles (0)
     "fetch": 1e-5,                                 an order of missing tiles beside its tiles (0)
     "per": "expert",                               all of one tile are of a whole expert (tile)
     "machines": [[3e-4, 1.2]]}                     each other machine with a share of every expert: the way
                                                    there and back, and seconds for one of the host's (none)

A side's seconds are linear in its tiles, behind a part that does not depend on their number: `round_trip`
once for a layer's host share, `launch` once for its device share, both only where that side computes any
tile, and `fetch` on the link once for each expert of which tiles are fetched.
A layer ends with the later of its shares. Where other machines have some tiles of each expert
(docs/cluster.md), it ends with theirs at the earliest, however it is cut here: the `floor`.

"All workers together" means wall time for each tile while every worker computes its share. The host and the
link read the same memory, so measure one while the other runs; otherwise the gain of a plan is imaginary.

The costs of a machine that is not here are derived from its rates by a roofline: an expert takes as long as
its bytes are read or its arithmetic is done, whichever is longer. What that leaves out (caches, small batches
that use a few cores, clocks that fall) is why measured costs come first where there are any.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from pipeline.assets import costs_dir
from pipeline.errors import PolicyError
from protocol.files import read_json

MAX_FILE_BYTES = 1 << 20
MOST_ROWS = 1 << 31  # more than any batch has
DERIVED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)  # the grid of derived costs
OPERATIONS = 2  # a multiplication and an addition, for each weight and row


class Seconds(dict[int, float]):
    """Seconds by row count, computed when they are first looked up: between grid points linear in the rows;
    outside the grid the nearest segment continues, never falling below 0 nor below the last point. 0 rows
    cost nothing."""

    def __init__(self, grid: Sequence[int], values: Sequence[float]) -> None:
        super().__init__({0: 0.0})
        self._grid, self._values = grid, values

    def __missing__(self, rows: int) -> float:
        grid, values = self._grid, self._values
        at = min(max(bisect_right(grid, rows) - 1, 0), len(grid) - 1)
        value = values[at]
        if len(grid) > 1 and rows != grid[at]:
            low = min(at, len(grid) - 2)
            slope = (values[low + 1] - values[low]) / (grid[low + 1] - grid[low])
            # a measured grid is noisy: a falling end must not make wide batches free
            slope = max(0.0, slope) if rows > grid[-1] else slope
            value = max(0.0, slope * (rows - grid[at]) + value)
        self[rows] = value
        return value


@dataclass(frozen=True)
class Costs:
    """Seconds per tile, or as a file has them per expert until `for_tiles` has divided them. Raises
    PolicyError where the numbers cannot be costs."""

    rows: tuple[int, ...]  # ascending
    host: tuple[float, ...]  # at those row counts, wall time while all workers share the work
    device: tuple[float, ...]  # at those row counts
    link: float  # transfer of one tile
    round_trip: float  # an empty Work
    other: tuple[float, ...] = ()  # at those row counts, a layer on the device outside its routed experts
    launch: float = 0.0  # a layer's device share, once, where the device computes any tile
    fetch: float = 0.0  # an order of missing tiles, once for each expert that is fetched
    per: Literal["tile", "expert"] = "tile"
    machines: tuple[tuple[float, float], ...] = ()  # others: seconds of the way, and for one of the host's

    def __post_init__(self) -> None:
        if not self.rows:
            raise PolicyError("costs: 'rows' is empty; give at least one row count")
        if any(b <= a for a, b in pairwise((0, *self.rows, MOST_ROWS))):
            given = str(list(self.rows))[:60]
            raise PolicyError(f"costs: 'rows' must be ascending, at least 1 and below 2**31, not {given}")
        if not self.other:
            object.__setattr__(self, "other", (0.0,) * len(self.rows))
        by_rows = {"host": self.host, "device": self.device, "other": self.other}
        for name, values in by_rows.items():
            if len(values) != len(self.rows):
                raise PolicyError(
                    f"costs: '{name}' has {len(values)} values for {len(self.rows)} row counts; give one each"
                )
        single = ("link", "round_trip", "launch", "fetch")
        every = by_rows | {name: (getattr(self, name),) for name in single}
        every["machines"] = tuple(chain.from_iterable(self.machines))
        for name, values in every.items():
            wrong = [value for value in values if not (math.isfinite(value) and value >= 0)]
            if wrong:
                raise PolicyError(f"costs: '{name}' holds {wrong[0]}; seconds are finite and not negative")

    def for_tiles(self, tiles: int) -> Costs:
        """Returns these costs per tile, for experts of `tiles` tiles."""
        if self.per == "tile":
            return self
        return replace(
            self,
            host=tuple(seconds / tiles for seconds in self.host),
            device=tuple(seconds / tiles for seconds in self.device),
            link=self.link / tiles,
            per="tile",
        )

    def floor(self, host: float) -> float:
        """Returns the seconds until the other machines have computed their tiles of a layer whose tiles here
        would all take the host so many; 0 without other machines."""
        return max([way + each * host for way, each in self.machines], default=0.0)

    def of_tiles(self, host: float, device: float, link: float) -> Costs:
        """Returns the costs with the seconds of a tile on each side times these; those of other machines are
        as they were."""
        return replace(
            self,
            machines=tuple((way, each / host) for way, each in self.machines),
            host=tuple(seconds * host for seconds in self.host),
            device=tuple(seconds * device for seconds in self.device),
            link=self.link * link,
        )

    @cached_property
    def host_at(self) -> Seconds:
        """Seconds the worker pool needs for a tile of an expert, by the rows that use it."""
        return Seconds(self.rows, self.host)

    @cached_property
    def device_at(self) -> Seconds:
        """Seconds the device needs for a tile of an expert, without transfers."""
        return Seconds(self.rows, self.device)

    @cached_property
    def other_at(self) -> Seconds:
        """Seconds of one layer on the device for so many rows, without its routed experts."""
        return Seconds(self.rows, self.other)

    def masked(self, left: float, up: float) -> Costs:
        """Returns the costs of tiles of which a row leaves out such a share of the channels. `up`: of a
        tile's bytes, which are read in any case. What crosses the link depends on the plan, and is as it
        was."""
        read = [up + (1 - left**rows) * (1 - up) for rows in self.rows]
        host, device = (
            tuple(seconds * share for seconds, share in zip(side, read, strict=True))
            for side in (self.host, self.device)
        )
        return replace(self, host=host, device=device)

    def scaled(self, host: float, device: float, link: float) -> Costs:
        """Returns the costs with the seconds of host and exchange, device and launch, and link times
        these."""
        return replace(
            self.of_tiles(host, device, link),
            round_trip=self.round_trip * host,
            launch=self.launch * device,
            fetch=self.fetch * link,
        )

    def to_json(self) -> dict[str, Any]:
        """The map that the file format above describes."""
        return {name: list(item) if isinstance(item, tuple) else item for name, item in asdict(self).items()}

    @classmethod
    def from_json(cls, data: object) -> Costs:
        """The inverse of `to_json`. Raises PolicyError naming the key that is wrong."""
        names = [field.name for field in fields(cls)]
        try:
            costs = msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise PolicyError(f"costs: {str(error)[:100]}; the keys are {', '.join(names)}") from None
        unknown = sorted(str(key) for key in cast(dict[object, object], data) if key not in names)
        if unknown:
            raise PolicyError(f"costs: '{unknown[0][:40]}' is no key; the keys are {', '.join(names)}")
        return costs

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read a costs file; a bare name that is no file here may be one that ships with Tandem
        (`pipeline/assets/costs`). Raises PolicyError, one line with the path, where it cannot be used."""
        if path.name == str(path) and path.name in shipped_costs() and not path.exists():
            path = costs_dir() / f"{path.name}.json"
        try:
            return cls.from_json(read_json(path, MAX_FILE_BYTES))
        except OSError as error:
            names = f" ({', '.join(shipped_costs())} can be named)" if path.name == str(path) else ""
            raise PolicyError(
                f"cannot read the costs file {path}: {error.strerror or error}{names}"
            ) from error
        except PolicyError as error:
            raise PolicyError(f"{path}: {error}") from error
        except ValueError as error:
            raise PolicyError(f"{path} is not JSON: {' '.join(str(error).split())[:100]}") from error


def shipped_costs() -> list[str]:
    """Names of the costs files that ship with Tandem."""
    return sorted(file.stem for file in costs_dir().glob("*.json"))


@dataclass(frozen=True)
class Rates:
    """The rates of a machine, all above 0, and its latencies."""

    host_gbps: float  # of the host's memory, which the workers and the link read together
    link_gbps: float
    device_gbps: float  # of the device's memory
    host_tflops: float
    device_tflops: float
    round_trip: float = 6e-5  # seconds of an empty Work, there and back
    layer: float = 1e-4  # seconds of starting the kernels of a layer, without its routed experts
    launch: float = 2e-5  # of starting those of its routed experts
    fetch: float = 1e-5  # of ordering the missing tiles of an expert

    @property
    def workers_gbps(self) -> float:
        """GB/s that the workers read while the link runs: the two share one memory. They have half of it at
        least, as a link that could take more does not come before them."""
        return max(self.host_gbps - self.link_gbps, self.host_gbps / 2)


# What programs reach, by our own estimate: about 80 % of the memory's and the link's data sheet, half of
# the arithmetic. The A100 stands beside 8 channels of DDR4-3200, the 4090 beside 2 of DDR5-5600, the H200
# beside 12 of DDR5-4800.
MACHINES = {
    "a100-pcie4": Rates(160.0, 25.0, 1500.0, 1.5, 150.0),
    "4090-pcie4": Rates(70.0, 25.0, 850.0, 1.2, 80.0),
    "h200-pcie5": Rates(360.0, 52.0, 3800.0, 4.0, 450.0),
}


def derived(
    rates: Rates, expert_bytes: float, expert_weights: float, other_bytes: float = 0, other_weights: float = 0
) -> Costs:
    """Costs of whole experts (`per` expert) of so many bytes as they are stored, and of so many weights. A
    layer has `other_bytes` and `other_weights` beside its routed experts, all on the device."""

    def seconds(gbps: float, tflops: float, size: float, weights: float) -> tuple[float, ...]:
        return tuple(
            max(size / gbps / 1e9, OPERATIONS * weights * rows / tflops / 1e12) for rows in DERIVED_ROWS
        )

    other = seconds(rates.device_gbps, rates.device_tflops, other_bytes, other_weights)
    return Costs(
        rows=DERIVED_ROWS,
        host=seconds(rates.workers_gbps, rates.host_tflops, expert_bytes, expert_weights),
        device=seconds(rates.device_gbps, rates.device_tflops, expert_bytes, expert_weights),
        link=expert_bytes / rates.link_gbps / 1e9,
        round_trip=rates.round_trip,
        other=tuple(rates.layer + value for value in other),
        launch=rates.launch,
        fetch=rates.fetch,
        per="expert",
    )
