"""Sets a paper's headline figures beside those of the presets here: a page of docs/evidence/, by one command.

    python -m benchmarks.evidence --paper daop [--folder F] > docs/evidence/daop.md
    python -m benchmarks.evidence --engines emulated,links [--folder F]

A page replays routing with the paper's costs on two cores: that of the embedded model, which the first page
records, and drawn one. `--engines` runs engines: `quality` scores held-out text, `accuracy` answers items,
`emulated` and `links` are paced to a paper's ratios, for half an hour.
F has a cache of its own, so that no other calibration is replaced; the answers of commands are kept there and
not made again. Every command is printed on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.evidence_commands import COSTS, ROWS, TABLE_1, Commands, Row, label, paces, quarter, relative
from protocol.program import user_folder

PAPERS = ("daop", "adapmoe", "dali", "moepic", "floe")
EXACT = "all-host,on-demand,mixtral-offloading,whole-layer,layerwise,fiddler,hybrimoe,bandwidth-split,dali"
PRESETS = EXACT + ",pre-gated,daop,adapmoe"
LINK_BOUND = "on-demand,mixtral-offloading,whole-layer,pre-gated,adapmoe"  # nothing is computed on the host
DALI = "dali,hybrimoe,fiddler,layerwise,all-host"


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


ENGINES: dict[str, Callable[[Commands], dict[str, list[Row]]]] = {
    "quality": quality,
    "accuracy": accuracy,
    "emulated": emulated,
    "links": links,
}


def markdown(name: str, rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], list | dict)))
    lines = [f"### {name}", "", "| " + " | ".join(keys) + " |", "|---" * len(keys) + "|"]
    return "\n".join(lines + ["| " + " | ".join(_cell(row.get(key)) for key in keys) + " |" for row in rows])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def page(paper: str, c: Commands) -> str:
    """Returns a paper's page, with what it took."""
    c.traces()
    began, before = time.monotonic(), os.times()
    text: str = import_module(f"benchmarks.{paper}").page(c)
    spent = sum(b - a for a, b in zip(before[:4], os.times()[:4], strict=True))
    took = f"{spent:.0f} s of processor time, {time.monotonic() - began:.0f} s at a load of"
    took += f" {os.getloadavg()[1]:.0f}"
    return f"{text}\n\nEverything is replayed: `python -m benchmarks.evidence --paper {paper}`, {took}.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--paper", choices=PAPERS, help="whose page is printed")
    parser.add_argument("--engines", help=f"some of {','.join(ENGINES)}")
    parser.add_argument("--folder", type=Path, default=user_folder("CACHE") / "evidence")
    parser.add_argument("--prefix", default="", help="put before each command, such as `taskset -c 0-3`")
    given = parser.parse_args()
    wanted = given.engines.split(",") if given.engines else []
    if unknown := [step for step in wanted if step not in ENGINES]:
        parser.error(f"unknown step {unknown[0]}; known are {', '.join(ENGINES)}")
    commands = Commands(given.folder.resolve(), given.prefix.split())
    if given.paper:
        print(page(given.paper, commands))
    tables = {name: rows for step in wanted for name, rows in ENGINES[step](commands).items()}
    print("\n\n".join(markdown(name, rows) for name, rows in tables.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
