"""Measures the memory bandwidth of reads and copies, and derives the bound on tokens a second. The buffer is
shared memory like the store, far larger than the last level of cache, and nameless."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from launch.doctor import cpu
from launch.doctor.finding import Finding, Topic
from launch.processes.trials import TrialFailed, trial
from launch.terminal.format import percent, rate
from pipeline.assets import model_dir
from pipeline.memory.plan import AUTOMATIC
from pipeline.models.config_keys import Config
from pipeline.models.registry import expert_shape, model_spec
from pipeline.models.shapes import SHAPES
from shm.layout import StoreLayout, format_named
from shm.segment import SHM_FOLDER, byte_size, free_shm_bytes

TOPIC = Topic("speed")
CHILD = "launch.doctor.rates"
SMALLEST, LARGEST = 1 << 26, 1 << 31  # bytes of the buffer
UNKNOWN_CACHE = 1 << 26
TIMES_CACHE = 8
SHARE = 8  # the buffer takes at most 1 / SHARE of the available memory
SECONDS = 1.0  # of each measurement, of all ways together
LIMIT = 60.0  # seconds for a child to start or to end
GAIN = 1.1  # of huge pages over small ones, from which on it is reported
BUSY = 0.2  # load average for each core, from which on the figures are too low


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, medians; None where it could not be measured."""

    cores: int
    buffer: int  # bytes
    one: float
    all: float
    copy: float
    one_huge: float | None  # one core, from huge pages

    def to_map(self) -> dict[str, Any]:
        """Returns the figures for JSON; GB are 1e9 bytes."""
        return {
            "read_one_core_gbps": self.one / 1e9,
            "read_all_cores_gbps": self.all / 1e9,
            "read_one_core_huge_pages_gbps": None if self.one_huge is None else self.one_huge / 1e9,
            "copy_gbps": self.copy / 1e9,
            "cores": self.cores,
            "buffer_bytes": self.buffer,
        }


@dataclass(frozen=True)
class Reads:
    """Bytes of a model's experts in the default format: all of them, and those that one token reads."""

    name: str
    store: int
    token: int
    layers: int


def embedded() -> Reads:
    """Returns those of the embedded model. Raises OSError, ValueError, PipelineError where it is damaged."""
    config = json.loads((model_dir() / "config.json").read_text("utf-8"))
    return _reads("the embedded model", config)


def example() -> Reads:
    """A well-known model of the supported architecture."""
    return _reads(f"Mixtral-8x7B ({AUTOMATIC[0]})", SHAPES["mixtral-8x7b"])


def _reads(name: str, config: Config) -> Reads:
    tile_format = format_named(AUTOMATIC[0])
    shape = expert_shape(config, None, tile_format)
    layout = StoreLayout(shape, tile_format)
    active = shape.layers * model_spec(config).top_k
    layers = model_spec(config).layers
    return Reads(name, layout.total_bytes, active * layout.expert_bytes, layers)


def last_cache() -> int | None:
    """Bytes of the last level of cache, all instances together; None where unknown."""
    return max((cache.total for cache in cpu.caches().values()), default=None)


def buffer_size(cache: int | None, available: int) -> int:
    """Bytes to measure with; 0 where memory is too short. `cache`: of the last level, `available`: bytes."""
    wanted = max(TIMES_CACHE * (cache or UNKNOWN_CACHE), 4 * SMALLEST)
    size = min(wanted, available // SHARE, LARGEST) // SMALLEST * SMALLEST
    return max(size, 0)


async def measure(cores: Sequence[int], cache: int | None, available: int) -> Bandwidth:
    """Takes a few seconds. Raises TrialFailed where too little memory is available or a child fails."""
    size = buffer_size(cache, available)
    with open_buffer(size) as fd:
        shared = {"fd": fd, "size": size, "seconds": SECONDS}
        whole = shared | {"lo": 0, "hi": size}
        copy = (await _together([whole | {"what": "copy", "cores": []}], fd))[0]
        alone = whole | {"cores": [cores[0]]}
        huge: float | None
        try:
            one, huge = await _together([alone | {"what": "huge"}], fd)
        except TrialFailed:  # a kernel without huge pages
            (one,), huge = await _together([alone | {"what": "read"}], fd), None
        part = size // len(cores) // 4096 * 4096
        parts = [
            shared | {"what": "read", "cores": [core], "lo": i * part, "hi": (i + 1) * part}
            for i, core in enumerate(cores)
        ]
        every = (await _together(parts, fd))[0] if len(cores) > 1 else one
    return Bandwidth(len(cores), size, one, every, copy, huge)


async def _together(configs: list[dict[str, Any]], fd: int) -> list[float]:
    """Run these children together. Returns the sum of their medians for each kind of memory."""
    results = await run_children(CHILD, configs, fd)
    return [sum(map(median, of_kind)) for of_kind in zip(*results, strict=True)]


async def run_children(module: str, configs: list[dict[str, Any]], fd: int) -> list[list[Any]]:
    """Run these children at the same time: for each, the rates of each kind of its work. Raises
    TrialFailed."""
    async with AsyncExitStack() as stack:
        children = [await stack.enter_async_context(trial(module, config, (fd,))) for config in configs]
        for child in children:
            await child.result(LIMIT)
        for child in children:
            await child.go()
        return [await child.result(LIMIT) for child in children]


@contextmanager
def open_buffer(size: int) -> Iterator[int]:
    if not size:
        raise TrialFailed("too little memory is available to measure")
    with ExitStack() as closing:
        try:
            fd = _nameless(2 * size)
            closing.callback(os.close, fd)
            os.posix_fallocate(fd, 0, size)
        except OSError as e:
            raise TrialFailed(f"no buffer of {byte_size(size)}: {e.strerror}") from e
        yield fd


def _nameless(size: int) -> int:
    """A nameless file in /dev/shm, with its mount options, if `size` bytes are free; else a memfd."""
    if free_shm_bytes() > size:
        return os.open(SHM_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return os.memfd_create("tandem-doctor")


def busy(load: float, cores: int) -> list[Finding]:
    """A note on a load average that makes the figures measured just after it too low."""
    if load < BUSY * cores:
        return []
    found = f"load average {load:.1f} before measuring: other programs are computing"
    means = "the speeds measured here, and what follows from them, are lower than on an idle machine"
    return [TOPIC.note(found, means, "close other programs and run this again")]


def explain(found: Bandwidth, embedded: Reads, example: Reads, cache: int | None) -> Iterator[Finding]:
    """Tells what the figures mean for the embedded model and for `example`, a large model."""
    each = f"one core reads {rate(found.one)}"
    both = f", {found.cores} together {rate(found.all)}" if found.cores > 1 else ""
    bound = (
        f"a token of {example.name} reads {byte_size(example.token)} of experts: "
        f"at most {found.all / example.token:.2g} tok/s with all-host"
    )
    here = f"; the embedded model's {byte_size(embedded.token)}: at most {found.all / embedded.token:,.0f}"
    if cache is not None and embedded.store <= cache:
        here += f", or more, because all its experts ({byte_size(embedded.store)}) fit the cache"
    yield TOPIC.ok(each + both, bound + here)
    if found.one_huge is not None and found.one_huge > GAIN * found.one:
        yield TOPIC.note(
            f"one core reads {rate(found.one_huge)} from huge pages",
            f"{percent(found.one_huge / found.one - 1)} more than from the small pages of /dev/shm",
            "sudo mount -o remount,huge=within_size /dev/shm",
        )
    means = "with --device cpu this is the link: the rate at which the prefetcher can move tiles"
    yield TOPIC.ok(f"one core copies {rate(found.copy)}", means)
