"""`launch.py advise`: which preset, expert cache and format for a model, how fast it would be, and what would
make it faster. Nothing of the model is loaded: presets are replayed on routing, with the costs of a machine.
Exit code 0: the model fits in some format; 1: not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch.advise.hardware import Hardware, elsewhere
from launch.advise.here import this_machine
from launch.advise.plot import draw_advice
from launch.advise.report import Report
from launch.advise.routing import drawn, recorded
from launch.advise.search import CURVE, DRAWN, Search, fitting
from launch.bench.plan import requested_policies
from launch.command_line.checks import check_engine
from launch.command_line.options import Options
from launch.errors import WrongUsage
from launch.forecast import RecordedText, Sizes, sizes_of
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from launch.terminal.plot import check_picture
from launch.terminal.progress import ProgressCounter
from pipeline.assets import model_dir
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_config
from pipeline.config import EngineConfig, FormatName
from pipeline.errors import ModelError, UsageError
from pipeline.memory.limits import CHUNK_MAX
from pipeline.memory.plan import AUTOMATIC

PROMPT = 128  # tokens, as bench


async def advise(options: Options, interrupts: Interrupts) -> int:
    """Raises UsageError, WrongUsage, TraceError, PolicyError."""
    written = options.written
    if "plot" in written:
        check_picture(written["plot"])
    prompt, batch, asked = written.get("prompt_len", PROMPT), written.get("batch", 1), options.config()
    requests = requested_policies(options, asked.seed)
    hardware: Hardware | None = elsewhere(written)
    source = open_config(written.get("model", model_dir()))
    if hardware is not None:
        config = replace(asked, device=hardware.device, workers=1 if asked.workers is None else asked.workers)
        each = _every_size(source, config, hardware)
        chunk = min(config.chunk or CHUNK_MAX, prompt)
        text = _text(written.get("trace"), each[0], prompt, chunk, batch, config.seed)
    else:
        if batch != 1:
            raise WrongUsage(
                "--batch is of a machine given by numbers; bench --batch measures it on this one"
            )
        check_engine(asked, source)
        trial = await this_machine(options, interrupts, source, prompt)
        hardware, config, text = trial.hardware, trial.config, trial.text
        each = _every_size(source, replace(config, format=asked.format), hardware)
    formats = [fitting(sizes, config, hardware) for sizes in each]
    fit = sum(one.fits for one in formats)
    total = fit * len(requests) + 4 + ("plot" in written) * DRAWN * len(CURVE)
    with ProgressCounter("advise: replays", total) as bar:
        search = Search(hardware, formats, text, prompt, config.seed, bar.count)
        if fit:
            await search.presets(requests)
        if search.advice.estimates:
            await search.what_if()
            if "plot" in written:
                await search.curve()
    report = Report(source, hardware, config, text, prompt, batch, search.advice)
    if "json" in written:
        print_json(report.to_json())
    else:
        show(report.render(), rendered=True)
    if search.advice.curves:
        draw_advice(report, written["plot"])
    return 0 if search.advice.estimates else 1


def _every_size(source: ModelSource, config: EngineConfig, hardware: Hardware) -> list[Sizes]:
    """Sizes in the formats to choose from, the most exact first. Raises UsageError."""
    names: Sequence[FormatName] = AUTOMATIC if config.format is None else (config.format,)
    if hardware.only is not None:
        names = (hardware.only,)
    sizes = []
    for name in names:
        try:
            sizes.append(sizes_of(source, config, name))
        except UsageError as e:
            if isinstance(e, ModelError) or len(names) == 1:
                raise
    return sizes


def _text(path: Path | None, sizes: Sizes, prompt: int, chunk: int, batch: int, seed: int) -> RecordedText:
    if path is None:
        return drawn(sizes.header, prompt, chunk, batch, seed)
    if batch != 1:
        raise WrongUsage("--batch is of synthetic routing; a trace has the batches that were recorded")
    return recorded(path, sizes.header)
