"""`launch.py bench`: the same prompts under several policies in one engine, in turns.

Then each approximate policy reads some held-out text, and so does an exact one, to see what it costs.

A machine's speed drifts (heat, other programs), so the policies take turns: A B C, then C B A, and so on,
after one turn that is not counted. Before every run the policy is set anew and reads a little text that is
not measured: then its placement has landed, its cache is filled, and every run of it begins alike. A policy
that places experts by how often they were used has seen these very prompts in earlier turns.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from launch.bench.perplexity import Perplexity, Texts
from launch.bench.plan import BenchPlan
from launch.bench.plot import draw
from launch.bench.prompts import make_prompts
from launch.bench.report import Entry, Report
from launch.bench.run import measure, settle
from launch.command_line.options import Options
from launch.connect.session import connected
from launch.errors import Disturbed
from launch.processes.cores import Cores
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json, show
from launch.terminal.progress import ProgressCounter
from pipeline.config import EngineConfig
from pipeline.policies.view import PolicyRequest
from protocol.client import Client
from protocol.errors import EngineGone, ProtocolError, RequestFailed
from protocol.messages import PolicyChanged

log = logging.getLogger("tandem")

EXACT = "all-host"  # what approximate policies are compared with where no exact one is asked for
SETTLE_PROMPT = 64  # tokens read before a run, at most: enough to use nearly every expert
SETTLE_NEW = 8


async def bench(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage, PolicyError, Disturbed, AnswerLost, RequestFailed, OutputFailed, and what the start
    of an engine raises."""
    plan = BenchPlan.of(options)
    async with connected(options, interrupts) as client:
        before = await client.stats()
        plan.check_room(client.welcome.context, before["scheduler"]["kv_tokens"])
        changes: list[PolicyChanged] = []  # by other clients
        client.on_policy = changes.append
        try:
            every = await _run(client, plan, changes)
            entries = [entry for entry in every if not entry.left_out]
            await _judge(client, plan, entries, changes)
            stats = await client.stats()
        finally:
            if options.connect and not changes:
                await _restore(client, before)
        left_out = [entry for entry in every if entry.left_out]
        config = _config(options, plan, client, stats) | {
            "left_out": {entry.request.name: entry.left_out for entry in left_out}
        }
    report = Report(config, entries, stats["emulation"], left_out)
    if "json" in options.written:
        print_json(report.to_json())
    else:
        show(report.render())
    if plan.plot is not None:
        draw(report, plan.plot)
    return 0


async def _run(client: Client, plan: BenchPlan, changes: list[PolicyChanged]) -> list[Entry]:
    """What was measured of each policy; those that cannot run here are marked and have no runs."""
    entries = [Entry(request) for request in plan.policies]
    with ProgressCounter("bench: prompts", len(entries) * (1 + plan.rounds)) as bar:
        *prompts, other = await make_prompts(client, plan.batch + 1, plan.prompt_len, plan.seed)
        for turn in range(1 + plan.rounds):
            for entry in (entries[index] for index in plan.order(turn)):
                if entry.left_out:
                    continue
                name = entry.request.name
                bar.start_stage(f"bench: round {turn}, {name}" if turn else f"bench: warm-up, {name}")
                try:
                    changed = await client.set_policy(name, entry.request.options)
                except RequestFailed as e:
                    others = any(not rest.left_out for rest in entries if rest is not entry)
                    if plan.named or turn or not e.usage or not others:
                        raise
                    entry.left_out = str(e)
                    bar.drop(1 + plan.rounds)
                    continue
                await settle(client, other[:SETTLE_PROMPT], min(SETTLE_NEW, plan.gen_len))
                run, _ = await measure(client, prompts, plan.gen_len)
                _check_own(changes)
                if turn:  # the first is the warm-up; what a policy says of a cold engine goes with it
                    entry.exact = changed.exact
                    entry.notes += [note for note in changed.notes if note not in entry.notes]
                    entry.runs.append(run)
                bar.count()
    return entries


async def _judge(
    client: Client, plan: BenchPlan, entries: Sequence[Entry], changes: list[PolicyChanged]
) -> None:
    """The perplexity of each approximate policy beside that of the first exact one, or of all-host."""
    approximate = [entry for entry in entries if not entry.exact]
    if not approximate or not plan.ppl_tokens:
        return
    exact = next((entry.request for entry in entries if entry.exact), PolicyRequest(EXACT))
    with ProgressCounter("bench: held-out text", 1 + len(approximate)) as bar:
        texts = await Texts.make(client, plan.ppl_tokens, plan.prompt_len, plan.seed)

        async def perplexity(request: PolicyRequest) -> float:
            bar.start_stage(f"bench: perplexity, {request.name}")
            await client.set_policy(request.name, request.options)
            await settle(client, texts.ids[-1][:SETTLE_PROMPT], SETTLE_NEW)
            found = await texts.perplexity(client)
            _check_own(changes)
            bar.count()
            return found

        reference = await perplexity(exact)
        for entry in approximate:
            found = await perplexity(entry.request)
            entry.perplexity = Perplexity(found, reference, exact.name, texts.tokens, texts.prefill)


def _check_own(changes: list[PolicyChanged]) -> None:
    """Raises Disturbed where another client has changed the policy."""
    if changes:
        raise Disturbed(
            f"another client set the policy {changes[-1].policy} meanwhile; use an engine of bench's own"
        )


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
        "ppl_tokens": plan.ppl_tokens,
        "warm_up": 1,
        "seed": plan.seed,
    }


def _workers(asked: EngineConfig) -> int:
    return Cores.here().default_workers() if asked.workers is None else asked.workers
