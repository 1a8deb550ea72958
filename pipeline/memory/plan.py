"""The memory plan, made before anything is loaded: a model's needs, the free memory, and the choices that
fit.

An engine takes memory from two or three pools:

    memory        experts, processes, and FREE_BYTES that stay free for the rest of the machine;
                  without a GPU the slab, the KV cache and the backbone as well
    /dev/shm      experts; without a GPU the slab as well
    GPU memory    slab, KV cache, backbone, the allocations of a step, and spare bytes by the card's size; of
                  formats that are read by channel the up matrices of all experts, beside the slab

Options that were given are kept. The others are chosen: first the most exact format that fits with a context
of useful length, then the longest context, then resident experts (more than DEFAULT_CACHE of them only on a
GPU), then KV cache for more contexts. On a GPU, staging slots take all tiles that a layer demands for one
token, up to STAGING_SHARE of the free memory; the fewest where what was given does not fit beside more.
Devices that are named one by one divide the layers by their memory (`divided`), and each is a pool of its
own. This module only calculates: it measures and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from math import ceil, floor, prod
from typing import Any, cast

from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import DEFAULT_CACHE, KV_BLOCK, KV_CONTEXTS, EngineConfig, FormatName, ResolvedConfig
from pipeline.device.base import spare_bytes
from pipeline.errors import UsageError
from pipeline.memory.needs import (
    STAGING_SHARE,
    Needs,
    cache_tiles,
    choose_context,
    kv_budget,
    kv_sequences,
    whole_blocks,
)

FREE_BYTES = 2_000_000_000  # left for the rest of the machine
MEMORY = "memory"  # the name of a pool
LEFT_FREE = "left free"  # the part of a pool with these
# By decreasing exactness. Checkpoints are in bf16, f16 or f32: no format of experts is more exact than bf16.
AUTOMATIC: tuple[FormatName, ...] = ("bf16", "int8", "int4", "int4-g128")
GOOD_CONTEXT = 4096  # tokens: for less than that, a less exact format is the better choice
LEAST_CONTEXT = 1024  # tokens; the plan never chooses a shorter context
CACHE_STEPS = 1000  # a cache that is chosen is a whole number of thousandths


@dataclass(frozen=True)
class Machine:
    """Bytes that are free now. `memory`: without swapping and within the control group's limit; `gpu`: None
    for the device cpu, of several GPUs the least. `total`: of memory, with what is in use; None where
    unknown. `cards`: of devices that are named one by one, GPUs or parts of the host's memory that stand for
    some."""

    memory: int
    shm: int
    gpu: int | None = None
    total: int | None = None
    cards: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Pool:
    """One kind of memory: its free bytes, and the bytes that each part of the engine needs of it."""

    name: str
    free: int
    parts: Mapping[str, int]

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def short(self) -> int:
        """Bytes that are missing; 0 where all parts fit."""
        return max(0, self.needed - self.free)


@dataclass(frozen=True)
class Plan:
    """An engine's choices and their memory. `slab`: the first policy keeps experts on the device; otherwise
    the slab is allocated when a later policy needs it."""

    needs: Needs
    slab: bool
    context: int
    kv_tokens: int
    expert_cache: float
    staging: int  # slots beside those of the cache, on each device
    stages: tuple[int, ...] = ()  # layers with experts on each of several devices

    def pools(self, machine: Machine) -> tuple[Pool, ...]:
        """Needed and free bytes of each pool. Experts that are in shared memory already need no others."""
        needs = self.needs
        new = needs.store - needs.present
        rest = {"processes": needs.processes, LEFT_FREE: FREE_BYTES}
        if machine.cards:
            return self._of_cards(machine, {"experts": new}, rest)
        device = self._on_device(range(len(needs.facts.moe_layers)))
        if machine.gpu is None:
            return (
                Pool(MEMORY, machine.memory, {"experts": new} | device | rest),
                Pool("/dev/shm", machine.shm, {"experts": new, "slab": device["slab"]}),
            )
        steps = {"steps": needs.steps + spare_bytes(machine.gpu)}
        return (
            Pool(MEMORY, machine.memory, {"experts": new} | rest),
            Pool("/dev/shm", machine.shm, {"experts": new}),
            Pool("GPU memory", machine.gpu, device | steps),
        )

    def _on_device(self, layers: range) -> dict[str, int]:
        """The bytes of each part for these layers, on their device."""
        needs, facts = self.needs, self.needs.facts
        every, decoder = len(facts.moe_layers), facts.decoder_layers(layers)
        tiles = needs.tiles * len(layers) // every
        slots = cache_tiles(self.expert_cache, tiles) + self.staging if self.slab else 0
        streams = [sum(heads * width for heads, width in layer) for layer in facts.kv_streams]
        states = [sum(map(prod, layer)) for layer in facts.state_shapes]
        kv = whole_blocks(self.kv_tokens) * needs.kv_token
        kept = kv_sequences(self.kv_tokens, needs.max_sequences) * needs.states
        parts = {
            "slab": slots * needs.slot,
            "KV cache": _share(kv, streams, decoder) + _share(kept, states, decoder) + needs.drafting,
            "backbone": _backbone(needs, layers) + self.context * needs.position,
        }
        if self.slab and needs.heads:
            parts["up matrices"] = needs.heads * len(layers) // every
        return parts

    def _of_cards(self, machine: Machine, experts: dict[str, int], rest: dict[str, int]) -> tuple[Pool, ...]:
        """The pools where devices are named: each is one, and with that of an emulated one the host's memory
        is less."""
        ends = list(accumulate(divided(self.needs, machine), initial=0))
        each = [self._on_device(range(start, end)) for start, end in pairwise(ends)]
        if machine.gpu is None:
            every = {part: sum(one.get(part, 0) for one in each) for part in each[0]}
            host = Pool(MEMORY, machine.memory, experts | every | rest)
            shm = Pool("/dev/shm", machine.shm, experts | {"slab": every["slab"]})
        else:
            spare = [spare_bytes(free) for _, free in machine.cards]
            each = [one | {"steps": self.needs.steps + of} for one, of in zip(each, spare, strict=True)]
            host, shm = Pool(MEMORY, machine.memory, experts | rest), Pool("/dev/shm", machine.shm, experts)
        cards = []
        for (name, free), parts, bounds in zip(machine.cards, each, pairwise(ends), strict=True):
            of = self.needs.facts.decoder_layers(range(*bounds))
            cards.append(Pool(f"{name} (layers {of.start + 1}-{of.stop})", free, parts))
        return host, shm, *cards

    def fits(self, machine: Machine) -> bool:
        return not any(pool.short for pool in self.pools(machine))

    def beside_store(self, machine: Machine) -> int:
        """Bytes of memory that the store must leave free. Without those of the processes: some of them run
        while the loader checks this, and the plan may fill all of the free memory."""
        memory = self.pools(machine)[0]
        return memory.needed - memory.parts["experts"] - memory.parts["processes"]

    def resolved(self, config: EngineConfig) -> ResolvedConfig:
        """The configuration with this plan's choices."""
        given = {field.name: getattr(config, field.name) for field in fields(config)}
        names = "context", "kv_tokens", "expert_cache", "staging", "stages"
        chosen: dict[str, Any] = {name: getattr(self, name) for name in names}
        chosen |= {"format": self.needs.format, "backbone_dtype": self.needs.backbone_dtype}
        chosen["host_memory"] = self.needs.store if self.needs.partial else None
        return ResolvedConfig(**(given | chosen))


