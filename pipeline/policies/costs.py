"""The costs of one tile on the host, on the device and on the link: the numbers that policies plan with.

They are measured at start, or read from a file (`--costs FILE`). The file is one JSON object with these keys,
of which the last seven may be left out; all times are seconds:

    {"rows": [1, 4, 16, 64],                        row counts of the grid, ascending, each at least 1
     "host": [2e-5, 3e-5, 7e-5, 2.4e-4],            one tile at each row count, all workers together
     "device": [4e-6, 4e-6, 5e-6, 9e-6],            one tile at each row count, on the device
     "link": 5e-5,                                  one tile to the device
     "round_trip": 1e-4,                            an empty Work, there and back
     "other": [1e-4, 1e-4, 2e-4, 6e-4],             one layer on the device without its routed experts (0)
     "launch": 2e-5,                                a layer's device share beside its tiles (0)
     "fetch": 1e-5,                                 an order of missing tiles beside its tiles (0)
     "both": 0,                                     a layer with both shares beside the later of them (0)
     "wake": 0,                                     a host share behind a layer without one (0)
     "zero_copy": 6e-5,                             one tile that the device reads in the host's memory (0)
     "per": "expert"}                               all of one tile are of a whole expert (tile)

A side's seconds are linear in its tiles, behind a part that does not depend on their number: `round_trip`
once for a layer's host share, `launch` once for its device share, both only where that side computes any
tile, and `fetch` on the link once for each expert of which tiles are fetched. Where both sides compute, the
layer ends `both` after the later of them. Workers that had nothing to do in the layer before begin `wake`
later. Without a number for "zero_copy" the device reads no tile in the host's memory.

"All workers together" means wall time for each tile while every worker computes its share. The host and the
link read the same memory, so measure one while the other runs; otherwise the gain of a plan is imaginary.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.assets import costs_dir
from pipeline.errors import PolicyError
from protocol.small_files import read_small

MAX_FILE_BYTES = 1 << 20
Unit = Literal["tile", "expert"]
OPTIONAL = ("other", "launch", "fetch", "both", "wake", "zero_copy", "per")  # keys that a file may leave out


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
    both: float = 0.0  # a layer with both shares takes so much longer than the later of them
    wake: float = 0.0  # a host share behind a layer without one begins so much later
    zero_copy: float = 0.0  # a tile that the device computes from the host's memory, at few rows; 0: unknown
    per: Unit = "tile"

    def __post_init__(self) -> None:
        if not self.rows:
            raise PolicyError("costs: 'rows' is empty; give at least one row count")
        if self.rows[0] < 1 or any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise PolicyError(f"costs: 'rows' must be ascending and at least 1, not {list(self.rows)}")
        if not self.other:
            object.__setattr__(self, "other", (0.0,) * len(self.rows))
        by_rows = {"host": self.host, "device": self.device, "other": self.other}
        for name, values in by_rows.items():
            if len(values) != len(self.rows):
                raise PolicyError(
                    f"costs: '{name}' has {len(values)} values for {len(self.rows)} row counts; give one each"
                )
        single = ("link", "round_trip", "launch", "fetch", "both", "wake", "zero_copy")
        for name, values in (by_rows | {name: (getattr(self, name),) for name in single}).items():
            wrong = [value for value in values if not (math.isfinite(value) and value >= 0)]
            if wrong:
                raise PolicyError(f"costs: '{name}' holds {wrong[0]}; seconds are finite and not negative")

    def for_tiles(self, tiles: int) -> Costs:
        """The same per tile, for experts of `tiles` tiles."""
        if self.per == "tile":
            return self
        return replace(
            self,
            host=tuple(seconds / tiles for seconds in self.host),
            device=tuple(seconds / tiles for seconds in self.device),
            link=self.link / tiles,
            zero_copy=self.zero_copy / tiles,
            per="tile",
        )

    def host_seconds(self, rows: ArrayLike, tiles: ArrayLike) -> NDArray[np.float64]:
        """Seconds the worker pool needs for `tiles` tiles of an expert that `rows` rows use; the two
        broadcast. 0 rows cost nothing. Between grid points the cost of a tile is linear in the rows;
        outside the grid it continues its nearest segment, never falling below 0 nor below the last point."""
        return self._seconds(self.host, rows, tiles)

    def device_seconds(self, rows: ArrayLike, tiles: ArrayLike) -> NDArray[np.float64]:
        """The same for the device, without transfers."""
        return self._seconds(self.device, rows, tiles)

    def other_seconds(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds of one layer on the device for `rows` rows, without its routed experts."""
        return self._seconds(self.other, rows, 1)

    def link_seconds(self, tiles: ArrayLike) -> NDArray[np.float64]:
        """Seconds to move `tiles` tiles to the device, without `fetch`."""
        return self.link * np.asarray(tiles, dtype=np.float64)

    def zero_copy_pays(self, experts: int, tiles: int) -> bool:
        """Whether the device computes so many missing tiles of a few rows sooner where they are than behind
        their fetches: these move one after the other, and the last one is computed then."""
        fetched = self.fetch * experts + self.link * tiles + self.device[0]
        return 0 < self.zero_copy * tiles < fetched

    def _seconds(self, values: tuple[float, ...], rows: ArrayLike, tiles: ArrayLike) -> NDArray[np.float64]:
        count = np.asarray(rows, dtype=np.float64)
        grid = np.asarray(self.rows, dtype=np.float64)
        tile = np.interp(count, grid, values)
        if len(grid) > 1:
            first = (values[1] - values[0]) / (grid[1] - grid[0])
            # a measured grid is noisy: a falling end must not make wide batches free
            last = max(0.0, (values[-1] - values[-2]) / (grid[-1] - grid[-2]))
            tile = np.where(count < grid[0], np.maximum(0.0, values[0] + first * (count - grid[0])), tile)
            tile = np.where(count > grid[-1], values[-1] + last * (count - grid[-1]), tile)
        return np.where(count > 0, tile, 0.0) * np.asarray(tiles, dtype=np.float64)

    def to_json(self) -> dict[str, Any]:
        """The map that the file format above describes."""
        return {name: list(item) if isinstance(item, tuple) else item for name, item in asdict(self).items()}

    @classmethod
    def from_json(cls, data: object) -> Costs:
        """The inverse of `to_json`. Raises PolicyError naming the key that is wrong."""
        names = [field.name for field in fields(cls)]
        if not isinstance(data, dict):
            raise PolicyError(f"costs: expected a JSON object with the keys {', '.join(names)}")
        missing = [name for name in names if name not in data and name not in OPTIONAL]
        if missing:
            raise PolicyError(f"costs: '{missing[0]}' is missing; the keys are {', '.join(names)}")
        unknown = sorted(str(key) for key in data if key not in names)
        if unknown:
            raise PolicyError(f"costs: '{unknown[0][:40]}' is no key; the keys are {', '.join(names)}")
        return cls(
            rows=tuple(_whole("rows", value) for value in _values("rows", data["rows"])),
            host=_numbers("host", data["host"]),
            device=_numbers("device", data["device"]),
            link=_number("link", data["link"]),
            round_trip=_number("round_trip", data["round_trip"]),
            other=_numbers("other", data.get("other", [])),
            launch=_number("launch", data.get("launch", 0.0)),
            fetch=_number("fetch", data.get("fetch", 0.0)),
            both=_number("both", data.get("both", 0.0)),
            wake=_number("wake", data.get("wake", 0.0)),
            zero_copy=_number("zero_copy", data.get("zero_copy", 0.0)),
            per=_unit(data.get("per", "tile")),
        )

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read a costs file; a bare name that is no file here may be one that ships with Tandem
        (`pipeline/assets/costs`). Raises PolicyError, one line with the path, where it cannot be used."""
        if path.name == str(path) and path.name in shipped_costs() and not path.exists():
            path = costs_dir() / f"{path.name}.json"
        try:
            raw = read_small(path, MAX_FILE_BYTES)
        except OSError as error:
            names = f" ({', '.join(shipped_costs())} can be named)" if path.name == str(path) else ""
            raise PolicyError(
                f"cannot read the costs file {path}: {error.strerror or error}{names}"
            ) from error
        try:
            return cls.from_json(json.loads(raw))
        except PolicyError as error:
            raise PolicyError(f"{path}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"{path} is not JSON: {' '.join(str(error).split())[:100]}") from error


def shipped_costs() -> list[str]:
    """Names of the costs files that ship with Tandem."""
    return sorted(file.stem for file in costs_dir().glob("*.json"))


def _unit(value: object) -> Unit:
    for unit in get_args(Unit):
        if value == unit:
            return cast(Unit, unit)
    raise PolicyError(f"costs: 'per' is {str(value)[:40]!r}; it must be {' or '.join(get_args(Unit))}")


def _values(name: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise PolicyError(f"costs: '{name}' must be a list of numbers")
    return value


def _numbers(name: str, value: object) -> tuple[float, ...]:
    return tuple(_number(name, item) for item in _values(name, value))


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 1 << 31:
        raise PolicyError(f"costs: '{name}' holds {str(value)[:40]!r}; row counts are whole numbers")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PolicyError(f"costs: '{name}' holds {str(value)[:40]!r}; seconds are numbers")
    try:
        return float(value)
    except OverflowError:
        raise PolicyError(f"costs: '{name}' holds a number that is too large") from None
