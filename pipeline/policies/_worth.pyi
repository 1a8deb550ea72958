from pipeline.arrays import FloatArray, IntArray
from pipeline.policies.view import Target

VERSION: int

class Table:
    free: int
    def __init__(
        self,
        *,
        value: FloatArray,
        empty: FloatArray,
        rank: FloatArray,
        noted: FloatArray,
        averages: FloatArray,
        target: IntArray,
        free: int,
        made: type[Target],
    ) -> None: ...
    def observe(
        self,
        layer: int,
        single: bool,
        fresh_kept: float,
        lasting_kept: float,
        fresh: float,
        lasting: float,
        weight: float,
        counts: bool,
        /,
    ) -> None: ...
    def ahead(
        self, layer: int, experts: list[int], left: int, near: int, tiles: int, /
    ) -> tuple[list[Target], int]: ...
    def moved(
        self, layer: int, experts: list[int], cuts: list[int], more: int, tiles: int, out: IntArray, /
    ) -> list[int]: ...
    def fetch(self, layer: int, experts: list[int], more: list[int], /) -> list[Target]: ...
    def rank(self) -> None: ...
    def grow(
        self, layer: int, expert: int, tiles: int, least: float, near: int, within: bool, /
    ) -> list[Target]: ...
