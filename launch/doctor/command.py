"""`launch.py doctor`: what this machine can do, what is missing, what to change. Each finding is a fact, its
meaning for an engine, and what to do about it. At the end an engine is started on the embedded model. Exit
code 0: it answered, and no finding prevents engines from running; else 1. With `--model` the doctor reports a
memory plan instead, see `model_plan.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from launch.command_line.options import Options
from launch.doctor import gpu, machine, measure
from launch.doctor.machine import Finding
from launch.doctor.model_plan import show_plan
from launch.errors import LaunchError
from launch.processes.cores import Cores
from launch.processes.trials import TrialFailed
from launch.terminal import tables
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import print_json, show
from pipeline.calibration.cost_cache import measured_here
from pipeline.errors import PipelineError
from protocol.program import user_folder

COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


async def doctor(options: Options, interrupts: Interrupts) -> int:
    """Examine the machine. Raises LaunchError on another system than Linux and for a damaged installation."""
    if sys.platform != "linux":
        raise LaunchError(f"Tandem runs on Linux; this is {sys.platform}")
    if "model" in options.written:
        return await show_plan(options, interrupts)
    try:
        embedded = measure.embedded()
    except (OSError, ValueError, PipelineError) as e:
        raise LaunchError(f"the embedded model cannot be read: {e}; install Tandem again") from e
    notice("examining the machine")
    cores, cache = Cores.here(), user_folder("CACHE")
    findings = [
        *machine.processor(cores),
        *machine.kernels(),
        *machine.memory(embedded.store),
        *machine.places(),
    ]
    load = os.getloadavg()[0]
    seen, link = await gpu.inspect(measure.example())
    notice("measuring the memory bandwidth: a few seconds")
    findings += [*seen, *measure.busy(load, len(cores.numbers))]
    measured: dict[str, Any] = {}
    try:
        bandwidth = await measure.measure_memory(cores.numbers)
        measured |= bandwidth.to_map() | {"ceiling_tok_s": bandwidth.all / embedded.token}
        findings += bandwidth.explain(embedded, measure.example())
    except TrialFailed as e:
        means = "the bound on this machine's speed is unknown"
        findings.append(Finding("speed", "note", f"memory was not measured: {e}", means))
    notice("starting an engine on the embedded model")
    proofs = [await measure.prove(options, interrupts, "auto")]
    if proofs[0].failure and gpu.has_driver():
        proofs.append(await measure.prove(options, interrupts, "cpu"))
    findings += [proof.explain() for proof in proofs]
    costs = measured_here(cache)
    findings += machine.costs(costs)

    ok = not any(finding.prevents for finding in findings)
    if "json" in options.written:
        measured |= {
            "host_to_device_gbps": None if link is None else link / 1e9,
            "expert_bytes_per_token": embedded.token,
            "ceiling_tok_s": measured.get("ceiling_tok_s"),
            "engine": proofs[0].to_map(),
            "costs": [{"file": str(path)} | record.to_json() for path, record in costs],
        }
        print_json({"ok": ok, "findings": [f.to_map() for f in findings], "measured": measured})
    else:
        show(render(findings, _verdict(ok, findings)), rendered=True)
    return 0 if ok else 1


def render(findings: Sequence[Finding], verdict: str) -> str:
    """Returns the findings by topic, and the verdict, as text."""
    parts: list[RenderableType] = []
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        rows = [(Text(each.level, style=COLOURS[each.level]), _description(each)) for each in group]
        table = tables.grid(rows, gap=1)
        table.columns[0].width = max(map(len, COLOURS))
        parts += [Text(topic, style="bold"), Padding(table, (0, 0, 1, 2))]
    return tables.render(*parts, Text(verdict, style="bold"))


def _description(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.means:
        text.append(f"\n{finding.means}", style="dim")
    for line in finding.do.splitlines():
        text.append("\n> ", style="cyan")
        text.append(line)
    return text


def _verdict(ok: bool, findings: Sequence[Finding]) -> str:
    counts = {level: sum(f.level == level for f in findings) for level in ("problem", "note")}
    words = " and ".join(count(n, level) for level, n in counts.items() if n)
    verdict = "Engines run on this machine" if ok else "Engines do not run on this machine as they should"
    return f"{verdict}{f': {words}' if words else ''}."
