"""Plans a start: GPU or CPU, the memory of this machine, the chosen configuration, and texts about them. A
model that cannot fit is refused here, before any process that imports torch is started."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.command_line.options import OPTIONS as OPTIONS_TABLE
from launch.errors import WrongUsage
from launch.terminal.format import count, model_name
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_model
from pipeline.config import (
    DEFAULT_CACHE,
    DEFAULT_CONTEXT,
    KV_CONTEXTS,
    Card,
    DeviceName,
    EngineConfig,
    FormatName,
)
from pipeline.errors import ModelError, UsageError
from pipeline.memory.needs import LAYERS_IN_MEMORY, Needs, choose_context, needs, needs_all, speed_on_disk
from pipeline.memory.plan import (
    AUTOMATIC,
    GOOD_CONTEXT,
    LEFT_FREE,
    MEMORY,
    Machine,
    Plan,
    Pool,
    automatic,
    choose,
    smallest,
)
from pipeline.models.facts import is_own
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Policy, PolicyRequest
from protocol.program import COMMAND, user_folder
from shm.disk_cache import free_on_disk, store_path
from shm.layout import format_named
from shm.segment import SHM_FOLDER, available_memory, byte_size, free_shm_bytes, total_memory
from workers.lifetime import PYTHON, environment

log = logging.getLogger("tandem")

DRIVER_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the second under WSL
# Prints how many GPUs there are, and the free bytes of those that are named, or of the first.
PROBE = """
import sys, torch
number = torch.cuda.device_count() if torch.cuda.is_available() else 0
asked = [int(word) for word in sys.argv[1:]] or [0]
print(number, *(torch.cuda.mem_get_info(index)[0] for index in asked if index < number))
"""
PROBE_LIMIT = 120.0  # seconds; a cold import of a CUDA build from a slow disk takes tens of them
# Options for formats of the KV cache, and of what shares the memory with it, by field of the configuration.
SMALLER = {"backbone_dtype": "--backbone-dtype", "kv_dtype": "--kv-dtype"}
# What a second rounding adds to the embedded model's perplexity: docs/checkpoints.md has the measurement.
SECOND = {"int8": "about 0.1 %", "int4": "about 1 %"}
SECOND_REST = dict.fromkeys(("int8", "bf16"), "less than 0.1 %")
DIGITS = 5  # of a size in an option
OPTIONS = {
    "format": "--format",
    "context": "--context",
    "kv_tokens": "--kv-tokens",
    "expert_cache": "--expert-cache",
}


def usable_device(asked: DeviceName, cards: Sequence[Card] = ()) -> tuple[DeviceName, tuple[int, ...]]:
    """The device to use, and the bytes that are free for a process, of its memory or of each of `cards`;
    none of cpu. Raises WrongUsage where cuda was asked for and is not usable; warns of a GPU that this torch
    cannot use."""
    if asked == "cpu":
        return "cpu", ()
    driver = any(node.exists() for node in DRIVER_NODES)
    if not driver:
        reason = "no NVIDIA driver is loaded"
    elif not (free := _free_on_gpus(cards)):
        reason = f"this torch cannot use the GPU; {COMMAND} doctor shows why, and what to install"
    else:
        return "cuda", free
    if asked == "cuda":
        raise WrongUsage(f"--device cuda: {reason}; or use --device cpu")
    if driver:
        log.warning(f"warning: computing on the CPU: {reason}")
    return "cpu", ()


def _free_on_gpus(cards: Sequence[Card]) -> tuple[int, ...]:
    """Bytes that are free on these GPUs, or on the first, beside one process's context; none where torch
    cannot use them. Raises WrongUsage for one that is not there."""
    # In a process of its own: the supervisor stays small, and a driver that hangs does not hang it.
    try:
        probe = subprocess.run(
            [*PYTHON, "-c", PROBE, *(str(card.number) for card in cards)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_LIMIT,
            env=environment(1),
        )
    except subprocess.TimeoutExpired:
        return ()
    lines = probe.stdout.splitlines() if probe.returncode == 0 else []
    number, *free = map(int, lines[-1].split() if lines else [0])
    if number and (beyond := [str(card) for card in cards if card.number >= number]):
        raise WrongUsage(
            f"--device {beyond[0]}: torch sees {count(number, 'CUDA device')} here, from cuda:0 on"
        )
    return tuple(free)


@dataclass(frozen=True)
class Situation:
    """The configuration, with device, policy and workers decided, and the machine."""

    config: EngineConfig
    policy: Policy  # the first
    machine: Machine

    def plan(self, config: EngineConfig, every: Sequence[Needs]) -> Plan | None:
        """Returns what would be chosen for another configuration of the same processes."""
        return choose(every, config, self.machine, self.policy.uses_device)

    def smallest(self, needs: Needs) -> Plan:
        """The smallest plan in one format, whether it fits or not."""
        return smallest(needs, self.config, self.policy.uses_device)


def situation(asked: EngineConfig, workers: int) -> Situation:
    """Takes a second or two with a GPU. `workers`: the default. Raises WrongUsage, PolicyError."""
    cards = asked.cards
    check_rates(asked)
    device, free = usable_device(asked.kind, cards)
    name = asked.policy or ("all-host" if device == "cpu" else "tandem")
    config = replace(
        asked,
        device=asked.device if cards else device,
        policy=name,
        workers=workers if asked.workers is None else asked.workers,
    )
    policy = make_policy(PolicyRequest(name, config.policy_options), config.seed)
    sizes = free if device == "cuda" else [card.memory or 0 for card in cards]
    named = tuple(zip(map(str, cards), sizes, strict=True)) if cards else ()
    gpu = min(free, default=None)
    machine = Machine(available_memory(), free_shm_bytes(), gpu, total_memory(), named)
    return Situation(config, policy, machine)


def check_divides(source: ModelSource, config: EngineConfig) -> None:
    """Raises UsageError for several devices and a model whose layers are not ours to divide."""
    if len(config.cards) > 1 and not is_own(source.config):
        raise UsageError(
            f"--device {','.join(map(str, config.cards))}: {source.name} runs on modules of transformers,"
            " whose layers are not divided: give one device"
        )


def check_rates(config: EngineConfig) -> None:
    """Raises WrongUsage for other than one rate of --link-gbps, or one for each device."""
    rates, devices = config.link_gbps, max(1, len(config.cards))
    if isinstance(rates, tuple) and len(rates) != devices:
        raise WrongUsage(
            f"--link-gbps: {len(rates)} rates for {count(devices, 'device')}; give one, or one each"
        )


def formats(asked: EngineConfig, source: ModelSource) -> tuple[FormatName, ...]:
    """The formats to choose from, the most exact first."""
    if asked.format is not None:
        return (asked.format,)
    # The embedded model is for trials: its text should not depend on the memory that other programs leave.
    return AUTOMATIC[:1] if asked.model is None else automatic(source)


def every_format(source: ModelSource, asked: EngineConfig, names: Sequence[FormatName]) -> list[Needs]:
    """The needs in each format that has tiles of the given size. Raises UsageError, ModelError."""
    fitting = []
    for name in names:
        try:
            fitting.append(needs(source, asked, name))
        except UsageError as e:
            if isinstance(e, ModelError) or (not fitting and name == names[-1]):
                raise
    return fitting


def make_plan(model: Path, now: Situation) -> tuple[Plan, list[str]]:
    """The plan to start with, and log lines about it. Raises UsageError where nothing fits, ModelError."""
    source = open_model(model)
    check_divides(source, now.config)
    every = every_format(source, now.config, formats(now.config, source))
    plan = now.plan(now.config, every)
    if plan is None:
        plan = plan_on_disk(source, now, every)
    if plan is None:
        raise UsageError(refusal(source, now, every))
    if plan.needs.partial and (why := needs_all(now.policy, format_named(plan.needs.format))):
        raise UsageError(why)
    return plan, [*memory_lines(plan, now.machine), *reasons(plan, now, every)]


def plan_on_disk(source: ModelSource, now: Situation, every: Sequence[Needs]) -> Plan | None:
    """The plan with as many experts in memory as fit, in the last format that was tried, and the others on
    disk; None where these have no room there, or other options would fit, or a larger /dev/shm."""
    last, config = every[-1], now.config
    if (
        config.host_memory is not None
        or config.lanes is not None
        or needs_all(now.policy, format_named(last.format))
    ):
        return None
    pool = worst(now.smallest(last), now.machine)
    room = room_for_experts(last, config, now.machine, now.policy.uses_device)
    file = store_path(user_folder("CACHE"), last.fingerprint)
    on_disk = file.exists() or free_on_disk(file) >= last.whole
    if pool.name != MEMORY or not room or not on_disk:
        return None
    if _fitting(source, now) is not None:
        return None
    partial = replace(config, format=last.format, host_memory=room)
    return now.plan(partial, [needs(source, partial, last.format)])


def room_for_experts(needs: Needs, config: EngineConfig, machine: Machine, slab: bool) -> int:
    """The bytes that everything else leaves for experts; 0 where so few may not be in memory."""
    bare = smallest(replace(needs, store=0, present=0), config, slab, DEFAULT_CONTEXT)
    room = min(pool.free - pool.needed for pool in bare.pools(machine) if "experts" in pool.parts)
    return room if room >= LAYERS_IN_MEMORY * needs.layer else 0


def start_line(model: Path, plan: Plan, machine: Machine, backbone_dtype: str) -> str:
    """Tells what a start will run: the model, its formats, and the memory that it takes."""
    needs = []
    for pool in plan.pools(machine):
        if pool.name != SHM_FOLDER:
            size = byte_size(sum(size for part, size in pool.parts.items() if part != LEFT_FREE))
            needs.append(f"{pool.name} {size} of {byte_size(pool.free)}")
    again = f" (a second rounding, of {plan.needs.rounded})" if plan.needs.rounded else ""
    rest = ", ".join(f"{target} of {kinds}" for kinds, target in plan.needs.rest_rounded)
    some = f" ({byte_size(plan.needs.store)} of {byte_size(plan.needs.whole)}, the others on disk)"
    again += some if plan.needs.partial else ""
    formats = f"experts {plan.needs.format}{again}, rest {backbone_dtype}{f' ({rest})' if rest else ''}"
    if plan.needs.kv_dtype == "int8":
        formats += ", KV cache int8 (an approximation)"
    return f"{model_name(str(model), article='')}: {formats}; {', '.join(needs)}"


def memory_lines(plan: Plan, machine: Machine) -> list[str]:
    """A line for each kind of memory with the parts that need it. /dev/shm is part of the memory."""
    return [
        f"{pool.name}: {parts(pool, plan)}; {byte_size(pool.free)} available"
        for pool in plan.pools(machine)
        if pool.name != SHM_FOLDER
    ]


def reasons(plan: Plan, now: Situation, every: Sequence[Needs]) -> list[str]:
    """A line for each choice that differs from the default: what was chosen, and why; and one for weights
    that are rounded a second time."""
    asked, lines = now.config, []
    names = [needs.format for needs in every]
    if position := names.index(plan.needs.format):
        pool = worst(now.smallest(every[position - 1]), now.machine)
        why = f"{names[position - 1]} needs {_needs(pool)}"
        if not pool.short:
            why = f"with {names[position - 1]} fewer than {GOOD_CONTEXT} tokens of context would fit"
        lines.append(f"--format {plan.needs.format}: {why}")
    if plan.needs.partial:
        lines.append(on_disk_line(plan.needs))
    lines += second_roundings(plan.needs)
    if plan.needs.kv_dtype == "int8":
        lines.append("--kv-dtype int8: keys and values are rounded, so answers are approximate")
    if asked.context is None and plan.context < choose_context(None, plan.needs.facts, asked.chunk):
        why = "--kv-tokens is no larger" if plan.context == asked.kv_tokens else "more does not fit"
        lines.append(f"--context {plan.context}: {why}")
    elif asked.context is None and plan.needs.facts.whole_prompts:
        lines.append(
            f"--context {plan.context}: this model's prompts are computed whole; --chunk N changes it"
        )
    elif asked.kv_tokens is None and plan.kv_tokens < KV_CONTEXTS * plan.context:
        contexts = f"{plan.kv_tokens / plan.context:.1f} contexts at once"
        lines.append(f"--kv-tokens {plan.kv_tokens}: {contexts}; more does not fit")
    if asked.expert_cache is None and plan.slab and plan.expert_cache != DEFAULT_CACHE:
        what = "all experts fit" if plan.expert_cache == 1 else "more experts do not fit"
        lines.append(f"--expert-cache {plan.expert_cache:g}: {what}")
    return lines


def on_disk_line(needs: Needs) -> str:
    """Tells how many of the experts are in memory, and where the others are."""
    file = store_path(user_folder("CACHE"), needs.fingerprint)
    sizes = f"{byte_size(needs.store)} of the experts' {byte_size(needs.whole)} are in memory"
    return f"{host_memory(needs.store)}: {sizes}, the others are read from {file}"


def host_memory(size: int) -> str:
    """The option for so many bytes, or for slightly fewer: more might not fit."""
    step = 10 ** max(0, len(str(size)) - DIGITS)
    return f"--host-memory {size // step * step / 1e9:.{DIGITS}g}GB"


def disk_line(needs: Needs, rate: float) -> str:
    """Tells what the disk's rate means for the speed."""
    return (
        f"experts: {byte_size(needs.store)} of {byte_size(needs.whole)} in memory; the disk reads"
        f" {byte_size(rate)}/s, enough for {speed_on_disk(needs, rate):.3g} tok/s where experts are used"
        " evenly, and for more where some are used more often"
    )


