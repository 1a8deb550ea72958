"""`launch.py bench`: the same prompts under several policies in one engine, in turns.

A machine's speed drifts (heat, other programs), so the policies take turns: A B C, then C B A, and so on,
after one turn that is not counted. Before every run the policy is set anew and reads a little text that is
not measured: then its placement has landed, its cache is filled, and every run of it begins alike. A policy
that places experts by how often they were used has seen these very prompts in earlier turns.
"""

from __future__ import annotations

import logging
from typing import Any

from launch.bench.plan import BenchPlan
from launch.bench.prompts import make_prompts
from launch.bench.report import Entry, Report
from launch.bench.run import measure, settle
from launch.cores import Cores
from launch.counting import counted
from launch.errors import Disturbed
from launch.interrupts import Interrupts
from launch.options import Options
from launch.output import print_json, show
from launch.session import connected
from pipeline.config import EngineConfig
from protocol.client import Client
from protocol.errors import EngineGone, ProtocolError
from protocol.messages import PolicyChanged

log = logging.getLogger("tandem")

SETTLE_PROMPT = 64  # tokens read before a run, at most: enough to use nearly every expert
SETTLE_NEW = 8


async def bench(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage, PolicyError, Disturbed, AnswerLost, RequestFailed, and what the start of an engine
    raises."""
    plan = BenchPlan.of(options)
    async with connected(options, interrupts) as client:
        before = await client.stats()
        plan.check_room(client.welcome.context, before["scheduler"]["kv_tokens"])
        changes: list[PolicyChanged] = []  # by other clients
        client.on_policy = changes.append
        try:
            entries = await _run(client, plan, changes)
            stats = await client.stats()
        finally:
            if options.connect and not changes:
                await _restore(client, before)
        config = _config(options, plan, client, stats)
    report = Report(config, entries, stats["emulation"])
    if "json" in options.written:
        print_json(report.to_json())
    else:
        show(report.render())
    return 0


async def _run(client: Client, plan: BenchPlan, changes: list[PolicyChanged]) -> list[Entry]:
    entries = [Entry(request) for request in plan.policies]
    with counted("bench: prompts", len(entries) * (1 + plan.rounds)) as bar:
        *prompts, other = await make_prompts(client, plan.batch + 1, plan.prompt_len, plan.seed)
        for turn in range(1 + plan.rounds):
            for index in plan.order(turn):
                entry = entries[index]
                name = entry.request.name
                bar.name(f"bench: round {turn}, {name}" if turn else f"bench: warm-up, {name}")
                changed = await client.set_policy(name, entry.request.options)
                await settle(client, other[:SETTLE_PROMPT], min(SETTLE_NEW, plan.gen_len))
                run, _ = await measure(client, prompts, plan.gen_len)
                if changes:
                    raise Disturbed(
                        f"another client set the policy {changes[-1].policy} meanwhile; use an engine of"
                        " bench's own"
                    )
                if turn:  # the first is the warm-up; what a policy says of a cold engine goes with it
                    entry.exact = changed.exact
                    entry.notes += [note for note in changed.notes if note not in entry.notes]
                    entry.runs.append(run)
                bar.count()
    return entries


async def _restore(client: Client, before: dict[str, Any]) -> None:
    """Give a running engine the policy back that it had."""
    try:
        await client.set_policy(before["policy"], before["policy_options"])
    except EngineGone:
        pass  # nothing to restore; what ended it is said elsewhere
    except ProtocolError as e:
        log.warning(f"warning: the engine's policy before, {before['policy']}, could not be set again: {e}")


def _config(options: Options, plan: BenchPlan, client: Client, stats: dict[str, Any]) -> dict[str, Any]:
    welcome, asked = client.welcome, options.config()
    started = not options.connect
    return {
        "engine": welcome.engine,
        "model": welcome.model,
        "device": welcome.device,
        "format": welcome.format,
        "backbone_dtype": welcome.backbone_dtype,
        "expert_cache": asked.expert_cache if started else None,
        "cache_tiles": stats["cache"]["capacity_tiles"] if "cache" in stats else None,
        "tile_bytes": stats["tile_bytes"],
        "workers": _workers(asked) if started else None,
        "context": welcome.context,
        "prefill_chunk": stats["scheduler"]["prefill_chunk"],
        "prompts": "held-out text" if welcome.has_tokenizer else "random ids",
        "prompt_len": plan.prompt_len,
        "gen_len": plan.gen_len,
        "batch": plan.batch,
        "rounds": plan.rounds,
        "warm_up": 1,
        "seed": plan.seed,
    }


def _workers(asked: EngineConfig) -> int:
    return Cores.here().default_workers() if asked.workers is None else asked.workers
