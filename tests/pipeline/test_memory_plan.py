"""The memory plan: it never exceeds the free memory, keeps the given options and uses all memory that it
can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.checkpoint.open import open_model
from pipeline.config import DEFAULT_CACHE, DEFAULT_CONTEXT, KV_BLOCK, EngineConfig, ResolvedConfig
from pipeline.device.base import LEAST_SPARE_BYTES, SPARE_BYTES, spare_bytes
from pipeline.errors import UsageError
from pipeline.memory.needs import Needs, cache_tiles, needs
from pipeline.memory.plan import (
    AUTOMATIC,
    FREE_BYTES,
    GOOD_CONTEXT,
    LEAST_CONTEXT,
    Machine,
    Plan,
    choose,
    smallest,
)

GB = 10**9
MODELS = ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite", "olmoe-1b-7b")
Case = tuple[tuple[Needs, ...], EngineConfig, Machine, bool]  # the last: whether there is a slab


@cache
def every(model: str, gpu: bool) -> tuple[Needs, ...]:
    source = open_model(Path(f"shape:{model}"))
    config = EngineConfig(device="cuda" if gpu else "cpu", workers=4)
    # As if no engine of this machine had one of these stores.
    return tuple(replace(needs(source, config, name), present=0) for name in AUTOMATIC)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    on_gpu = draw(st.booleans())
    needed = every(draw(st.sampled_from(MODELS)), on_gpu)
    context = draw(st.none() | st.integers(1, 4096))
    kv = draw(st.none() | st.integers(4096, 100_000))
    share = draw(st.none() | st.floats(0, 1))
    asked = EngineConfig(context=context, kv_tokens=kv, expert_cache=share)
    # The needs of one of the formats, or a little more or less: plans differ there.
    edge, slab = draw(st.sampled_from(needed)), draw(st.booleans())
    near = st.integers(-GB, GB // 2) | st.integers(0, 12 * GB)
    staging = st.sampled_from([edge.staging, edge.layer_staging])
    device = edge.backbone + int((share or 0) * edge.tiles + draw(staging)) * edge.slot * slab
    memory = edge.store + FREE_BYTES + edge.processes + (0 if on_gpu else device) + draw(near)
    shm = draw(st.just(200 * GB) | near.map(lambda more: edge.store + more))
    gpu = device + edge.steps + SPARE_BYTES + draw(near) if on_gpu else None
    if draw(st.booleans()):
        needed = (draw(st.sampled_from(needed)),)
    return needed, asked, Machine(memory, shm, gpu), slab


def chosen(needed: Sequence[Needs], asked: EngineConfig, machine: Machine, slab: bool = False) -> Plan:
    """The plan, which must exist."""
    plan = choose(needed, asked, machine, slab)
    assert plan is not None
    return plan


def whole_blocks(tokens: int) -> int:
    return -(-tokens // KV_BLOCK) * KV_BLOCK


def takes(
    needs: Needs, machine: Machine, slab: bool, context: int, kv: int, share: float, staging: int = 4
) -> bool:
    """Whether the plan fits, by a second implementation of the documented rule."""
    tiles = cache_tiles(share, needs.tiles) + staging if slab else 0
    device = tiles * needs.slot + whole_blocks(kv) * needs.kv_token + needs.backbone
    device += context * needs.position
    new = needs.store - needs.present
    host = machine.memory - FREE_BYTES - needs.processes
    if machine.gpu is None:
        return new + device <= host and new + tiles * needs.slot <= machine.shm
    return new <= min(host, machine.shm) and device + needs.steps + spare_bytes(machine.gpu) <= machine.gpu


def fits_with(needs: Needs, asked: EngineConfig, machine: Machine, slab: bool, least: int) -> bool:
    most = asked.context or min(
        DEFAULT_CONTEXT, needs.facts.max_positions, asked.kv_tokens or DEFAULT_CONTEXT
    )
    context = asked.context or min(least, most)
    return takes(needs, machine, slab, context, asked.kv_tokens or context, asked.expert_cache or 0.0)


@given(cases())
def test_plan_fits_keeps_given_options_and_is_the_most_exact(case: Case) -> None:
    needed, asked, machine, slab = case
    plan = choose(needed, asked, machine, slab)
    if plan is None:
        assert not any(fits_with(n, asked, machine, slab, LEAST_CONTEXT) for n in needed)
        least_of_all = smallest(needed[-1], asked, slab)
        assert any(pool.short for pool in least_of_all.pools(machine))
        return
    sizes = plan.context, plan.kv_tokens, plan.expert_cache, plan.staging
    assert takes(plan.needs, machine, slab, *sizes)
    for pool in plan.pools(machine):
        assert sum(pool.parts.values()) == pool.needed <= pool.free
        assert min(pool.parts.values()) >= 0
    assert plan.context in (asked.context or plan.context,)
    assert plan.kv_tokens in (asked.kv_tokens or plan.kv_tokens,)
    assert asked.expert_cache is None or plan.expert_cache == asked.expert_cache
    assert 0 < plan.context <= min(plan.kv_tokens, plan.needs.facts.max_positions)
    assert 0 <= plan.expert_cache <= 1
    more_exact = needed[: needed.index(plan.needs)]
    least = GOOD_CONTEXT if fits_with(plan.needs, asked, machine, slab, GOOD_CONTEXT) else LEAST_CONTEXT
    assert not any(fits_with(n, asked, machine, slab, least) for n in more_exact)
    if least == LEAST_CONTEXT:
        assert not any(fits_with(n, asked, machine, slab, GOOD_CONTEXT) for n in needed)


@given(cases())
def test_plan_uses_the_memory_that_fits(case: Case) -> None:
    needed, asked, machine, slab = case
    plan = choose(needed, asked, machine, slab)
    assume(plan is not None)

    def fits(context: int, kv: int, share: float, slab: bool = slab) -> bool:
        return takes(plan.needs, machine, slab, context, kv, share, plan.staging)

    usual = min(DEFAULT_CONTEXT, plan.needs.facts.max_positions, asked.kv_tokens or DEFAULT_CONTEXT)
    if asked.context is None and plan.context < usual:
        longer = min(plan.context + 64, usual)
        assert not fits(longer, asked.kv_tokens or longer, asked.expert_cache or 0.0)
        assert plan.context % 64 == 0 or plan.context == min(LEAST_CONTEXT, usual)
    if asked.kv_tokens is None and plan.kv_tokens < 4 * plan.context:
        before = (
            plan.expert_cache if asked.expert_cache is not None else min(plan.expert_cache, DEFAULT_CACHE)
        )
        assert not fits(plan.context, plan.kv_tokens + 64, before)
    if asked.expert_cache is None and slab:
        most = DEFAULT_CACHE if machine.gpu is None else 1.0
        # The KV cache gets more contexts only once the expert cache has its usual share.
        kv = asked.kv_tokens or (plan.kv_tokens if plan.expert_cache >= DEFAULT_CACHE else plan.context)
        assert plan.expert_cache == most or not fits(plan.context, kv, plan.expert_cache + 0.001)


@given(cases())
def test_store_in_shared_memory_needs_no_more(case: Case) -> None:
    needed, asked, machine, slab = case
    plan = smallest(replace(needed[0], present=needed[0].store), asked, slab)
    assert plan.pools(machine)[0].parts["experts"] == plan.pools(machine)[1].parts["experts"] == 0
    smaller = replace(machine, shm=0)
    if not slab and plan.fits(machine):
        assert plan.fits(smaller)


@given(cases())
def test_store_leaves_memory_for_the_other_parts(case: Case) -> None:
    """The loader's own check of the same numbers agrees with the plan."""
    needed, asked, machine, slab = case
    plan = choose(needed, asked, machine, slab)
    if plan is not None:
        assert plan.needs.store <= machine.memory - plan.beside_store(machine)
        device = whole_blocks(plan.kv_tokens) * plan.needs.kv_token + plan.context * plan.needs.position
        device += plan.needs.backbone + plan.pools(machine)[-1].parts.get("slab", 0)
        assert plan.beside_store(machine) == FREE_BYTES + (device if machine.gpu is None else 0)


