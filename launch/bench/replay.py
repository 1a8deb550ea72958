"""`launch.py bench --replay F`: each policy's decisions on a recorded trace of routings, and their time by
measured or published costs. No engine is started, and the checkpoint is not needed. A policy that places
experts by how often they were used begins with the counts of the calibration; without one, with those of the
whole trace, as in `bench`, where it has seen the prompts in earlier rounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.bench.plan import requested_policies
from launch.bench.plot import check_picture
from launch.bench.replay_report import Report, Result
from launch.bench.sweep import combinations
from launch.bench.sweep_plot import draw_sweep
from launch.bench.sweep_report import Point, SweepReport
from launch.command_line.options import Options
from launch.command_line.sweep import axes
from launch.errors import LaunchError, WrongUsage
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import print_json, show
from launch.terminal.progress import ProgressCounter
from pipeline.calibration.cost_cache import measured_here
from pipeline.calibration.file import NAME, load
from pipeline.config import DEFAULT_CACHE
from pipeline.errors import CalibrationError, PlanError, PolicyError, TraceError
from pipeline.memory.limits import cache_tiles
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.replay.machine import Replay
from pipeline.replay.overview import Overview, summarize
from pipeline.traces.header import Header
from pipeline.traces.reader import Trace
from pipeline.traces.steps import TracedStep
from protocol.program import user_folder

log = logging.getLogger("tandem")


async def replay(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage, PolicyError, TraceError, and LaunchError for a policy that breaks its contract."""
    written = options.written
    if "plot" in written:
        check_picture(written["plot"])
    trace = Trace(written["replay"])
    overview = summarize(trace)
    points = [(settings, Replays.of(each, trace, overview)) for settings, each in combinations(options)]
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
    reports = [(settings, replays.report()) for settings, replays in points]
    found: Report | SweepReport = reports[0][1]
    if "sweep" in written:
        found = SweepReport(axes(written), [Point(*each) for each in reports])
    if "json" in written:
        print_json(found.to_json(), detail="detail" in written)
    else:
        show(found.render(), rendered=True)
    if isinstance(found, SweepReport) and "plot" in written:
        draw_sweep(found, written["plot"])
    return 0


@dataclass
class Replays:
    """Replays of one setting; all of them advance together, so that the trace is read once."""

    trace: Trace
    overview: Overview
    capacity: int  # tiles
    costs: Costs
    costs_of: str
    here: bool  # the costs were measured on this machine
    calibration: Calibration | None
    skip_unable: bool
    running: list[tuple[PolicyRequest, Replay]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # policy: reason

    @classmethod
    def of(cls, options: Options, trace: Trace, overview: Overview) -> Replays:
        """Replays of the policies, none of which has seen a step. Raises WrongUsage, PolicyError."""
        config, written = options.config(), options.written
        requests = requested_policies(options, config.seed)
        header, shape = trace.header, trace.header.shape
        costs, costs_of = _costs(header, config.costs)
        share = DEFAULT_CACHE if config.expert_cache is None else config.expert_cache
        replays = cls(
            trace,
            overview,
            cache_tiles(share, shape.layers * shape.experts * shape.tiles),
            costs.for_tiles(shape.tiles),
            costs_of,
            config.costs is None,
            calibration := _calibration(header, overview.first),
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
                )
                replays.running.append((request, machine))
        return replays

    def step(self, step: TracedStep) -> None:
        for request, machine in list(self.running):
            with self.guarded(request):
                machine.step(step)

    def report(self) -> Report:
        """Raises WrongUsage where no policy is left."""
        if not self.running:
            raise WrongUsage(f"no policy can be replayed here: {'; '.join(self.left_out.values())}")
        return Report(
            self.trace.path,
            self.trace.header,
            self.overview,
            self.capacity,
            self.costs,
            self.costs_of,
            self.here,
            self.calibration is not None,
            [Result(request, machine.outcome) for request, machine in self.running],
            self.left_out,
        )

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


def _costs(header: Header, asked: Path | None) -> tuple[Costs, str]:
    """The costs, and their origin in words. Raises PolicyError, WrongUsage."""
    if asked is not None:
        return Costs.load(asked), str(asked)
    for _, record in measured_here(user_folder("CACHE")):
        if record.setting.store == header.store and record.tiles == header.shape.tiles:
            emulated = f" ({record.setting.emulation})" if record.setting.emulation else ""
            return record.costs, f"measured on this machine, {record.setting.device}{emulated}"
    raise WrongUsage(
        "bench --replay: no costs of this model were measured on this machine; give --costs FILE, or"
        " --costs daop-table-1, which was published for Mixtral-8x7B"
    )


def _calibration(header: Header, first: bool) -> Calibration | None:
    """The model's calibration on this machine, or None; without the gate for the next token's first layer
    where the trace holds no probe for it. A damaged file is as none, with a warning."""
    path = user_folder("CACHE") / header.fingerprint / NAME
    if not path.exists():
        return None
    try:
        found = load(path)
    except CalibrationError as e:
        log.warning(f"warning: {e}")
        return None
    if found.decode_counts.shape != (header.shape.layers, header.shape.experts):
        raise WrongUsage(f"{path} calibrates a model of another shape than the trace's")
    found = replace(found, mlp_inner=None, mlp_outer=None, mlp_accuracy=None)  # traces hold no probe of them
    return found if first else replace(found, first_gate=None)