def second_roundings(needs: Needs) -> list[str]:
    """A line for experts that are rounded a second time, and for other matrices in each format."""
    rounded: list[tuple[str, str, str, dict[str, str]]] = []
    if needs.rounded:
        rounded.append(("the experts", needs.rounded, needs.format, SECOND))
    rounded += [("other matrices", kinds, target, SECOND_REST) for kinds, target in needs.rest_rounded]
    lines = []
    for what, kinds, target, costs in rounded:
        cost = f", which adds {costs[target]} to the embedded model's perplexity" if target in costs else ""
        lines.append(f"{what} are {kinds} in the file, kept as {target}: a second rounding{cost}")
    return lines


def _smaller(asked: EngineConfig, name: str) -> Iterator[EngineConfig]:
    """The configuration with each format that an option of SMALLER takes, none where there is no option."""
    formats = next((o.value for o in OPTIONS_TABLE if o.key == name), None)
    for dtype in formats if isinstance(formats, tuple) else ():
        changed: dict[str, Any] = {name: dtype}
        yield replace(asked, **changed)


def refusal(source: ModelSource, now: Situation, every: Sequence[Needs]) -> str:
    """Tells why the model does not fit, with the numbers of the smallest plan, and what to do."""
    plan = now.smallest(every[-1])
    pool = worst(plan, now.machine)
    even = "even " if len(every) > 1 else ""
    return (
        f"{source.name} does not fit: {even}with --format {plan.needs.format} it needs {_needs(pool)}"
        f" ({parts(pool, plan, rest=True)}): {remedy(source, now, plan, pool)}"
    )


