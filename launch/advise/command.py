"""`launch.py advise`: which preset, expert cache and format for a model, how fast it would be, and what would
make it faster. Nothing of the model is loaded: presets are replayed on routing, with the costs of a machine.
Exit code 0: the model fits in some format; 1: not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from launch.advise.machine import Hardware, drawn, elsewhere, recorded, this_machine
from launch.advise.search import CURVE, DRAWN, Fitting, Search, fitting
from launch.bench.plan import requested_policies
from launch.bench.replay import ASSUMPTION
from launch.command_line.checks import check_engine
from launch.command_line.options import Options
from launch.errors import WrongUsage
from launch.forecast import Estimate, RecordedText, Sizes, sizes_of
from launch.terminal.format import alike, count, merged_notes, model_name, percent, three_digits
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json
from launch.terminal.plot import BLUE, FAINT, Panel, Series, check_picture, draw
from launch.terminal.progress import ProgressCounter
from launch.terminal.tables import Column, Table, each, policy_name, print_parts
from pipeline.assets import model_dir
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_config
from pipeline.config import EngineConfig, FormatName
from pipeline.errors import ModelError, UsageError
from pipeline.memory.limits import CHUNK_MAX
from pipeline.memory.plan import AUTOMATIC
from shm.segment import SHM_FOLDER, byte_size

PROMPT = 128  # tokens, as bench
SHOWN = 8  # presets of the best format


async def advise(options: Options, interrupts: Interrupts) -> int:
    """Raises UsageError, WrongUsage, TraceError, PolicyError."""
    written, asked = options.written, options.config()
    if "plot" in written:
        check_picture(written["plot"])
    prompt, batch = written.get("prompt_len", PROMPT), written.get("batch", 1)
    requests = requested_policies(options, asked.seed)
    hardware = elsewhere(written)
    source = open_config(written.get("model", model_dir()))
    if hardware is not None:
        config = replace(asked, device=hardware.device, workers=1 if asked.workers is None else asked.workers)
        every = _every_size(source, config, hardware)
        chunk = min(config.chunk or CHUNK_MAX, prompt)
        text = _text(written.get("trace"), every[0], prompt, chunk, batch, config.seed)
    else:
        if batch != 1:
            raise WrongUsage(
                "--batch is of a machine given by numbers; bench --batch measures it on this one"
            )
        check_engine(asked, source)
        hardware, config, text = await this_machine(options, interrupts, source, prompt)
        every = _every_size(source, replace(config, format=asked.format), hardware)
    formats = [fitting(sizes, config, hardware) for sizes in every]
    total = sum(one.fits for one in formats) * len(requests) + 4 + ("plot" in written) * DRAWN * len(CURVE)
    with ProgressCounter("advise: replays", total) as bar:
        search = Search(hardware, formats, text, prompt, config.seed, bar.count)
        await search.presets(requests)
        if (best := search.best()) is not None:
            await search.what_if(best)
            if "plot" in written:
                await search.curve(best)
    report = Report(source, batch, search)
    if "json" in written:
        print_json(report.to_json())
    else:
        print_parts(*report.parts())
    if search.curves and best is not None:
        report.draw(best, written["plot"])
    return 0 if best is not None else 1


def _every_size(source: ModelSource, config: EngineConfig, hardware: Hardware) -> list[Sizes]:
    """Returns sizes in the formats to choose from, the most exact first. Raises UsageError."""
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


@dataclass(frozen=True)
class Report:
    """All that was searched, and its settings."""

    source: ModelSource
    batch: int
    search: Search

    def to_json(self) -> dict[str, Any]:
        search = self.search
        return {
            "model": self.source.name,
            "machine": search.hardware.words,
            "routing": search.text.words,
            "prompt_len": search.prompt,
            "batch": self.batch,
            "advice": [_command(estimate) for estimate in search.recommended()],
            "formats": [self._format_map(fitting) for fitting in search.formats],
            "estimates": [estimate.to_map() for estimate in search.estimates],
            "changes": [vars(change) for change in search.changes],
            "curves": search.curves,
            "left_out": [{"policy": name, "reason": why} for name, why in search.left_out.items()],
            "unknown": self._unknown(),
        }

    def _format_map(self, fitting: Fitting) -> dict[str, Any]:
        pools = fitting.plan.pools(self.search.hardware.memory)
        return {
            "format": fitting.sizes.format,
            "fits": fitting.fits,
            "context": fitting.plan.context,
            "expert_cache": fitting.plan.expert_cache,
            "memory": [
                {"name": pool.name, "needed": pool.needed, "parts": dict(pool.parts)} for pool in pools
            ],
        }

    def parts(self) -> Iterator[RenderableType]:
        """Yields tables and lines."""
        search, shape = self.search, self.search.formats[0].sizes.header.shape
        load = f"prompt of {search.prompt} tokens, {count(self.batch, 'request')} at once"
        yield Text(model_name(self.source.name, article=""), style="bold")
        yield f"{shape.layers} layers of {count(shape.experts, 'expert')}, {shape.top_k} a token"
        yield from (search.hardware.words, f"{search.text.words}; {load}", "", self._formats(), "")
        best = search.best()
        if best is None:
            yield Text("It does not fit.", style="bold red")
            return
        estimates = search.of(best.setting.format)[:SHOWN]
        yield from (_presets(best, estimates), "")
        first, *others = search.recommended()
        yield Text("Advice", style="bold green")
        yield Text(f"  {_command(first)}", style="bold")
        yield f"  about {three_digits(first.tok_s)} tok/s"
        for other in others:
            yield f"or with more exact weights, about {three_digits(other.tok_s)} tok/s:"
            yield f"  {_command(other)}"
        yield Text("\nWhat would change its speed", style="bold")
        for change in search.changes:
            yield f"  {change.words:32} {100 * (change.ratio - 1):+.0f} %"
        yield Text("\nWhat this does not know", style="bold")
        notes = merged_notes((estimate.setting.policy.name, estimate.notes) for estimate in estimates)
        notes += [f"{name} left out: {reason}" for name, reason in search.left_out.items()]
        for line in (*(f"- {line}" for line in self._unknown()), *(f"note: {note}" for note in notes)):
            yield Text(line, style="dim")

    def _formats(self) -> Table[Any]:
        """Returns each format's memory and its fastest preset."""
        memory = self.search.hardware.memory
        pools = [
            {pool.name: pool for pool in fitting.plan.pools(memory) if pool.name != SHM_FOLDER}
            for fitting in self.search.formats
        ]
        best = [self.search.best(fitting.sizes.format) for fitting in self.search.formats]
        short = [", ".join(f"{name} too small" for name in of if of[name].short) for of in pools]
        gpu = memory.gpu is not None
        columns = [
            Column[Any]("format", lambda row: row[0].sizes.format, text=True),
            Column[Any](
                "fastest exact preset",
                lambda row: _policy(row[1]) if row[1] else f"does not fit: {row[3]}",
                text=True,
            ),
            *([Column[Any]("GPU", lambda row: byte_size(row[2]["GPU memory"].needed))] if gpu else []),
            Column[Any]("host", lambda row: byte_size(row[2]["memory"].needed)),
            *(
                [Column[Any]("cache", lambda row: percent(row[0].plan.expert_cache if row[0].fits else None))]
                if gpu
                else []
            ),
            Column[Any]("tok/s", lambda row: row[1] and row[1].tok_s, alike),
            Column[Any]("first\ntoken", lambda row: row[1] and row[1].first_token_s, each(_seconds)),
        ]
        return Table(columns, list(zip(self.search.formats, best, pools, short, strict=True)), gap=0)

    def _unknown(self) -> list[str]:
        search = self.search
        lines = [*search.hardware.unknown, *search.text.unknown]
        if search.text.rest is None:
            lines.append("time of planning and of messages between processes, which a busy host lengthens")
        lines.append("other programs on the machine, heat, contexts longer than the prompt")
        if any(not estimate.exact for estimate in search.estimates):
            lines.append(f"{ASSUMPTION}; bench measures their perplexity")
        return lines

    def draw(self, best: Estimate, path: Path) -> None:
        """Draw the fastest presets over the size of the expert cache, and the fastest of every format. Raises
        OutputFailed."""
        search, setting = self.search, best.setting
        curves = [
            Series(label, {share: [speed] for share, speed in points})
            for label, points in search.curves.items()
        ]
        along, title = "expert cache, share of all tiles", f"decode, tok/s, {setting.format}"
        left = Panel(title, curves, along, mark=(setting.share, "what fits"))
        kinds = {"exact": (True, BLUE), "approximate": (False, FAINT)}
        fastest = [three for fitting in search.formats for three in search.of(fitting.sizes.format)[:3]]
        bars = [
            Series(label, {_name(one): [one.tok_s * (one.exact is exact)] for one in fastest}, color)
            for label, (exact, color) in kinds.items()
        ]
        right = Panel("the three fastest of each format, tok/s", bars)
        heading = f"{model_name(self.source.name, article='')}, {search.hardware.words}"
        draw(path, [[left, right]], f"{heading}\n{search.text.words}; estimated")


