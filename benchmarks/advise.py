"""`launch.py advise` against the engine: predicted and measured speed of every exact preset, on this machine
with its link and its workers slowed to the ratios of other machines.

    python -m benchmarks.advise FOLDER [--only olmoe-1,qwen-1]

Each machine is an engine with one expert cache, whose costs after a short run are what advise predicts from.
What was measured stays in FOLDER, which also has a cache of its own.
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

from launch.advise.machine import NEW, engine, recorded, run
from launch.bench.measure import make_prompts, measure, read_other_texts, warm_up
from launch.command_line.options import Options, parse
from launch.forecast import Priced, Setting, Sizes, by_replay, sizes_of
from launch.terminal.interrupts import Interrupts
from pipeline.assets import model_dir
from pipeline.checkpoint.open import open_model
from pipeline.policies.costs import Costs
from pipeline.policies.view import PolicyRequest
from pipeline.replay.machine import DividedText
from pipeline.replay.steps import counts_of

PROMPT = 48  # tokens
PRESETS = (
    "all-host",
    "on-demand",
    "fiddler",
    "bandwidth-split",
    "layerwise",
    "hybrimoe",
    "mixtral-offloading",
)
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
class Point:
    """A preset on a machine: tokens a second of decode, and seconds to the first token."""

    machine: str
    policy: str
    measured: float
    predicted: float
    first: float
    predicted_first: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


async def run_machine(words: list[str], folder: Path) -> dict[str, Any]:
    """Record the model's routing once and run every preset; what was measured, as JSON."""
    options, interrupts = parse(["bench", *words]), Interrupts()
    model = str(options.written.get("model", "embedded")).replace("/", "-")
    trace = folder / f"{model}.trace"
    if not trace.exists():
        plain = {k: v for k, v in options.written.items() if k not in ("link_gbps", "host_slowdown")}
        begun = trace.with_suffix(".begun")  # one that was interrupted does not count
        begun.unlink(missing_ok=True)
        async with engine(Options("bench", plain), interrupts, record=begun.absolute()) as client:
            await run(client, PROMPT)
        begun.rename(trace)
    async with engine(options, interrupts) as client:
        costs, cache = await run(client, PROMPT)
        await read_other_texts(client, 0)
        measured, other = await make_prompts(client, 2, PROMPT, 0)
        runs = {}
        for name in PRESETS:
            await client.set_policy(name, {}, counted=False)
            await warm_up(client, [other], NEW)
            timed = [(await measure(client, [measured], NEW))[0] for _ in range(2)]
            best = max(timed, key=lambda each: each.decode_tok_s)  # other load only adds to the time
            runs[name] = {"tok_s": best.decode_tok_s, "first": best.first_token_s}
    return {"trace": str(trace), "costs": costs.to_json(), "cache": cache, "runs": runs}


def points(machine: str, words: list[str], found: dict[str, Any]) -> list[Point]:
    """Every preset's prediction beside its run."""
    asked = parse(["bench", *words]).config()
    config = replace(asked, device="cpu", workers=2)
    sizes = sizes_of(open_model(asked.model or model_dir()), config, config.format or "bf16")
    text, costs = _text(Path(found["trace"]), sizes), Costs.from_json(found["costs"])
    rest = text.rest or 0.0

    def predicted(policy: str, priced: Priced) -> Any:
        setting = Setting(PolicyRequest(policy), sizes.format, found["cache"], 0.0)
        return by_replay(setting, sizes, priced, text, PROMPT, 0)

    priced = Priced(costs, rest)
    rows = []
    for policy, ran in found["runs"].items():
        best = predicted(policy, priced)
        rows.append(Point(machine, policy, ran["tok_s"], best.tok_s, ran["first"], best.first_token_s or 0.0))
    return rows


def _text(trace: Path, sizes: Sizes) -> DividedText:
    """Popularity is that of the prompts alone, as in the engine that is measured: the answers of a model with
    random weights repeat themselves."""
    text = recorded(trace, sizes.header)
    prompts = [step for step in text.steps[: text.begin] if step.phase == "prefill"]
    return replace(text, counts=counts_of(prompts, sizes.header.shape.layers, sizes.header.shape.experts))


def summary(rows: list[Point]) -> dict[str, Any]:
    """Errors, and pairs of one machine in the wrong order."""
    error = statistics.median(abs(row.error) for row in rows)
    pairs = [
        (a, b)
        for a, b in combinations(rows, 2)
        if a.machine == b.machine and abs(a.measured / b.measured - 1) > 2 * error
    ]
    wrong = [(a, b) for a, b in pairs if (a.measured > b.measured) != (a.predicted > b.predicted)]
    firsts = [abs(row.predicted_first / row.first - 1) for row in rows]
    return {
        "settings": len(rows),
        "median_error": error,
        "worst_error": max(abs(row.error) for row in rows),
        "median_error_first_token": statistics.median(firsts),
        "pairs_apart": len(pairs),
        "pairs_in_wrong_order": [f"{a.machine}: {a.policy}, {b.policy}" for a, b in wrong],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="machines, separated by commas")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(arguments.folder / "cache")
    rows: list[Point] = []
    for name in arguments.only.split(",") if arguments.only else MACHINES:
        words, kept = MACHINES[name].split(), arguments.folder / f"{name}.json"
        if not kept.exists():
            kept.write_text(json.dumps(asyncio.run(run_machine(words, arguments.folder))))
        rows += points(name, words, json.loads(kept.read_text()))
    for row in rows:
        print(
            f"{row.machine:10}{row.policy:20}{row.measured:8.1f}{row.predicted:8.1f} {row.error:+6.0%}"
            f"   first token {1e3 * row.first:.0f} {1e3 * row.predicted_first:.0f} ms"
        )
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