def remedy(source: ModelSource, now: Situation, least: Plan, pool: Pool) -> str:
    """Tells what would make it fit. `least`: the smallest plan, too large; `pool`: the memory it lacks."""
    ways = []
    if (found := _fitting(source, now)) is not None:
        config, plan = found
        there = replace(now, config=config).smallest(plan.needs)
        takes = next(p.needed for p in there.pools(now.machine) if p.name == pool.name)
        ways.append(f"use {_options(plan, now.config, config)} (at least {byte_size(takes)})")
    if pool.name == SHM_FOLDER and sum(other.short > 0 for other in least.pools(now.machine)) == 1:
        ways.append(f"enlarge it: {_enlarge(pool)}")
    if not ways:
        end = now.smallest(every_format(source, now.config, AUTOMATIC)[-1])
        if now.config.format is not None and end.needs.format != now.config.format:
            needed = byte_size(worst(end, now.machine).needed)
            ways.append(f"even {end.needs.format} would need {needed}")
        total = now.machine.total
        others = total is None or worst(end, now.machine).needed <= total
        ways.append("close other programs, use a smaller model" if others else "use a smaller model")
        ways[-1] += " or a machine with more memory"
    return "; ".join(ways)


def worst(plan: Plan, machine: Machine) -> Pool:
    """The kind of memory that lacks most; where none is short, the one with the least to spare."""
    return max(plan.pools(machine), key=lambda pool: pool.needed - pool.free)


