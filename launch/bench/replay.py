"""`launch.py bench --replay F`: what each policy would have done with the routing of a recorded run, and how
long that takes by measured or published costs. No engine is started, and the model need not be there.

A policy that places experts by how often they were used begins with the counts of the calibration, as those
do that ask for one; where there is none, with those of the whole trace, as in `bench`, where it has seen the
prompts in earlier turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.bench.plan import requested_policies
from launch.bench.replay_report import Entry, Report, Settings
from launch.command_line.options import Options
from launch.errors import LaunchError, WrongUsage
from launch.processes.runtime import cache_root
from launch.terminal.interrupts import Interrupts
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
from pipeline.replay.overview import look_over
from pipeline.traces.header import Header
from pipeline.traces.reader import Trace

log = logging.getLogger("tandem")


async def replay(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage, PolicyError, TraceError, and LaunchError for a policy that breaks its contract."""
    config, written = options.config(), options.written
    requests = requested_policies(options, config.seed)
    trace = Trace(written["replay"])
    header, shape = trace.header, trace.header.shape
    costs, costs_of = _costs(header, config.costs)
    costs = costs.for_tiles(shape.tiles)
    overview = look_over(trace)
    share = DEFAULT_CACHE if config.expert_cache is None else config.expert_cache
    capacity = cache_tiles(share, shape.layers * shape.experts * shape.tiles)
    calibration = _calibration(header, overview.first)

    def begin(request: PolicyRequest) -> Replay:
        policy = make_policy(request, config.seed)
        counts = overview.counts if calibration is None else calibration.decode_counts
        return Replay(header, policy, costs, capacity, calibration=calibration, popularity=counts)

    runs = Runs(keep_going="policy" not in written)
    for request in requests:
        with runs.guarded(request):
            runs.machines.append((request, begin(request)))
    with ProgressCounter("replay: steps", sum(overview.steps.values())) as bar:
        for step in trace.steps():
            for request, machine in list(runs.machines):
                with runs.guarded(request):
                    machine.step(step)
            bar.count()
            await asyncio.sleep(0)  # a Ctrl-C is taken in here
    if not runs.machines:
        raise WrongUsage(f"no policy can be replayed here: {'; '.join(runs.left_out.values())}")
    entries = [Entry(request, machine.outcome) for request, machine in runs.machines]
    settings = Settings(trace.path, capacity, costs, costs_of, calibration is not None)
    report = Report(header, overview, settings, entries, runs.left_out)
    if "json" in written:
        print_json(report.to_json())
    else:
        show(report.render())
    return 0


@dataclass
class Runs:
    """The policies under way, step by step together, so that the trace is read once. With `keep_going` one
    that cannot run here is left out."""

    keep_going: bool
    machines: list[tuple[PolicyRequest, Replay]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # policies, and why

    @contextmanager
    def guarded(self, request: PolicyRequest) -> Iterator[None]:
        """For what one policy does. Raises its PolicyError or TraceError unless it can be left out, and
        LaunchError where it breaks its contract."""
        try:
            yield
        except PlanError as e:
            raise LaunchError(f"policy {request.name} cannot be replayed: {e}") from e
        except (PolicyError, TraceError) as e:
            if not self.keep_going:
                raise
            self.left_out[request.name] = str(e)
            self.machines = [item for item in self.machines if item[0] is not request]


def _costs(header: Header, asked: Path | None) -> tuple[Costs, str]:
    """The costs, and whose they are, for a person. Raises PolicyError for a file that cannot be used, and
    WrongUsage where none was given and none were measured."""
    if asked is not None:
        return Costs.load(asked), str(asked)
    for _, record in measured_here(cache_root()):
        if record.setting.store == header.store and record.tiles == header.shape.tiles:
            emulated = f" ({record.setting.emulation})" if record.setting.emulation else ""
            return record.costs, f"measured on this machine, {record.setting.device}{emulated}"
    raise WrongUsage(
        "bench --replay: no costs of this model were measured on this machine; give --costs FILE, or"
        " --costs daop-table-1, which was published for Mixtral-8x7B"
    )


def _calibration(header: Header, first: bool) -> Calibration | None:
    """The model's, where it has been calibrated on this machine; without the gate for the next token's first
    layer where the trace has nothing of it. One that cannot be used is as good as none, and that is said."""
    path = cache_root() / header.fingerprint / NAME
    if not path.exists():
        return None
    try:
        found = load(path)
    except CalibrationError as e:
        log.warning(f"warning: {e}")
        return None
    if found.decode_counts.shape != (header.shape.layers, header.shape.experts):
        raise WrongUsage(f"{path} is the calibration of a model of another shape than the trace's")
    return found if first else replace(found, first_gate=None)
