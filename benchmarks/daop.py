"""DAOP's page: on routing drawn at Mixtral's and Phi's depth, and on the embedded model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.evidence_commands import Commands
from benchmarks.papers import Job, drawn, recorded, replayed, similarity, write
from pipeline.policies.costs import Costs, Rates, derived
from pipeline.policies.view import ModelShape
from pipeline.traces.synthetic import PROFILES

TABLE_1 = Costs.load(Path("daop-table-1"))
# Its A6000 beside an i9-10980XE: four channels of DDR4-2933 (94 GB/s by the data sheet, 70 % reached), 768
# GB/s on the device. What its link reaches is not said: table I's transfer is 8.8 GB/s, the PCIe 3.0 x16 of
# that processor about 12, the PCIe 4.0 x16 of the text about 25.
A6000 = Rates(66.0, 12.0, 614.0, 1.0, 75.0)
LINKS = (8.8, 12.0, 25.0)
WEIGHTS = {"Mixtral": 3 * 4096 * 14336, "Phi": 3 * 4096 * 6400}  # of an expert, 16 bits each
SHAPES = {"Mixtral": ModelShape(32, 8, 4, 2), "Phi": ModelShape(32, 16, 4, 2)}
CACHES = (0.25, 0.375, 0.469)
MOST = CACHES[-1:]
PLACED, SLOWER = "daop:placement=popular", "A6000, host 1.5 slower"
OFFLOADING = "mixtral-offloading"
FETCHING = ("on-demand", OFFLOADING, f"{OFFLOADING}+sequences", f"{OFFLOADING}+random-next")
PAIR, BOUND = ("fiddler", PLACED), ("on-demand+belady",)
PARTS = tuple(f"{PLACED}:{part}" for part in ("predict=0", "early=0"))
OWN = ("fiddler", "daop", "daop:first_layer=1")
STREAMED = 45.1e9 * 2  # bytes of Mixtral's experts


def a6000(model: str, link: float = A6000.link_gbps, slower: float = 1.0) -> Costs:
    """Returns its costs, with a link of so many GB/s and a host so many times slower."""
    rates = replace(A6000, link_gbps=link, host_gbps=link + (A6000.host_gbps - link) / slower)
    return derived(rates, 2 * WEIGHTS[model], WEIGHTS[model], 84e6, 42e6)


def _jobs() -> list[Job]:
    jobs: list[Job] = []

    def add(text: str, machine: str, costs: Costs, policies: Sequence[str], caches: Sequence[float]) -> None:
        labels = (("machine", machine),)
        jobs.extend(Job(text, policy, costs, cache, labels) for policy in policies for cache in caches)

    add("embedded", "table I", TABLE_1, OWN, CACHES)
    add("Mixtral", "table I", TABLE_1, PAIR, CACHES)
    add("Mixtral", "table I", TABLE_1, (*BOUND, *FETCHING, *PARTS), MOST)
    add("Mixtral", "A6000", a6000("Mixtral"), PAIR, CACHES)
    add("Mixtral", "A6000", a6000("Mixtral"), (*BOUND, *FETCHING[:2]), MOST)
    add("Phi", "A6000", a6000("Phi"), PAIR, CACHES)
    for link in LINKS[::2]:
        add("Mixtral", f"A6000, link {link}", a6000("Mixtral", link), (*PAIR, *FETCHING[:2]), MOST)
    add("Mixtral", SLOWER, a6000("Mixtral", slower=1.5), PAIR, CACHES)
    add("Mixtral", SLOWER, a6000("Mixtral", slower=1.5), FETCHING[:2], MOST)
    return jobs


def page(c: Commands) -> str:
    """Returns DAOP's page."""
    texts = {name: drawn(shape, PROFILES["mixtral-8x7b"], 256, 32) for name, shape in SHAPES.items()}
    texts["embedded"] = recorded(c.trace(1))
    found = replayed(texts, _jobs())
    most: dict[str, Any] = {"cache": CACHES[-1]}
    drawn_ones: dict[str, Any] = {"text": "Mixtral", "policy": PLACED}
    machines = [{"machine": name} | drawn_ones for name in ("table I", "A6000", SLOWER)]
    links = [m for m in dict.fromkeys(row["machine"] for row in found.rows) if m.startswith("A6000")]
    own = found.ratios("fiddler", text="embedded", policy="daop")
    settings = [{"text": "Mixtral", "machine": link} | most for link in links]
    ours = {
        "mean": [mean(found.ratios("fiddler", **each)) for each in machines],
        "largest": [found.ratios("fiddler", **each | most)[0] for each in machines],
        "own": own,
        "phi": [mean(found.ratios("fiddler", text="Phi", policy=PLACED))],
        "fetching": [
            found.ratios(name, **each, policy=PLACED)[0] for name in FETCHING[:2] for each in settings
        ],
        "below": [found.get("tok_s", **each, policy=name)[0] for name in FETCHING[:2] for each in settings],
        "mii": [link * 1e9 / STREAMED for link in LINKS],
        "mixtral": found.get("tok_s", **machines[1])[::-2],
        "phis": found.get("tok_s", text="Phi", policy=PLACED)[::-2],
        "similar": [similarity(texts[name].text) for name in ("embedded", "Mixtral")],
        "predicted": [float(c.calibration().accuracy["raw"][1:].mean())],
    }
    first = found.ratios("fiddler", policy="daop:first_layer=1", text="embedded")
    words = {
        "first": f"{min(first):.2f} to {max(first):.2f}",
        "table": found.ratios("on-demand", **machines[0] | most)[0],
    }
    tables = [
        found.table(f"{text}, {machine}: tok/s, and over Fiddler", *COLUMNS, text=text, machine=machine)
        for text, machine in dict.fromkeys((row["text"], row["machine"]) for row in found.rows)
    ]
    return write("daop", ours, words, tables)


COLUMNS = ("fiddler", "cache")
