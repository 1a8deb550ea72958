"""DAOP's page: on routing drawn at Mixtral's and Phi's depth, and on the embedded model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.evidence_commands import Commands
from benchmarks.papers import Job, Results, Words, drawn, recorded, replayed, similarity, write
from pipeline.energy import GPU_WATTS, MODEL, PROCESSOR_WATTS
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
IDLE = PROCESSOR_WATTS[0] + GPU_WATTS[0]  # W while the link alone works


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
    for link in LINKS[::2]:
        add("Mixtral", f"A6000, link {link}", a6000("Mixtral", link), (*PAIR, *FETCHING[:2]), MOST)
    add("Mixtral", SLOWER, a6000("Mixtral", slower=1.5), PAIR, CACHES)
    add("Mixtral", SLOWER, a6000("Mixtral", slower=1.5), FETCHING[:2], MOST)
    add("Phi", "A6000", a6000("Phi"), PAIR, CACHES)
    add("Phi", SLOWER, a6000("Phi", slower=1.5), PAIR, CACHES)
    return jobs


def _ends(found: Results) -> Results:
    """Returns rows that also have tok/s from a prompt of 256 tokens to the end of 256 and of 512 more, and of
    the former the tokens a kJ."""
    ends = [
        {f"end {n}": n / (256 / row["prefill"] + n / row["tok_s"]) for n in (256, 512)}
        | {"a kJ": 1e3 / (row["prompt joules"] + row["joules"])}
        for row in found.rows
    ]
    return Results([row | end for row, end in zip(found.rows, ends, strict=True)])


def page(c: Commands) -> str:
    """Returns DAOP's page."""
    texts = {name: drawn(shape, PROFILES["mixtral-8x7b"], 256, 32) for name, shape in SHAPES.items()}
    texts["embedded"] = recorded(c.trace(1))
    found = _ends(replayed(texts, _jobs()))
    most: dict[str, Any] = {"cache": CACHES[-1]}

    def at(machine: str, text: str = "Mixtral", policy: str = PLACED) -> dict[str, Any]:
        return {"text": text, "machine": machine, "policy": policy}

    machines = [at(name) for name in ("table I", "A6000", SLOWER)]
    links = [m for m in dict.fromkeys(row["machine"] for row in found.rows) if m.startswith("A6000")]
    alike = {
        link: max(found.get("end 256", **at(link, policy=p), **most)[0] for p in FETCHING[:2])
        for link in links
    }

    def fetching(of: Sequence[str]) -> list[float]:
        return [found.ratios(p, "end 256", **at(link), **most)[0] for p in FETCHING[:2] for link in of]

    def speeds(text: str, end: str, cache: float) -> list[float]:
        return [found.get(end, **at(machine, text), cache=cache)[0] for machine in ("A6000", SLOWER)]

    own = {name: found.ratios("fiddler", "end 256", text="embedded", policy=name) for name in OWN[1:]}
    alone = {n: similarity(texts[n]) for n in ("embedded", "Mixtral")}
    streamed = [link * 1e9 / STREAMED for link in LINKS]
    here = [(text, machine) for text in SHAPES for machine in ("A6000", SLOWER)]
    ours = {
        "mean": [mean(found.ratios("fiddler", "end 256", **each)) for each in machines],
        "largest": [found.ratios("fiddler", "end 512", **each | most)[0] for each in machines],
        "own": own["daop"],
        "phi": [mean(found.ratios("fiddler", "end 256", **at(m, "Phi"))) for m in ("A6000", SLOWER)],
        "fetching": fetching([link for link, fastest in alike.items() if fastest < 1]),
        "below": [
            found.get("end 256", **at(link, policy=p), **most)[0] for p in FETCHING[:2] for link in links
        ],
        "mii": streamed,
        "mixtral-most": speeds("Mixtral", "end 512", MOST[0]),
        "mixtral-least": speeds("Mixtral", "end 256", CACHES[0]),
        "phi-most": speeds("Phi", "end 512", MOST[0]),
        "phi-least": speeds("Phi", "end 256", CACHES[0]),
        "nearer": [own_text / others for own_text, _, others in alone.values()],
        "predicted": [float(c.calibration().accuracy["raw"][1:].mean())],
        "energy": [found.ratios("fiddler", "a kJ", **at(m, t), **most)[0] for t, m in here],
        "energy-fetching": [
            found.ratios(p, "a kJ", **at(link), **most)[0] for p in FETCHING[:2] for link in links
        ],
        "energy-mii": [found.get("a kJ", **at("A6000"), **most)[0] / (1e3 * s / IDLE) for s in streamed],
        "energy-mixtral": [found.get("a kJ", **at(m), **most)[0] for m in ("A6000", SLOWER)],
        "energy-phi": [found.get("a kJ", **at(m, "Phi"), **most)[0] for m in ("A6000", SLOWER)],
    }
    words: dict[str, Words] = {
        "first": own["daop:first_layer=1"],
        "decode": [mean(found.ratios("fiddler", **each)) for each in machines],
        "every": fetching(links),
        "table": found.ratios("on-demand", "end 256", **machines[0] | most)[0],
        "similar": [one for one, _, _ in alone.values()],
        "random": [one for _, one, _ in alone.values()],
        "others": [one for _, _, one in alone.values()],
        "speed": [found.ratios("fiddler", "end 256", **at(m, t), **most)[0] for t, m in here],
        "watts": MODEL.removeprefix("modelled: "),
    }
    tables = [
        found.table(
            f"{text}, {machine}: {title}, and over Fiddler",
            *COLUMNS,
            figure=figure,
            text=text,
            machine=machine,
        )
        for text, machine in dict.fromkeys((row["text"], row["machine"]) for row in found.rows)
        for title, figure in FIGURES
    ]
    tables += [
        found.table(
            f"{text}, A6000: tokens a kJ, modelled, and over Fiddler",
            *COLUMNS,
            figure="a kJ",
            text=text,
            machine="A6000",
        )
        for text in SHAPES
    ]
    return write("daop", ours, words, tables)


COLUMNS = ("fiddler", "cache")
FIGURES = ("tok/s of decode", "tok_s"), ("tok/s from prompt to end, 256 and 256", "end 256")