def test_resolved_config_changes_only_the_choices() -> None:
    asked = EngineConfig(workers=3, seed=5, policy_options={"a": "b"}, kv_tokens=9000)
    plan = chosen(every("olmoe-1b-7b", False), asked, Machine(40 * GB, 40 * GB))
    resolved = plan.resolved(asked)
    assert isinstance(resolved, ResolvedConfig)
    choices = {"format": plan.needs.format, "context": 4096, "kv_tokens": 9000, "expert_cache": 0.25}
    choices["backbone_dtype"] = "bf16"
    for field in fields(asked):
        assert getattr(resolved, field.name) == choices.get(field.name, getattr(asked, field.name))
    assert ResolvedConfig.from_map(vars(resolved)) == resolved


def test_plans_of_typical_machines() -> None:
    """Choices that an engineer would make too."""

    def planned(model: str, *gigabytes: int) -> Plan:
        """With so much memory, shared memory and memory of a GPU."""
        machine = Machine(*(size * GB for size in gigabytes))
        return chosen(every(model, machine.gpu is not None), EngineConfig(), machine, machine.gpu is not None)

    roomy = planned("mixtral-8x7b", 130, 130)
    assert (roomy.needs.format, roomy.context, roomy.kv_tokens) == ("bf16", 8192, 32768)
    table, attention = 32000 * 4096, 2 * 4096 * (4096 + 1024)
    router, norms = 8 * 4096, 2 * 4096
    backbone = 2 * (2 * table + 32 * attention) + 4 * (32 * (router + norms) + 4096)
    assert (roomy.expert_cache, roomy.needs.backbone) == (0.25, backbone)
    short = planned("mixtral-8x7b", 100, 95)
    assert short.needs.format == "bf16"  # with fewer contexts at once
    assert 8192 <= short.kv_tokens < 4 * 8192
    small = planned("mixtral-8x7b", 60, 30)
    assert small.needs.format == "int4"  # /dev/shm has half of the memory
    little = Machine(24 * GB, 24 * GB)
    assert choose(every("mixtral-8x7b", False), EngineConfig(), little, False) is None
    laptop = planned("deepseek-v2-lite", 24, 24)
    assert (laptop.needs.format, laptop.context) == ("int8", 8192)
    gpu = planned("mixtral-8x7b", 130, 130, 24)
    assert gpu.needs.format == "bf16"
    assert 0.1 < gpu.expert_cache < 0.25  # a whole context, then experts
    assert (gpu.context, gpu.kv_tokens) == (8192, 8192 + 384)  # and less than a thousandth of them was left
    assert gpu.staging == 2 * 16 + 2  # both experts of a layer
    for gigabytes, staging, share in ((8, 11, 0.0), (12, 17, 0.06)):
        smaller = planned("mixtral-8x7b", 130, 130, gigabytes)
        assert (smaller.needs.format, smaller.staging) == ("bf16", staging)
        assert smaller.expert_cache >= share
    assert planned("olmoe-1b-7b", 130, 130, 80).expert_cache == 1.0