def parts(pool: Pool, plan: Plan, rest: bool = False) -> str:
    """Lists what a kind of memory is for; `rest`: with what stays free."""
    needs, words = plan.needs, []
    for part, size in pool.parts.items():
        if part == "experts" and needs.present:
            new = f"experts {byte_size(size)}" if size else "no experts"
            words.append(f"{new} ({byte_size(needs.present)} in {needs.format} exist already)")
        elif part == "experts":
            words.append(f"experts {byte_size(size)} ({needs.format})")
        elif size and part != LEFT_FREE:
            kept = f" ({plan.kv_tokens} tokens in {needs.kv_dtype})" if part == "KV cache" else ""
            words.append(f"{part} {byte_size(size)}{kept}")
    free = pool.parts.get(LEFT_FREE, 0) if rest else 0
    return f"with {byte_size(free)} that stay free: " * bool(free) + ", ".join(words)


def _needs(pool: Pool) -> str:
    return f"{byte_size(pool.needed)} of {pool.name}, and {byte_size(pool.free)} is available"


def _enlarge(pool: Pool) -> str:
    status = os.statvfs(SHM_FOLDER)
    size = (status.f_blocks * status.f_frsize + pool.short >> 20) + 64
    return f"sudo mount -o remount,size={size}m {SHM_FOLDER}"


