"""A short run of the model on this machine: its routing, and what its layers take.

The engine's probe measures tiles alone; a step's tiles are colder, and threads have to be woken. So two
presets are run, one with everything on the host and one with everything on the device, and the costs are
changed so that a replay of each takes as long as the run did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.advise.estimate import Setting, estimate
from launch.advise.hardware import Priced
from launch.advise.routing import RecordedText
from launch.advise.sizes import Sizes
from launch.bench.prompts import Prompt, make_prompts
from launch.bench.run import Run, measure, warm_up
from launch.phase_profile import PhaseProfile
from pipeline.policies.costs import Costs
from pipeline.policies.view import PolicyRequest
from protocol.client import Client

HOST, DEVICE = "all-host", "on-demand"
PROBES = "fiddler"  # needs costs: setting it makes the engine measure them
ROUNDS = 12  # of the search for the link's seconds


@dataclass(frozen=True)
class Ran:
    """One preset's run."""

    request: PolicyRequest
    run: Run

    @property
    def step(self) -> float:
        """Seconds of a step of decode, as a client sees it."""
        return self.rows / self.run.decode_tok_s

    @property
    def rows(self) -> float:
        return self.profile.rows / max(self.profile.steps, 1)

    @property
    def profile(self) -> PhaseProfile:
        return PhaseProfile(self.run.decode, 1)

    def seconds(self, *causes: str) -> float:
        """Of a step."""
        return sum(self.profile.causes[cause] for cause in causes) / max(self.profile.steps, 1)


async def run_presets(
    client: Client, requests: Sequence[PolicyRequest], prompt: int, warm: int, tokens: int, batch: int, seed: int
) -> list[Ran]:
    """Each preset's run after a warm-up. Raises Disturbed, RequestFailed, WrongUsage."""
    prompts = await make_prompts(client, 2 * batch, prompt, seed)
    return [await _ran(client, each, prompts[:batch], prompts[batch:], warm, tokens) for each in requests]


async def _ran(
    client: Client,
    request: PolicyRequest,
    prompts: Sequence[Prompt],
    others: Sequence[Prompt],
    warm: int,
    tokens: int,
) -> Ran:
    await client.set_policy(request.name, request.options, counted=False)
    await warm_up(client, others, warm)
    run, _ = await measure(client, prompts, tokens)
    return Ran(request, run)


async def probed_costs(client: Client) -> Costs:
    """The costs that this engine measured. Raises RequestFailed, PolicyError."""
    await client.set_policy(PROBES, {}, counted=False)
    found: Any = (await client.stats())["costs"]
    return Costs.from_json(found)


def fitted(
    probed: Costs, host: Ran, device: Ran, sizes: Sizes, text: RecordedText, capacity: int, prompt: int, seed: int
) -> Priced:
    """The costs with which replays of the two runs take as long as these did. `capacity`: tiles of the second
    run's cache."""
    shape = sizes.header.shape
    layers, top_k = shape.layers, shape.top_k
    own = device.step - device.seconds("workers", "link", "device", "attention")  # planning, head, transport
    other = min(host.seconds("attention"), device.seconds("attention")) / layers
    tiles = device.profile.tiles / max(device.profile.steps, 1)
    on_device = device.seconds("device") / tiles if tiles else 0.0
    rows = max(1, round(host.rows))
    # of a layer under all-host: the rest is the exchange and the workers' tiles
    share = (host.step - own) / layers - other
    busy = host.run.decode["host_busy_s"] / max(host.profile.steps, 1) / layers
    on_host = busy / (host.profile.tiles / max(host.profile.steps, 1) / layers)
    del top_k
    costs = replace(
        probed,
        host=_scaled(probed.host, on_host / float(probed.host_seconds(rows, 1))),
        device=_scaled(probed.device, on_device / max(1e-12, float(probed.device_seconds(rows, 1)))),
        other=_scaled(probed.other, other / max(1e-12, float(probed.other_seconds(rows)))),
        round_trip=max(0.0, share - busy),
    )
    setting = Setting(device.request, sizes.format, capacity, 0.0)
    low, high = 0.0, 4.0
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        priced = Priced(replace(costs, link=probed.link * middle), own)
        found = estimate(setting, sizes, priced, text, prompt, seed)
        low, high = (middle, high) if found.tok_s > device.rows / device.step else (low, middle)
    return Priced(replace(costs, link=probed.link * (low + high) / 2), own, own, "measured here")


def _scaled(values: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(value * factor for value in values)
