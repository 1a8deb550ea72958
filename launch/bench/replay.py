"""`launch.py bench --replay F`: each policy's decisions on a recorded trace of routings, and their time by
measured or published costs. No engine is started, and the checkpoint is not needed. The first texts of the
trace warm every policy alike, and only what follows is measured (`pipeline/replay/steps.py`). A policy that
places experts by how often they were used begins with the counts of the calibration; without one, with those
of the texts that warm it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType

from launch.bench.drawn import PROMPT, drawn_trace
from launch.bench.plan import requested_policies
from launch.bench.report import Figures, compared, policy_tables, routing_notes, show_tables
from launch.bench.sweep import Point, SweepReport, combinations
from launch.command_line.options import Options, axes
from launch.errors import LaunchError, WrongUsage
from launch.forecast import Sizes, calibration_of, costs_there
from launch.profile import PhaseProfile
from launch.terminal.format import count, merged_notes, model_name
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import print_json
from launch.terminal.plot import check_picture
from launch.terminal.progress import ProgressCounter
from launch.terminal.tables import print_parts
from pipeline.arrays import PHASES, Phase
from pipeline.calibration.cost_cache import measured_here
from pipeline.config import DEFAULT_CACHE
from pipeline.errors import PlanError, PolicyError, TraceError
from pipeline.memory.needs import cache_tiles
from pipeline.models.shapes import is_shape
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import MACHINES, Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.replay.machine import Replay
from pipeline.replay.steps import Overview, summarize
from pipeline.traces.synthetic import DrawnTrace
from pipeline.traces.trace import Header, Trace, TracedStep
from protocol.program import user_folder
from shm.segment import byte_size

LEFT_OUT = ("embedding", "head", "sampling", "planning", "messages", "scheduling")  # of the time
ASSUMPTION = "approximate policies are replayed on the recorded text; they might have generated another"


async def replay(options: Options, interrupts: Interrupts) -> int:
    """Run `bench --replay`. Raises WrongUsage, PolicyError, TraceError, and LaunchError for a policy that
    breaks its contract."""
    written = options.written
    if "plot" in written:
        check_picture(written["plot"])
    seed = options.config().seed
    trace, sizes = (
        drawn_trace(written["replay"], seed)
        if is_shape(written["replay"])
        else (Trace(written["replay"]), None)
    )
    overview = summarize(trace)
    points = [
        (settings, Replays.of(each, trace, sizes, overview)) for settings, each in combinations(options)
    ]
    runs = sum(len(replays.running) for _, replays in points)
    if "sweep" in written:
        steps = sum(overview.steps.values())
        notice(f"sweep: {count(len(points), 'setting')}, {count(runs, 'replay')} of {steps} steps at once")
    with ProgressCounter("replay: steps", sum(overview.steps.values())) as bar:
        for step in trace.steps():
            for _, replays in points:
                replays.step(step)
                await asyncio.sleep(0)  # lets the event loop handle a Ctrl-C
            bar.count()
    for _, replays in points:
        replays.finish()
    report: Replays | SweepReport = points[0][1]
    if "sweep" in written:
        report = SweepReport(axes(written), [Point(*each) for each in points])
    if "json" in written:
        print_json(report.to_json())
    else:
        print_parts(*report.parts())
    if isinstance(report, SweepReport) and "plot" in written:
        report.draw(written["plot"])
    return 0


class Result(NamedTuple):
    """The replay of one policy."""

    request: PolicyRequest
    exact: bool
    notes: list[str]
    profiles: dict[Phase, PhaseProfile]


@dataclass
class Replays:
    """Replays of one setting, and their report; they advance together, so that the trace is read once."""

    trace: Trace | DrawnTrace
    overview: Overview
    capacity: int  # tiles
    costs: Costs
    costs_of: str
    calibration: Calibration | None
    skip_unable: bool
    running: list[tuple[PolicyRequest, Replay]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # policy: reason
    results: list[Result] = field(default_factory=list)

    @classmethod
    def of(
        cls, options: Options, trace: Trace | DrawnTrace, sizes: Sizes | None, overview: Overview
    ) -> Replays:
        """Replays of the policies, none of which has seen a step. `sizes`: of the model, where the trace is
        drawn. Raises WrongUsage, PolicyError."""
        config, written = options.config(), options.written
        requests = requested_policies(options, config.seed)
        header, shape = trace.header, trace.header.shape
        costs, costs_of = _costs(header, config.costs, sizes)
        share = DEFAULT_CACHE if config.expert_cache is None else config.expert_cache
        replays = cls(
            trace,
            overview,
            cache_tiles(share, shape.layers * shape.experts * shape.tiles),
            costs.for_tiles(shape.tiles),
            costs_of,
            calibration := calibration_of(header, overview.first),
            skip_unable="policy" not in written,
        )
        counts = overview.counts if calibration is None else calibration.decode_counts
        for request in requests:
            with replays.guarded(request):
                policy = make_policy(request, config.seed)
                machine = Replay(
                    *(header, policy, replays.costs, replays.capacity),
                    calibration=calibration,
                    popularity=counts,
                    last_steps=overview.last_steps,
                    begin=overview.begin,
                )
                replays.running.append((request, machine))
        return replays

    def step(self, step: TracedStep) -> None:
        for request, machine in list(self.running):
            with self.guarded(request):
                machine.step(step)

    def finish(self) -> None:
        """Take the outcomes. Raises WrongUsage where no policy is left."""
        if not self.running:
            raise WrongUsage(f"no policy can be replayed here: {'; '.join(self.left_out.values())}")
        self.results = [self._result(*each) for each in self.running]

    def _result(self, request: PolicyRequest, machine: Replay) -> Result:
        outcome, size = machine.outcome, self.trace.header.tile_bytes
        profiles = {phase: PhaseProfile(outcome.measured[phase], size) for phase in PHASES}
        return Result(request, outcome.exact, outcome.notes, profiles)

    @contextmanager
    def guarded(self, request: PolicyRequest) -> Iterator[None]:
        """Leaves out a policy that cannot be replayed, if allowed. Raises LaunchError for a PlanError."""
        try:
            yield
        except PlanError as e:
            raise LaunchError(f"policy {request.name} cannot be replayed: {e}") from e
        except (PolicyError, TraceError) as e:
            if not self.skip_unable:
                raise
            self.left_out[request.label] = str(e)
            self.running = [item for item in self.running if item[0] is not request]

    def to_json(self) -> dict[str, Any]:
        header, seen = self.trace.header, self.overview
        shape = header.shape
        config = {
            "trace": str(self.trace.path),
            "model": header.model,
            "layers": shape.layers,
            "experts": shape.experts,
            "tiles": shape.tiles,
            "top_k": shape.top_k,
            "tile_bytes": header.tile_bytes,
            "steps": dict(seen.steps),
            "tokens": dict(seen.measured),
            "warming": {phase: seen.rows[phase] - rows for phase, rows in seen.measured.items()},
            "cut_short": seen.cut_short,
            "time_leaves_out": self._left_out,
            "cache_tiles": self.capacity,
            "calibrated": self.calibration is not None,
            "costs": self.costs.to_json() | {"of": self.costs_of},
        }
        policies = [self._to_map(result) for result in self.results]
        left_out = [{"name": name, "reason": reason} for name, reason in self.left_out.items()]
        return {"config": config, "policies": policies, "left_out": left_out}

    def _to_map(self, result: Result) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "name": result.request.name,
            "options": result.request.options,
            "exact": result.exact,
            "notes": [*result.notes, *routing_notes(self.trace.header.model)],
        }
        if not result.exact:
            plain["assumption"] = ASSUMPTION
        return plain | {name: self._phase(name, profile) for name, profile in result.profiles.items()}

    def _phase(self, name: Phase, profile: PhaseProfile) -> dict[str, Any]:
        plain, shares = profile.to_map(), profile.shares
        plain["bytes_per_token"]["moved"] = profile.copied_per_token
        return plain | {
            "steps": profile.steps,
            "tokens": profile.rows,
            "seconds": profile.seconds,
            "tok_s": profile.tok_s or 0.0,
            "host_share": profile.host_share,
            "busy": {  # work is booked when it is sent, and may go on in the next phase
                **{"host": profile.host_busy, "device": profile.device_busy, "link": profile.link_busy},
            },
            "waits": {"link": shares["link"], "host": shares["workers"]},
            "fidelity": profile.fidelity,
            "ratio": self._ratio(name, profile),
        }

    def _ratio(self, name: Phase, profile: PhaseProfile) -> float | None:
        """Returns the speed relative to the first policy."""
        mine, first = profile.tok_s, self.results[0].profiles[name].tok_s
        return mine / first if mine and first else None

    @property
    def _left_out(self) -> tuple[str, ...]:
        """Returns what the simulated time does not contain."""
        return LEFT_OUT if any(self.costs.other) else ("attention", *LEFT_OUT)

    @property
    def figures(self) -> list[Figures]:
        several = len(self.results) > 1
        rows = []
        for result in self.results:
            prefill, decode = result.profiles["prefill"], result.profiles["decode"]
            rows.append(
                Figures(
                    *(result.request, result.exact, decode),
                    prefill=[prefill.tok_s] if prefill.tok_s else [],
                    decode=[decode.tok_s] if decode.tok_s else [],
                    prefill_ratio=self._ratio("prefill", prefill) if several else None,
                    decode_ratio=self._ratio("decode", decode) if several else None,
                )
            )
        return rows

    @property
    def without(self) -> list[str]:
        """A line for each policy that cannot be replayed here."""
        return [f"{name} left out: {reason}" for name, reason in self.left_out.items()]

    def parts(self) -> Iterator[RenderableType]:
        """The report as text."""
        rows = self.figures
        notes = [
            *routing_notes(self.trace.header.model),
            *[ASSUMPTION] * (not all(row.exact for row in rows)),
        ]
        notes += ["the file ends within a step; that step is left out"] * self.overview.cut_short
        notes += merged_notes((result.request.name, result.notes) for result in self.results)
        return show_tables(policy_tables(rows), [*self.about, *compared(rows)], [*notes, *self.without])

    @property
    def about(self) -> list[str]:
        """Returns lines about the trace and its costs."""
        header, seen = self.trace.header, self.overview
        shape = header.shape
        every = shape.layers * shape.experts * shape.tiles
        size = byte_size(self.capacity * header.tile_bytes)
        drawn = "drawn" if isinstance(self.trace, DrawnTrace) else "recorded"
        return [
            f"{model_name(header.model, article='')}, {shape.layers} x {shape.experts} experts of"
            f" {count(shape.tiles, 'tile')}; {drawn}: {count(seen.measured['prefill'], 'token')} of prefill,"
            f" {seen.measured['decode']} of decode, behind"
            f" {sum(seen.rows.values()) - sum(seen.measured.values())} that warm every policy",
            f"expert cache: {self.capacity} of {every} tiles, {size}",
            f"costs: {self.costs_of}",
            "tok/s: of the layers alone, simulated; an engine is slower, because this leaves out"
            f" {', '.join(self._left_out)}",
        ]


def _costs(header: Header, asked: Path | None, sizes: Sizes | None) -> tuple[Costs, str]:
    """The costs, and their origin in words. Raises PolicyError, WrongUsage."""
    if asked is not None:
        if sizes is not None and str(asked) in MACHINES and not asked.exists():
            return costs_there(MACHINES[str(asked)], sizes, PROMPT), f"derived from the rates of {asked}"
        return Costs.load(asked), str(asked)
    for _, record in measured_here(user_folder("CACHE")):
        if record.setting.store == header.store and record.tiles == header.shape.tiles:
            emulated = f" ({record.setting.emulation})" if record.setting.emulation else ""
            return record.costs, f"measured on this machine, {record.setting.device}{emulated}"
    raise WrongUsage(
        "bench --replay: no costs of this model were measured on this machine; give --costs FILE, or"
        " --costs daop-table-1, which was published for Mixtral-8x7B"
    )
