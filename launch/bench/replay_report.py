"""The report of a replay, as one JSON object or as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.bench.profile_table import policy_name, routing_notes
from launch.bench.result import merged_notes
from launch.terminal.format import MISSING, alike, count, model_name, percent, three_digits
from launch.terminal.tables import make_table, render
from pipeline.arrays import Phase
from pipeline.policies.costs import Costs
from pipeline.policies.view import PolicyRequest
from pipeline.replay.outcome import Outcome, PhaseOutcome
from pipeline.replay.overview import Overview
from pipeline.traces.header import Header
from shm.segment import byte_size

LEFT_OUT = ("embedding", "head", "sampling", "planning", "messages", "scheduling")  # of the time
ASSUMPTION = "approximate policies are replayed on the recorded text; they might have generated another"


@dataclass(frozen=True)
class Result:
    request: PolicyRequest
    outcome: Outcome


@dataclass(frozen=True)
class Report:
    """All policies' outcomes, and the settings that they were replayed with."""

    path: Path  # of the trace
    header: Header
    overview: Overview
    capacity: int  # tiles
    costs: Costs  # per tile
    costs_of: str  # where they come from, in words
    here: bool  # they were measured on this machine, like the steps' rest
    calibrated: bool
    results: Sequence[Result]
    left_out: Mapping[str, str]  # policy: why it cannot be replayed here

    def to_json(self) -> dict[str, Any]:
        header, seen = self.header, self.overview
        shape = header.shape
        config = {
            "trace": str(self.path),
            "model": header.model,
            "layers": shape.layers,
            "experts": shape.experts,
            "tiles": shape.tiles,
            "top_k": shape.top_k,
            "tile_bytes": header.tile_bytes,
            "steps": dict(seen.steps),
            "tokens": dict(seen.rows),
            "cut_short": seen.cut_short,
            "time_leaves_out": self._left_out,
            "cache_tiles": self.capacity,
            "calibrated": self.calibrated,
            "costs": self.costs.to_json() | {"of": self.costs_of},
        }
        policies = [self._to_map(result) for result in self.results]
        left_out = [{"name": name, "reason": reason} for name, reason in self.left_out.items()]
        return {"config": config, "policies": policies, "left_out": left_out}

    def _to_map(self, result: Result) -> dict[str, Any]:
        outcome = result.outcome
        plain: dict[str, Any] = {
            "name": result.request.name,
            "options": result.request.options,
            "exact": outcome.exact,
            "notes": outcome.notes,
        }
        if not outcome.exact:
            plain["assumption"] = ASSUMPTION
        for name, phase in outcome.phases.items():
            ratio = _ratio(phase, self.results[0].outcome.phases[name])
            rest, whole = self._rest(name), self._whole(name, phase)
            plain[name] = phase.to_json(self.header.tile_bytes)
            plain[name] |= {"ratio": ratio, "rest_s_per_step": rest, "whole_tok_s": whole}
        plain["notes"] = [*outcome.notes, *routing_notes(self.header.model)]
        return plain

    @property
    def _left_out(self) -> tuple[str, ...]:
        """What the simulated time does not contain."""
        return LEFT_OUT if any(self.costs.other) else ("attention", *LEFT_OUT)

    def _rest(self, phase: Phase) -> float | None:
        """Seconds a step that were measured while recording and are not simulated; None for another machine's
        costs, and where they were not measured."""
        return self.overview.rest[phase] if self.here else None

    def _whole(self, name: Phase, phase: PhaseOutcome) -> float | None:
        """Estimated tokens a second of an engine: the simulated time and the rest."""
        rest = self._rest(name)
        return None if rest is None or not phase.rows else phase.rows / (phase.seconds + phase.steps * rest)

    def render(self) -> str:
        return render(self._speeds(), "", self._reasons(), "", *self._footnotes())

    def _speeds(self) -> Table:
        several = len(self.results) > 1
        whole = self._rest("decode") is not None
        names = ("prefill,\nlayers", *("x",) * several, "decode,\nlayers", *("x",) * several)
        partial = any(d.tile_hit_rate != d.hit_rate for d in (r.outcome.decode for r in self.results))
        names += (*("whole\ntoken",) * whole, "hits", *("tile\nhits",) * partial)
        names += (f"{self._unit[0]}/\ntoken", "host")
        table = make_table("policy", numbers=names, gap=0)
        first = self.results[0].outcome
        moved = self._bytes(lambda decode: decode.moved)
        for result, bytes_moved in zip(self.results, moved, strict=True):
            prefill, decode = result.outcome.prefill, result.outcome.decode
            table.add_row(
                policy_name(result.request, result.outcome.exact),
                _speed(prefill),
                *(_times(prefill, first.prefill),) * several,
                Text(_speed(decode), style="bold"),
                *(Text(_times(decode, first.decode), style="bold"),) * several,
                *(_tok_s(self._whole("decode", decode)),) * whole,
                percent(decode.hit_rate),
                *(percent(decode.tile_hit_rate),) * partial,
                bytes_moved,
                percent(decode.host_share),
            )
        return table

    def _reasons(self) -> Table:
        """Decode's time by cause, and the predicted tiles by their use, if a policy predicts."""
        predicts = any(r.outcome.decode.wanted_experts for r in self.results)
        names = ["host\nbusy", "dev.\nbusy", "link\nbusy", "wait\nlink", "wait\nhost"]
        names += ["issued", "predicted", "useful", "late", "wasted"] * predicts
        table = make_table("policy", numbers=names, gap=0)
        uses = (attrgetter(name) for name in ("predicted", "useful", "late", "wasted"))
        brought = zip(*map(self._bytes, uses), strict=True)
        for result, bytes_brought in zip(self.results, brought, strict=True):
            decode = result.outcome.decode
            plain = decode.to_json(self.header.tile_bytes)
            cells = [percent(share) for share in (*plain["busy"].values(), *plain["waits"].values())]
            cells += [percent(decode.issued_share), *bytes_brought] * predicts
            table.add_row(policy_name(result.request, exact=True), *cells)
        return table

    @property
    def _unit(self) -> tuple[str, float]:
        """Name and size of the unit for bytes a token; kB for a small model."""
        decodes = [result.outcome.decode for result in self.results]
        most = max(d.moved * self.header.tile_bytes / max(d.rows, 1) for d in decodes)
        return ("MB", 1e6) if most >= 1e6 else ("kB", 1e3)

    def _bytes(self, tiles: Callable[[PhaseOutcome], float]) -> list[str]:
        """A column: of each result, the bytes a token of these tiles in decode."""
        size = self.header.tile_bytes / self._unit[1]
        decodes = [result.outcome.decode for result in self.results]
        return alike([tiles(decode) * size / max(decode.rows, 1) for decode in decodes])

    def _about_times(self) -> list[str]:
        rest = self._rest("decode")
        lines = [
            "layers: tok/s of the layers alone; an engine is slower, because this leaves out",
            ", ".join(self._left_out),
        ]
        if rest is None:
            why = (
                "these costs are another machine's" if not self.here else "the trace has no measurement of it"
            )
            return [*lines, f"no estimate of a whole token: {why}"]
        words = f"{1e3 * rest:.1f} ms a step, as measured while recording"
        return [*lines, f"whole token: estimated tok/s of decode with the rest too: {words}"]

    def _footnotes(self) -> list[Text]:
        header, seen, shape = self.header, self.overview, self.header.shape
        model = model_name(header.model, article="")
        every = shape.layers * shape.experts * shape.tiles
        size = byte_size(self.capacity * header.tile_bytes)
        lines = [
            f"{model}, {shape.layers} x {shape.experts} experts of {count(shape.tiles, 'tile')}; recorded:"
            f" {count(seen.rows['prefill'], 'token')} of prefill, {seen.rows['decode']} of decode",
            f"expert cache: {self.capacity} of {every} tiles, {size}",
            f"costs: {self.costs_of}",
        ]
        if len(self.results) > 1:
            lines.append(f"x: ratio to {self.results[0].request.label}")
        lines += [*self._about_times(), "hits: share of the needed experts that were resident, in decode"]
        lines += [
            "host: share of the tiles that the workers computed; busy, wait: shares of time",
            f"predicted, useful, late, wasted: {self._unit[0]}/token",
            "issued: share of the wanted prefetches (named by the prediction, and neither",
            "resident nor under way) that were ordered from the link",
        ]
        inexact = [result for result in self.results if not result.outcome.exact]
        lines += [_fidelity(result) for result in inexact]
        notes = [*routing_notes(header.model), *[ASSUMPTION] * bool(inexact)]
        notes += ["the file ends within a step; that step is left out"] * seen.cut_short
        notes += merged_notes((result.request.name, result.outcome.notes) for result in self.results)
        notes += [f"{name} left out: {reason}" for name, reason in self.left_out.items()]
        return [
            *(Text(line, style="dim") for line in lines),
            *(Text(f"note: {note}") for note in dict.fromkeys(notes)),
        ]


def _tok_s(value: float | None) -> str:
    return MISSING if value is None else three_digits(value)


def _fidelity(result: Result) -> str:
    shares = ", ".join(
        f"{kind} {percent(share, 1)}" for kind, share in result.outcome.decode.shares().items()
    )
    return f"{result.request.label}, of the routed weight: {shares}"


def _speed(phase: PhaseOutcome) -> str:
    return three_digits(phase.tok_s) if phase.seconds else MISSING


def _times(phase: PhaseOutcome, first: PhaseOutcome) -> str:
    ratio = _ratio(phase, first)
    return MISSING if ratio is None else f"{ratio:.2f}"


def _ratio(phase: PhaseOutcome, first: PhaseOutcome) -> float | None:
    return phase.tok_s / first.tok_s if phase.seconds and first.seconds else None
