"""The round trip of an empty Work: what a layer costs before anything is computed.

    python benchmarks/round_trip.py --workers 1 2

Real worker processes, the coordinator's real end of their socket, one row of hidden states each way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from launch.processes.children import spawn
from launch.processes.control import Control
from launch.processes.cores import Cores
from pipeline.coordinator_config import WorkerCores
from pipeline.experts.host_shards import empty_shard
from pipeline.experts.peers import ChildServerSocket, ExitEvents
from pipeline.experts.worker_pool import WorkerPool
from protocol.messages import Shutdown
from protocol.sockets import Identity, ipc_endpoint
from shm.control import ControlSegment
from shm.layout import F32, ExpertShape, StoreLayout
from shm.manifest import StoreManifest
from shm.segment import unlink
from shm.store import StoreBuilder

FINGERPRINT = "0" * 64


def build_store(name: str, hidden: int) -> None:
    """A store of one small expert: an empty Work reads none of it."""
    layout = StoreLayout(ExpertShape(1, 1, hidden, 32, 32), F32())
    manifest = StoreManifest(FINGERPRINT, layout.shape, layout.format.name, "benchmarks/round_trip.py")
    builder = StoreBuilder.create(name, manifest)
    builder.expert(0, 0)[:] = 0
    builder.checksum(0)
    builder.finish()


async def measure(workers: int, hidden: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` round trips to all workers."""
    with tempfile.TemporaryDirectory(prefix="rt-") as folder:
        runtime = Path(folder)
        store = f"/tandem-round-trip-{os.getpid()}"
        build_store(store, hidden)
        control = Control(ipc_endpoint(runtime, "control.sock"))
        progress = ControlSegment.create(f"{store}-control", workers)
        socket = ChildServerSocket(
            runtime, "work.sock", "worker", FINGERPRINT, control.key, ExitEvents(), lambda message: None
        )
        children = []
        cpu_sets = Cores.here().for_workers(workers)
        try:
            for index in range(workers):
                config = {"engine": "bench", "runtime": folder, "log_level": "WARNING", "store": store}
                config |= {"control": progress.segment.name}
                config |= {"fingerprint": FINGERPRINT, "host_slowdown": 1.0}
                config["cores"] = list(cpu_sets[index].cores)
                threads = len(cpu_sets[index].cores)
                child = await spawn(Identity("worker", index, 0), threads, control.key)
                child.configure(config)
                children.append(child)
            return await asyncio.to_thread(_round_trips, socket, progress, workers, hidden, repeats)
        finally:
            for index in range(len(children)):
                socket.send(index, Shutdown())
            await asyncio.gather(*(child.process.wait() for child in children))
            socket.close()
            control.close()
            progress.close()
            unlink(progress.segment.name)
            unlink(store)


def _round_trips(
    socket: ChildServerSocket, progress: ControlSegment, workers: int, hidden: int, repeats: int
) -> list[float]:
    pool = WorkerPool(socket, progress, WorkerCores.alike(workers), hidden)
    pool.wait_ready(30.0)
    x = np.zeros((1, hidden), np.float32)
    seconds = []
    for _ in range(repeats + 100):
        started = time.perf_counter()
        pool.result(pool.submit_shards(0, [empty_shard()] * workers, x))
        seconds.append(time.perf_counter() - started)
    return seconds[100:]  # the first ones import torch in the workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2000)
    arguments = parser.parse_args()
    for workers in arguments.workers:
        seconds = asyncio.run(measure(workers, arguments.hidden, arguments.repeats))
        low, *_, high = statistics.quantiles(seconds, n=20)
        print(
            f"{workers} workers, {arguments.hidden} numbers: median {statistics.median(seconds) * 1e6:.0f} us"
            f" (5 % to 95 %: {low * 1e6:.0f} to {high * 1e6:.0f})"
        )


if __name__ == "__main__":
    main()
