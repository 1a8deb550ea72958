"""What a replay found, as one JSON object or as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from launch.bench.why import policy_name
from launch.terminal.format import three_digits
from pipeline.assets import model_dir
from pipeline.models.shapes import short_name
from pipeline.policies.costs import Costs
from pipeline.policies.view import PolicyRequest
from pipeline.replay.outcome import Outcome, PhaseOutcome
from pipeline.replay.overview import Overview
from pipeline.traces.header import Header

ASSUMPTION = "approximate policies are replayed as if the text had stayed the same under them"


@dataclass(frozen=True)
class Entry:
    """One policy's replay."""

    request: PolicyRequest
    outcome: Outcome


@dataclass(frozen=True)
class Settings:
    """What all policies were replayed with."""

    path: Path  # of the trace
    capacity: int  # tiles
    costs: Costs  # per tile
    costs_of: str  # whose they are, in words
    calibrated: bool


@dataclass(frozen=True)
class Report:
    """`left_out`: policies that cannot be replayed here, and why."""

    header: Header
    overview: Overview
    settings: Settings
    entries: Sequence[Entry]
    left_out: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        header, seen = self.header, self.overview
        shape = header.shape
        config = {
            "trace": str(self.settings.path),
            "model": header.model,
            "layers": shape.layers,
            "experts": shape.experts,
            "tiles": shape.tiles,
            "top_k": shape.top_k,
            "tile_bytes": header.tile_bytes,
            "steps": dict(seen.steps),
            "tokens": dict(seen.rows),
            "cut_short": seen.cut_short,
            "cache_tiles": self.settings.capacity,
            "calibrated": self.settings.calibrated,
            "costs": self.settings.costs.to_json() | {"of": self.settings.costs_of},
        }
        policies = [self._entry(entry) for entry in self.entries]
        left_out = [{"name": name, "reason": reason} for name, reason in self.left_out.items()]
        return {"config": config, "policies": policies, "left_out": left_out}

    def _entry(self, entry: Entry) -> dict[str, Any]:
        outcome = entry.outcome
        plain: dict[str, Any] = {
            "name": entry.request.name,
            "options": entry.request.options,
            "exact": outcome.exact,
            "notes": outcome.notes,
        }
        if not outcome.exact:
            plain["assumption"] = ASSUMPTION
        for name, phase in outcome.phases.items():
            ratio = _ratio(phase, self.entries[0].outcome.phases[name])
            plain[name] = phase.to_json(self.header.tile_bytes) | {"ratio": ratio}
        return plain

    def render(self) -> str:
        """The tables and what is needed to read them: with colours for a terminal, else plain."""
        console = Console(highlight=False)
        with console.capture() as captured:
            tables = (self._speeds(console.is_terminal), Text(), self._reasons(console.is_terminal))
            console.print(Group(*tables, *self._footnotes()))
        return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"

    def _speeds(self, terminal: bool) -> Table:
        table = _table(terminal)
        several = len(self.entries) > 1
        for name in ("prefill\ntok/s", *("x",) * several, "decode\ntok/s", *("x",) * several):
            table.add_column(name, justify="right", no_wrap=True)
        for name in ("hits", f"{self._unit[0]}/\ntoken", "host"):
            table.add_column(name, justify="right", no_wrap=True)
        first = self.entries[0].outcome
        for entry in self.entries:
            prefill, decode = entry.outcome.prefill, entry.outcome.decode
            table.add_row(
                policy_name(entry.request, entry.outcome.exact),
                _speed(prefill),
                *(_times(prefill, first.prefill),) * several,
                Text(_speed(decode), style="bold"),
                *(Text(_times(decode, first.decode), style="bold"),) * several,
                f"{decode.hit_rate:.0%}",
                self._bytes(decode, decode.moved),
                f"{decode.host_share:.0%}",
            )
        return table

    def _reasons(self, terminal: bool) -> Table:
        """What decode's time went into, and what became of predictions, if there were any."""
        table = _table(terminal)
        predicts = any(e.outcome.decode.predicted or e.outcome.decode.late for e in self.entries)
        names = ["host\nbusy", "dev.\nbusy", "link\nbusy", "wait\nlink", "wait\nhost"]
        names += ["pre-\ndicted", "use-\nful", "late", "was-\nted"] * predicts
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for entry in self.entries:
            decode = entry.outcome.decode
            plain = decode.to_json(self.header.tile_bytes)
            cells = [f"{share:.0%}" for share in (*plain["busy"].values(), *plain["waits"].values())]
            brought = (decode.predicted, decode.useful, decode.late, decode.wasted)
            cells += [self._bytes(decode, tiles) for tiles in brought] * predicts
            table.add_row(Text(entry.request.name, style="bold"), *cells)
        return table

    @property
    def _unit(self) -> tuple[str, float]:
        """For bytes a token: small models move little."""
        decodes = [entry.outcome.decode for entry in self.entries]
        most = max(d.moved * self.header.tile_bytes / max(d.rows, 1) for d in decodes)
        return ("MB", 1e6) if most >= 1e6 else ("kB", 1e3)

    def _bytes(self, phase: PhaseOutcome, tiles: int) -> str:
        return three_digits(tiles * self.header.tile_bytes / max(phase.rows, 1) / self._unit[1])

    def _footnotes(self) -> list[Text]:
        header, seen, shape = self.header, self.overview, self.header.shape
        model = "embedded model" if header.model == str(model_dir()) else short_name(header.model)
        every = shape.layers * shape.experts * shape.tiles
        size = self.settings.capacity * header.tile_bytes / 1e6
        plural = "s" * (shape.tiles > 1)
        lines = [
            f"{model}, {shape.layers} x {shape.experts} experts of {shape.tiles} tile{plural},"
            f" {seen.rows['prefill']} prompt and {seen.rows['decode']} new tokens recorded",
            f"expert cache: {self.settings.capacity} of {every} tiles, {size:.1f} MB",
            f"costs: {self.settings.costs_of}",
        ]
        if len(self.entries) > 1:
            lines.append(f"x: ratio to {self.entries[0].request.name}")
        lines += [
            "of decode: hits: used experts that were resident; host: share of the tiles;",
            f"busy, wait: shares of the time; predicted and after: {self._unit[0]}/token",
        ]
        inexact = [entry for entry in self.entries if not entry.outcome.exact]
        lines += [_fidelity(entry) for entry in inexact]
        notes = [ASSUMPTION] * bool(inexact)
        notes += ["the file ends within a step, which is left out"] * seen.cut_short
        notes += [note for entry in self.entries for note in entry.outcome.notes]
        notes += [f"without {name}: {reason}" for name, reason in self.left_out.items()]
        return [
            Text(),
            *(Text(line, style="dim") for line in lines),
            *(Text(f"note: {note}") for note in dict.fromkeys(notes)),
        ]


def _fidelity(entry: Entry) -> str:
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in entry.outcome.decode.shares().items())
    return f"{entry.request.name}, of the routed weight: {shares}"


def _table(terminal: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD if terminal else None,
        padding=(0, 0 if terminal else 1, 0, 0),
        show_edge=False,
        header_style="bold",
    )
    table.add_column("policy", overflow="fold")
    return table


def _speed(phase: PhaseOutcome) -> str:
    return three_digits(phase.tok_s) if phase.seconds else "-"


def _times(phase: PhaseOutcome, first: PhaseOutcome) -> str:
    ratio = _ratio(phase, first)
    return "-" if ratio is None else f"{ratio:.2f}"


def _ratio(phase: PhaseOutcome, first: PhaseOutcome) -> float | None:
    return phase.tok_s / first.tok_s if phase.seconds and first.seconds else None
