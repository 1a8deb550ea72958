"""Examines NVIDIA GPUs: the driver, torch's view of them, the bandwidth of the link. Every call of the driver
is made in a child process with a time limit."""

from __future__ import annotations

from importlib.util import find_spec
from statistics import median
from typing import Any

from launch.doctor.machine import Finding, pip_install
from launch.doctor.measure import CHILD
from launch.forecast import Sizes
from launch.planning import DRIVER_NODES
from launch.processes.trials import Trial, TrialFailed, trial
from launch.terminal.format import rate
from shm.segment import byte_size

LIMIT = 120.0  # seconds; a cold import of a CUDA build of torch from a slow disk takes tens of them
CUDA_BUILDS = "https://download.pytorch.org/whl/cu128"
ON_CPU = "engines compute on the CPU"


async def inspect(example: Sizes) -> tuple[list[Finding], float | None]:
    """Returns the findings, and the bytes a second from page-locked memory to the device, if measured."""
    if not any(node.exists() for node in DRIVER_NODES):
        means = "engines run with --device cpu and the policy all-host: the cores compute every expert"
        do = "where there is a GPU, install its driver; in a container: `docker run --gpus all`"
        return [Finding("gpu", "note", "no driver of an NVIDIA GPU is loaded", means, do)], None
    async with trial(CHILD, {"what": "gpu"}) as child:
        seen, failure = await _tried(child)
        if failure:
            do = "nvidia-smi\nengines start with --device cpu meanwhile"
            return [Finding("gpu", "problem", f"torch fails: {failure}", ON_CPU, do)], None
        findings = _devices(seen)
        if seen["devices"] and find_spec("cuda") is None:
            do = pip_install("'tandem[cuda]'")
            findings.append(Finding("gpu", "problem", "cuda-bindings is not installed", ON_CPU, do))
        if findings[-1].level == "problem":
            return findings, None
        paces, failure = await _tried(child)
    if failure:
        means = "experts cannot be moved to the GPU at the speed of its link"
        no_copy = Finding("gpu", "problem", f"no copy from page-locked memory: {failure}", means)
        return [*findings, no_copy], None
    pace = median(paces)
    means = (
        f"where every expert of a token is fetched ({byte_size(example.token)} of {example.header.model}),"
        f" at most {pace / example.token:.2g} tok/s"
    )
    link = Finding("gpu", "ok", f"host to device: {rate(pace)} from page-locked memory", means)
    return [*findings, link], pace


async def _tried(child: Trial) -> tuple[Any, str]:
    """Returns the child's next answer, and an error text, or ""."""
    try:
        answer = await child.result(LIMIT)
    except TrialFailed as e:
        return None, str(e)
    return answer, answer.get("failure", "") if isinstance(answer, dict) else ""


def _devices(seen: dict[str, Any]) -> list[Finding]:
    """Describes the GPUs that torch sees, or says why it sees none."""
    if devices := seen["devices"]:
        first = "attention and shared parts are kept there, and as many experts as --expert-cache sets"
        every = ",".join(f"cuda:{number}" for number in range(len(devices)))
        further = f"with --device {every} it has a part of the layers; without, the first GPU has all"
        return [
            Finding(
                "gpu",
                "ok",
                f"{device['name']}, {byte_size(device['bytes'])}, {byte_size(device['free'])} free",
                further if number else first,
            )
            for number, device in enumerate(devices)
        ]
    if seen["cuda"] is None:
        why = "a build without CUDA"
        do = pip_install(f"--force-reinstall torch --index-url {CUDA_BUILDS}")
    else:
        why = "it finds no GPU that it can use"
        do = f"nvidia-smi\nif the driver is older than CUDA {seen['cuda']}, update it"
    return [Finding("gpu", "problem", f"torch {seen['version']}: {why}", ON_CPU, do)]
