"""`launch.py doctor`: what this machine can do, what is missing, what to change. Each finding is a fact, its
meaning for an engine, and what to do about it. At the end an engine is started on the embedded model. Exit
code 0: it answered, and no finding prevents engines from running; else 1. With `--model` the doctor reports a
memory plan instead, see `model_plan.py`; with `--cluster` its machines, see `cluster.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from launch.command_line.options import Options
from launch.doctor import gpu, machine, measure
from launch.doctor.cluster import show_cluster
from launch.doctor.machine import Finding
from launch.doctor.model_plan import show_plan
from launch.errors import LaunchError
from launch.forecast import Sizes
from launch.processes.cores import Cores
from launch.processes.trials import TrialFailed
from launch.terminal import tables
from launch.terminal.format import count, rate
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import print_json, show
from pipeline.assets import model_dir
from pipeline.errors import PipelineError
from protocol.program import COMMAND
from shm.segment import byte_size

EXAMPLE = "shape:mixtral-8x7b"
COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


async def doctor(options: Options, interrupts: Interrupts) -> int:
    """Examine the machine. Raises LaunchError on another system than Linux and for a damaged installation."""
    if sys.platform != "linux":
        raise LaunchError(f"Tandem runs on Linux; this is {sys.platform}")
    if "cluster" in options.written:
        return await show_cluster(options)
    if "model" in options.written:
        return await show_plan(options, interrupts)
    try:
        embedded = measure.reads_of(model_dir())
    except (OSError, PipelineError) as e:
        raise LaunchError(f"the embedded model cannot be read: {e}; install Tandem again") from e
    notice("examining the machine")
    cores, example = Cores.here(), measure.reads_of(Path(EXAMPLE))
    findings = [
        *machine.processor(cores),
        *machine.kernels(),
        *machine.memory(embedded.needs.store),
        *machine.places(),
    ]
    load = os.getloadavg()[0]
    seen, link = await gpu.inspect(example)
    notice("measuring the memory bandwidth: a few seconds")
    findings += [*seen, *measure.busy(load, len(cores.numbers))]
    notes, speeds = await _speed(cores.numbers, embedded.token, example)
    notice("starting an engine on the embedded model")
    proof, engine = await _engine(options, interrupts)
    findings += [notes, proof]
    measured = speeds | {"expert_bytes_per_token": embedded.token, "engine": engine}
    measured["host_to_device_gbps"] = None if link is None else link / 1e9
    ok = not any(finding.prevents for finding in findings)
    if "json" in options.written:
        print_json({"ok": ok, "findings": [f.to_map() for f in findings], "measured": measured})
    else:
        show(render(findings, _verdict(ok, findings)), rendered=True)
    return 0 if ok else 1


async def _speed(cores: Sequence[int], token: int, example: Sizes) -> tuple[Finding, dict[str, Any]]:
    """Measures the memory; returns what its bandwidth means for `token`, the bytes of experts that a token of
    the embedded model reads, and for `example`, a large model; and the figures."""
    try:
        (pace,) = await measure.rates(cores)
    except TrialFailed as e:
        means = "the bound on this machine's speed is unknown"
        return Finding("speed", "note", f"memory was not measured: {e}", means), {"ceiling_tok_s": None}
    words = f"{count(len(cores), 'core')} together: {rate(pace)} read from memory"
    means = (
        f"a token of {example.header.model} reads {byte_size(example.token)} of experts: at most"
        f" {pace / example.token:.2g} tok/s with all-host; the embedded model's {byte_size(token)}: at most"
        f" {pace / token:,.0f}"
    )
    figures = {"read_all_cores_gbps": pace / 1e9, "cores": len(cores), "ceiling_tok_s": pace / token}
    return Finding("speed", "ok", words, means), figures


async def _engine(options: Options, interrupts: Interrupts) -> tuple[Finding, dict[str, Any]]:
    try:
        figures = await measure.prove(options, interrupts, "auto")
    except TrialFailed as e:
        means = "no engine can run on this machine until this is solved"
        do = f"solve the problems above\nshow the engine's log: {COMMAND} doctor --log-level debug"
        failed = Finding("engine", "problem", f"the engine failed: {e}", means, do, prevents=True)
        return failed, {"failure": str(e)}
    words = (
        "an engine started in {start_s:.1f} s and generated {tokens} tokens at {decode_tok_s:,.0f} tok/s"
        " ({policy})".format_map(figures)
    )
    means = "the embedded model is so small that a step's overhead exceeds the reading of its experts"
    return Finding("engine", "ok", words, means), figures


def render(findings: Sequence[Finding], verdict: str) -> str:
    """Returns the findings by topic, and the verdict, as text."""
    parts: list[RenderableType] = []
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        rows = [(_level(each), _description(each)) for each in group]
        parts += [Text(topic, style="bold"), tables.Grid(rows, gap=1, indent=2), ""]
    return tables.render(*parts, Text(verdict, style="bold"))


def _level(finding: Finding) -> Text:
    """Returns its level, as wide as the longest."""
    return Text(f"{finding.level:{max(map(len, COLOURS))}}", style=COLOURS[finding.level])


def _description(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.means:
        text.append(f"\n{finding.means}", style="dim")
    for line in finding.do.splitlines():
        text.append(f"\n{tables.COMMAND}", style="cyan")
        text.append(line)
    return text


def _verdict(ok: bool, findings: Sequence[Finding]) -> str:
    counts = {level: sum(f.level == level for f in findings) for level in ("problem", "note")}
    words = " and ".join(count(n, level) for level, n in counts.items() if n)
    verdict = "Engines run on this machine" if ok else "Engines do not run on this machine as they should"
    return f"{verdict}{f': {words}' if words else ''}."
