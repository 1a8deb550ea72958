"""`launch.py doctor`: what this machine can do, what is missing, what to change. Each finding is a fact, its
meaning for an engine, and what to do about it. At the end an engine is started on the embedded model. Exit
code 0: it answered, and no finding prevents engines from running; else 1. With `--model` the doctor reports a
memory plan instead, see `model_plan.py`."""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

from launch.command_line.options import Options
from launch.doctor import bandwidth, costs, cpu, gpu, kernels, memory, places, proof, software
from launch.doctor.finding import Finding, render
from launch.doctor.model_plan import show_plan
from launch.errors import LaunchError
from launch.processes.cores import Cores
from launch.processes.trials import TrialFailed
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import print_json, show
from pipeline.calibration.cost_cache import measured_here
from pipeline.errors import PipelineError
from protocol.program import user_folder
from shm.kernel_files import contents, limits
from shm.segment import available_memory

log = logging.getLogger("tandem")


async def doctor(options: Options, interrupts: Interrupts) -> int:
    """Examine the machine. Raises LaunchError on another system than Linux and for a damaged installation."""
    if sys.platform != "linux":
        raise LaunchError(f"Tandem runs on Linux; this is {sys.platform}")
    if "model" in options.written:
        return await show_plan(options, interrupts)
    try:
        embedded = bandwidth.embedded()
    except (OSError, ValueError, PipelineError) as e:
        raise LaunchError(f"the embedded model cannot be read: {e}; install Tandem again") from e
    notice("examining the machine")
    cores = Cores.here()
    findings = _inspect(embedded, cores)
    load = os.getloadavg()[0]
    seen, link = await gpu.inspect(bandwidth.example())
    findings += seen
    notice("measuring the memory bandwidth: a few seconds")
    speed, speeds = await _measure(embedded, cores)
    findings += bandwidth.busy(load, len(cores.numbers)) + speeds
    notice("starting an engine on the embedded model")
    proofs = await _prove(options, interrupts)
    ceiling = None if speed is None else speed.all / embedded.token
    findings += [proof.explain(p, ceiling, embedded.store <= (bandwidth.last_cache() or 0)) for p in proofs]
    findings += [finding for p in proofs for finding in proof.explain_idle(p)]
    findings += costs.inspect(user_folder("CACHE"))

    ok = not any(finding.prevents for finding in findings)
    if "json" in options.written:
        measured: dict[str, Any] = {} if speed is None else speed.to_map()
        measured |= {
            "host_to_device_gbps": None if link is None else link / 1e9,
            "expert_bytes_per_token": embedded.token,
            "ceiling_tok_s": ceiling,
            "engine": proofs[0].to_map(),
            "costs": [costs.to_map(*kept) for kept in measured_here(user_folder("CACHE"))],
        }
        print_json({"ok": ok, "findings": [f.to_map() for f in findings], "measured": measured})
    else:
        show(render(findings, _verdict(ok, findings)), rendered=True)
    return 0 if ok else 1


def _inspect(embedded: bandwidth.Reads, cores: Cores) -> list[Finding]:
    """The findings that need no measurement and no GPU."""
    allowed = limits()
    lockable, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = memory.parse_meminfo(contents(memory.MEMINFO)).get("MemTotal", 0)
    return [
        *cpu.inspect(cores.numbers, allowed.cpus),
        *cpu.inspect_threads(cores),
        *kernels.inspect(),
        *memory.inspect(embedded.store, allowed.memory, None if lockable < 0 else lockable, files),
        *memory.inspect_shared(embedded.store, min(total, allowed.memory or total)),
        *software.inspect(gpu=bool(gpu.driver_nodes())),
        *places.inspect(),
    ]


async def _measure(
    embedded: bandwidth.Reads, cores: Cores
) -> tuple[bandwidth.Bandwidth | None, list[Finding]]:
    cache, available = bandwidth.last_cache(), available_memory()
    try:
        speed = await bandwidth.measure(cores.numbers, cache, available)
    except TrialFailed as e:
        means = "the bound on this machine's speed is unknown"
        return None, [bandwidth.TOPIC.note(f"memory was not measured: {e}", means)]
    return speed, [*bandwidth.explain(speed, embedded, bandwidth.example(), cache)]


async def _prove(options: Options, interrupts: Interrupts) -> list[proof.Proof]:
    """Start an engine on the default device; where that fails on a machine with a GPU, on the CPU as well."""
    proofs = [await proof.prove(options, interrupts, "auto")]
    if proofs[0].failure and gpu.driver_nodes():
        proofs.append(await proof.prove(options, interrupts, "cpu"))
    return proofs


def _verdict(ok: bool, findings: Sequence[Finding]) -> str:
    counts = {level: sum(f.level == level for f in findings) for level in ("problem", "note")}
    words = " and ".join(count(n, level) for level, n in counts.items() if n)
    verdict = "Engines run on this machine" if ok else "Engines do not run on this machine as they should"
    return f"{verdict}{f': {words}' if words else ''}."
