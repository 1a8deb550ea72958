"""`launch.py doctor --model`: whether a model fits, in which formats, and the memory that each part needs, by
the plan of an engine with these options, and the tokens a second to expect. Nothing of the model is loaded.
Exit code 0: the model fits; 1: not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from launch.command_line.checks import check_engine
from launch.command_line.options import Options
from launch.doctor import costs
from launch.doctor.speeds import explain, left_out, measure_speeds
from launch.forecast import Expected, Speeds, by_rates, sizes_of
from launch.planning.plan import OPTIONS, Situation, every_format, formats, reasons, refusal, situation
from launch.processes.cores import Cores
from launch.processes.trials import TrialFailed
from launch.terminal.format import alike, count
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from launch.terminal.tables import Cell, Column, Table, render
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_config
from pipeline.config import EngineConfig, FormatName
from pipeline.memory.needs import Needs
from pipeline.memory.plan import AUTOMATIC, LEFT_FREE, Plan
from pipeline.models.registry import expert_shape, model_spec
from pipeline.models.spec import ModelSpec
from protocol.program import user_folder
from shm.kernel_files import limits
from shm.layout import format_named
from shm.segment import SHM_FOLDER, byte_size


async def show_plan(options: Options, interrupts: Interrupts) -> int:
    """Show the plan. Raises UsageError, WrongUsage for a model that cannot be read and for wrong options."""
    config = options.config()
    source = open_config(options.written["model"])
    check_engine(config, source)
    now = await asyncio.to_thread(situation, config, Cores.here().default_workers())
    names = AUTOMATIC if config.format in AUTOMATIC else tuple(dict.fromkeys((*formats(config), *AUTOMATIC)))
    each = {needs.format: needs for needs in every_format(source, now.config, names)}
    every = [each[name] for name in formats(config) if name in each]
    chosen = now.plan(now.config, every)
    rows = [_row(now, needs, chosen) for needs in each.values()]
    why = [refusal(source, now, every)] if chosen is None else reasons(chosen, now, every)
    stores = {name: expert_shape(source.config, now.config.tile, format_named(name)).tile for name in each}
    kept = costs.of_model(user_folder("CACHE"), {source.fingerprint(*store) for store in stores.items()})
    speeds, forecasts, notes = await _expected(source, now.config, each, options, interrupts)
    if "json" in options.written:
        measured = [costs.to_map(path, record) for path, record in kept]
        report = _report(source, now, rows, chosen, why, forecasts) | {"costs": measured}
        print_json(report | {"speeds": None if speeds is None else speeds.to_map()})
    else:
        show(_text(source, now, rows, chosen, why, costs.paragraphs(kept), forecasts, notes), rendered=True)
    return 0 if chosen is not None else 1


async def _expected(
    source: ModelSource,
    config: EngineConfig,
    each: Mapping[FormatName, Needs],
    options: Options,
    interrupts: Interrupts,
) -> tuple[Speeds | None, Mapping[FormatName, Expected], list[str]]:
    """The expected speed in each format, and lines about it."""
    if config.device != "cpu":
        return None, {}, ["Expected tok/s: give --device cpu; with a GPU `bench` measures them."]
    try:
        speeds = await measure_speeds(source, config, list(each), options, interrupts)
    except TrialFailed as e:
        return None, {}, [f"The expected tok/s are unknown: {e}"]
    share = left_out(config)
    expected = {name: by_rates(sizes_of(source, config, name), speeds, share) for name in each}
    return speeds, expected, explain(expected, speeds, config)


def _row(now: Situation, needs: Needs, chosen: Plan | None) -> Plan:
    """The plan for a format: the best that fits, else the smallest."""
    if chosen is not None and chosen.needs == needs:
        return chosen
    config = replace(now.config, format=needs.format)
    return now.plan(config, [needs]) or now.smallest(needs)


def _text(
    source: ModelSource,
    now: Situation,
    rows: Sequence[Plan],
    chosen: Plan | None,
    why: Sequence[str],
    measured: Sequence[tuple[str, list[str]]],
    forecasts: Mapping[FormatName, Expected],
    notes: Sequence[str],
) -> str:
    parts: list[RenderableType] = [Text(source.name, style="bold"), _layers(model_spec(source.config))]
    parts.append(f"with --device {now.config.device} --policy {now.config.policy}")
    if (limit := limits().memory) is not None:
        parts.append(f"the control group allows {byte_size(limit)} of memory, including what is in use")
    parts += ["", _table(now, rows, chosen, forecasts)]
    # Of the table's figures, and so beside it.
    explained: list[RenderableType] = [*(Text(line, style="dim") for line in notes), ""]
    if chosen is None:
        parts += [*explained, Text(why[0], style="bold red")]
    else:
        resolved = chosen.resolved(now.config)
        words = [f"{option} {getattr(resolved, name)}" for name, option in OPTIONS.items()]
        parts += [*explained, Text("It fits. An engine would start with", style="bold green")]
        parts.append("  " + " ".join(words if chosen.slab else words[:-1]))
        parts += [Text(f"  {line}", style="dim") for line in why]
    for heading, lines in measured:
        parts += ["", Text(f"Costs measured here ({heading})", style="bold")]
        parts += [Padding(Text(line), (0, 0, 0, 2)) for line in lines]
    return render(*parts)


def _layers(spec: ModelSpec) -> str:
    sparse = len(spec.moe_layers)
    which = "" if sparse == spec.layers else f", {sparse} of them"
    experts = f"{count(spec.experts, 'expert')}, {spec.top_k} active per token"
    layers = f"{count(spec.layers, 'layer')}{which} with {experts}"
    return f"{layers}; context of up to {spec.max_positions} tokens"


def _table(
    now: Situation, rows: Sequence[Plan], chosen: Plan | None, forecasts: Mapping[FormatName, Expected]
) -> Table[tuple[Cell, ...]]:
    """A column for each format, with the bytes needed and the expected speed."""
    lines: list[tuple[Cell, ...]] = []
    for pools in zip(*(plan.pools(now.machine) for plan in rows), strict=True):
        # As the line of a start counts it: without what is left free, which must be available all the same.
        sums = [
            Text(byte_size(pool.needed - pool.parts.get(LEFT_FREE, 0)), "red" if pool.short else "green")
            for pool in pools
        ]
        lines.append((pools[0].name, byte_size(pools[0].free), *sums))
        for part in () if pools[0].name == SHM_FOLDER else pools[0].parts:
            if any(pool.parts[part] for pool in pools):
                name = f"and {part}" if part == LEFT_FREE else f"  {part}"
                lines.append((name, "", *(byte_size(pool.parts[part]) for pool in pools)))
    lines.append(("context (tokens)", "", *(str(plan.context) for plan in rows)))
    if any(plan.slab for plan in rows):
        lines.append(("expert cache", "", *(f"{plan.expert_cache:g}" for plan in rows)))
    fits = {True: "fits", False: "too large"}
    verdicts = ("chosen" if plan is chosen else fits[plan.fits(now.machine)] for plan in rows)
    lines.append(("", "", *verdicts))
    if forecasts:  # below the verdict, of a format that is too large as well
        expected = [forecasts[plan.needs.format] for plan in rows]
        lines.append(("tok/s, about", "", *alike([each.usual for each in expected])))
        slow, fast = (
            alike(list(speeds)) for speeds in zip(*((e.slow, e.fast) for e in expected), strict=True)
        )
        lines.append(("  range", "", *map("{}-{}".format, slow, fast)))
        lines.append(("  memory's limit", "", *alike([each.limit for each in expected])))
    columns = [
        Column[tuple[Cell, ...]](plan.needs.format, itemgetter(place), style="bold" if plan is chosen else "")
        for place, plan in enumerate(rows, 2)
    ]
    first = (
        Column[tuple[Cell, ...]]("", itemgetter(0), text=True),
        Column[tuple[Cell, ...]]("available", itemgetter(1)),
    )
    return Table([*first, *columns], lines)


def _report(
    source: ModelSource,
    now: Situation,
    rows: Sequence[Plan],
    chosen: Plan | None,
    why: Sequence[str],
    forecasts: Mapping[FormatName, Expected],
) -> dict[str, Any]:
    resolved = None if chosen is None else chosen.resolved(now.config)
    return {
        "model": source.name,
        "fits": chosen is not None,
        "device": now.config.device,
        "policy": now.config.policy,
        "chosen": None if resolved is None else {name: getattr(resolved, name) for name in OPTIONS},
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
                "expected": found.to_map() if (found := forecasts.get(plan.needs.format)) else None,
                "memory": [
                    {"name": p.name, "there": p.free, "needed": p.needed, "parts": dict(p.parts)}
                    for p in plan.pools(now.machine)
                ],
            }
            for plan in rows
        ],
    }