def divided(needs: Needs, machine: Machine) -> tuple[int, ...]:
    """How many layers with experts each device gets: so that the device with the least memory for a layer has
    as much for one as it can, and with it each layer as large a cache. Raises UsageError for more devices
    than layers."""
    cards, layers = machine.cards, len(needs.facts.moe_layers)
    if len(cards) > layers:
        raise UsageError(f"--device: {len(cards)} devices, and the model has {layers} layers with experts")
    free = [size - needs.steps - spare_bytes(size) * (machine.gpu is not None) for _, size in cards]
    free[0] -= needs.embedding
    free[-1] -= needs.head
    given = [1] * len(cards)
    for _ in range(layers - len(cards)):
        best = max(range(len(cards)), key=lambda card: max(1, free[card]) / (given[card] + 1))
        given[best] += 1
    return tuple(given)


def _backbone(needs: Needs, layers: range) -> int:
    """Bytes of the backbone for these layers: a share of it, with embedding and head where they begin and
    end."""
    facts, every = needs.facts, len(needs.facts.moe_layers)
    if len(layers) == every:
        return needs.backbone
    tied = facts.tied_embeddings and needs.head == needs.embedding
    middle = needs.backbone - needs.embedding - (0 if tied else needs.head)
    share = -(-middle * len(facts.decoder_layers(layers)) // facts.layers)
    return share + needs.embedding * (not layers.start) + needs.head * (layers.stop == every)


def _share(size: int, weights: Sequence[int], of: range) -> int:
    """The part of a size that these layers have, by the weights of all."""
    return -(-size * sum(weights[of.start : of.stop]) // (sum(weights) or 1))


def automatic(source: ModelSource) -> tuple[FormatName, ...]:
    """The formats to choose from where none is asked for, the most exact first: of a quantized model its own,
    and none that is only larger."""
    if source.own_format is None:
        return AUTOMATIC[1:] if source.quantized else AUTOMATIC
    return (cast(FormatName, source.own_format), *AUTOMATIC[1:])


def smallest(needs: Needs, requested: EngineConfig, slab: bool, least: int = LEAST_CONTEXT) -> Plan:
    """The smallest plan for this format, with `least` tokens of context if the model and --kv-tokens allow so
    many. Raises UsageError for a context beyond the model's or beyond --kv-tokens."""
    most = choose_context(requested.context, needs.facts, requested.chunk)
    context = most if requested.context is not None else min(least, most, requested.kv_tokens or most)
    kv = context if requested.kv_tokens is None else kv_budget(requested.kv_tokens, context)
    return Plan(needs, slab, context, kv, requested.expert_cache or 0.0, needs.staging)


def plan_format(
    needs: Needs, requested: EngineConfig, machine: Machine, slab: bool, least: int = LEAST_CONTEXT
) -> Plan | None:
    """The best plan for this format; None where even the smallest does not fit. Raises like `smallest`."""
    plan = smallest(needs, requested, slab, least)
    if not plan.fits(machine):
        return None
    plan = replace(plan, stages=divided(needs, machine)) if machine.cards else plan
    if machine.gpu is not None:
        most = max(needs.staging, min(needs.layer_staging, int(STAGING_SHARE * machine.gpu) // needs.slot))
        # Counted also where the slab is for a later policy, which then has it beside the cache.
        if replace(plan, slab=True, staging=most).fits(machine):
            plan = replace(plan, staging=most)

    def grow(plan: Plan, high: int, step: int, to: Callable[[int], Plan]) -> Plan:
        """The plan `to(n)` of the largest n that fits: `high`, or a multiple of `step`; else the plan."""
        if to(high).fits(machine):
            return to(high)
        fitting, beyond = 0, ceil(high / step)
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            fitting, beyond = (middle, beyond) if to(middle * step).fits(machine) else (fitting, middle)
        grown = to(fitting * step)
        return grown if fitting and _size(grown) > _size(plan) else plan

    def longer_context(tokens: int) -> Plan:
        return replace(plan, context=tokens, kv_tokens=max(tokens, requested.kv_tokens or 0))

    def more_contexts(tokens: int) -> Plan:
        return replace(plan, kv_tokens=max(tokens, plan.context))

    def larger_cache(steps: int) -> Plan:
        return replace(plan, expert_cache=steps / CACHE_STEPS)

    if requested.context is None:
        most = choose_context(None, needs.facts, requested.chunk)
        plan = grow(plan, min(most, requested.kv_tokens or most), KV_BLOCK, longer_context)
    usual = floor(DEFAULT_CACHE * CACHE_STEPS)
    if requested.expert_cache is None and slab:
        plan = grow(plan, usual, 1, larger_cache)
    if requested.kv_tokens is None:
        plan = grow(plan, KV_CONTEXTS * plan.context, KV_BLOCK, more_contexts)
    own = machine.gpu is not None or bool(machine.cards)  # memory that nothing else needs
    if requested.expert_cache is None and (own or not slab):
        # Without a slab now: for policies that are set later, with the memory that is left then.
        plan = replace(plan, slab=True)
        plan = grow(plan, CACHE_STEPS if own else usual, 1, larger_cache)
        plan = replace(plan, slab=slab)
    return plan


def choose(every: Sequence[Needs], requested: EngineConfig, machine: Machine, slab: bool) -> Plan | None:
    """The plan to start with, for the first of these formats that fits. Raises UsageError like `smallest`."""
    for least in (GOOD_CONTEXT, LEAST_CONTEXT):
        for needs in every:
            plan = plan_format(needs, requested, machine, slab, least)
            if plan is not None:
                return plan
    return None


def _size(plan: Plan) -> tuple[int, int, float]:
    return plan.context, plan.kv_tokens, plan.expert_cache
