"""`launch.py advise` against the engine: predicted and measured speed of every exact preset, on this machine
with its link and its workers slowed to the ratios of other machines.

    python -m benchmarks.advise FOLDER [--only olmoe-1,qwen-1] [--json]

Each machine is an engine with one expert cache. Two of its presets, all-host and on-demand, are what advise
itself runs on a machine; all others are predicted from these two. What was measured stays in FOLDER, which
also has a cache of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from launch.advise.estimate import Setting, estimate
from launch.advise.routing import RecordedText, counts_of, recorded
from launch.advise.sizes import Sizes, sizes_of
from launch.advise.trial import DEVICE, HOST, Ran, engine, fitted, probed_costs, record, run_presets
from launch.bench.run import Run
from launch.command_line.options import Options, parse
from launch.terminal.interrupts import Interrupts
from pipeline.assets import model_dir
from pipeline.checkpoint.open import open_model
from pipeline.policies.costs import Costs
from pipeline.policies.view import PolicyRequest

PROMPT = 48  # tokens
PRESETS = ("fiddler", "bandwidth-split", "layerwise", "hybrimoe", "mixtral-offloading")
OLMOE = "--model shape:olmoe-1b-7b/6 --format int8 --backbone-dtype int8"
QWEN = "--model shape:qwen3-30b-a3b/4 --format int4 --backbone-dtype int4"
MIXTRAL = "--model shape:mixtral-8x7b/2 --format int4 --backbone-dtype int4"
MACHINES = {
    "olmoe-1": f"{OLMOE} --link-gbps 2 --host-slowdown 3 --expert-cache 0.4",
    "olmoe-2": f"{OLMOE} --link-gbps 1 --host-slowdown 2 --expert-cache 0.2",
    "qwen-1": f"{QWEN} --link-gbps 0.8 --host-slowdown 4 --expert-cache 0.5",
    "qwen-2": f"{QWEN} --link-gbps 3 --host-slowdown 6 --expert-cache 0.25",
    "embedded": "--link-gbps 0.3 --host-slowdown 8 --expert-cache 0.5",
    "mixtral": f"{MIXTRAL} --link-gbps 3 --host-slowdown 3 --expert-cache 0.4",
}


@dataclass(frozen=True)
class Measured:
    """One machine's runs."""

    trace: str  # the file of the model's routing
    probed: Costs
    cache: int  # tiles
    runs: list[Ran]

    def to_json(self) -> dict[str, Any]:
        runs = [{"policy": ran.request.name, "prompt": ran.prompt, "run": vars(ran.run)} for ran in self.runs]
        return {"trace": self.trace, "probed": self.probed.to_json(), "cache": self.cache, "runs": runs}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        runs = [Ran(PolicyRequest(r["policy"]), r["prompt"], Run(**r["run"])) for r in data["runs"]]
        return cls(data["trace"], Costs.from_json(data["probed"]), data["cache"], runs)


@dataclass(frozen=True)
class Point:
    """A preset on a machine, tokens a second of decode and seconds to the first token."""

    machine: str
    policy: str
    measured: float
    predicted: float
    probe: float  # predicted by the engine's probe alone
    first: float
    predicted_first: float
    given: bool  # the prediction has seen this run

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


async def measure(words: list[str], folder: Path) -> Measured:
    """Record the model's routing once, run every preset."""
    options, interrupts = parse(["bench", *words]), Interrupts()
    model = str(options.written.get("model", "embedded")).replace("/", "-")
    trace = folder / f"{model}.trace"
    if not trace.exists():
        plain = {k: v for k, v in options.written.items() if k not in ("link_gbps", "host_slowdown")}
        begun = trace.with_suffix(".begun")  # one that was interrupted does not count
        begun.unlink(missing_ok=True)
        async with engine(Options("bench", plain), interrupts, record=begun.absolute()) as client:
            await record(client, begun, PROMPT)
        begun.rename(trace)
    async with engine(options, interrupts) as client:
        probed = await probed_costs(client)
        cache = int((await client.stats())["cache"]["capacity_tiles"])
        requests = [HOST, DEVICE, *map(PolicyRequest, PRESETS)]
        return Measured(str(trace), probed, cache, await run_presets(client, requests, PROMPT))


def points(machine: str, words: list[str], found: Measured) -> list[Point]:
    """Every preset's prediction beside its run."""
    asked = parse(["bench", *words]).config()
    config = replace(asked, device="cpu", workers=2)
    sizes = sizes_of(open_model(asked.model or model_dir()), config, config.format or "bf16")
    text = _text(Path(found.trace), sizes)
    host, device = found.runs[:2]
    priced = fitted(found.probed, host, device, sizes, found.cache, text)
    rows = []
    for ran in found.runs:
        setting = Setting(ran.request, sizes.format, found.cache, 0.0)
        best, plain = (
            estimate(setting, sizes, each, text, PROMPT, 0)
            for each in (priced, replace(priced, costs=found.probed))
        )
        speed, first = (ran.run.decode_tok_s, best.tok_s, plain.tok_s), best.first_token_s or 0.0
        rows.append(
            Point(machine, ran.request.name, *speed, ran.run.first_token_s, first, ran in (host, device))
        )
    return rows


def _text(trace: Path, sizes: Sizes) -> RecordedText:
    """Popularity is that of the prompts alone, as in the engine that is measured: the answers of a model with
    random weights repeat themselves."""
    text = recorded(trace, sizes.header)
    prompts = [step for step in text.steps[: text.begin] if step.phase == "prefill"]
    return replace(text, counts=counts_of(prompts, sizes.header.shape.layers, sizes.header.shape.experts))


def summary(rows: list[Point]) -> dict[str, Any]:
    """Errors of the runs that no prediction has seen, and pairs of one machine in the wrong order."""
    unseen = [row for row in rows if not row.given]
    error = statistics.median(abs(row.error) for row in unseen)
    pairs = [
        (a, b)
        for a, b in combinations(rows, 2)
        if a.machine == b.machine and abs(a.measured / b.measured - 1) > 2 * error
    ]
    wrong = [(a, b) for a, b in pairs if (a.measured > b.measured) != (a.predicted > b.predicted)]
    firsts = [abs(row.predicted_first / row.first - 1) for row in unseen]
    return {
        "settings": len(unseen),
        "median_error": error,
        "worst_error": max(abs(row.error) for row in unseen),
        "median_error_of_the_probe": statistics.median(abs(row.probe / row.measured - 1) for row in unseen),
        "median_error_first_token": statistics.median(firsts),
        "pairs_apart": len(pairs),
        "pairs_in_wrong_order": [f"{a.machine}: {a.policy}, {b.policy}" for a, b in wrong],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="machines, separated by commas")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(arguments.folder / "cache")
    rows: list[Point] = []
    for name in arguments.only.split(",") if arguments.only else MACHINES:
        words, kept = MACHINES[name].split(), arguments.folder / f"{name}.json"
        if not kept.exists():
            kept.write_text(json.dumps(asyncio.run(measure(words, arguments.folder)).to_json()))
        rows += points(name, words, Measured.from_json(json.loads(kept.read_text())))
    if arguments.json:
        print(json.dumps({"points": [vars(row) for row in rows]} | summary(rows)))
        return
    for row in rows:
        note = "given" if row.given else f"{row.error:+.0%}"
        probe = f"{row.probe / row.measured - 1:+.0%}"
        print(
            f"{row.machine:10}{row.policy:20}{row.measured:8.1f}{row.predicted:8.1f} {note:>6}"
            f"   probe {probe:>5}   first token {1e3 * row.first:.0f} {1e3 * row.predicted_first:.0f} ms"
        )
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
