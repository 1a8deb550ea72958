"""Measures how fast a store is built from a checkpoint, compared with the disk and the quantizer alone.

    python -m benchmarks.cold_load [shape:olmoe-1b-7b/3 | DIR] [--formats int4,int8,bf16] [--fused] [--json]

A shape is first written as a checkpoint of random weights into a folder that is removed at the end. For each
format, in one run:

- disk: the checkpoint's files read from beginning to end, after their pages were dropped from the page cache
  (POSIX_FADV_DONTNEED after fsync). A virtual machine's host may still have them.
- quantizer: expert matrices in memory as bf16, encoded by all cores in the loader's chunks, into memory that
  has been used before.
- cold load: a loader process with dropped pages and without a cached store, from its start until its store is
  complete, and until it reports Ready, after writing the disk cache as well.

Disk and quantizer are measured before and after the load and averaged. `others` is the number of cores that
other programs used during the load: with more than a tenth, the figures mean little. All rates are in GB/s of
the checkpoint's experts. The ratios are the loader's rate, until the store is complete and until Ready, to
the slower of disk and quantizer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import zmq

from benchmarks.quantizer_rate import CORES, quantizer_rate
from benchmarks.random_checkpoint import write
from pipeline.checkpoint.hf_checkpoint import Checkpoint
from pipeline.models.registry import expert_shape
from pipeline.models.shapes import is_shape, shape_config
from protocol.codec import decode
from protocol.messages import Failed, Progress, Ready
from protocol.sockets import Identity, bind_router, ipc_endpoint
from shm.layout import StoreLayout, format_named
from shm.segment import unlink
from shm.store import store_name
from workers.interpreter import CHILD_PROCESS
from workers.lifetime import pack_config

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 1 << 24  # bytes of one read
CACHING = "writing the cache"  # the stage after the last checksum
LIMIT = 600.0  # seconds for one load


def drop(files: list[Path]) -> None:
    """Drop these files from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_rate(files: list[Path]) -> float:
    """Bytes a second of reading these files, dropped from the page cache, from beginning to end."""
    drop(files)
    buffer = bytearray(CHUNK)
    start = time.perf_counter()
    total = 0
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                total += count
    return total / (time.perf_counter() - start)


def cold_load(model: Path, format_name: str, files: list[Path]) -> dict[str, float]:
    """Run a loader as the supervisor does, in temporary folders. Returns `_follow`, the loader's CPU
    seconds, and `others`: the cores that other programs used. Raises RuntimeError where it fails."""
    identity = Identity("loader", 0, 1).prove(b"k" * 32)
    with tempfile.TemporaryDirectory(prefix="tandem-cold-load-") as folder, zmq.Context() as context:
        runtime = Path(folder) / "engine"
        runtime.mkdir(mode=0o700)
        control = bind_router(context, ipc_endpoint(runtime, "control.sock"))
        config = {
            "engine": "cold-load",
            "runtime": str(runtime),
            "log_level": "WARNING",
            "role": "loader",
            "index": 0,
            "incarnation": 1,
            "identity": identity,
            "model": str(model),
            "format": format_name,
            "tile": None,
            "cache_dir": str(Path(folder) / "cache"),
            "reserve_bytes": 0,
            "nodes": [],
            "keep_store": False,
            "verify": False,
        }
        drop(files)
        read_end, write_end = os.pipe()
        own, every = child_cpu(), machine_cpu()
        start = time.perf_counter()
        command = [*CHILD_PROCESS, "pipeline.loader", "--lifeline", str(read_end)]
        with subprocess.Popen(command, cwd=ROOT, pass_fds=(read_end,)) as process:
            try:
                os.close(read_end)
                os.write(write_end, pack_config(config))
                found = _follow(control, start)
            finally:
                os.close(write_end)
                control.close(linger=0)
                process.wait(LIMIT)
        cpu = child_cpu() - own
        others = (machine_cpu() - every - cpu) / (time.perf_counter() - start)
        return found | {"cpu": cpu, "others": others}


def child_cpu() -> float:
    """CPU seconds of this process's ended children."""
    times = os.times()
    return times.children_user + times.children_system


def machine_cpu() -> float:
    """CPU seconds of all programs."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _follow(control: zmq.Socket[bytes], start: float) -> dict[str, float]:
    """Seconds from the start until allocation, encoding and caching began and until Ready, and the bytes read
    from the checkpoint."""
    began: dict[str, float] = {}
    while control.poll(int(LIMIT * 1000)):
        message = decode(control.recv_multipart()[1:])
        now = time.perf_counter() - start
        if isinstance(message, Progress):
            began.setdefault(message.stage, now)
        elif isinstance(message, Ready):
            unlink(store_name(message.fingerprint))
            nbytes = int(message.notes[0].removeprefix("source checkpoint: ").split()[0])
            return {CACHING: now, **began, "ready": now, "nbytes": nbytes}
        elif isinstance(message, Failed):
            raise RuntimeError(message.text)
    raise RuntimeError(f"no message from the loader in {LIMIT:.0f} seconds")


def measure(model: Path, format_name: str) -> dict[str, Any]:
    """All figures of one format; rates in GB/s of the checkpoint's experts."""
    files = sorted(model.glob("*.safetensors"))
    layout = StoreLayout(
        expert_shape(Checkpoint(model).config, None, format_named(format_name)), format_named(format_name)
    )
    before = disk_rate(files), quantizer_rate(layout)
    load = cold_load(model, format_name, files)
    after = disk_rate(files), quantizer_rate(layout)
    disk, quantizer = ((one + other) / 2 for one, other in zip(before, after, strict=True))
    encoding, complete = load[Checkpoint.filling], load[CACHING]
    nbytes, slower = load["nbytes"], min(disk, quantizer)
    return {
        "format": format_name,
        "experts_gb": nbytes / 1e9,
        "store_gb": layout.total_bytes / 1e9,
        "disk": disk / 1e9,
        "quantizer": quantizer / 1e9,
        "start_s": load["allocating"],
        "allocate_s": encoding - load["allocating"],
        "encode_s": complete - encoding,
        "keep_s": load["ready"] - complete,
        "ready_s": load["ready"],
        "cpu_s": load["cpu"],
        "others": load["others"],
        "ratio_whole": nbytes / complete / slower,
        "ratio_ready": nbytes / load["ready"] / slower,
    }


@contextmanager
def checkpoint(model: str, fused: bool) -> Iterator[Path]:
    """The folder, or for a shape a temporary folder with its checkpoint."""
    if not is_shape(model):
        yield Path(model)
        return
    with tempfile.TemporaryDirectory(prefix="tandem-cold-load-") as folder:
        write(Path(folder), shape_config(model)[1], fused=fused)
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="shape:olmoe-1b-7b/3")
    parser.add_argument("--formats", default="int4,int8,bf16")
    parser.add_argument("--fused", action="store_true", help="a shape's experts in fused tensors")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with checkpoint(arguments.model, arguments.fused) as model:
        rows = [measure(model, name) for name in arguments.formats.split(",")]
    if arguments.json:
        print(json.dumps({"model": arguments.model, "cores": CORES, "formats": rows}))
        return
    names = list(rows[0])
    print("  ".join(f"{name:>11}" for name in names))
    for row in rows:
        cells = (value if isinstance(value, str) else f"{value:.2f}" for value in row.values())
        print("  ".join(f"{cell:>11}" for cell in cells))


if __name__ == "__main__":
    main()