@given(cases())
def test_staging_slots_are_of_a_small_share_of_a_gpu(case: Case) -> None:
    """All that a layer demands for a token, while that is small and something else fits beside it."""
    needed, asked, machine, slab = case
    plan = choose(needed, asked, machine, slab)
    assume(plan is not None)
    if machine.gpu is None:
        assert plan.staging == 4
        return
    assert 4 <= plan.staging <= max(4, plan.needs.layer_staging)
    beyond = (plan.staging - 4) * plan.needs.slot
    assert beyond <= machine.gpu / 32
    if 4 < plan.staging < plan.needs.layer_staging:
        assert (plan.staging + 1) * plan.needs.slot > machine.gpu / 32
    most = min(plan.needs.layer_staging, int(machine.gpu / 32) // plan.needs.slot)
    if plan.staging == 4 < most:  # then nothing larger fits beside as many
        sizes = smallest(plan.needs, asked, slab, GOOD_CONTEXT)
        if not fits_with(plan.needs, asked, machine, slab, GOOD_CONTEXT):
            sizes = smallest(plan.needs, asked, slab, LEAST_CONTEXT)
        least = sizes.context, sizes.kv_tokens, sizes.expert_cache
        assert not takes(plan.needs, machine, True, *least, most)


def test_less_exact_format_is_preferred_to_a_short_context() -> None:
    needed = every("qwen1.5-moe-a2.7b", False)
    bf16, *_, smallest_of_all = needed

    def machine_for(needs: Needs, tokens: int) -> Machine:
        kv = tokens * (needs.kv_token + needs.position)
        memory = needs.store + needs.backbone + needs.processes + FREE_BYTES + kv
        return Machine(memory, memory)

    for edge, tokens, format, context in (
        (bf16, GOOD_CONTEXT, "bf16", GOOD_CONTEXT),
        (bf16, GOOD_CONTEXT - 64, "int8", 8192),
        (smallest_of_all, 1999, "int4-g128", 1984),
    ):
        plan = chosen(needed, EngineConfig(), machine_for(edge, tokens))
        assert (plan.needs.format, plan.context) == (format, context)
    least = machine_for(smallest_of_all, LEAST_CONTEXT - 1)
    assert choose(needed, EngineConfig(), least, False) is None


def test_contradictory_options_are_refused() -> None:
    machine, (first, *_) = Machine(200 * GB, 200 * GB), every("olmoe-1b-7b", False)
    with pytest.raises(UsageError, match="--context 5000 is more than the model's 4096"):
        choose([first], EngineConfig(context=5000), machine, False)
    with pytest.raises(UsageError, match="--kv-tokens 99 is less than one context of 100"):
        smallest(first, EngineConfig(context=100, kv_tokens=99), False)
    plan = chosen([first], EngineConfig(kv_tokens=99), machine)
    assert (plan.context, plan.kv_tokens) == (99, 99)  # the plan chooses the context


@settings(deadline=None)  # the first case reads the models
@given(st.sampled_from(MODELS), st.lists(st.integers(6, 40), min_size=2, max_size=4), st.booleans())
def test_layers_are_divided_by_the_memory_of_the_devices(model: str, sizes: list[int], on_gpu: bool) -> None:
    """Each device holds its part, all parts together are the whole, and no layer is better elsewhere."""
    needed = next(each for each in every(model, on_gpu) if each.format == "int4")
    cards = tuple((f"card {number}", size * GB) for number, size in enumerate(sizes))
    machine = Machine(400 * GB, 400 * GB, min(sizes) * GB if on_gpu else None, cards=cards)
    plan = chosen([needed], EngineConfig(), machine, slab=True)
    layers = len(needed.facts.moe_layers)
    assert plan.resolved(EngineConfig()).stages == plan.stages
    assert (sum(plan.stages), len(plan.stages), min(plan.stages) > 0) == (layers, len(sizes), True)
    host, _, *pools = plan.pools(machine)
    assert [pool.free for pool in pools] == [size * GB for size in sizes]
    assert not any(pool.short for pool in pools)
    whole = replace(plan, stages=()).pools(replace(machine, cards=()))[-1 if on_gpu else 0]
    for part in ("KV cache", "backbone"):
        there = sum(pool.parts[part] for pool in pools)
        beside = 0 if part == "KV cache" else needed.head + plan.context * needed.position * len(sizes)
        assert whole.parts[part] <= there + len(sizes) <= whole.parts[part] + beside + 2 * len(sizes)
        assert host.parts.get(part, there) == there
    free = [size * GB - needed.steps - spare_bytes(size * GB) * on_gpu for size in sizes]
    free[0] -= needed.embedding
    free[-1] -= needed.head
    least = min(size / number for size, number in zip(free, plan.stages, strict=True))
    for giver, taker in permutations(range(len(sizes)), 2):
        moved = list(plan.stages)
        moved[giver] -= 1
        moved[taker] += 1
        if min(moved):
            assert min(size / number for size, number in zip(free, moved, strict=True)) <= least + 1


def test_unequal_cards_get_unequal_layers() -> None:
    needed = next(each for each in every("mixtral-8x7b", True) if each.format == "int4")
    machine = Machine(200 * GB, 200 * GB, 12 * GB, cards=(("cuda:0", 24 * GB), ("cuda:1", 12 * GB)))
    plan = chosen([needed], EngineConfig(), machine, slab=True)
    assert plan.stages == (22, 10)
    alone = chosen([needed], EngineConfig(), Machine(200 * GB, 200 * GB, 24 * GB), slab=True)
    assert plan.expert_cache > alone.expert_cache
    few = Machine(200 * GB, 200 * GB, cards=(("cpu:1GB", GB),) * 33)
    with pytest.raises(UsageError, match="33 devices, and the model has 32 layers"):
        plan.pools(few)


@pytest.mark.parametrize(("size", "spare"), [(4, 0.2), (12, 0.375), (16, 0.5), (24, 0.5), (80, 0.5)])
def test_what_stays_free_follows_the_card(size: int, spare: float) -> None:
    """A small card keeps less free, and no byte that the rule does not ask for."""
    needed = next(each for each in every("qwen1.5-moe-a2.7b", True) if each.format == "int4")
    assert spare_bytes(size * GB) == int(spare * GB)
    assert LEAST_SPARE_BYTES <= spare_bytes(size * GB) <= SPARE_BYTES
    *_, pool = smallest(needed, EngineConfig(), True).pools(Machine(400 * GB, 400 * GB, size * GB))
    assert pool.parts["steps"] == needed.steps + spare_bytes(size * GB)
    if size != 12:
        return
    other = pool.needed - spare_bytes(size * GB)
    asked = EngineConfig(expert_cache=0.0, context=LEAST_CONTEXT, kv_tokens=LEAST_CONTEXT)
    edge = next(free for free in range(other, 2 * other, 1000) if other + spare_bytes(free) <= free)
    for free, fits in ((edge, True), (edge - 1000, False)):
        there = Machine(400 * GB, 400 * GB, free)
        assert (choose([needed], asked, there, True) is not None) == fits
