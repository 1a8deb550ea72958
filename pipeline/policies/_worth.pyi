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
        kept: tuple[float, float],
        weights: tuple[float, float],
        lasting: float,
        fresh: bool,
        /,
    ) -> None: ...
    def moved(
        self, layer: int, experts: list[int], cuts: list[int], more: int, tiles: int, out: IntArray, /
    ) -> list[int]: ...
    def fetch(self, layer: int, experts: list[int], more: list[int], /) -> list[Target]: ...
    def rank(self) -> None: ...
    def grow(
        self, layer: int, expert: int, tiles: int, least: float, near: int, within: bool, /
    ) -> list[Target]: ...
