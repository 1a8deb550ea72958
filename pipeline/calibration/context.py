"""What a calibration is given, and what it finds beside its arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.backbone.kv_cache import KVCache
from pipeline.calibration.magnitudes import Up
from pipeline.config import DEFAULT_CACHE
from pipeline.engine.engine import Engine
from shm.store import Store

Progress = Callable[[str, int, int], None]  # stage, done, total; its exceptions end the calibration


@dataclass(frozen=True)
class CalibrationContext:
    """The parts of an engine that a calibration uses. `chunk`: prefill tokens of a step; `lanes`: sequences
    that are decoded together at most; `cache`: share of all experts that a cache would keep, where none is
    open; `up`: u = up x of an expert, where the format keeps the up matrices apart; `max_loss`: percent that
    an approximation may add to the perplexity, if that is bounded."""

    engine: Engine
    store: Store
    kv: KVCache
    chunk: int
    lanes: int
    context: int
    seed: int
    cache: float = DEFAULT_CACHE
    up: Up | None = None
    max_loss: float | None = None


@dataclass
class Findings:
    """Results of a calibration other than its arrays. `hits`: of the experts that tokens use, the share that
    the cache would hold with the most used experts in it: with those of the training windows, of the
    `heldout` windows' tokens; with those of all windows, of the tokens of `prompts` and of the `tokens` that
    the engine has computed for its clients (`own`). Those two are None for too few tokens, and `differs`
    follows from them as in a policy's note. `share`: of all experts, the cache's."""

    tokens: int = 0  # that were read
    windows: int = 0
    hits: dict[str, float | int | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    notes: list[str] = field(default_factory=list)  # arrays that could not be measured, with the remedy
    losses: dict[str, float] = field(default_factory=dict)  # nats a token: "exact", "gated"; "bound": of both
    bounded: dict[str, str] = field(default_factory=dict)  # with `max_loss`, by approximate preset: its
    # setting, or why it has none
    sparsities: list[list[float]] = field(default_factory=list)  # tried: share of the channels, perplexity

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the block's time to the stage's."""
        began = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began
