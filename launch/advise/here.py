"""This machine: its costs and a model's routing from a short run of the model, in the one format that is run;
other formats by their bytes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.advise.hardware import Hardware
from launch.advise.routing import recorded
from launch.bench.prompts import make_prompts, read_other_texts
from launch.bench.run import warm_up
from launch.command_line.options import Options
from launch.connect import connected
from launch.forecast import Priced, RecordedText, Setting, Sizes, by_replay, sizes_of
from launch.planning import make_plan, situation
from launch.processes.cores import Cores
from launch.terminal.format import model_name
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from pipeline.assets import model_dir
from pipeline.calibration.cost_cache import processor
from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import EngineConfig
from pipeline.policies.costs import Costs
from pipeline.policies.view import PolicyRequest
from protocol.client import Client

RUN = PolicyRequest("fiddler")  # computes on both sides, so that both sides' costs follow what runs
NEW = 48  # tokens of an answer
# Options of the command that its engine takes as well.
OF_ENGINE = {"model", "format", "backbone_dtype", "device", "expert_cache", "tile", "workers", "context"}
OF_ENGINE |= {"kv_tokens", "chunk", "graphs", "link_gbps", "host_slowdown"}
OF_ENGINE |= {"seed", "log_level", "record"}


@dataclass(frozen=True)
class Situated:
    """This machine, the configuration of its engines, and the routing that was recorded or given."""

    hardware: Hardware
    config: EngineConfig
    text: RecordedText


async def this_machine(
    options: Options, interrupts: Interrupts, source: ModelSource, prompt: int
) -> Situated:
    """Runs the model for a moment. Raises as its start; UsageError where nothing fits."""
    written = {name: value for name, value in options.written.items() if name not in ("policy", "set")}
    asked = Options("bench", written).config()
    now = await asyncio.to_thread(situation, asked, Cores.here().default_workers())
    plan, _ = await asyncio.to_thread(make_plan, asked.model or model_dir(), now)
    config = replace(now.config, format=plan.needs.format)
    sizes = sizes_of(source, config, plan.needs.format)
    notice(f"advise: running {model_name(source.name)} in {sizes.format}, to see how fast it is here")
    with tempfile.TemporaryDirectory(prefix="tandem-advise-") as folder:
        path = written.get("trace") or Path(folder) / "run.trace"
        recording = {} if "trace" in written else {"record": path}
        own = Options("advise", written | {"format": sizes.format})
        async with engine(own, interrupts, **recording) as client:
            costs, capacity = await run(client, prompt)
        text = recorded(path, sizes.header)
    setting = Setting(RUN, sizes.format, capacity, 0.0)
    measured = Priced(costs, text.rest or 0.0, "measured by a short run here")
    replayed = by_replay(setting, sizes, measured, text, prompt, config.seed).replayed
    measured = replace(measured, planned=replayed)

    def priced(other: Sizes, _: int) -> Priced:
        if other.format == sizes.format:
            return measured
        by_bytes = costs.of_tiles(other.tile / sizes.tile, other.header.tile_bytes / sizes.header.tile_bytes)
        return replace(measured, costs=by_bytes, words=f"from those of {sizes.format}, by bytes")

    unknown = [
        f"measured in {sizes.format} with {RUN.name}; other presets are predicted from its costs, other"
        " formats by their bytes",
        "batches of more rows than one, and longer prompts, than were run",
    ]
    words = "this machine, {}, {} cores".format(*processor())
    if config.emulation:
        words += f"; emulated: {config.emulation}"
    return Situated(Hardware(words, now.machine, priced, unknown, config.device), config, text)


@asynccontextmanager
async def engine(options: Options, interrupts: Interrupts, **changes: Any) -> AsyncIterator[Client]:
    """A client of an engine of its own with the command's options and these. Raises as its start."""
    written = {name: value for name, value in options.written.items() if name in OF_ENGINE}
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
