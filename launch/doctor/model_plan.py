"""`launch.py doctor --model`: whether a model fits, in which formats, and the memory that each part needs, by
the plan of an engine with these options, and the tokens a second to expect. Nothing of the model is loaded.
Exit code 0: the model fits; 1: not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from rich.console import RenderableType
from rich.text import Text

from launch.bench.drawn import PROMPT
from launch.command_line.checks import check_engine
from launch.command_line.options import Options
from launch.doctor.measure import disk_rate, explain_speeds, left_out, measure_speeds
from launch.forecast import (
    CONTEXT,
    Expected,
    OnDisk,
    Sizes,
    Speeds,
    by_rates,
    drawn,
    on_disk,
    sizes_of,
    with_disk,
)
from launch.planning import (
    OPTIONS,
    Situation,
    check_divides,
    every_format,
    formats,
    plan_on_disk,
    reasons,
    refusal,
    situation,
)
from launch.processes.cores import Cores
from launch.processes.trials import TrialFailed
from launch.terminal.format import alike, count
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json
from launch.terminal.tables import Cell, Column, Table, dim, print_parts
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_config
from pipeline.config import FloeName, FormatName
from pipeline.memory.needs import Needs
from pipeline.memory.plan import AUTOMATIC, LEFT_FREE, Plan
from pipeline.models.facts import facts_of
from shm.segment import SHM_FOLDER, byte_size

TableRow = tuple[str, str, Sequence[Cell]]  # a name, what is available, a cell for each format


@dataclass(frozen=True)
class ModelPlan:
    """`rows`: a plan for each format, the best that fits or else the smallest; `chosen`: the one that an
    engine would start with, for the reasons in `why`, which else says why nothing fits."""

    source: ModelSource
    now: Situation
    rows: Sequence[Plan]
    chosen: Plan | None
    why: Sequence[str]

    @classmethod
    def of(cls, source: ModelSource, now: Situation) -> ModelPlan:
        check_divides(source, now.config)
        asked = formats(now.config, source)
        names = AUTOMATIC if asked[0] in AUTOMATIC else (asked[0], *AUTOMATIC)
        each = every_format(source, now.config, names)
        allowed = [needs for needs in each if needs.format in asked]
        chosen = now.plan(now.config, allowed) or plan_on_disk(source, now, allowed)

        def row(needs: Needs) -> Plan:
            if chosen is not None and chosen.needs.format == needs.format:
                return chosen
            return now.plan(replace(now.config, format=needs.format), [needs]) or now.smallest(needs)

        why = [refusal(source, now, allowed)] if chosen is None else reasons(chosen, now, allowed)
        return cls(source, now, [row(needs) for needs in each], chosen, why)

    @property
    def formats(self) -> list[FormatName]:
        return [plan.needs.format for plan in self.rows]

    def to_map(self, forecasts: Mapping[FormatName, Expected]) -> dict[str, Any]:
        now = self.now
        resolved = None if self.chosen is None else self.chosen.resolved(now.config)
        expected = {name: forecast.to_map() for name, forecast in forecasts.items()}
        return {
            "model": self.source.name,
            "fits": self.chosen is not None,
            "device": now.config.device,
            "policy": now.config.policy,
            "chosen": None if resolved is None else {name: getattr(resolved, name) for name in OPTIONS},
            "why": list(self.why),
            "formats": [
                {
                    "format": plan.needs.format,
                    "fits": plan.fits(now.machine),
                    "context": plan.context,
                    "kv_tokens": plan.kv_tokens,
                    "kv_dtype": plan.needs.kv_dtype,
                    "expert_cache": plan.expert_cache,
                    "store_bytes": plan.needs.store,
                    "in_memory_already_bytes": plan.needs.present,
                    "expected": expected.get(plan.needs.format),
                    "memory": [
                        {"name": p.name, "there": p.free, "needed": p.needed, "parts": dict(p.parts)}
                        for p in plan.pools(now.machine)
                    ],
                }
                for plan in self.rows
            ],
        }

    def table(self, forecasts: Mapping[FormatName, Expected]) -> Table[TableRow]:
        """Returns a column for each format, with the bytes needed and the expected speed."""
        columns = [
            Column[TableRow]("", lambda row: row[0], text=True),
            Column("available", lambda row: row[1]),
        ]
        for place, plan in enumerate(self.rows):
            style = "bold" if plan is self.chosen else ""
            columns.append(Column(plan.needs.format, partial(_cell, place), style=style))
        return Table(columns, [*self._memory(), *self._choices(), *self._speeds(forecasts)])

    def _memory(self) -> Iterator[TableRow]:
        for pools in zip(*(plan.pools(self.now.machine) for plan in self.rows), strict=True):
            # As a start's line counts it: without what is left free, which must be available all the same.
            sums = [
                Text(byte_size(pool.needed - pool.parts.get(LEFT_FREE, 0)), "red" if pool.short else "green")
                for pool in pools
            ]
            yield pools[0].name, byte_size(pools[0].free), sums
            for part in () if pools[0].name == SHM_FOLDER else pools[0].parts:
                if any(pool.parts[part] for pool in pools):
                    name = f"and {part}" if part == LEFT_FREE else f"  {part}"
                    yield name, "", [byte_size(pool.parts[part]) for pool in pools]

    def _choices(self) -> Iterator[TableRow]:
        yield "context (tokens)", "", [str(plan.context) for plan in self.rows]
        if any(plan.slab for plan in self.rows):
            yield "expert cache", "", [f"{plan.expert_cache:g}" for plan in self.rows]
        fits = {True: "fits", False: "too large"}
        machine = self.now.machine
        yield "", "", ["chosen" if plan is self.chosen else fits[plan.fits(machine)] for plan in self.rows]

    def _speeds(self, forecasts: Mapping[FormatName, Expected]) -> Iterator[TableRow]:
        if forecasts:  # also of a format that is too large
            expected = [forecasts[name] for name in self.formats]
            yield "tok/s, about", "", alike([each.usual for each in expected])
            slow, fast = (alike(speeds) for speeds in zip(*(each.range for each in expected), strict=True))
            yield "  range", "", list(map("{}-{}".format, slow, fast))


def _cell(place: int, row: TableRow) -> Cell:
    return row[2][place]


async def show_plan(options: Options, interrupts: Interrupts) -> int:
    """Show the plan. Raises UsageError, WrongUsage for a model that cannot be read and for wrong options."""
    config = options.config()
    source = open_config(options.written["model"])
    check_engine(config, source)
    now = await asyncio.to_thread(situation, config, Cores.here().default_workers())
    plan = ModelPlan.of(source, now)
    speeds, forecasts, notes = await _expected(plan, options, interrupts)
    if "json" in options.written:
        print_json(plan.to_map(forecasts) | {"speeds": None if speeds is None else speeds.to_map()})
    else:
        print_parts(*_head(plan), "", plan.table(forecasts), *dim(notes), "", *_verdict(plan))
    return 0 if plan.chosen is not None else 1


async def _expected(
    plan: ModelPlan, options: Options, interrupts: Interrupts
) -> tuple[Speeds | None, Mapping[FormatName, Expected], list[str]]:
    """Returns the expected speed in each format, and lines about it."""
    source, config = plan.source, plan.now.config
    if config.kind != "cpu" or config.cards:
        return None, {}, ["Expected tok/s: give --device cpu; with a GPU `bench` measures them."]
    with_some = [row.needs.format for row in plan.rows if row.needs.partial]
    try:
        speeds = await measure_speeds(source, config, plan.formats, options, interrupts)
        disk = await asyncio.to_thread(disk_rate) if with_some else 0.0
    except TrialFailed as e:
        return None, {}, [f"The expected tok/s are unknown: {e}"]
    share, notes = left_out(config), list[str]()
    sizes = {name: sizes_of(source, config, name) for name in plan.formats}
    expected = {name: by_rates(each, speeds, share) for name, each in sizes.items()}
    found = {name: await asyncio.to_thread(_found, sizes[name], config.seed) for name in with_some}
    for name, each in found.items():
        expected[name] = with_disk(expected[name], each, disk)
    if found:
        notes.append(_reads(found, disk))
    first = expected[plan.formats[0]]
    reads = (
        f"tok/s: expected of one request after {CONTEXT} tokens, with --policy all-host. A token reads its"
        f" experts, {byte_size(first.backbone)} of backbone in {plan.rows[0].needs.backbone_dtype} and"
        f" {byte_size(first.kv)} of KV cache"
    )
    floe = any(name in get_args(FloeName) for name in plan.formats)
    reads += f"; in floe formats it leaves out {share:.0%} of an expert." if floe else "."
    return speeds, expected, [reads, *explain_speeds(plan.formats, speeds), *notes]


def _found(sizes: Sizes, seed: int) -> OnDisk:
    """Returns what a token of drawn routing reads."""
    return on_disk(sizes, drawn(sizes.header, PROMPT, PROMPT, seed))


def _reads(found: Mapping[FormatName, OnDisk], rate: float) -> str:
    each = [
        f"{name} {one.hit_rate:.0%} (it reads {byte_size(round(one.bytes))})" for name, one in found.items()
    ]
    routing = next(iter(found.values())).routing
    return (
        f"Experts on disk, which reads {byte_size(rate)}/s: of its experts a token finds in memory"
        f" {', '.join(each)}; {routing}."
    )


def _head(plan: ModelPlan) -> Iterator[RenderableType]:
    facts, config = facts_of(plan.source.config), plan.now.config
    which = "" if len(facts.moe_layers) == facts.layers else f", {len(facts.moe_layers)} of them"
    experts = f"{count(facts.experts, 'expert')}, {facts.top_k} active per token"
    yield Text(plan.source.name, style="bold")
    context = f"context of up to {facts.max_positions} tokens"
    yield f"{count(facts.layers, 'layer')}{which} with {experts}; {context}"
    if numbers := facts.table_numbers:
        size = f"{byte_size(2 * numbers)} in bf16"
        yield f"Tables beside the input's embedding, {size}, stay on disk: a step reads rows of them"
    yield f"with --device {','.join(map(str, config.cards)) or config.device} --policy {config.policy}"


def _verdict(plan: ModelPlan) -> Iterator[Text]:
    if plan.chosen is None:
        yield Text(plan.why[0], style="bold red")
        return
    resolved = plan.chosen.resolved(plan.now.config)
    words = [f"{option} {getattr(resolved, name)}" for name, option in OPTIONS.items()]
    yield Text("It fits. An engine would start with", style="bold green")
    yield Text("  " + " ".join(words if plan.chosen.slab else words[:-1]))
    yield from dim(f"  {line}" for line in plan.why)
