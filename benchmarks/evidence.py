"""Sets the papers' headline figures beside those of the presets here: the tables of docs/evidence.md.

    python -m benchmarks.evidence FOLDER [--only traces,presets,...]

The steps, in order: `traces` calibrates and records; `presets`, `daop`, `dali`, `adapmoe`, `moepic` and
`floe` replay routing with a paper's costs; `quality` scores held-out text; `accuracy` answers items;
`emulated` and `links` run engines whose link and workers are paced to a paper's ratios, for half an hour.
FOLDER has a cache of its own, so that no other calibration is replaced; the answers of commands are kept
there and not made again.
Every command is printed on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence_commands import COSTS, ROWS, TABLE_1, Commands, Row, label, paces, relative
from benchmarks.floe import floe
from benchmarks.moepic import moepic
from pipeline.assets import heldout
from pipeline.policies.calibration import Calibration, at_limits

Floats = NDArray[np.float64]

EXACT = "all-host,on-demand,mixtral-offloading,whole-layer,layerwise,fiddler,hybrimoe,bandwidth-split,dali"
PRESETS = EXACT + ",pre-gated,daop,adapmoe"
PREDICTING = "mixtral-offloading,whole-layer,pre-gated,hybrimoe,dali,adapmoe"
LINK_BOUND = "on-demand,mixtral-offloading,whole-layer,pre-gated,adapmoe"  # nothing is computed on the host
DALI = "dali,hybrimoe,fiddler,layerwise,all-host"
# HybriMoE's assignment as DALI describes it, of which the paper does not say the workload
ROWS_ON_HOST = (1, 2, 4, 8, 16, 32)
THRESHOLDS = ",".join(f"hybrimoe:assignment=threshold:rows={rows}" for rows in ROWS_ON_HOST)
# DALI's figure 14, assignments alone, and its figure 19, where each bar has one technique more. All of them
# begin with every expert on the host; of the last two the first has a static cache instead.
ALONE = "placement=empty:prediction=none:replacement=keep"
BARS = (
    f"all-host,dali:{ALONE},dali:placement=empty:replacement=keep,dali:replacement=keep,dali,"
    f"hybrimoe:{ALONE}," + ",".join(f"dali:{ALONE}:assignment=threshold:rows={n}" for n in ROWS_ON_HOST)
)
DAOP = "fiddler,daop,daop:first_layer=1,daop:early=0,daop:predict=0,on-demand"


def traces(c: Commands) -> dict[str, list[Row]]:
    """Text between the prompts of `bench` calibrates: they begin every 20,000 bytes."""
    text = c.file("calibration.txt")
    text.write_bytes(b"".join(_piece(path.read_bytes()) for path in heldout().values()))
    found = c.run("calibrate", "calibrate", "--text", str(text))
    for batch, prompt, new in ((1, 256, 256), (4, 32, 64), (16, 32, 64), (64, 32, 128)):
        words = ("--prompt-len", str(prompt), "--gen-len", str(new), "--rounds", "1")
        to = ("--sweep", f"batch={batch}", "--record", str(c.file(f"batch-{batch}.trace")))
        c.run(f"record-{batch}", "bench", "--policy", "all-host", *words, *to)
    return {
        "calibration": [
            {
                "figure": "accuracy of the next layer's router",
                "ours": found["accuracy"]["raw"],
                "paper": 0.8411,
            },
            {"figure": "with DALI's residual", "ours": found["accuracy"]["residual"], "paper": None},
            {"figure": "tokens of one expert at T", "ours": found["single_expert_share"], "paper": 0.25},
        ],
    }


def _piece(text: bytes) -> bytes:
    return text[text.find(b"\n", 3_000) + 1 : text.find(b"\n", 13_000) + 1]


def presets(c: Commands) -> dict[str, list[Row]]:
    sweep = ("--sweep", "cache=0.25,0.5")
    rows = c.replay("presets", "batch-1.trace", PRESETS, "daop-table-1", *sweep)
    free = c.replay("presets-unpaused", "batch-1.trace", unpaused(PREDICTING), "daop-table-1", *sweep)
    return {"presets, replayed": rows, "presets without pauses, replayed": free}


def unpaused(policies: str) -> str:
    """The same with predictions that never pause."""
    every = policies.split(",")
    return ",".join(f"{one}:pause=0" if one.split(":")[0] in PREDICTING.split(",") else one for one in every)


def daop(c: Commands) -> dict[str, list[Row]]:
    rows = c.replay("daop", "batch-1.trace", DAOP, "daop-table-1", "--sweep", "cache=0.25,0.375,0.469")
    relative(rows, "fiddler", "cache")
    return {"DAOP, replayed": rows}


def dali(c: Commands) -> dict[str, list[Row]]:
    rows = []
    for batch in (1, 4, 16, 64):
        every = f"{DALI},{THRESHOLDS}"
        found = c.replay(f"dali-{batch}", f"batch-{batch}.trace", every, "dali", "--expert-cache", "0.5")
        rows += [{"batch": batch} | row for row in found]
    relative(rows, "dali", "batch")
    parts = []
    for batch in (1, 4, 16, 64):
        found = c.replay(f"bars-{batch}", f"batch-{batch}.trace", BARS, "dali", "--expert-cache", "0.25")
        parts += [{"batch": batch} | row for row in found]
    relative(parts, "all-host", "batch")
    return {"DALI, replayed": rows, "DALI's bars, replayed": parts}


def adapmoe_policies(c: Commands) -> str:
    """Table 2's, with the threshold at which a quarter of the tokens uses one expert."""
    gate = f"gate=adaptive:threshold={quarter(c.calibration()):.3g}"
    every = ["on-demand", f"on-demand:{gate}", "adapmoe:gate=own:sizes=even", f"on-demand:{gate}:sizes=dp"]
    every.append(f"on-demand:{gate}:sizes=predicted")
    every += ["adapmoe:gate=own", f"adapmoe:sizes=even:{gate.split(':')[1]}", f"adapmoe:{gate.split(':')[1]}"]
    return ",".join([*every, "adapmoe", "mixtral-offloading", "pre-gated", "whole-layer"])