def _others(asked: EngineConfig) -> Iterator[EngineConfig]:
    """Configurations that may fit: with the same context in smaller formats beside the experts', then with
    fewer options: without one, without all, at last with a smaller backbone."""
    context: dict[str, None] = {"context": None, "kv_tokens": None}
    everything: dict[str, None] = {"format": None, "expert_cache": None} | context
    if asked.context is not None or asked.kv_tokens is not None:
        for name in SMALLER:
            yield from _smaller(asked, name)
    for fewer in ({"format": None}, context, {"expert_cache": None}, everything):
        freed = replace(asked, **fewer)  # type: ignore[arg-type]  # each of these may be None
        if freed != asked:
            yield freed
    if asked.kind == "cpu":
        smaller = {"int4": (), "int8": ("int4",)}
        for dtype in smaller.get(asked.backbone_dtype or "bf16", ("int8", "int4")):
            yield replace(asked, **everything, backbone_dtype=dtype)  # type: ignore[arg-type]


def _fitting(source: ModelSource, now: Situation) -> tuple[EngineConfig, Plan] | None:
    """The first of the other configurations that fits, with its plan."""
    for config in _others(now.config):
        plan = now.plan(config, every_format(source, config, formats(config, source)))
        if plan is not None:
            return config, plan
    return None


def _options(plan: Plan, asked: EngineConfig, other: EngineConfig) -> str:
    """The options that change the given configuration into this plan."""
    resolved = plan.resolved(other)
    changed = []
    for name, option in OPTIONS.items():
        before, after = getattr(asked, name), getattr(resolved, name)
        if before is not None and before != after:
            changed.append(f"{option} {after}")
    for name, option in SMALLER.items():
        if (dtype := getattr(other, name, None)) != getattr(asked, name, None):
            changed.append(f"{option} {dtype}")
    return " ".join(changed)
