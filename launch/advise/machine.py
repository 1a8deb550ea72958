"""The machine to advise on, and the routing that presets are replayed on there: a machine described by
numbers, with routing that was drawn or recorded; or this one, with the costs and the routing of a short run
of the model in one format, and other formats by their bytes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.bench.measure import make_prompts, read_other_texts, warm_up
from launch.command_line.options import Options
from launch.connect import connected
from launch.doctor.measure import disk_rate
from launch.errors import WrongUsage
from launch.forecast import WARM, Priced, Sizes, calibration_of, costs_there, sizes_of
from launch.planning import make_plan, situation
from launch.processes.cores import Cores
from launch.terminal.format import model_name, rate
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from pipeline.assets import model_dir
from pipeline.calibration.cost_cache import processor
from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import DeviceName, EngineConfig
from pipeline.memory.plan import Machine
from pipeline.policies.costs import MACHINES, Costs, Rates
from pipeline.policies.options import did_you_mean
from pipeline.policies.view import PolicyRequest
from pipeline.replay.machine import DividedText
from pipeline.replay.steps import summarize
from pipeline.traces.trace import Header, Trace
from protocol.client import Client

GIGABYTE = 1e9
ENOUGH = 1 << 60  # bytes of memory, where none are given
GPU_GB = {"a100-pcie4": 80.0, "4090-pcie4": 24.0, "h200-pcie5": 141.0}
GPU_FREE = 0.96  # of a GPU's memory, beside the driver and a display
# Where only bandwidths are given: both are about what the named machines have.
HOST_TFLOPS_PER_GBPS, GPU_TFLOPS_PER_GBPS = 0.0125, 0.1
BESIDE_STEP = 5e-4  # seconds of a step between its last layer and the next step: sampling, messages
RATES = {"host_gbps": "host_gbps", "link_gbps": "link_gbps", "gpu_gbps": "device_gbps"}  # options, fields

RUN = PolicyRequest("fiddler")  # computes on both sides, so that both sides' costs follow what runs
NEW = 48  # tokens of an answer

MOST = 256  # steps of decode of a trace that count, at most


# --- a machine that is not here -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Hardware:
    """A machine to advise on."""

    words: str
    memory: Machine
    priced: Callable[[Sizes, int], Priced]  # for a model's sizes and the tokens that a token attends to
    device: DeviceName = "cuda"
    disk: float = 0.0  # bytes a second that are read from it; 0: unknown


def elsewhere(written: Mapping[str, Any]) -> Hardware | None:
    """Returns the machine that the command line describes; None where it is this one. Raises WrongUsage."""
    given = {name for name in (*RATES, "gpu_gb", "host_gb", "disk_gbps") if name in written}
    known = written.get("machine")
    if not given and known is None:
        return None
    if known is not None and known not in MACHINES:
        near = did_you_mean(known, MACHINES)
        raise WrongUsage(f"--machine {known[:40]}: unknown{near} (supported: {', '.join(MACHINES)})")
    gpu_gb = written.get("gpu_gb", GPU_GB.get(known or ""))
    host = int(written["host_gb"] * GIGABYTE) if "host_gb" in written else ENOUGH
    memory = Machine(memory=host, shm=host, gpu=int(GPU_FREE * (gpu_gb or 0) * GIGABYTE))
    missing = [name for name in (*RATES, "gpu_gb") if name not in given]
    if known is None and missing:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise WrongUsage(
            f"advise: a machine that is not here needs {options} as well, or --machine NAME"
            f" ({', '.join(MACHINES)})"
        )
    values = {field: written[option] for option, field in RATES.items() if option in written}
    if known is None:
        values["host_tflops"] = HOST_TFLOPS_PER_GBPS * values["host_gbps"]
        values["device_tflops"] = GPU_TFLOPS_PER_GBPS * values["device_gbps"]
    rates = Rates(**values) if known is None else replace(MACHINES[known], **values)
    words = (
        f"{known + ': ' if known else ''}host memory {rates.host_gbps:g} GB/s, link {rates.link_gbps:g} GB/s,"
        f" GPU of {gpu_gb:g} GB at {rates.device_gbps:g} GB/s"
    )
    disk = written.get("disk_gbps", 0.0)
    words += f", disk {disk:g} GB/s" * bool(disk)

    def priced(sizes: Sizes, context: int) -> Priced:
        rest = BESIDE_STEP + sizes.head / (rates.device_gbps * GIGABYTE)
        return Priced(costs_there(rates, sizes, context), rest)

    return Hardware(words, memory, priced, disk=disk * GIGABYTE)


# --- this machine -------------------------------------------------------------------------------------------


async def this_machine(
    options: Options, interrupts: Interrupts, source: ModelSource, prompt: int
) -> tuple[Hardware, EngineConfig, DividedText]:
    """Runs the model for a moment. Returns this machine, the configuration of its engines, and the routing
    that was recorded or given. Raises as its start; UsageError where nothing fits."""
    written = options.written
    asked = Options("bench", {k: v for k, v in written.items() if k not in ("policy", "set")}).config()
    now = await asyncio.to_thread(situation, asked, Cores.here().default_workers())
    plan, _ = await asyncio.to_thread(make_plan, asked.model or model_dir(), now)
    memory = plan.needs.store if plan.needs.partial else asked.host_memory
    config = replace(now.config, format=plan.needs.format, host_memory=memory)
    sizes = sizes_of(source, config, plan.needs.format)
    notice(f"advise: running {model_name(source.name)} in {sizes.format}, to see how fast it is here")
    with tempfile.TemporaryDirectory(prefix="tandem-advise-") as folder:
        path = written.get("trace") or Path(folder) / "run.trace"
        recording = {} if "trace" in written else {"record": path}
        own = Options("advise", written | {"format": sizes.format})
        async with engine(own, interrupts, **recording) as client:
            costs, _ = await run(client, prompt)
        text = recorded(path, sizes.header)

    def priced(other: Sizes, _: int) -> Priced:
        if other.format == sizes.format:
            return Priced(costs, text.rest or 0.0)
        read, moved = other.tile / sizes.tile, other.header.tile_bytes / sizes.header.tile_bytes
        return Priced(costs.of_tiles(read, read, moved), text.rest or 0.0)

    words = "this machine, {}, {} cores".format(*processor())
    if config.emulation:
        words += f"; emulated: {config.emulation}"
    disk = 0.0 if memory is None else await asyncio.to_thread(disk_rate)
    words += f"; its disk reads {rate(disk)}" * bool(disk)
    return Hardware(words, now.machine, priced, config.kind, disk), config, text


@asynccontextmanager
async def engine(options: Options, interrupts: Interrupts, **changes: Any) -> AsyncIterator[Client]:
    """Returns a client of an engine of its own with the command's options and these. Raises as its start."""
    written = {name: value for name, value in options.written.items() if name not in ("policy", "set")}
    async with connected(Options("bench", written | changes), interrupts) as client:
        yield client


