"""`launch.py stress`: many concurrent clients, and every answer compared with the same request run alone.

First C clients send all entries of the script; with --chaos faults are injected meanwhile, from which the
engine must recover. Then each deterministic request is repeated alone in the same engine, and the answers are
compared (`equality.py`). The exit code is 0 only if no answer differs, no request failed or was lost, no
message came twice, and the engine holds nothing afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from launch.assets import stress_script
from launch.command_line.checks import check_reads_text
from launch.command_line.options import Options
from launch.connect import endpoint
from launch.equality import Verdict, rounding_bound
from launch.errors import WrongUsage
from launch.stress.chaos import Chaos, Injector, runtime_of
from launch.stress.load import (
    SILENCE,
    End,
    Entry,
    Finding,
    Load,
    Outcome,
    alone,
    compare_all,
    count_strays,
    read_script,
    run_load,
)
from launch.stress.report import StressRun, report, report_parts
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import print_json
from launch.terminal.progress import ProgressCounter
from launch.terminal.tables import print_parts
from pipeline.assets import model_dir
from protocol.client import Client
from protocol.messages import Welcome

CLIENTS = 8
IDLE_SECONDS = 10.0  # for the engine to notice that clients have disconnected
IDLE = {
    "running": ("request", "still running"),
    "waiting": ("request", "still queued"),
    "kv_tokens_used": ("token", "of KV still in use"),
    "kv_tokens_kept": ("token", "of KV still kept"),
}


async def stress(options: Options, interrupts: Interrupts) -> int:
    """1 where the run failed. Raises WrongUsage, EngineGone, as an engine's start; reports the run so far."""
    path: Path = options.written.get("script", stress_script())
    if not options.connect:
        check_reads_text(options.config().model or model_dir(), ids="")
    entries = read_script(path) * options.written.get("repeat", 1)
    clients = options.written.get("clients", CLIENTS)
    chaos = Chaos.asked(options.written, options.config().seed)
    quiet = chaos is not None and "log_level" not in options.written
    if quiet:  # the engine refuses hostile messages by the thousand and restarts what was killed, as intended
        options = replace(options, written=options.written | {"log_level": "error"})
    async with (
        endpoint(options, interrupts) as where,
        Client.connect(where, name="stress", retry=SILENCE if chaos else 0.0) as client,
    ):
        welcome = client.welcome
        _check_model(welcome, entries, path)
        bound = rounding_bound(welcome.format, welcome.backbone_dtype, welcome.kv_dtype)
        run = StressRun(str(path), welcome, bound, Load([[] for _ in range(clients)]))
        try:
            if quiet:
                logging.disable(logging.WARNING)
            await _run(run, where, client, entries, chaos)
            run.finished = True
        finally:
            logging.disable(logging.NOTSET)
            summary = report(run)
            if "json" in options.written:
                print_json(summary)
            else:
                print_parts(*report_parts(summary))
    return 0 if summary["passed"] else 1


def _check_model(welcome: Welcome, entries: list[Entry], path: Path) -> None:
    if not welcome.has_tokenizer:
        raise WrongUsage("this model has no tokenizer, and a stress script holds texts")
    if not welcome.has_chat_template:
        for entry in entries:
            if entry.prompt is None:
                raise WrongUsage(f"{path}: {entry.name} is a chat, and this model has no chat template")


async def _run(run: StressRun, where: str, client: Client, entries: list[Entry], chaos: Chaos | None) -> None:
    retry = SILENCE if chaos else 0.0  # the coordinator may be killed, too
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Client.connect(where, name=f"stress {number}", retry=retry))
            for number in range(len(run.load.outcomes))
        ]
        if chaos is not None:  # after the clients' connections, which enlarge the engine's processes
            run.chaos = Injector(client.stats, runtime_of(where), chaos)
            await run.chaos.begin()
        with ProgressCounter("stress: under load", sum(entry.requests for entry in entries)) as counter:

            def ended(outcome: Outcome) -> None:
                counter.count(failed=outcome.end in (End.FAILED, End.GONE, End.LOST))

            async with run.chaos or nullcontext():
                await run_load(clients, entries, run.load, ended)
            counter.drop(run.load.unsent)
        if run.chaos:
            await run.chaos.recover()
        outcomes = run.load.all
        with ProgressCounter(
            "stress: each alone", sum(alone(outcome) is not None for outcome in outcomes)
        ) as counter:

            def compared(finding: Finding) -> None:
                run.findings.append(finding)
                counter.count(failed=finding.verdict is Verdict.MISMATCH)

            await compare_all(client, outcomes, run.bound, compared)
        await count_strays(clients, run.load)
    await _look_for_leaks(client, run)


async def _look_for_leaks(client: Client, run: StressRun) -> None:
    """Note what the engine holds after this run's clients; not checked while others are connected."""
    deadline = asyncio.get_running_loop().time() + IDLE_SECONDS
    while True:
        stats = await client.stats()
        held = ((stats["scheduler"].get(key), *words) for key, words in IDLE.items())
        leaks = [f"{count(number, noun)} {what}" for number, noun, what in held if number]
        others = stats["clients"]["connected"] > 1
        if not (leaks or others) or asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.1)
    run.leaks_checked = not others
    if run.leaks_checked:
        run.leaks = leaks
