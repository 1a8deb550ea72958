"""The time of a decoded token on a machine with a GPU, by a model that has no GPU's figures yet: what can be
measured without one is measured here.

    python -m benchmarks.gpu.model [--link-gbps 25,50] [--workers 15] [--json]

    token = layers * (bytes / (B_host + B_link) + coordinator) + head

`bytes`: of a layer's active experts in int4 that are not resident, which host and link read side by side.
Measured here: B_host, what all cores read from memory as the kernels do; `coordinator`, its own time a layer
beside the driver's calls (`coordinator.py`), and the number of these for the experts. Not measured, because
there is no GPU: B_link, by default that of PCIe 4 and 5; the driver's calls, LAUNCH each; HEAD; the GPU's own
time, which is hidden where what runs beside it takes longer; the waking of workers, which happens meanwhile.
All that is resident is therefore a bound by the coordinator alone, without CUDA graphs. The rates of hits are
assumptions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.gpu.coordinator import Times, measured, planning
from shm.layout import ExpertShape, StoreLayout, format_named
from workers.kernels.native import best

LAUNCH = 4e-6  # seconds of a driver's call from Python; estimated
TORCH = (
    13 + 3
)  # of a layer of Mixtral: attention, norms, router (tests/pipeline/test_cuda_launches.py counts)
LANDED = 6  # of tiles that land in two parts: two launches and a copy each. None waits for a staging slot
OTHERS = 2 + 1 + 1  # the layer's read, the sum of the partials, the residual
READ = 1 << 29  # bytes
HEAD = 0.3e-3  # seconds a token: head, sampling, messages; estimated


@dataclass(frozen=True)
class Shape:
    """Returns costs of a model's layers."""

    name: str
    layers: int
    experts: int
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
    Shape("mixtral-8x7b", 32, 8, 4096, 14336, 1792, 2, {"ECR 25 %": 0.25, "50 %": 0.5, "all": 1.0}),
    Shape("qwen3-30b-a3b", 48, 128, 2048, 768, 768, 8, {"ECR 25 %": 0.4, "50 %": 0.65, "all": 1.0}),
)


@dataclass(frozen=True)
class Estimate:
    shape: str
    cache: str
    link: float  # GB/s
    milliseconds: float  # a token
    tokens: float  # a second


def host_pace(seconds: float) -> float:
    """Bytes a second that all cores read; the best of short runs, as other programs take some away."""
    library = best()
    if library is None:
        raise SystemExit("no C library was compiled: give --host-gbps")
    team, memory = library.team(len(os.sched_getaffinity(0))), np.ones(READ, np.uint8)
    until, paces = time.perf_counter() + seconds, list[float]()
    while not paces or time.perf_counter() < until:
        began = time.perf_counter()
        library.read(memory, team)
        paces.append(READ / (time.perf_counter() - began))
    return max(paces)


def estimates(shape: Shape, times: Times, host: float, links: list[float]) -> list[Estimate]:
    """Rates in bytes a second."""
    found, layer = [], shape.active * shape.layout.expert_bytes
    for link in links:
        for cache, hits in shape.hits.items():
            beside = (1 - hits) * layer / (host + link)
            seconds = shape.layers * (beside + coordinator(times, hits < 1)) + HEAD
            found.append(Estimate(shape.name, cache, link / 1e9, seconds * 1e3, 1 / seconds))
    return found


def coordinator(times: Times, divided: bool) -> float:
    """Seconds of a layer, with the driver's calls; `divided`: not all tiles are resident."""
    calls = TORCH + OTHERS + times.calls + LANDED * divided
    return (times.divided if divided else times.resident) + calls * LAUNCH


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link-gbps", default="25,50", help="links, GB/s")
    parser.add_argument("--host-gbps", type=float, help="use this rate instead of measuring")
    parser.add_argument("--workers", type=int, default=15, help="of a machine with 16 cores")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring the host's memory")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        links = [float(link) * 1e9 for link in arguments.link_gbps.split(",")]
    except ValueError:
        parser.error(f"--link-gbps {arguments.link_gbps}: numbers, separated by commas")
    host = host_pace(arguments.seconds) if arguments.host_gbps is None else arguments.host_gbps * 1e9
    rows: list[Estimate] = []
    parts: dict[str, Times] = {}
    plans = planning()
    for shape in SHAPES:
        plan = plans[shape.experts]
        found = parts[shape.name] = measured(
            shape.layout, shape.experts, shape.active, plan, arguments.workers
        )
        rows += estimates(shape, found, host, links)
    if arguments.json:
        layers = {name: asdict(found) for name, found in parts.items()}
        print(
            json.dumps(
                {"host_gbps": host / 1e9, "layers": layers, "estimates": [asdict(row) for row in rows]}
            )
        )
        return 0
    print(f"host {host / 1e9:.1f} GB/s; {arguments.workers} workers; microseconds of a layer:")
    for name, found in parts.items():
        cells = [
            f"{part} {value * 1e6:.1f}" if isinstance(value, float) else f"{part} {value}"
            for part, value in asdict(found).items()
        ]
        whole = ", ".join(f"{coordinator(found, kind) * 1e6:.0f}" for kind in (True, False))
        print(f"{name}: {', '.join(cells)}; divided and all resident, with the driver's calls: {whole}")
    for row in rows:
        cache = f"link {row.link:3.0f} GB/s  {row.cache:8}"
        print(f"{row.shape:14} {cache}  {row.milliseconds:6.1f} ms  {row.tokens:5.0f} tok/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
