"""`launch.py bench`: the same prompts under several policies in one engine, interleaved.

A machine's speed drifts (heat, other programs), so the order of the policies alternates: A B C, then C B A,
after one round that is not counted. Before every run the policy is set anew and computes other requests, as
many at once as are measured: the same under every policy, and long enough for the slowest to learn, so that
a cache by use is full of what text uses, and predictions have been judged.

No policy keeps what it learns from a measured prompt. Placements by use see the same counts in every round:
those of held-out texts of every kind, which are read first, or of a running engine's earlier requests; the
engine counts none of the steps after that. At the end approximate policies and an exact one score held-out
text; the perplexities' difference is an approximation's cost.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
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
from launch.bench.plan import BenchPlan
from launch.bench.report import Report
from launch.command_line.options import Options
from launch.connect import connected
from launch.errors import Disturbed
from launch.processes.cores import Cores
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json
from launch.terminal.progress import ProgressCounter
from launch.terminal.tables import print_parts
from pipeline.calibration.cost_cache import processor
from pipeline.policies.placements import ENOUGH_TOKENS
from pipeline.policies.presets import make_policy
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
    plan = BenchPlan.of(options)
    async with session(options, interrupts) as (client, changes):
        await check(client, plan)
        with ProgressCounter("bench: prompts", plan.runs) as bar:
            report = await compare(client, plan, options, changes, bar)
    if "json" in options.written:
        print_json(report.to_json())
    else:
        print_parts(*report.parts())
    if plan.plot is not None:
        report.draw(plan.plot)
    return 0


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


async def compare(
    client: Client,
    plan: BenchPlan,
    options: Options,
    changes: list[PolicyChanged],
    bar: ProgressCounter,
    prefix: str = "bench: ",
) -> Report:
    """Measure every policy. `bar`: counts the runs, 1 + rounds of each policy, each described after `prefix`.
    Raises Disturbed, AnswerLost, RequestFailed, WrongUsage."""
    every = await _run(client, plan, changes, bar, prefix)
    results = [result for result in every if not result.left_out]
    await _compare_perplexity(client, plan, results, changes, bar, prefix)
    stats = await client.stats()
    left_out = [result for result in every if result.left_out]
    config = _config(options, plan, client, stats) | {
        "counted_tokens": stats["counted_tokens"],
        "uncalibrated": [] if stats["calibrated"] else _uncalibrated(results, plan.seed),
        "left_out": {result.request.label: result.left_out for result in left_out},
    }
    return Report(config, results, stats["emulation"], left_out)


async def _run(
    client: Client,
    plan: BenchPlan,
    changes: list[PolicyChanged],
    bar: ProgressCounter,
    prefix: str,
) -> list[PolicyResult]:
    """Each policy's runs; a policy that cannot run here has none, and `left_out` has the reason."""
    results = [PolicyResult(request) for request in plan.policies]
    prompts, others = await _prepare(client, plan)
    _, new = plan.warm_up(client.welcome.context)
    for turn in range(1 + plan.rounds):
        for result in (results[index] for index in plan.order(turn)):
            if result.left_out:
                continue
            request, label = result.request, result.request.label
            bar.start_stage(f"{prefix}round {turn}, {label}" if turn else f"{prefix}warm-up, {label}")
            try:
                changed = await client.set_policy(request.name, request.options, counted=False)
            except RequestFailed as e:
                more = any(not rest.left_out for rest in results if rest is not result)
                if plan.named or turn or not e.usage or not more:
                    raise
                result.left_out = str(e)
                bar.drop(1 + plan.rounds)
                continue
            await warm_up(client, others, new)
            run, _ = await measure(client, prompts, plan.gen_len)
            check_own(changes)
            if turn:  # the first is the warm-up; a policy's notes about a cold engine are dropped with it
                result.exact = changed.exact
                result.notes += [note for note in changed.notes if note not in result.notes]
                result.runs.append(run)
            bar.count()
    return results


async def _prepare(client: Client, plan: BenchPlan) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts, and as many others for warm-ups. An engine that has counted no routing yet reads text of
    every kind first."""
    stats = await client.stats()
    if stats["counted_tokens"] < ENOUGH_TOKENS:
        await client.set_policy(EXACT)
        await read_other_texts(client, plan.seed)
    await client.set_policy(EXACT, counted=False)  # the prompts are tokenized by scoring them
    prompts = await make_prompts(client, plan.batch, plan.prompt_len, plan.seed)
    return prompts, await _others(client, plan, plan.batch)


async def _others(client: Client, plan: BenchPlan, count: int) -> list[Prompt]:
    """Prompts for warm-ups, which differ from the measured ones."""
    length, _ = plan.warm_up(client.welcome.context)
    return await make_prompts(client, count, length, plan.seed, first=plan.batch)


async def _compare_perplexity(
    client: Client,
    plan: BenchPlan,
    results: Sequence[PolicyResult],
    changes: list[PolicyChanged],
    bar: ProgressCounter,
    prefix: str,
) -> None:
    """Set the perplexity of each approximate policy, beside that of the first exact one, or of all-host."""
    approximate = [result for result in results if not result.exact]
    if not approximate or not plan.ppl_tokens:
        return
    exact = next((result.request for result in results if result.exact), PolicyRequest(EXACT))
    texts = await Texts.make(client, plan.ppl_tokens, plan.prompt_len, plan.seed)
    others = await _others(client, plan, 1)
    _, new = plan.warm_up(client.welcome.context)

    async def perplexity(request: PolicyRequest) -> float:
        bar.start_stage(f"{prefix}perplexity, {request.label}")
        await client.set_policy(request.name, request.options, counted=False)
        await warm_up(client, others, new)
        measured = await texts.perplexity(client)
        check_own(changes)
        return measured

    reference = await perplexity(exact)
    for result in approximate:
        measured = await perplexity(result.request)
        result.perplexity = Perplexity(measured, reference, exact.name, texts.tokens, texts.prefill)


def _uncalibrated(results: Sequence[PolicyResult], seed: int) -> list[str]:
    """Names of the policies that would place experts by a calibration."""
    return [result.request.label for result in results if make_policy(result.request, seed).likes_calibration]


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
