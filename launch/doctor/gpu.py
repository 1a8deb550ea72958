"""Examines NVIDIA GPUs: the driver, torch's view of them, CUDA graphs, CUDA IPC, the bandwidth of the link.
Every call of the driver is made in a child process with a time limit."""

from __future__ import annotations

from importlib.util import find_spec
from statistics import median
from typing import Any

from launch.doctor.machine import Finding, pip_install
from launch.doctor.measure import CHILD, Reads
from launch.planning import DRIVER_NODES
from launch.processes.trials import Trial, TrialFailed, trial
from launch.terminal.format import rate
from shm.segment import byte_size

LIMIT = 120.0  # seconds; a cold import of a CUDA build of torch from a slow disk takes tens of them
CUDA_BUILDS = "https://download.pytorch.org/whl/cu128"
ON_CPU = "engines compute on the CPU"


def has_driver() -> bool:
    """Tells whether a driver is loaded: without one no GPU can be used."""
    return any(node.exists() for node in DRIVER_NODES)


async def inspect(example: Reads) -> tuple[list[Finding], float | None]:
    """Returns the findings, and the bytes a second from page-locked memory to the device, if measured."""
    if not has_driver():
        means = "engines run with --device cpu and the policy all-host: the cores compute every expert"
        do = "where there is a GPU, install its driver; in a container: `docker run --gpus all`"
        return [Finding("gpu", "note", "no driver of an NVIDIA GPU is loaded", means, do)], None
    async with trial(CHILD, {"what": "gpu"}) as child:
        seen, failure = await _tried(child)
        if failure:
            do = "nvidia-smi\nengines start with --device cpu meanwhile"
            return [Finding("gpu", "problem", f"torch fails: {failure}", ON_CPU, do)], None
        if not seen["devices"]:
            return [_devices(seen)], None
        if find_spec("cuda") is None:
            do = pip_install("'tandem[cuda]'")
            words = "cuda-bindings is not installed"
            return [_devices(seen), Finding("gpu", "problem", words, ON_CPU, do)], None
        graph, no_graph = await _tried(child)
        paces, no_copy = await _tried(child)
        handle, no_ipc = await _tried(child)
        if not no_ipc:
            async with trial(CHILD, {"what": "open", "handle": handle}) as other:
                same, no_ipc = await _tried(other)
            if same is False:
                no_ipc = "another process reads something else than was written"
    if graph is False:
        no_graph = "a replay gave other numbers"
    findings = [_devices(seen), _graphs(no_graph), _ipc(no_ipc)]
    findings.append(_link(median(paces or [0.0]), no_copy, example))
    return findings, median(paces) if paces else None


async def _tried(child: Trial) -> tuple[Any, str]:
    """Returns the child's next answer, and an error text, or ""."""
    try:
        answer = await child.result(LIMIT)
    except TrialFailed as e:
        return None, str(e)
    failure = answer.get("failure") if isinstance(answer, dict) else None
    return (None, failure) if failure else (answer, "")


def _devices(seen: dict[str, Any]) -> Finding:
    """Describes the first GPU that torch sees, or says why it sees none."""
    if seen["devices"]:
        device, *others = seen["devices"]
        words = f"{device['name']}, {byte_size(device['bytes'])}, {byte_size(device['free'])} free"
        means = "attention and shared parts are kept there, and as many experts as --expert-cache sets"
        more = f"; an engine uses this GPU alone, of {1 + len(others)}"
        return Finding("gpu", "ok", words, means + more * bool(others))
    if seen["cuda"] is None:
        why = "a build without CUDA"
        do = pip_install(f"--force-reinstall torch --index-url {CUDA_BUILDS}")
    else:
        why = "it finds no GPU that it can use"
        do = f"nvidia-smi\nif the driver is older than CUDA {seen['cuda']}, update it"
    return Finding("gpu", "problem", f"torch {seen['version']}: {why}", ON_CPU, do)


def _graphs(failure: str) -> Finding:
    if failure:
        return Finding("gpu", "problem", f"CUDA graphs do not work: {failure}", "decode steps take longer")
    return Finding("gpu", "ok", "CUDA graphs work", "decode steps need few calls of the driver")


def _ipc(failure: str) -> Finding:
    """Tells whether another process can use the memory that one has allocated."""
    if failure:
        means = "no tile is prefetched; demanded tiles are copied as ever (WSL has no CUDA IPC)"
        return Finding("gpu", "note", f"CUDA IPC does not work: {failure}", means)
    return Finding("gpu", "ok", "CUDA IPC works", "the prefetch process can copy predicted tiles to the GPU")


def _link(pace: float, failure: str, example: Reads) -> Finding:
    if failure:
        means = "experts cannot be moved to the GPU at the speed of its link"
        return Finding("gpu", "problem", f"no copy from page-locked memory: {failure}", means)
    means = (
        f"where every expert of a token is fetched ({byte_size(example.token)} of {example.name}), at most"
        f" {pace / example.token:.2g} tok/s"
    )
    return Finding("gpu", "ok", f"host to device: {rate(pace)} from page-locked memory", means)
