"""What goes where before anything is loaded: what a model takes, what there is, and what is chosen of it.

An engine takes memory from two or three pools:

    memory        experts, processes, and FREE_BYTES that stay free for the rest of the machine;
                  without a GPU the slab, the KV cache and the backbone as well
    /dev/shm      experts; without a GPU the slab as well
    GPU memory    slab, KV cache, backbone, and what a step allocates

What a person gave is kept. The rest is chosen: first the most exact format that fits with a context worth
having, then the longest context, then resident experts (only a GPU has more than DEFAULT_CACHE of them),
then room for more contexts in the KV cache. Everything here is arithmetic: nothing is measured or allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, floor

from pipeline.config import (
    DEFAULT_CACHE,
    KV_CONTEXTS,
    EngineConfig,
    FormatName,
    SettledConfig,
)
from pipeline.memory.limits import STAGING_TILES, cache_tiles, choose_context, kv_budget
from pipeline.memory.needs import Needs

FREE_BYTES = 2_000_000_000  # left for the rest of the machine
SPARE_BYTES = 500_000_000  # of GPU memory, for the libraries
# By decreasing exactness. Checkpoints are in bf16, f16 or f32: bf16 is as exact as experts are ever served.
AUTOMATIC: tuple[FormatName, ...] = ("bf16", "int8", "int4", "int4-g128")
GOOD_CONTEXT = 4096  # tokens: for less than that, a less exact format is the better choice
LEAST_CONTEXT = 1024  # and less is not chosen at all
CONTEXT_STEP = 64  # the KV cache gives room in blocks of so many
CACHE_STEPS = 1000  # a cache that is chosen is a whole number of thousandths


@dataclass(frozen=True)
class Machine:
    """Bytes that can be had now. `memory`: without swapping and within the control group's limit; `gpu`: None
    where the device is cpu."""

    memory: int
    shm: int
    gpu: int | None = None


@dataclass(frozen=True)
class Pool:
    """One kind of memory: what there is of it, and what is needed for what."""

    name: str
    there: int
    parts: Mapping[str, int]

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def short(self) -> int:
        """Bytes that are missing; 0 where it fits."""
        return max(0, self.needed - self.there)


@dataclass(frozen=True)
class Plan:
    """An engine's choices and what they take. `slab`: the policy keeps experts on the device from the start;
    any other makes room for them when a policy is set that does."""

    needs: Needs
    slab: bool
    context: int
    kv_tokens: int
    expert_cache: float

    def pools(self, machine: Machine) -> tuple[Pool, ...]:
        """What is needed beside what there is. Experts in shared memory already need nothing more."""
        needs = self.needs
        new = needs.store - needs.present
        tiles = cache_tiles(self.expert_cache, needs.tiles) + STAGING_TILES if self.slab else 0
        device = {
            "slab": tiles * needs.slot,
            "KV cache": self.kv_tokens * needs.kv_token,
            "backbone": needs.backbone + self.context * needs.position,
        }
        rest = {"processes": needs.processes, "left free": FREE_BYTES}
        if machine.gpu is None:
            return (
                Pool("memory", machine.memory, {"experts": new} | device | rest),
                Pool("/dev/shm", machine.shm, {"experts": new, "slab": device["slab"]}),
            )
        steps = {"steps": needs.steps + SPARE_BYTES}
        return (
            Pool("memory", machine.memory, {"experts": new} | rest),
            Pool("/dev/shm", machine.shm, {"experts": new}),
            Pool("GPU memory", machine.gpu, device | steps),
        )

    def fits(self, machine: Machine) -> bool:
        return not any(pool.short for pool in self.pools(machine))

    def beside_store(self, machine: Machine) -> int:
        """Bytes of memory that the store must leave free. The processes' own are no part of it: some of them
        run while it is checked, and what is chosen may fill all that there is."""
        memory = self.pools(machine)[0]
        return memory.needed - memory.parts["experts"] - memory.parts["processes"]

    def settled(self, config: EngineConfig) -> SettledConfig:
        """The configuration with these choices."""
        given = {field.name: getattr(config, field.name) for field in fields(config)}
        chosen = {name: getattr(self, name) for name in ("context", "kv_tokens", "expert_cache")}
        return SettledConfig(**(given | chosen | {"format": self.needs.format}))


def smallest(needs: Needs, asked: EngineConfig, slab: bool, least: int = LEAST_CONTEXT) -> Plan:
    """What this format takes at least, with `least` tokens of context if the model and --kv-tokens allow
    so many. Raises UsageError for a context beyond the model's, or more than --kv-tokens."""
    most = choose_context(asked.context, needs.spec)
    context = most if asked.context is not None else min(least, most, asked.kv_tokens or most)
    kv = context if asked.kv_tokens is None else kv_budget(asked.kv_tokens, context)
    return Plan(needs, slab, context, kv, asked.expert_cache or 0.0)


def plan_format(
    needs: Needs, asked: EngineConfig, machine: Machine, slab: bool, least: int = LEAST_CONTEXT
) -> Plan | None:
    """The best plan for this format; None where the smallest does not fit. Raises as `smallest`."""
    plan = smallest(needs, asked, slab, least)
    if not plan.fits(machine):
        return None

    def grow(plan: Plan, high: int, step: int, to: Callable[[int], Plan]) -> Plan:
        """`to` of the largest multiple of `step`, or of `high` itself, with which it fits; else the plan."""
        if to(high).fits(machine):
            return to(high)
        fitting, beyond = 0, ceil(high / step)
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            fitting, beyond = (middle, beyond) if to(middle * step).fits(machine) else (fitting, middle)
        grown = to(fitting * step)
        return grown if fitting and _size(grown) > _size(plan) else plan

    def longer(tokens: int) -> Plan:
        return replace(plan, context=tokens, kv_tokens=max(tokens, asked.kv_tokens or 0))

    def roomier(tokens: int) -> Plan:
        return replace(plan, kv_tokens=max(tokens, plan.context))

    def fuller(steps: int) -> Plan:
        return replace(plan, expert_cache=steps / CACHE_STEPS)

    if asked.context is None:
        most = choose_context(None, needs.spec)
        plan = grow(plan, min(most, asked.kv_tokens or most), CONTEXT_STEP, longer)
    usual = floor(DEFAULT_CACHE * CACHE_STEPS)
    if asked.expert_cache is None and slab:
        plan = grow(plan, usual, 1, fuller)
    if asked.kv_tokens is None:
        plan = grow(plan, KV_CONTEXTS * plan.context, CONTEXT_STEP, roomier)
    if asked.expert_cache is None and (machine.gpu is not None or not slab):
        # Without a slab it is for policies that are set later: with what is then left.
        plan = replace(plan, slab=True)
        plan = grow(plan, usual if machine.gpu is None else CACHE_STEPS, 1, fuller)
        plan = replace(plan, slab=slab)
    return plan


def choose(every: Sequence[Needs], asked: EngineConfig, machine: Machine, slab: bool) -> Plan | None:
    """The plan to start with, for one of these formats, the most exact first; None where none fits. Raises
    UsageError as `smallest`."""
    for least in (GOOD_CONTEXT, LEAST_CONTEXT):
        for needs in every:
            plan = plan_format(needs, asked, machine, slab, least)
            if plan is not None:
                return plan
    return None


def _size(plan: Plan) -> tuple[int, int, float]:
    return plan.context, plan.kv_tokens, plan.expert_cache