def _presets(best: Estimate, estimates: list[Estimate]) -> Table[Estimate]:
    """Returns the presets of the best setting's format."""
    columns = [
        Column[Estimate](f"policy, {best.setting.format}", _policy, text=True),
        Column[Estimate]("tok/s", lambda of: of.tok_s, alike),
        Column[Estimate]("x", lambda of: f"{of.tok_s / best.tok_s:.2f}"),
        Column[Estimate]("first\ntoken", lambda of: of.first_token_s, each(_seconds)),
        Column[Estimate]("hits", lambda of: of.hit_rate, each(percent)),
        Column[Estimate]("host", lambda of: of.host_share, each(percent)),
        Column[Estimate]("moved/\ntoken", lambda of: byte_size(round(of.moved))),
        Column[Estimate]("wait\nlink", lambda of: of.wait_link, each(percent)),
        Column[Estimate]("wait\nhost", lambda of: of.wait_host, each(percent)),
        Column[Estimate]("weight\nchanged", _changed),
    ]
    return Table(columns, estimates, gap=0, style=lambda of: "bold" if of is best else "")


def _policy(estimate: Estimate) -> Text:
    return policy_name(estimate.setting.policy, estimate.exact)


def _name(estimate: Estimate) -> str:
    return f"{estimate.setting.format} {estimate.setting.policy.name}"


def _command(estimate: Estimate) -> str:
    """Returns the options of a setting."""
    setting, policy = estimate.setting, estimate.setting.policy
    words = [f"--policy {policy.name}"]
    words += [f"--set {policy.name}.{name}={value}" for name, value in policy.options.items()]
    words.append(f"--format {setting.format}")
    if setting.capacity and (estimate.host_share < 1 or estimate.moved):
        words.append(f"--expert-cache {setting.share:.3g}")
    return " ".join(words)


def _changed(estimate: Estimate) -> str:
    """Returns the share of the routed weight that is computed otherwise."""
    if estimate.exact:
        return "exact"
    changed = sum(share or 0 for kind, share in estimate.fidelity.items() if kind != "predicted")
    return percent(changed) if changed else "predicted"


def _seconds(value: float) -> str:
    return f"{three_digits(value)} s" if value >= 1 else f"{1e3 * value:.0f} ms"
