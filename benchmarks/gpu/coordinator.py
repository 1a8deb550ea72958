"""The coordinator's own time of a layer of one row beside the driver's calls, part by part, measured on this
machine: with real shards, rings and kernels' tables, but with a launcher that launches nothing and workers
that answer at once. Half of the layer's tiles are the host's.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.coordinator_config import WorkerCores
from pipeline.device.partial_sums import Part, sum_on_host
from pipeline.experts.host_shards import divide_into_shards
from pipeline.experts.shares import split_layer
from pipeline.models.routing import Softmax
from pipeline.policies.view import Routing
from shm.doorbell import library
from shm.layout import StoreLayout
from shm.mask import DENSE
from shm.ring import CoordinatorRing, WorkerRing
from shm.slot import SlotShape
from workers.kernels.cuda.experts import CudaExperts
from workers.kernels.cuda.reserved import Reserved
from workers.kernels.cuda.sums import PartSums

ROOT = Path(__file__).parents[2]
REPEATS, TURNS = 300, 100
PLANNER = "benchmarks/planner.py --policy tandem --tokens 32 --runs 2 --layers 1 --json"


class NoLauncher:
    """A `Launcher` that launches nothing, and counts."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls = 0

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        self.calls += 1

    def reserve(self, size: int) -> Reserved:
        return Reserved(np.empty(size, np.uint8), torch.empty(size, dtype=torch.uint8), self._count)

    def _count(self, *copy: object) -> None:
        self.calls += 1

    def upload(self, array: NDArray[np.uint8]) -> Tensor:
        self.calls += 1
        return torch.from_numpy(array)


@dataclass(frozen=True)
class Times:
    """Seconds of a layer, and the driver's calls of its experts."""

    router: float  # softmax and the k largest
    planning: float  # the policy, `tandem`
    division: float  # into shares and shards
    posting: float  # a Work to each worker, without waking it
    collecting: float  # their answers read, and their sum launched
    share: float  # the device's share
    calls: int
    host_sum: float  # what their sum takes where the host adds; not a part of the others

    @property
    def resident(self) -> float:
        """Where the device has every tile."""
        return self.router + self.planning + self.share

    @property
    def divided(self) -> float:
        """Where the host has a share."""
        return self.resident + self.division + self.posting + self.collecting


def planning() -> dict[int, float]:
    """Of a layer, by the number of experts; the quickest run counts."""
    command = [sys.executable, *PLANNER.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return {row["experts"]: row["median_us"] / 1e6 for row in json.loads(done.stdout)["planner"]}


def measured(layout: StoreLayout, experts: int, active: int, plan: float, workers: int) -> Times:
    """Of a model with so many experts, `active` of them used by a row. Raises SystemExit where rings cannot
    be made."""
    hidden, tiles = layout.shape.hidden, layout.shape.tiles
    random, cores = np.random.default_rng(1), WorkerCores.equal(workers)
    router, logits = Softmax(active, rescaled=True), random.standard_normal((1, experts)).astype(np.float32)
    residency = np.full(experts, tiles // 2 if tiles > 1 else 0, np.int32)
    cut = residency.copy()
    if tiles == 1:
        cut[: experts // 2] = residency[: experts // 2] = 1
    chosen = np.linspace(0, experts - 1, active).astype(np.int32)[None]  # of both halves
    weights = np.full(chosen.shape, 1 / active, np.float32)

    def divided() -> object:
        split = split_layer(Routing(chosen, weights), cut, residency, tiles)
        return divide_into_shards(split.host, cores, "decode", 1)

    with torch.inference_mode():
        share, calls = _share(layout, active)
        posting, collecting, host_sum = _exchange(
            divide_into_shards(
                split_layer(Routing(chosen, weights), cut, residency, tiles).host, cores, "decode", 1
            ),
            hidden,
        )
    return Times(
        _median(lambda: router(logits)), plan, _median(divided), posting, collecting, share, calls, host_sum
    )


def _share(layout: StoreLayout, active: int) -> tuple[float, int]:
    """The device's share with all active experts, one row: seconds, and launches and copies."""
    gpu = NoLauncher()
    experts, tiles, hidden = CudaExperts(gpu, layout), layout.shape.tiles, layout.shape.hidden
    x, offsets = torch.zeros(1, hidden), np.arange(active + 1, dtype=np.int32)
    cuts, rows = np.full(active, tiles, np.int32), np.zeros(active, np.int32)
    weights, slot = np.ones(active, np.float32), torch.zeros(1, dtype=torch.uint8)
    wanted = [(expert, tile, slot) for expert in range(active) for tile in range(tiles)]

    def once() -> None:
        gpu.calls = 0
        layer = experts.begin(x, cuts, offsets, rows, weights)
        layer.add(wanted)
        layer.result()

    return _median(once), gpu.calls


def _exchange(shards: list, hidden: int) -> tuple[float, float, float]:  # type: ignore[type-arg]
    """A layer's shards through rings: posted, collected and added by the device, added by the host."""
    functions = library()
    if functions is None:
        raise SystemExit("shm/doorbell.c was not compiled")
    shape, prefix = SlotShape.for_rows(1, hidden), f"/tandem-benchmark-{secrets.token_hex(4)}-exchange-"
    rings = [CoordinatorRing(functions, f"{prefix}{number}", shape, 1) for number in range(len(shards))]
    others = [WorkerRing(functions, ring.name, 1) for ring in rings]  # which remove the names
    for ring in rings:
        ring.in_place = True
    sums, x, y = PartSums(NoLauncher()), np.zeros((1, hidden), np.float32), torch.empty(1, hidden)
    posting, collecting, adding, seq = list[float](), list[float](), list[float](), 0
    for _ in range(TURNS):
        began = time.perf_counter()
        works = [shard.work(seq + number, 0, x, DENSE) for number, shard in enumerate(shards)]
        for ring, work in zip(rings, works, strict=True):
            ring.post(work)
        posting.append(time.perf_counter() - began)
        for other in others:
            slot = other.take()
            assert slot is not None
            other.answer(slot, 0.0)
        began = time.perf_counter()
        parts = [Part(ring.answers()[0].y, shard.kept) for ring, shard in zip(rings, shards, strict=True)]
        places = [int(part.y.__array_interface__["data"][0]) for part in parts]
        sums.add(places, [part.kept for part in parts], y)
        collecting.append(time.perf_counter() - began)
        began = time.perf_counter()
        sum_on_host(parts, (1, hidden))
        adding.append(time.perf_counter() - began)
        for ring, work in zip(rings, works, strict=True):
            ring.release(work.seq)
        seq += len(shards)
    return statistics.median(posting), statistics.median(collecting), statistics.median(adding)


def _median(once: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
