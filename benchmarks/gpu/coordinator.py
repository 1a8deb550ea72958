"""The coordinator's own time of a layer of one row beside the driver's calls, part by part, measured on this
machine: with real descriptors, lanes and kernels' tables, a launcher that launches nothing, and workers
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

from pipeline.config import WorkerCores
from pipeline.device.base import sum_on_host
from pipeline.experts.division import Divided, divider, split_layer
from pipeline.models.routing import Softmax
from pipeline.policies.view import Routing
from shm.lane import CoordinatorLane, LaneShape, WorkerLane, library
from shm.layout import StoreLayout
from shm.mask import NOTHING
from shm.segment import Segment, unlink
from workers.kernels.cuda.experts import CudaExperts
from workers.kernels.cuda.matrix import PartSums

ROOT = Path(__file__).parents[2]
REPEATS, TURNS = 300, 100
PLANNER = "-m benchmarks.planner --policy tandem --tokens 32 --runs 2 --json"


class NoLauncher:
    """A `Launcher` that launches nothing, and counts."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls = 0
        self.upload: Callable[[NDArray[np.uint8]], Tensor] = self._upload

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        self.calls += 1

    def _upload(self, array: NDArray[np.uint8]) -> Tensor:
        self.calls += 1
        return torch.from_numpy(array)


@dataclass(frozen=True)
class Times:
    """Seconds of a layer, and the driver's calls of its experts."""

    router: float  # softmax and the k largest
    planning: float  # the policy, `tandem`
    division: float  # into shares and descriptors
    posting: float  # a Work to each worker, without waking it
    collecting: float  # their answers read, and their sum launched
    share: float  # the device's share
    calls: int
    host_sum: float  # what their sum takes where the host adds; not a part of the others

    @property
    def resident(self) -> float:
        """Returns times where the device has every tile."""
        return self.router + self.planning + self.share

    @property
    def divided(self) -> float:
        """Returns times where the host has a share."""
        return self.resident + self.division + self.posting + self.collecting


def planning() -> dict[int, float]:
    """Returns times of a layer, by the number of experts; the quickest run counts."""
    command = [sys.executable, *PLANNER.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return {row["experts"]: row["median_us"] / 1e6 for row in json.loads(done.stdout)["planner"]}


def measured(layout: StoreLayout, experts: int, active: int, plan: float, workers: int) -> Times:
    """Returns inputs of a model with so many experts, `active` of them used by a row. Raises SystemExit
    where lanes cannot be made."""
    hidden, tiles = layout.shape.hidden, layout.shape.tiles
    random, cores = np.random.default_rng(1), WorkerCores.equal(workers)
    router, logits = Softmax(active, rescaled=True), random.standard_normal((1, experts)).astype(np.float32)
    residency = np.full(experts, tiles // 2 if tiles > 1 else 0, np.int32)
    cut = residency.copy()
    if tiles == 1:
        cut[: experts // 2] = residency[: experts // 2] = 1
    chosen = np.linspace(0, experts - 1, active).astype(np.int32)[None]  # of both halves
    weights = np.full(chosen.shape, 1 / active, np.float32)

    division = divider(cores, experts, tiles)

    def divided() -> Divided:
        return division.divide(split_layer(Routing(chosen, weights), cut, residency, tiles), 1)

    with torch.inference_mode():
        share, calls = _share(layout, active)
        posting, collecting, host_sum = _exchange(divided(), hidden)
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


def _exchange(divided: Divided, hidden: int) -> tuple[float, float, float]:
    """A layer's Works through lanes: posted, collected and added by the device, added by the host."""
    functions = library()
    if functions is None:
        raise SystemExit("shm/doorbell.c was not compiled")
    parts = [descriptor for _, descriptor in divided.parts]
    shape = LaneShape(hidden, (1, max(map(len, parts))), (1, max(map(len, parts))))
    prefix = f"/tandem-benchmark-{secrets.token_hex(4)}-arena-"
    hall = Segment.create(f"{prefix}hall", shape.hall_bytes)
    lanes = [CoordinatorLane(functions, f"{prefix}{number}", shape, 1) for number in range(len(parts))]
    others = [WorkerLane(functions, hall.name, lane.name, 1) for lane in lanes]  # which remove the names
    unlink(hall.name)
    sums, y = PartSums(NoLauncher()), torch.empty(1, hidden)
    posting, collecting, adding = list[float](), list[float](), list[float]()
    for turn in range(TURNS):
        began = time.perf_counter()
        for lane, part in zip(lanes, parts, strict=True):
            slot = lane.room(1, len(part))
            assert slot is not None
            lane.post(slot, turn, part, 0)
        posting.append(time.perf_counter() - began)
        for other in others:
            taken = other.take()
            assert taken is not None
            other.answer(taken, 0.0, NOTHING)
        began = time.perf_counter()
        slots = [lane.answers()[0][1] for lane in lanes]
        answers = [slot.y[: slot.rows] for slot in slots]
        sums.add([int(each.__array_interface__["data"][0]) for each in answers], y)
        collecting.append(time.perf_counter() - began)
        began = time.perf_counter()
        sum_on_host(answers, (1, hidden))
        adding.append(time.perf_counter() - began)
        for lane, slot in zip(lanes, slots, strict=True):
            lane.free(slot)
    return statistics.median(posting), statistics.median(collecting), statistics.median(adding)


def _median(once: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
