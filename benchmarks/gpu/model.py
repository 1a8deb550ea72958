"""What a token would take on a GPU beside this machine's cores: the model of the CUDA path, with the
constants that this machine gives.

    python -m benchmarks.gpu.model [--link-gbps 25,50] [--host-gbps G] [--seconds S] [--json]

    ms a token = L (bytes / (B_host + B_link) + coordinator) + head

`bytes`: of a layer's active experts in int4 that are not resident, which host and link read side by side.
Measured here: B_host, what all cores read from memory as the kernels do; `coordinator`, its own time a layer
beside the driver's calls: planning, given as a number, and what the device's share takes
(`workers/kernels/cuda/experts.py`, with a launcher that launches nothing). Not measured, because there is no
GPU: B_link, by default that of PCIe 4 and 5; the driver's calls, LAUNCH each; the GPU's own time, which is
hidden where what runs beside it takes longer. All that is resident is therefore a bound by the coordinator
alone, without CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shm.layout import ExpertShape, StoreLayout, format_named
from workers.kernels.choice import Prefetch
from workers.kernels.cuda.experts import CudaExperts
from workers.kernels.native import best

LAUNCH = 4e-6  # seconds of a driver's call from Python; estimated
CALLS = 20 + 10  # a layer: attention, norms and router by torch; kernels and copies of experts
READ = 1 << 29  # bytes
HEAD = 0.3e-3  # seconds a token: head, sampling, messages; estimated
REPEATS = 300


@dataclass(frozen=True)
class Shape:
    """Of a model's layers."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    tile: int
    active: int
    hits: dict[str, float]  # share of routed experts that are resident, by cache

    @property
    def layout(self) -> StoreLayout:
        shape = ExpertShape(1, self.active, self.hidden, self.intermediate, self.tile)
        return StoreLayout(shape, format_named("int4"))


SHAPES = (
    Shape("mixtral-8x7b", 32, 4096, 14336, 1792, 2, {"ECR 25 %": 0.25, "50 %": 0.5, "all": 1.0}),
    Shape("qwen3-30b-a3b", 48, 2048, 768, 768, 8, {"ECR 25 %": 0.4, "50 %": 0.65, "all": 1.0}),
)


class NoLauncher:
    """A `Launcher` that launches nothing."""

    device = torch.device("cpu")

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        """Nothing: the driver's calls are counted apart."""

    def upload(self, data: NDArray[np.uint8]) -> Tensor:
        return torch.from_numpy(data)


@dataclass(frozen=True)
class Estimate:
    shape: str
    cache: str
    link: float  # GB/s
    milliseconds: float  # a token
    tokens: float  # a second


def share_seconds(shape: Shape) -> float:
    """The coordinator's own time of a device share of all active experts, one row."""
    experts, tiles = CudaExperts(NoLauncher(), shape.layout), shape.layout.shape.tiles
    x, offsets = torch.zeros(1, shape.hidden), np.arange(shape.active + 1, dtype=np.int32)
    cuts, rows = np.full(shape.active, tiles, np.int32), np.zeros(shape.active, np.int32)
    weights, slot = np.ones(shape.active, np.float32), torch.zeros(1, dtype=torch.uint8)
    wanted = [(expert, tile, slot) for expert in range(shape.active) for tile in range(tiles)]
    seconds = []
    with torch.inference_mode():
        for _ in range(REPEATS):
            began = time.perf_counter()
            layer = experts.begin(x, cuts, offsets, rows, weights)
            layer.add(wanted)
            layer.result()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def host_pace(seconds: float) -> float:
    """Bytes a second that all cores read; the best of short runs, as other programs take some away."""
    library = best()
    if library is None:
        raise SystemExit("no C library was compiled: give --host-gbps")
    team, memory = library.team(len(os.sched_getaffinity(0))), np.ones(READ, np.uint8)
    until, paces = time.perf_counter() + seconds, []
    while not paces or time.perf_counter() < until:
        began = time.perf_counter()
        library.read(memory, Prefetch(), team)
        paces.append(READ / (time.perf_counter() - began))
    return max(paces)


def estimates(shape: Shape, coordinator: float, host: float, links: list[float]) -> list[Estimate]:
    """`coordinator`: seconds a layer; rates in bytes a second."""
    found, layer = [], shape.active * shape.layout.expert_bytes
    for link in links:
        for cache, hits in shape.hits.items():
            beside = (1 - hits) * layer / (host + link)
            seconds = shape.layers * (beside + coordinator) + HEAD
            found.append(Estimate(shape.name, cache, link / 1e9, seconds * 1e3, 1 / seconds))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link-gbps", default="25,50", help="links, GB/s")
    parser.add_argument("--host-gbps", type=float, help="use this rate instead of measuring")
    parser.add_argument(
        "--planning-us", type=float, default=60.0, help="of a layer: benchmarks/planner.py measures it"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring the host's memory")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        links = [float(link) * 1e9 for link in arguments.link_gbps.split(",")]
    except ValueError:
        parser.error(f"--link-gbps {arguments.link_gbps}: numbers, separated by commas")
    host = host_pace(arguments.seconds) if arguments.host_gbps is None else arguments.host_gbps * 1e9
    rows: list[Estimate] = []
    notes = {}
    for shape in SHAPES:
        share = share_seconds(shape)
        coordinator = share + arguments.planning_us * 1e-6 + CALLS * LAUNCH
        notes[shape.name] = {"share_us": share * 1e6, "coordinator_us": coordinator * 1e6}
        rows += estimates(shape, coordinator, host, links)
    if arguments.json:
        print(
            json.dumps({"host_gbps": host / 1e9, "layers": notes, "estimates": [asdict(row) for row in rows]})
        )
        return 0
    print(f"host {host / 1e9:.1f} GB/s")
    for name, note in notes.items():
        share_us, all_us = note["share_us"], note["coordinator_us"]
        print(f"{name}: the coordinator's layer takes {all_us:.0f} us, {share_us:.0f} of them for the share")
    for row in rows:
        cache = f"link {row.link:3.0f} GB/s  {row.cache:8}"
        print(f"{row.shape:14} {cache}  {row.milliseconds:6.1f} ms  {row.tokens:5.0f} tok/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