def quarter(calibration: Calibration) -> float:
    """T of AdapMoE's gate at which 25 % of the (token, layer) pairs use a single expert."""
    sensitivity = np.asarray(calibration.sensitivity, np.float64)
    tried = np.geomspace(1e-7, 1, 400)
    limits = [np.sqrt(one / sensitivity).tolist() for one in tried.tolist()]
    single = [at_limits(calibration.kept, one)[:, 1].mean() for one in limits]
    return float(tried[np.argmin(np.abs(np.subtract(single, 0.25)))])


def adapmoe(c: Commands) -> dict[str, list[Row]]:
    tables = {}
    for costs in ("adapmoe", "adapmoe-slow"):
        policies, words = adapmoe_policies(c), ("--expert-cache", "0.5")
        paused = c.replay(costs, "batch-1.trace", policies, costs, *words)
        relative(paused, "on-demand")
        tables[f"{costs}, replayed"] = paused
        free = c.replay(f"{costs}-unpaused", "batch-1.trace", unpaused(policies), costs, *words)
        relative(free, "on-demand")
        tables[f"{costs} without pauses, replayed"] = free
    return tables


def quality(c: Commands) -> dict[str, list[Row]]:
    gate = f"threshold={quarter(c.calibration()):.3g}"
    policies = f"all-host,adapmoe,adapmoe:{gate},pre-gated,daop,daop:first_layer=1"
    words = (
        "--ppl-tokens",
        "1400",
        "--rounds",
        "1",
        "--gen-len",
        "8",
        "--prompt-len",
        "128",
        "--expert-cache",
    )
    rows = []
    for cache in ("0.25", "0.375", "0.469"):
        rows += _perplexities(c.run(f"quality-{cache}", "bench", "--policy", policies, *words, cache), cache)
    return {"perplexity": rows}


