"""`launch.py doctor --model`: would this model fit, in which format, and where would what of it lie?

The plan is the one that an engine with the same options would start with now. Nothing is loaded. Exit code 0:
it fits; 1: it does not.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launch.command_line.checks import check_engine
from launch.command_line.options import Options
from launch.doctor import costs
from launch.doctor.report import PLAIN_WIDTH, WIDEST
from launch.plan import OPTIONS, Situation, every_format, formats, reasons, refusal, situation
from launch.processes.cores import Cores
from launch.processes.runtime import cache_root
from launch.terminal.output import print_json, show
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_model
from pipeline.memory.needs import Needs
from pipeline.memory.plan import AUTOMATIC, Plan
from pipeline.models.registry import expert_shape, model_spec
from pipeline.models.spec import ModelSpec
from shm import cgroup
from shm.layout import format_named
from shm.segment import SHM_FOLDER, byte_size


async def show_plan(options: Options) -> int:
    """Raises UsageError, WrongUsage: a model that cannot be read, options that are wrong."""
    config = options.config()
    check_engine(config)
    now = await asyncio.to_thread(situation, config, Cores.here().default_workers())
    source = open_model(options.written["model"])
    names = AUTOMATIC if config.format in AUTOMATIC else tuple(dict.fromkeys((*formats(config), *AUTOMATIC)))
    each = {needs.format: needs for needs in every_format(source, now.config, names)}
    every = [each[name] for name in formats(config) if name in each]
    chosen = now.plan(now.config, every)
    rows = [_row(now, needs, chosen) for needs in each.values()]
    why = [refusal(source, now, every)] if chosen is None else reasons(chosen, now, every)
    stores = {name: expert_shape(source.config, now.config.tile, format_named(name)).tile for name in each}
    kept = costs.of_model(cache_root(), {source.fingerprint(*store) for store in stores.items()})
    if "json" in options.written:
        measured = [costs.to_map(path, record) for path, record in kept]
        print_json(_report(source, now, rows, chosen, why) | {"costs": measured})
    else:
        show(_rendered(source, now, rows, chosen, why, costs.paragraphs(kept)))
    return 0 if chosen is not None else 1


def _row(now: Situation, needs: Needs, chosen: Plan | None) -> Plan:
    """The plan for a format: the best that fits, else the smallest there is."""
    if chosen is not None and chosen.needs == needs:
        return chosen
    config = replace(now.config, format=needs.format)
    return now.plan(config, [needs]) or now.smallest(needs)


def _rendered(
    source: ModelSource,
    now: Situation,
    rows: Sequence[Plan],
    chosen: Plan | None,
    why: Sequence[str],
    measured: Sequence[tuple[str, list[str]]],
) -> str:
    """For stdout as it is now."""
    terminal = sys.stdout.isatty()
    out = io.StringIO()
    width = min(Console().width, WIDEST) if terminal else PLAIN_WIDTH
    console = Console(
        file=out, width=width, force_terminal=terminal, highlight=False, markup=False, emoji=False
    )
    console.print(source.name, style="bold")
    console.print(_layers(model_spec(source.config)))
    console.print(f"with --device {now.config.device} --policy {now.config.policy}")
    if (limit := cgroup.limits().memory) is not None:
        console.print(f"the control group allows {byte_size(limit)} of memory, with what is used already")
    console.print()
    console.print(_table(now, rows, chosen))
    console.print()
    if chosen is None:
        console.print(why[0], style="bold red")
    else:
        settled = chosen.settled(now.config)
        words = [f"{option} {getattr(settled, name)}" for name, option in OPTIONS.items()]
        console.print("It fits. An engine would start with", style="bold green")
        console.print("  " + " ".join(words if chosen.slab else words[:-1]))
        for line in why:
            console.print(f"  {line}", style="dim")
    for heading, lines in measured:
        console.print()
        console.print(f"Costs measured here ({heading})", style="bold")
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, 2)))
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _layers(spec: ModelSpec) -> str:
    sparse = len(spec.moe_layers)
    which = "" if sparse == spec.layers else f", {sparse} of them"
    experts = f"{spec.experts} experts, {spec.top_k} of which compute a token"
    return f"{spec.layers} layers{which} with {experts}; up to {spec.max_positions} tokens of context"


def _table(now: Situation, rows: Sequence[Plan], chosen: Plan | None) -> Table:
    """A column for each format, sizes in GB."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("GB", no_wrap=True)
    table.add_column("there", justify="right")
    for plan in rows:
        table.add_column(plan.needs.format, justify="right", style="bold" if plan is chosen else "")
    for pools in zip(*(plan.pools(now.machine) for plan in rows), strict=True):
        sums = [
            Text(_gb(pool.needed), style="red" if pool.short else "green", justify="right") for pool in pools
        ]
        table.add_row(pools[0].name, _gb(pools[0].free), *sums)
        for part in () if pools[0].name == SHM_FOLDER else pools[0].parts:
            if any(pool.parts[part] for pool in pools):
                table.add_row(f"  {part}", "", *(_gb(pool.parts[part]) for pool in pools))
    table.add_row("context (tokens)", "", *(str(plan.context) for plan in rows))
    if any(plan.slab for plan in rows):
        table.add_row("expert cache", "", *(f"{plan.expert_cache:g}" for plan in rows))
    table.add_row("", "", *(_verdict(plan, plan is chosen, now) for plan in rows))
    return table


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"


def _verdict(plan: Plan, chosen: bool, now: Situation) -> str:
    if not plan.fits(now.machine):
        return "too large"
    return "chosen" if chosen else "fits"


def _report(
    source: ModelSource, now: Situation, rows: Sequence[Plan], chosen: Plan | None, why: Sequence[str]
) -> dict[str, Any]:
    settled = None if chosen is None else chosen.settled(now.config)
    return {
        "model": source.name,
        "fits": chosen is not None,
        "device": now.config.device,
        "policy": now.config.policy,
        "chosen": None if settled is None else {name: getattr(settled, name) for name in OPTIONS},
        "why": list(why),
        "formats": [
            {
                "format": plan.needs.format,
                "fits": plan.fits(now.machine),
                "context": plan.context,
                "kv_tokens": plan.kv_tokens,
                "expert_cache": plan.expert_cache,
                "store_bytes": plan.needs.store,
                "in_memory_already_bytes": plan.needs.present,
                "memory": [
                    {"name": p.name, "there": p.free, "needed": p.needed, "parts": dict(p.parts)}
                    for p in plan.pools(now.machine)
                ],
            }
            for plan in rows
        ],
    }
