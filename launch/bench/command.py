"""`launch.py bench`: the same prompts under several policies in one engine, interleaved.

A machine's speed drifts (heat, other programs), so the order of the policies alternates: A B C, then C B A,
after one round that is not counted. Before every run the policy is set anew and computes other requests, as
many at once as are measured: the same under every policy, and long enough for the slowest to learn, so that
a cache by use is full of what text uses, and predictions have been judged.

No policy keeps what it learns from a measured prompt. Placements by use see the same counts in every round:
those of held-out texts of every kind, which are read first, or of a running engine's earlier requests; the
engine counts none of the steps after that. At the end approximate policies and an exact one score held-out
text; the perplexities' difference is an approximation's cost.

With `--sweep` all of this is done for every combination of settings. Options of policies are further policies
of each comparison; the other settings are comparisons one after the other, in one engine as long as the
expert cache keeps its size. What was measured before a Ctrl-C or a failure is shown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from launch.bench.measure import (
    Perplexity,
    PolicyResult,
    Prompt,
    Texts,
    make_prompts,
    measure,
    read_other_texts,
    warm_up,
)
from launch.bench.plan import BenchPlan, comparisons
from launch.bench.report import Report
from launch.bench.sweep import Point, SweepReport
from launch.command_line.options import Options, axes
from launch.connect import connected
from launch.errors import Disturbed, WrongUsage
from launch.processes.cores import Cores
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import print_json
from launch.terminal.progress import ProgressCounter
from launch.terminal.tables import print_parts
from pipeline.calibration.cost_cache import processor
from pipeline.policies.placements import ENOUGH_TOKENS
from pipeline.policies.view import PolicyRequest
from protocol.client import Client
from protocol.errors import EngineGone, ProtocolError, RequestFailed
from protocol.messages import PolicyChanged

log = logging.getLogger("tandem")

# Computes what is not measured; the reference for approximate policies where --policy names no exact one.
EXACT = "all-host"


async def bench(options: Options, interrupts: Interrupts) -> int:
    """Run `bench`. Raises Disturbed, AnswerLost, OutputFailed, RequestFailed, WrongUsage; as an engine's
    start."""
    every, swept = comparisons(options), "sweep" in options.written
    engines = [list(group) for _, group in groupby(every, key=lambda each: each.settings.get("cache"))]
    runs = sum(each.plan.runs for each in every)
    if swept:
        policies, rounds = len(every[0].plan.policies), every[0].plan.rounds
        notice(
            f"sweep: {count(len(every), 'setting')}, policies: {policies}, {count(rounds, 'round')} and one"
            f" to warm up: {runs} runs"
            + (f", {count(len(engines), 'engine')} one after the other" if len(engines) > 1 else "")
        )
    report = SweepReport(axes(options.written))
    bar = ProgressCounter("bench: prompts", runs)
    try:
        for group in engines:
            async with session(group[0].options, interrupts) as (client, changes):
                for each in group:
                    place = f"{len(report.points) + 1}/{len(every)} {Point(each.settings, None)}: "
                    try:
                        with bar:
                            await check(client, each.plan)
                            run = Comparing(client, each.plan, changes, bar, place if swept else "bench: ")
                            report.points.append(Point(each.settings, await run.report(each.options)))
                    except (WrongUsage, RequestFailed) as e:
                        if not swept or (isinstance(e, RequestFailed) and not e.usage):
                            raise
                        report.points.append(Point(each.settings, None, str(e)))
    except (Exception, asyncio.CancelledError):
        report.interrupted = True
        if report.reports:
            _show(report, options)
        raise
    if not report.reports:
        raise WrongUsage(f"no setting can be measured: {report.points[0].left_out}")
    _show(report, options)
    if every[0].plan.plot is not None:
        report.draw(every[0].plan.plot)
    return 0


def _show(report: SweepReport, options: Options) -> None:
    shown = report if "sweep" in options.written else report.reports[0]
    if "json" in options.written:
        print_json(shown.to_json())
    else:
        print_parts(*shown.parts())


@asynccontextmanager
async def session(
    options: Options, interrupts: Interrupts, restore: bool = True
) -> AsyncIterator[tuple[Client, list[PolicyChanged]]]:
    """A client of the engine, and the changes of its policy by others. With `restore` a running engine has
    its own policy again at the end, unless another client has set one. Raises as `connected`; WrongUsage."""
    async with connected(options, interrupts) as client:
        before = await client.stats()
        changes: list[PolicyChanged] = []
        client.on_policy = changes.append
        try:
            yield client, changes
        finally:
            if restore and options.connect and not changes:
                await _restore(client, before)


async def check(client: Client, plan: BenchPlan) -> None:
    """Raises WrongUsage where the requests do not fit the engine."""
    plan.check_lengths(client.welcome.context, (await client.stats())["scheduler"]["kv_tokens"])


@dataclass(frozen=True)
class Comparing:
    """One comparison of policies. `bar`: counts the runs, 1 + rounds of each policy, each described after
    `prefix`; `changes`: of the policy, by other clients."""

    client: Client
    plan: BenchPlan
    changes: list[PolicyChanged]
    bar: ProgressCounter
    prefix: str

    async def report(self, options: Options) -> Report:
        """Measure every policy. Raises Disturbed, AnswerLost, RequestFailed, WrongUsage."""
        every = await self._run()
        results = [result for result in every if not result.left_out]
        await self._compare_perplexity(results)
        stats = await self.client.stats()
        left_out = [result for result in every if result.left_out]
        config = _config(options, self.plan, self.client, stats) | {
            "counted_tokens": stats["counted_tokens"],
            "left_out": {result.request.label: result.left_out for result in left_out},
        }
        return Report(config, results, stats["emulation"], left_out)

    async def _run(self) -> list[PolicyResult]:
        """Each policy's runs; a policy that cannot run here has none, and `left_out` has the reason."""
        client, plan, bar = self.client, self.plan, self.bar
        results = [PolicyResult(request) for request in plan.policies]
        prompts = await self._prompts()
        others = await self._others(plan.batch)
        for turn in range(1 + plan.rounds):
            for result in (results[index] for index in plan.order(turn)):
                if result.left_out:
                    continue
                stage = f"round {turn}" if turn else "warm-up"
                try:
                    changed = await self._begin(result.request, stage)
                except RequestFailed as e:
                    more = any(not rest.left_out for rest in results if rest is not result)
                    if plan.named or turn or not e.usage or not more:
                        raise
                    result.left_out = str(e)
                    bar.drop(1 + plan.rounds)
                    continue
                await self._warm_up(others)
                run, _ = await measure(client, prompts, plan.gen_len)
                check_own(self.changes)
                if turn:  # the first is the warm-up; a policy's notes about a cold engine are dropped with it
                    result.exact = changed.exact
                    result.notes += [note for note in changed.notes if note not in result.notes]
                    result.runs.append(run)
                bar.count()
        return results

    async def _begin(self, request: PolicyRequest, stage: str) -> PolicyChanged:
        """Set a policy, which no measured request teaches anything."""
        self.bar.start_stage(f"{self.prefix}{stage}, {request.label}")
        return await self.client.set_policy(request.name, request.options, counted=False)

    async def _warm_up(self, prompts: Sequence[Prompt]) -> None:
        _, new = self.plan.warm_up(self.client.welcome.context)
        await warm_up(self.client, prompts, new)

    async def _prompts(self) -> list[Prompt]:
        """The measured prompts. An engine that has counted no routing yet reads text of every kind first."""
        client, plan = self.client, self.plan
        stats = await client.stats()
        if stats["counted_tokens"] < ENOUGH_TOKENS:
            await client.set_policy(EXACT)
            await read_other_texts(client, plan.seed)
        await client.set_policy(EXACT, counted=False)  # the prompts are tokenized by scoring them
        return await make_prompts(client, plan.batch, plan.prompt_len, plan.seed)

    async def _others(self, count: int) -> list[Prompt]:
        """Prompts for warm-ups, which differ from the measured ones."""
        length, _ = self.plan.warm_up(self.client.welcome.context)
        return await make_prompts(self.client, count, length, self.plan.seed, first=self.plan.batch)

    async def _compare_perplexity(self, results: Sequence[PolicyResult]) -> None:
        """Set the perplexity of each approximate policy, beside the first exact one's, or all-host's."""
        client, plan = self.client, self.plan
        approximate = [result for result in results if not result.exact]
        if not approximate or not plan.ppl_tokens:
            return
        exact = next((result.request for result in results if result.exact), PolicyRequest(EXACT))
        texts = await Texts.make(client, plan.ppl_tokens, plan.prompt_len, plan.seed)
        others = await self._others(1)

        async def perplexity(request: PolicyRequest) -> float:
            await self._begin(request, "perplexity")
            await self._warm_up(others)
            measured = await texts.perplexity(client)
            check_own(self.changes)
            return measured

        reference = await perplexity(exact)
        for result in approximate:
            measured = await perplexity(result.request)
            result.perplexity = Perplexity(measured, reference, exact.name, texts.tokens, texts.prefill)


