"""This machine: costs from a short run of the model, in the one format that is run; other formats by their
bytes."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.advise.hardware import Hardware, Priced
from launch.advise.routing import RecordedText, recorded
from launch.advise.sizes import Sizes, sizes_of
from launch.advise.trial import DEVICE, HOST, engine, fitted, probed_costs, record, run_presets
from launch.command_line.options import Options
from launch.planning.plan import make_plan, situation
from launch.processes.cores import Cores
from launch.terminal.format import model_name
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from pipeline.assets import model_dir
from pipeline.calibration.cost_cache import processor
from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import DeviceName, EngineConfig
from pipeline.memory.plan import Machine


@dataclass
class Here(Hardware):
    """This machine. `of`: the sizes in the format that was run."""

    words: str
    device: DeviceName
    memory: Machine
    of: Sizes
    measured: Priced
    without_workers: float | None = None
    unknown: list[str] = field(default_factory=list)

    def priced(self, sizes: Sizes, context: int) -> Priced:
        if sizes.format == self.of.format:
            return self.measured
        ratio, moved = sizes.tile / self.of.tile, sizes.header.tile_bytes / self.of.header.tile_bytes
        costs = self.measured.costs
        scaled = replace(
            costs,
            host=tuple(seconds * ratio for seconds in costs.host),
            device=tuple(seconds * ratio for seconds in costs.device),
            link=costs.link * moved,
        )
        return replace(self.measured, costs=scaled, words=f"from those of {self.of.format}, by bytes")


@dataclass(frozen=True)
class Situated:
    """This machine, the configuration of its engines, and the routing that was recorded or given."""

    hardware: Here
    config: EngineConfig
    text: RecordedText


async def this_machine(
    options: Options, interrupts: Interrupts, source: ModelSource, prompt: int
) -> Situated:
    """Runs the model for a moment: one engine records its routing, unless --trace has it, one is timed, and
    without a GPU one without workers as well. Raises as their start; UsageError where nothing fits."""
    written = {name: value for name, value in options.written.items() if name not in ("policy", "set")}
    asked = Options("bench", written).config()
    model = asked.model or model_dir()
    now = await asyncio.to_thread(situation, asked, Cores.here().default_workers())
    plan, _ = await asyncio.to_thread(make_plan, model, now)
    config = replace(now.config, format=plan.needs.format)
    sizes = sizes_of(source, config, plan.needs.format)
    own = Options("advise", written | {"format": sizes.format})
    notice(f"advise: running {model_name(source.name)} in {sizes.format}, to see how fast it is here")
    with tempfile.TemporaryDirectory(prefix="tandem-advise-") as folder:
        path = written.get("trace")
        if path is None:
            path = Path(folder) / "run.trace"
            async with engine(own, interrupts, record=path, keep_store=True) as client:
                await record(client, path, prompt)
        text = recorded(path, sizes.header)
    async with engine(own, interrupts) as client:
        probed = await probed_costs(client)
        cache = int((await client.stats())["cache"]["capacity_tiles"])
        host, device = await run_presets(client, [HOST, DEVICE], prompt)
    alone = None
    if config.device == "cpu" and asked.workers is None:
        async with engine(own, interrupts, workers=0) as client:
            (without,) = await run_presets(client, [HOST], prompt)
        alone = without.run.decode_tok_s / host.run.decode_tok_s
    priced = fitted(probed, host, device, sizes, cache, text)
    unknown = [
        f"measured in {sizes.format} with {HOST.name} and {DEVICE.name}; other presets are predicted from"
        " these two, other formats by their bytes",
        "batches of more rows than one, and longer prompts, than were run",
    ]
    words = "this machine, {}, {} cores".format(*processor())
    if config.emulation:
        words += f"; emulated: {config.emulation}"
    hardware = Here(words, config.device, now.machine, sizes, priced, alone, unknown)
    return Situated(hardware, config, text)
