"""What `bench` found, as one JSON object or as a table that fits 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from launch.bench.perplexity import Perplexity
from launch.bench.run import Run
from launch.bench.why import legend, policy_name, profile_to_map, why_table
from launch.phase_profile import PhaseProfile, added
from launch.terminal.format import three_digits
from pipeline.assets import model_dir
from pipeline.models.shapes import short_name
from pipeline.policies.view import PolicyRequest


@dataclass
class Entry:
    """One policy's runs, in the order of the rounds."""

    request: PolicyRequest
    exact: bool = True
    notes: list[str] = field(default_factory=list)  # of the engine, each once
    runs: list[Run] = field(default_factory=list)
    perplexity: Perplexity | None = None  # of an approximate one
    left_out: str = ""  # why it cannot run here

    def ratio(self, first: Entry, figure: str) -> float:
        """The median of the rounds' ratios to the first policy. A round's runs are neighbours in time, so
        what the machine does meanwhile weighs less in it than in the ratio of two medians."""
        pairs = zip(self.figures(figure), first.figures(figure), strict=True)
        return median(mine / its for mine, its in pairs)

    def figures(self, name: str) -> list[float]:
        """A field of Run, in the order of the rounds."""
        return [float(getattr(run, name)) for run in self.runs]

    @property
    def placed_bytes(self) -> float:
        """A token, moved in the background and not because they were predicted: the rounds' median."""
        return median(self.figures("placed_bytes_per_token"))

    def decode(self, tile_bytes: int) -> PhaseProfile:
        """What the engine counted in the decode of all rounds."""
        return PhaseProfile(added(run.decode for run in self.runs), tile_bytes)


@dataclass(frozen=True)
class Report:
    """`config`: what ran and on what, as the JSON object has it."""

    config: dict[str, Any]
    entries: Sequence[Entry]
    emulation: str
    left_out: Sequence[Entry] = ()  # policies that cannot run here

    @property
    def profiles(self) -> list[PhaseProfile]:
        """Of each policy's decode; none where the engine's counters are not there."""
        tile_bytes = self.config["tile_bytes"]
        counted = all(run.decode for entry in self.entries for run in entry.runs)
        return [entry.decode(tile_bytes) for entry in self.entries] if counted else []

    @property
    def model_name(self) -> str:
        """For a person."""
        model = self.config["model"]
        return "embedded model" if model == str(model_dir()) else short_name(model)

    def to_json(self) -> dict[str, Any]:
        policies = [_entry(entry, self.entries[0]) for entry in self.entries]
        for entry, plain, profile in zip(self.entries, policies, self.profiles, strict=True):
            plain["decode"] = profile_to_map(profile, entry)
        return {"config": self.config, "policies": policies, "emulation": self.emulation}

    def render(self) -> str:
        """The table and what is needed to read it: with colours for a terminal, else plain."""
        console = Console(highlight=False)
        with console.capture() as captured:
            tables: list[RenderableType] = [_table(self, console.is_terminal)]
            if profiles := self.profiles:
                tables += [Text(), why_table(self.entries, profiles, console.is_terminal)]
            console.print(Group(*tables, *self._footnotes()))
        return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"

    def _footnotes(self) -> list[Text]:
        c = self.config
        lines = [
            f"{self.model_name} on {c['device']}"
            + (f", {c['workers']} workers" if c["workers"] is not None else "")
            + f": experts {c['format']}, backbone {c['backbone_dtype']}",
            _cache(c),
            f"batch {c['batch']}: {c['prompt_len']} prompt tokens ({c['prompts']}), {c['gen_len']} new ones",
            f"{c['rounds']} rounds, the policies in turns: median, and below it least-most",
        ]
        if len(self.entries) > 1:
            lines.append(f"x: median of the rounds' ratios to {self.entries[0].request.name}")
        lines.append("MB/token: copied to the device in decode; host: share of decode's expert tiles")
        lines += legend(self.entries, self.profiles, c["prompts"])
        notes = [f"note: {note}" for entry in self.entries for note in entry.notes]
        notes += [f"note: without {entry.request.name}: {entry.left_out}" for entry in self.left_out]
        return [
            Text(),
            *(Text(line, style="dim") for line in lines),
            *(Text(line) for line in dict.fromkeys(notes)),
        ]


def _entry(entry: Entry, first: Entry) -> dict[str, Any]:
    return {
        "name": entry.request.name,
        "options": entry.request.options,
        "exact": entry.exact,
        **{
            figure: _spread(entry.figures(figure))
            for figure in ("prefill_tok_s", "decode_tok_s", "first_token_s")
        },
        "prefill_ratio": entry.ratio(first, "prefill_tok_s"),
        "decode_ratio": entry.ratio(first, "decode_tok_s"),
        **{
            figure: median(entry.figures(figure))
            for figure in ("moved_bytes", "moved_bytes_per_token", "host_share")
        },
        "notes": entry.notes,
    }


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "runs": values}


def _table(report: Report, terminal: bool) -> Table:
    title = f"emulation: {report.emulation}" if report.emulation else None
    table = Table(
        title=title,
        title_style="bold yellow",
        box=box.SIMPLE_HEAD if terminal else None,
        padding=(0, 1 if terminal else 2, 0, 0),
        show_edge=False,
        header_style="bold",
        leading=0 if terminal else 1,
    )
    several = len(report.entries) > 1
    table.add_column("policy", overflow="fold")
    for name in ("prefill\ntok/s", *("x",) * several, "first\ntoken ms", "decode\ntok/s", *("x",) * several):
        table.add_column(name, justify="right", vertical="top", no_wrap=True)
    table.add_column("MB/\ntoken", justify="right", no_wrap=True)
    table.add_column("host", justify="right", no_wrap=True)
    first = report.entries[0]
    for entry in report.entries:
        prefill, decode = ([entry.ratio(first, f"{p}_tok_s")] * several for p in ("prefill", "decode"))
        table.add_row(
            policy_name(entry.request, entry.exact),
            _cell(entry.figures("prefill_tok_s")),
            *(f"{ratio:.2f}" for ratio in prefill),
            _cell([1e3 * seconds for seconds in entry.figures("first_token_s")]),
            _cell(entry.figures("decode_tok_s"), "bold"),
            *(Text(f"{ratio:.2f}", style="bold") for ratio in decode),
            three_digits(median(entry.figures("moved_bytes_per_token")) / 1e6),
            f"{median(entry.figures('host_share')):.0%}",
        )
    return table


def _cell(values: list[float], style: str = "") -> Text:
    cell = Text(three_digits(median(values)), style=style)
    return cell.append(f"\n{three_digits(min(values))}-{three_digits(max(values))}", style="dim not bold")


def _cache(config: dict[str, Any]) -> str:
    if config["cache_tiles"] is None:
        return "expert cache: none"
    size = config["cache_tiles"] * config["tile_bytes"] / 1e6
    share = "" if config["expert_cache"] is None else f", {config['expert_cache']:.0%} of all"
    return f"expert cache: {config['cache_tiles']} tiles, {size:.1f} MB{share}"
