"""`launch.py bench --sweep`: `bench` for every combination of swept settings. Options of policies are further
policies of each comparison; the other settings are comparisons one after the other, in one engine as long as
the expert cache keeps its size. What was measured before a Ctrl-C or a failure is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

from launch.bench.command import EXACT, check, compare, session
from launch.bench.meter import open_meter
from launch.bench.plan import WARM_UP_NEW, WARM_UP_PROMPT, BenchPlan
from launch.bench.prompts import make_prompts
from launch.bench.run import Run, measure
from launch.bench.sweep_plot import draw_sweep
from launch.bench.sweep_report import Point, SweepReport, words_of
from launch.command_line.options import Options
from launch.command_line.sweep import SETTINGS, axes
from launch.errors import Disturbed, WrongUsage
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import print_json, show
from launch.terminal.progress import ProgressCounter
from pipeline.config import KV_BLOCK, EngineConfig
from protocol.client import Client
from protocol.errors import RequestFailed

TRIAL_PROMPT, TRIAL_NEW = 32, 24  # tokens of the runs that a sweep's time is estimated from


@dataclass(frozen=True)
class Comparison:
    """One combination of settings; `options`: the command line with them instead of --sweep."""

    settings: dict[str, Any]
    options: Options
    plan: BenchPlan


def combinations(options: Options) -> Iterator[tuple[dict[str, Any], Options]]:
    """Every combination of the swept settings, and the command line with it. Raises WrongUsage."""
    found = axes(options.written)
    swept = [axis for axis in found if axis.is_setting]
    # the policies' options stay: Options.policies makes further policies of them
    rest = [f"{axis.name}={','.join(axis.values)}" for axis in found if not axis.is_setting]
    for values in product(*(axis.values for axis in swept)):
        settings = {axis.name: value for axis, value in zip(swept, values, strict=True)}
        given = {SETTINGS[name][0]: value for name, value in settings.items()}
        yield settings, replace(options, written=options.written | given | {"sweep": rest})


def comparisons(options: Options) -> list[Comparison]:
    """All, with an engine that is large enough for each. Raises WrongUsage; UsageError as BenchPlan.of."""
    found = list(combinations(options))
    if not options.connect:
        found = _in_one_size(found)
    # perplexities, unless asked for: they would take most of the time
    found = [(of, replace(o, written={"ppl_tokens": 0} | o.written)) for of, o in found]
    return [Comparison(of, each, BenchPlan.of(each)) for of, each in found]


def _in_one_size(found: Sequence[tuple[dict[str, Any], Options]]) -> list[tuple[dict[str, Any], Options]]:
    """The same engine for every batch and length, so that only the cache's size needs another one."""
    written = [options.written for _, options in found]
    batches = [given.get("batch", 1) for given in written]
    longest = [
        max(given.get("prompt_len", 128) + given.get("gen_len", 64), WARM_UP_PROMPT + WARM_UP_NEW)
        for given in written
    ]
    size: dict[str, Any] = {"max_sequences": max(EngineConfig.max_sequences, *batches)}
    if max(batches) > EngineConfig.max_sequences:
        blocks = max(b * -(-tokens // KV_BLOCK) for b, tokens in zip(batches, longest, strict=True))
        size["kv_tokens"] = blocks * KV_BLOCK
    return [(of, replace(options, written=size | options.written)) for of, options in found]


async def sweep(options: Options, interrupts: Interrupts) -> int:
    """Raises as `bench`."""
    every = comparisons(options)
    meter = await open_meter(options)
    caches = [list(group) for _, group in groupby(every, key=lambda each: each.settings.get("cache"))]
    runs = sum(each.plan.runs for each in every)
    policies, rounds = len(every[0].plan.policies), every[0].plan.rounds
    notice(
        f"sweep: {count(len(every), 'setting')} x {policies} policies x {rounds + 1} rounds = {runs} runs"
        + (f", {count(len(caches), 'engine')} one after the other" if len(caches) > 1 else "")
    )
    report = SweepReport([axis for axis in axes(options.written)])
    bar = ProgressCounter("sweep", runs)
    try:
        for group in caches:
            async with session(group[0].options, interrupts) as (client, changes):
                if group is caches[0]:
                    await _announce(client, every)
                for each in group:
                    where = f"{len(report.points) + 1}/{len(every)} {words_of(each.settings)}: "
                    try:
                        with bar:
                            await check(client, each.plan, each.options)
                            found = await compare(client, each.plan, each.options, changes, bar, where, meter)
                    except (WrongUsage, RequestFailed) as e:
                        if isinstance(e, RequestFailed) and not e.usage:
                            raise
                        report.points.append(Point(each.settings, None, str(e)))
                        continue
                    report.points.append(Point(each.settings, found))
    except (Exception, asyncio.CancelledError):
        report.interrupted = True
        if report.measured:
            _show(report, options)
        raise
    if not report.measured:
        raise WrongUsage(f"no setting can be measured: {report.points[0].left_out}")
    _show(report, options)
    if every[0].plan.plot is not None:
        draw_sweep(report, every[0].plan.plot)
    return 0


def _show(report: SweepReport, options: Options) -> None:
    if "json" in options.written:
        print_json(report.to_json(), detail="detail" in options.written)
    else:
        show(report.render(), rendered=True)


async def _announce(client: Client, every: Sequence[Comparison]) -> None:
    """Say how long the sweep will probably take, from two short runs under an exact policy."""
    largest = max(each.plan.batch for each in every)
    await client.set_policy(EXACT, counted=False)
    prompts = await make_prompts(client, largest, TRIAL_PROMPT, seed=0)
    try:
        pace = {b: (await measure(client, prompts[:b], TRIAL_NEW))[0] for b in {1, largest}}
    except (WrongUsage, Disturbed):  # so many requests do not overlap, or do not fit
        return
    minutes = sum(_seconds(each.plan, pace, client.welcome.context) for each in every) / 60
    notice(f"sweep: about {minutes:.0f} minutes" if minutes >= 1.5 else f"sweep: about {60 * minutes:.0f} s")


def _seconds(plan: BenchPlan, pace: dict[int, Run], context: int) -> float:
    """Of all runs and their warm-ups; between the measured batches a step's time is taken to be linear."""
    largest = max(pace)
    first, last = 1 / pace[1].decode_tok_s, largest / pace[largest].decode_tok_s
    step = first + (last - first) * (plan.batch - 1) / max(largest - 1, 1)
    read, new = plan.warm_up(context)
    prefill = plan.batch * (plan.prompt_len + read) / pace[largest].prefill_tok_s
    return plan.runs * (prefill + step * (plan.gen_len + new))
