"""A short run of the model on this machine: its routing, and what its layers take.

The engine's probe measures tiles alone; a step's tiles are colder, and threads have to be woken. So two
presets are run, one with everything on the host and one with everything on the device, and the costs are
changed so that a replay of each takes as long as the run did. Other presets are predicted from those.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.advise.estimate import Estimate, Setting, estimate
from launch.advise.hardware import Priced
from launch.advise.routing import RecordedText
from launch.advise.sizes import Sizes
from launch.bench.prompts import Prompt, make_prompts, read_other_texts
from launch.bench.run import Run, measure, warm_up
from launch.command_line.options import Options
from launch.connect.session import connected
from launch.phase_profile import PhaseProfile
from launch.terminal.interrupts import Interrupts
from pipeline.policies.costs import Costs
from pipeline.policies.view import PolicyRequest
from protocol.client import Client

HOST, DEVICE = PolicyRequest("all-host"), PolicyRequest("on-demand")
PROBES = "fiddler"  # needs costs: setting it makes the engine measure them
WARM, NEW = 40, 48  # tokens of an answer: before a measured one, and measured
RUNS = 2  # of each preset; the faster counts: other load of the machine only adds to the time
ROUNDS = 12  # of the search for the link's seconds
SLOWEST_LINK = 4.0  # times the probe's seconds
# Options of the command that its engines take as well.
OF_ENGINE = {"model", "format", "backbone_dtype", "device", "expert_cache", "tile", "workers", "context"}
OF_ENGINE |= {"kv_tokens", "chunk", "graphs", "link_gbps", "host_slowdown"}
OF_ENGINE |= {"seed", "log_level", "record"}


@dataclass(frozen=True)
class Ran:
    """One preset's run."""

    request: PolicyRequest
    prompt: int  # tokens
    run: Run

    @property
    def profile(self) -> PhaseProfile:
        """Of decode; without bytes."""
        return PhaseProfile(self.run.decode, 1)

    @property
    def rows(self) -> float:
        """Of a step."""
        return self.profile.rows / max(self.profile.steps, 1)

    @property
    def step(self) -> float:
        """Seconds of a step of decode, as a client sees it."""
        return self.rows / self.run.decode_tok_s

    def seconds(self, *causes: str) -> float:
        """Of a step."""
        return sum(self.profile.causes[cause] for cause in causes) / max(self.profile.steps, 1)


@asynccontextmanager
async def engine(options: Options, interrupts: Interrupts, **changes: Any) -> AsyncIterator[Client]:
    """A client of an engine of its own with the command's options and these. Raises as its start."""
    written = {name: value for name, value in options.written.items() if name in OF_ENGINE}
    async with connected(Options("bench", written | changes), interrupts) as client:
        yield client


async def record(client: Client, path: Path, prompt: int) -> None:
    """Have an engine that records into `path` read other texts, then answer two prompts: the first answer is
    the history, the second the text that counts. Raises RequestFailed."""
    await read_other_texts(client, 0)
    for each in reversed(await make_prompts(client, 2, prompt, 0)):
        await warm_up(client, [each], NEW)


async def run_presets(client: Client, requests: Sequence[PolicyRequest], prompt: int) -> list[Ran]:
    """Each preset's run behind a warm-up, on the placement by the use of other texts. Raises Disturbed,
    RequestFailed, WrongUsage."""
    await client.set_policy(HOST.name, {})
    await read_other_texts(client, 0)
    measured, other = await make_prompts(client, 2, prompt, 0)
    found = []
    for request in requests:
        await client.set_policy(request.name, request.options, counted=False)
        runs = [await _run(client, measured, other) for _ in range(RUNS)]
        found.append(Ran(request, prompt, max(runs, key=lambda run: run.decode_tok_s)))
    return found


async def _run(client: Client, measured: Prompt, other: Prompt) -> Run:
    await warm_up(client, [other], WARM)
    run, _ = await measure(client, [measured], NEW)
    return run


async def probed_costs(client: Client) -> Costs:
    """The costs that this engine measured. Raises RequestFailed, PolicyError."""
    await client.set_policy(PROBES, {}, counted=False)
    found: Any = (await client.stats())["costs"]
    return Costs.from_json(found)


def fitted(probed: Costs, host: Ran, device: Ran, sizes: Sizes, cache: int, text: RecordedText) -> Priced:
    """The costs with which replays of the two runs take as long as these did: in `host` nothing was computed
    on the device, in `device` everything, with a cache of `cache` tiles. A preset plans in a replay as it
    does in an engine, where that takes longer: as many times as in `device`."""
    layers, rows = sizes.header.shape.layers, max(1, round(host.rows))
    rest = device.step - device.seconds("workers", "link", "device", "attention")  # planning, head, transport
    other = min(host.seconds("attention"), device.seconds("attention")) / layers
    busy = host.run.decode["host_busy_s"] / max(host.profile.steps, 1)

    def replayed(ran: Ran, costs: Costs, rest: float) -> Estimate:
        setting = Setting(ran.request, sizes.format, 0 if ran is host else cache, 0.0)
        return estimate(setting, sizes, Priced(costs, rest), text, ran.prompt, seed=0)

    planned = replayed(device, probed, rest).replayed
    planning = device.seconds("planning") / planned if planned else 0.0
    rest_of_host = max(0.0, rest + planning * (replayed(host, probed, rest).replayed - planned))
    costs = replace(
        probed,
        host=_scaled(probed.host, busy / _tiles(host), probed.host_seconds(rows, 1)),
        device=_scaled(
            probed.device, device.seconds("device") / _tiles(device), probed.device_seconds(rows, 1)
        ),
        other=_scaled(probed.other, other, probed.other_seconds(rows)),
        # of a layer under all-host what is neither attention nor the workers' computing
        round_trip=max(0.0, (host.step - rest_of_host - busy) / layers - other),
        launch=0.0,  # it is among the seconds of the device's tiles
    )
    low, high = 0.0, SLOWEST_LINK * probed.link
    for _ in range(ROUNDS):
        link = (low + high) / 2
        slower = replayed(device, replace(costs, link=link), rest).tok_s < device.run.decode_tok_s
        low, high = (low, link) if slower else (link, high)
    costs = replace(costs, link=(low + high) / 2)
    first = replayed(host, costs, rest_of_host).first_token_s
    prefill = 0.0 if first is None else max(0.0, host.run.first_token_s - first)
    return Priced(costs, rest, prefill, "measured by a short run here", planning, planned)


def _tiles(ran: Ran) -> float:
    """Of a step."""
    return max(1.0, ran.profile.tiles / max(ran.profile.steps, 1))


def _scaled(values: Sequence[float], measured: float, probed: Any) -> tuple[float, ...]:
    """The values of all row counts, so many times as large as the one that was measured."""
    factor = measured / float(probed) if probed else 1.0
    return tuple(value * factor for value in values)
