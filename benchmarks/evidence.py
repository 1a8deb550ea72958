"""Sets a paper's headline figures beside those of the presets here: a page of docs/evidence/, by one command.

    python -m benchmarks.evidence --paper daop [--folder F] > docs/evidence/daop.md
    python -m benchmarks.evidence --engines quality,links [--folder F]

A page replays routing with the paper's costs on two cores: that of the embedded model, which the first page
records, and drawn one. `--engines` runs engines: `quality` scores held-out text, `accuracy` answers items,
`bits` does both, and has a slow link, in AdapMoE's 4+2 bits, `links` are paced to a paper's ratios.
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

from benchmarks.evidence_commands import TABLE_1, Commands, Row, label, paces, quarter
from protocol.program import user_folder

PAPERS = ("daop", "adapmoe", "dali", "moepic", "floe")
LINK_BOUND = "on-demand,mixtral-offloading,whole-layer,pre-gated,adapmoe"  # nothing is computed on the host


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


def two_bits(c: Commands) -> dict[str, list[Row]]:
    """AdapMoE's 4+2 bits: experts of 2 bits, the rest of the model in 4."""
    gate = f"threshold={quarter(c.calibration()):.3g}"
    bits = ("--format", "int2", "--backbone-dtype", "int4", "--expert-cache", "0.5")
    score = ("--ppl-tokens", "1400", "--rounds", "1", "--gen-len", "8", "--prompt-len", "128")
    both = f"all-host,adapmoe:{gate}"
    scored = c.run("bits-quality", "bench", "--policy", both, *score, *bits)
    asked = c.run("bits-accuracy", "evaluate", "--policy", both, "--limit", "150", *bits)
    fetching = f"on-demand,mixtral-offloading:pause=0,adapmoe:pause=0:{gate}"
    short = ("--prompt-len", "32", "--gen-len", "24", "--rounds", "3", "--ppl-tokens", "0")
    paced = ("--workers", "1", "--link-gbps", "0.02")
    speeds = c.measure("bits-links", fetching, *short, *paced, *bits)
    return {
        "4+2 bits, perplexity": _perplexities(scored, "0.5"),
        "4+2 bits, items": asked["policies"],
        "4+2 bits, a slow link": speeds,
    }


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
    "bits": two_bits,
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