def check_own(changes: list[PolicyChanged]) -> None:
    """Raises Disturbed where another client has changed the policy."""
    if changes:
        raise Disturbed(
            f"another client set the policy {changes[-1].policy} meanwhile; run this without --connect"
        )


async def _restore(client: Client, before: dict[str, Any]) -> None:
    """Set the policy again that the running engine had before."""
    try:
        await client.set_policy(before["policy"], before["policy_options"])
    except EngineGone:
        log.debug("the engine has ended; its policy is not set again")
    except ProtocolError as e:
        log.warning(f"warning: the engine's earlier policy, {before['policy']}, was not set again: {e}")


def _config(options: Options, plan: BenchPlan, client: Client, stats: dict[str, Any]) -> dict[str, Any]:
    welcome, asked = client.welcome, options.config()
    started = not options.connect
    workers = Cores.here().default_workers() if asked.workers is None else asked.workers
    of_engine = ("engine", "model", "device", "format", "backbone_dtype")
    of_plan = ("prompt_len", "gen_len", "batch", "rounds", "ppl_tokens")
    return {
        **{name: getattr(welcome, name) for name in of_engine},
        "expert_cache": asked.expert_cache if started else None,
        "cache_tiles": stats["cache"]["capacity_tiles"] if "cache" in stats else None,
        "tile_bytes": stats["tile_bytes"],
        "workers": workers if started else None,
        "machine": "{}, {} cores".format(*processor()),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "context": welcome.context,
        "prefill_chunk": stats["scheduler"]["prefill_chunk"],
        "prompts": "held-out text" if welcome.has_tokenizer else "random ids",
        **{name: getattr(plan, name) for name in of_plan},
        "warm_up": 1,
        "warm_up_tokens": plan.warm_up(welcome.context),  # read and new ones of each request
        "seed": plan.seed,
    }