async def run(client: Client, prompt: int) -> tuple[Costs, int]:
    """Answer two prompts under RUN, of which the first is the history of a trace that is recorded meanwhile.
    Returns the engine's costs, as its steps have corrected them, and the tiles of its cache. Raises
    RequestFailed, PolicyError."""
    await client.set_policy(RUN.name, {}, counted=False)
    await read_other_texts(client, 0)
    for each in reversed(await make_prompts(client, 2, prompt, 0)):
        await warm_up(client, [each], NEW)
    stats: Any = await client.stats()
    return Costs.from_json(stats["costs"]), int(stats["cache"]["capacity_tiles"])


# --- routing ------------------------------------------------------------------------------------------------


def recorded(path: Path, header: Header) -> DividedText:
    """Returns a trace's routing. `header`: of the model that is advised on. Raises TraceError, WrongUsage."""
    trace = Trace(path)
    of, its = header.shape, trace.header.shape
    if (of.layers, of.experts, of.top_k) != (its.layers, its.experts, its.top_k):
        raise WrongUsage(
            f"--trace {path}: it has {its.layers} layers of {its.experts} experts, {its.top_k} a token, and"
            f" the model {of.layers} of {of.experts}, {of.top_k} a token; give the model that was recorded"
        )
    seen = summarize(trace, MOST)
    if not seen.rows["decode"]:
        raise WrongUsage(f"--trace {path}: it has no step of decode")
    steps = list(trace.steps())
    before = [index for index, step in enumerate(steps[: seen.begin]) if step.phase == "decode"]
    first = before[-WARM] if len(before) > WARM else 0
    words = (
        f"recorded routing: the last {seen.measured['decode']} tokens count, what is before is the history"
    )
    calibration = calibration_of(trace.header, seen.first)
    return DividedText(steps[first:], seen.begin - first, seen.counts, words, seen.rest, calibration)
