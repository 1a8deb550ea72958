"""NVIDIA GPUs: the driver, torch's view of them, CUDA IPC, the bandwidth of the link. Every call of the
driver is made in a child process with a time limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from launch.doctor.bandwidth import Reads
from launch.doctor.finding import Finding, Topic
from launch.doctor.software import installed, pip_install
from launch.planning.device_choice import DRIVER_NODES
from launch.processes.trials import TrialFailed, trial
from launch.terminal.format import count, rate
from shm.kernel_files import contents, entries
from shm.segment import byte_size

TOPIC = Topic("gpu")
CHILD = "launch.doctor.gpu_child"
LIMIT = 120.0  # seconds; a cold import of a CUDA build of torch from a slow disk takes tens of them
CUDA_BUILDS = "https://download.pytorch.org/whl/cu128"
BINDINGS = "cuda-bindings"
ON_CPU = "engines compute on the CPU"
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor; first digits of a display controller's class


def driver_nodes(root: Path = Path("/")) -> list[str]:
    """Device nodes of a loaded driver; empty where no GPU can be used."""
    return [str(node) for node in DRIVER_NODES if (root / str(node).lstrip("/")).exists()]


def driver_version(text: str) -> str:
    """Returns the version in /proc/driver/nvidia/version; "" where it holds none."""
    match = re.search(r"Module(?:\s+for\s+\S+)?\s+([0-9]+(?:\.[0-9]+)+)", text)
    return match[1] if match else ""


def cards(root: Path = Path("/")) -> int:
    """NVIDIA display controllers on the PCI bus, driver or not."""
    devices = entries(root / "sys/bus/pci/devices", "*")
    return sum(
        contents(d / "vendor") == NVIDIA and contents(d / "class").startswith(DISPLAY) for d in devices
    )


async def inspect(example: Reads, root: Path = Path("/")) -> tuple[list[Finding], float | None]:
    """The findings, and the bytes a second from page-locked host memory to the device, if measured."""
    nodes = driver_nodes(root)
    if not nodes:
        return [_without_driver(cards(root))], None
    version = driver_version(contents(root / "proc/driver/nvidia/version"))
    found = [TOPIC.ok(f"NVIDIA driver {version or 'of unknown version'}", f"seen at {nodes[0]}")]
    try:
        seen = await _try({"what": "torch"})
    except TrialFailed as e:
        do = "nvidia-smi\nengines start with --device cpu meanwhile"
        return [*found, TOPIC.problem(f"torch fails: {e}", ON_CPU, do)], None
    found += _devices(seen)
    if not seen["devices"] or installed(BINDINGS) is None:  # topic `software` has the remedy
        return found, None
    found.append(await _graphs())
    found.append(await _ipc(wsl="/dev/dxg" in nodes))
    try:
        rate = median(await _try({"what": "link"}))
    except TrialFailed as e:
        means = "experts cannot be moved to the GPU at the speed of its link"
        return [*found, TOPIC.problem(f"no copy from page-locked memory: {e}", means, "")], None
    return [*found, _link(rate, example)], rate


def _without_driver(gpus: int) -> Finding:
    if gpus:
        return TOPIC.note(
            f"{count(gpus, 'NVIDIA GPU')}, and no driver is loaded",
            ON_CPU,
            "install the driver, on Ubuntu: sudo ubuntu-drivers install\n"
            "in a container: `docker run --gpus all`",
        )
    means = "engines run with --device cpu and the policy all-host: the cores compute every expert"
    return TOPIC.note("no NVIDIA GPU", means)


def _devices(seen: dict[str, Any]) -> Iterator[Finding]:
    if not seen["devices"]:
        if seen["cuda"] is None:
            why = "a build without CUDA"
            do = pip_install(f"--force-reinstall torch --index-url {CUDA_BUILDS}")
        else:
            why = "it finds no GPU that it can use"
            do = f"nvidia-smi\nif the driver is older than CUDA {seen['cuda']}, update it"
        yield TOPIC.problem(f"torch {seen['version']}: {why}", ON_CPU, do)
    means = "attention and shared parts are kept there, and as many experts as --expert-cache sets"
    for device in seen["devices"]:
        size, free = byte_size(device["bytes"]), byte_size(device["free"])
        yield TOPIC.ok(f"{device['name']}, {size}, {free} free", means)
        means = "an engine uses the first GPU alone"


async def _try(config: dict[str, Any]) -> Any:
    async with trial(CHILD, config) as child:
        return await child.result(LIMIT)


async def _graphs() -> Finding:
    try:
        reason = "" if await _try({"what": "graph"}) else "a replay gave other numbers"
    except TrialFailed as e:
        reason = str(e)
    if not reason:
        return TOPIC.ok("CUDA graphs work", "decode steps need few calls of the driver, see --graphs")
    return TOPIC.problem(f"CUDA graphs do not work: {reason}", "decode steps take longer", "")


async def _ipc(wsl: bool) -> Finding:
    """Memory of one process, read by another while the first keeps it."""
    try:
        async with trial(CHILD, {"what": "export"}) as owner:
            handle = await owner.result(LIMIT)
            same = await _try({"what": "open", "handle": handle})
            await owner.go()
        reason = "" if same else "another process reads something else than was written"
    except TrialFailed as e:
        reason = str(e)
    if not reason:
        means = "the prefetcher can be a process of its own, where the first start measures that as better"
        return TOPIC.ok("CUDA IPC works", means)
    means = "the prefetcher cannot be a process of its own" + "; WSL has no CUDA IPC" * wsl
    return TOPIC.problem(f"CUDA IPC does not work: {reason}", means, "start engines with --prefetcher thread")


def _link(pace: float, example: Reads) -> Finding:
    means = (
        f"where every expert of a token is fetched ({byte_size(example.token)} of {example.name}), "
        f"at most {pace / example.token:.2g} tok/s"
    )
    return TOPIC.ok(f"host to device: {rate(pace)} from page-locked memory", means)