def _perplexities(answer: Row, cache: str) -> list[Row]:
    return [
        {"cache": cache, "policy": label(policy), **found}
        for policy in answer["policies"]
        if (found := policy["decode"]["perplexity"])
    ]


def accuracy(c: Commands) -> dict[str, list[Row]]:
    rows = []
    for cache in ("0.25", "0.469"):
        policies = "all-host,daop,daop:first_layer=1,adapmoe,pre-gated"
        words = ("--policy", policies, "--expert-cache", cache, "--limit", "150")
        answer = c.run(f"accuracy-{cache}", "evaluate", *words)
        rows += [{"cache": cache, **row} for row in answer["policies"]]
    return {"accuracy": rows}


def emulated(c: Commands) -> dict[str, list[Row]]:
    """Engines in which the host takes part: these take a minute each."""
    table_1 = paces(c, *TABLE_1)
    short = ("--prompt-len", "64", "--gen-len", "32", "--rounds", "3")
    hosts = ",".join(name for name in PRESETS.split(",") if name not in LINK_BOUND.split(","))
    rows = []
    for cache in ("0.25", "0.375", "0.469", "0.5"):
        policies = hosts if cache in ("0.25", "0.5") else "fiddler"
        policies += ",daop" * (policies == "fiddler") + ",daop:first_layer=1"
        words = ("--expert-cache", cache, *short, *table_1)
        rows += [{"cache": cache} | row for row in c.measure(f"emulated-{cache}", policies, *words)]
    relative(rows, "fiddler", "cache")
    costs = COSTS["dali"]
    batches = []
    for batch, mean in ((1, 1), (4, 1), (16, 4)):
        block = 2 * costs["device"][0] + costs["other"][0]
        pace = paces(c, costs["link"], costs["host"][ROWS.index(mean)], block, mean)
        words = ("--expert-cache", "0.5", "--batch", str(batch), "--prompt-len", "32", "--gen-len", "32")
        found = c.measure(
            f"emulated-dali-{batch}", ",".join(DALI.split(",")[:5]), *words, *pace, "--rounds", "2"
        )
        batches += [{"batch": batch} | row for row in found]
    relative(batches, "dali", "batch")
    return {"presets, emulated": rows, "DALI, emulated": batches}


def links(c: Commands) -> dict[str, list[Row]]:
    """Engines that only the link limits: slow, so that they are measured with few tokens."""
    rows = []
    for cache in ("0.25", "0.5"):
        for policy in LINK_BOUND.split(","):
            words = ("--prompt-len", "64", "--gen-len", "16", "--rounds", "2", *paces(c, *TABLE_1))
            found = c.measure(f"link-{policy}-{cache}", policy, "--expert-cache", cache, *words)
            rows += [{"cache": cache} | row for row in found]
    return {"link-bound presets, emulated": rows}


STEPS: dict[str, Callable[[Commands], dict[str, list[Row]]]] = {
    step.__name__: step
    for step in (traces, presets, daop, dali, adapmoe, moepic, floe, quality, accuracy, emulated, links)
}


def markdown(name: str, rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], list | dict)))
    lines = [f"### {name}", "", "| " + " | ".join(keys) + " |", "|---" * len(keys) + "|"]
    return "\n".join(lines + ["| " + " | ".join(_cell(row.get(key)) for key in keys) + " |" for row in rows])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="of traces, calibration and answers; made where it is missing"
    )
    parser.add_argument("--only", help=f"some of the steps: {','.join(STEPS)}")
    parser.add_argument("--prefix", default="", help="put before each command, such as `taskset -c 0-3`")
    arguments = parser.parse_args()
    wanted = (arguments.only or ",".join(STEPS)).split(",")
    if unknown := [step for step in wanted if step not in STEPS]:
        parser.error(f"unknown step {unknown[0]}; known are {', '.join(STEPS)}")
    commands = Commands(arguments.folder.resolve(), arguments.prefix.split())
    tables = {name: rows for step in wanted for name, rows in STEPS[step](commands).items()}
    print("\n\n".join(markdown(name, rows) for name, rows in tables.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
