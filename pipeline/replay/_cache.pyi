from collections.abc import Iterable

from pipeline.arrays import IntArray
from pipeline.policies.view import Target
from pipeline.replay.orders import Key
from pipeline.replay.outcome import PhaseOutcome

VERSION: int

class Cache:
    counters: PhaseOutcome
    free: float
    def __init__(
        self,
        *,
        residency: IntArray,
        target: IntArray,
        ordered: IntArray,
        tiles: int,
        orders: int,
        capacity: int,
        tile_seconds: float,
        fetch_seconds: float,
        error: type[Exception],
    ) -> None: ...
    @property
    def predicted(self) -> int: ...
    @property
    def unused(self) -> int: ...
    def retarget(self, changes: Iterable[Target], predicted: bool = False) -> None: ...
    def settle(self) -> None: ...
    def advance(self, now: float) -> None: ...
    def update(self, now: float) -> None: ...
    def used(self, key: Key, tiles: int) -> None: ...
    def demand(
        self, layer: int, missing: list[tuple[int, int, int]], now: float
    ) -> list[tuple[int, float]]: ...
    def compute(
        self,
        layer: int,
        experts: list[int],
        rows: list[int],
        cuts: list[int],
        seconds: dict[int, tuple[float, float, float]],
        launch: float,
        now: float,
        busy: float,
        waited: float,
        /,
    ) -> tuple[float, float, float]: ...
    def host_seconds(
        self, rows: list[int], cuts: list[int], seconds: dict[int, tuple[float, float, float]], /
    ) -> float: ...
    def link_seconds(self, now: float) -> float: ...
    def under_way(self, layer: int, now: float) -> list[tuple[int, int, float]]: ...
