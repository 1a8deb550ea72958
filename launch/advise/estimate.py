"""One setting's estimate: a preset replayed on the routing with the costs of a machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from launch.advise.hardware import Priced
from launch.advise.routing import RecordedText
from launch.advise.sizes import Sizes
from pipeline.config import FormatName
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from pipeline.replay.machine import Replay
from pipeline.replay.outcome import PhaseOutcome

HIDDEN = ("setting", "notes", "replayed")  # from `to_map`


@dataclass(frozen=True)
class Setting:
    """A preset with an expert cache, in one format."""

    policy: PolicyRequest
    format: FormatName
    capacity: int  # tiles
    share: float  # of all tiles
    workers: int | None = None  # None: the default


@dataclass(frozen=True)
class Estimate:
    """What a setting would reach. Rates and shares are of decode."""

    setting: Setting
    exact: bool
    tok_s: float
    first_token_s: float | None  # of a prompt alone; None where the routing has no prompt
    hit_rate: float
    host_share: float  # of the tiles
    moved: float  # bytes a token
    wait_link: float  # share of the time
    wait_host: float
    fidelity: dict[str, float | None]
    notes: tuple[str, ...]
    replayed: float = 0.0  # seconds that the replay itself took for a step

    def to_map(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name not in HIDDEN}
        setting = self.setting
        return {
            "policy": setting.policy.name,
            "options": setting.policy.options,
            "format": setting.format,
            "expert_cache": setting.share,
            "cache_tiles": setting.capacity,
            "workers": setting.workers,
            **plain,
            "notes": list(self.notes),
        }


def estimate(
    setting: Setting, sizes: Sizes, priced: Priced, text: RecordedText, prompt: int, seed: int
) -> Estimate:
    """`prompt`: tokens of the prompt whose first token is timed. Raises PolicyError where the preset lacks an
    input, TraceError where the routing does, PlanError."""
    policy = make_policy(setting.policy, seed)
    machine = Replay(
        *(sizes.header, policy, priced.costs, setting.capacity),
        calibration=text.calibration,
        popularity=text.counts,
        last_steps=text.last_steps,
    )
    for step in text.steps[: text.begin]:
        machine.step(step)
    warm = replace(machine.outcome.decode)  # a copy: the steps after it count
    active, hits = warm.active.copy(), warm.hits.copy()
    read = machine.outcome.prefill
    before = read.seconds, read.rows, read.steps
    replayed = 0.0
    for step in text.steps[text.begin :]:
        began = time.process_time()
        machine.step(step)
        if step.phase == "decode":
            replayed += time.process_time() - began
    outcome = machine.outcome
    decode = _since(outcome.decode, warm)
    decode.active, decode.hits = outcome.decode.active - active, outcome.decode.hits - hits
    seconds, rows, steps = (
        now - then for now, then in zip((read.seconds, read.rows, read.steps), before, strict=True)
    )
    if not rows:  # no prompt among the steps that count
        seconds, rows, steps = before
    first = None
    if rows:
        first = (seconds + steps * priced.prefill_rest) * prompt / rows
    replayed /= max(decode.steps, 1)
    whole = decode.seconds + decode.steps * priced.rest_of(replayed)
    return Estimate(
        setting=setting,
        exact=outcome.exact,
        tok_s=decode.rows / whole,
        first_token_s=first,
        hit_rate=decode.hit_rate,
        host_share=decode.host_share,
        moved=decode.moved * sizes.header.tile_bytes / max(decode.rows, 1),
        wait_link=decode.wait_link / whole,
        wait_host=decode.wait_host / whole,
        fidelity={} if outcome.exact else decode.shares(),
        notes=tuple(outcome.notes),
        replayed=replayed,
    )


def _since(now: PhaseOutcome, then: PhaseOutcome) -> PhaseOutcome:
    """The difference of the plain sums."""
    plain = {
        name: getattr(now, name) - getattr(then, name)
        for name, value in vars(then).items()
        if isinstance(value, int | float) and name != "layers"
    }
    return replace(now, **plain)
