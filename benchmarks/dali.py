"""DALI's page: the embedded model's routing at four batches, prompts drawn for DeepSeek's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import mean

import numpy as np

from benchmarks.evidence_commands import TRACES, Commands
from benchmarks.papers import Job, Results, Text, drawn, recorded, replayed, write
from pipeline.policies.assignments import greedy
from pipeline.policies.costs import Costs
from pipeline.policies.view import ModelShape, Routing
from pipeline.traces.synthetic import PROFILES
from pipeline.traces.trace import TracedStep

# HybriMoE's assignment as DALI describes it, of which the paper does not say the workload
ROWS_ON_HOST = (2, 4, 8)
THRESHOLDS = tuple(f"hybrimoe:assignment=threshold:rows={rows}" for rows in ROWS_ON_HOST)
WHOLE = ("dali", "hybrimoe", *THRESHOLDS, "fiddler", "layerwise", "all-host")
# Its figure 14, assignments alone, and its figure 19, where each bar has one technique more: all begin with
# every expert on the host.
EMPTY, KEPT = "placement=empty:replacement=keep", "dali:replacement=keep"
ALONE = f"{EMPTY}:prediction=none"
GREEDY, PREFETCH = f"dali:{ALONE}", f"dali:{EMPTY}"
RANDOM = f"dali+random-next:{EMPTY}"
FIXED = tuple(f"dali:{ALONE}:assignment=threshold:rows={rows}" for rows in ROWS_ON_HOST)
BARS = ("all-host", GREEDY, PREFETCH, RANDOM, KEPT, "dali", f"hybrimoe:{ALONE}", *FIXED)
CACHED = ("dali", "dali:replacement=score", "dali:replacement=lru", "dali+belady")
WINDOWS = tuple(f"dali:window={w}:swaps={u}" for w, u in ((2, 1), (2, 2), (4, 1), (4, 2), (8, 1)))
SIZES = tuple(f"dali:prefetch={size}:pause=0" for size in (1, 2, 4))
DEEPSEEK = ModelShape(8, 64, 4, 6)
SMALLER = 3 * 2048 * 1408 / (3 * 4096 * 14336)  # of an expert of DeepSeek-V2-Lite's, beside Mixtral's
PROMPTS = (64, 256, 1024)  # rows: batches of 1, 4 and 16 prompts of 64 tokens
PREFILL = ("dali:prediction=next-gate", "hybrimoe", *THRESHOLDS[1:], "layerwise", "all-host")


def _jobs(costs: Costs) -> Iterator[Job]:
    for batch in TRACES:
        for policies, cache, kind in ((WHOLE, 0.5, "whole"), (BARS, 0.25, "bars")):
            yield from (Job(f"batch {batch}", p, costs, cache, (("kind", kind),)) for p in policies)
    for policy, cache in product(CACHED, (0.25, 0.5, 0.75)):
        yield Job("batch 4", policy, costs, cache, (("kind", "caches"),))
    yield from (Job("batch 16", policy, costs, 0.5, (("kind", "windows"),)) for policy in WINDOWS)
    yield from (Job("batch 4", policy, costs, 0.25, (("kind", "sizes"),)) for policy in SIZES)
    small = costs.of_tiles(SMALLER, SMALLER, SMALLER)
    for rows, policy in product(PROMPTS, PREFILL):
        yield Job(f"prompt {rows}", policy, small, 0.25, (("kind", "prefill"),))


def page(c: Commands) -> str:
    """Returns DALI's page."""
    costs = c.costs("dali")
    texts = {f"batch {batch}": recorded(c.trace(batch)) for batch in TRACES}
    for rows in PROMPTS:
        texts[f"prompt {rows}"] = drawn(DEEPSEEK, PROFILES["olmoe-1b-7b"], rows, 1, chunk=rows)
    found = replayed(texts, list(_jobs(costs)))

    def of(over: str, policy: str, kind: str, figure: str = "tok_s") -> list[float]:
        return found.ratios(over, figure, kind=kind, policy=policy)

    by_rows = [of(name, "dali", "whole") for name in THRESHOLDS]
    fixed = [of(name, GREEDY, "bars") for name in FIXED]
    against = {name: of(name, PREFILL[0], "prefill", "prefill") for name in PREFILL[1:]}
    gains = {n: [_named(texts[f"batch {batch}"], n) for batch in (4, 16, 64)] for n in (1, 2)}
    ours = {
        "rows": [mean(row) for row in by_rows],
        "best": [min(row) for row in zip(*by_rows, strict=True)],
        "queue": of("hybrimoe", "dali", "whole"),
        "layers": of("layerwise", "dali", "whole"),
        "llama": of("layerwise", "dali", "whole"),
        "fiddler": of("fiddler", "dali", "whole"),
        "pre-host": against["all-host"],
        "pre-layers": against["layerwise"],
        "pre-rows": [min(pair) for pair in zip(*(against[name] for name in THRESHOLDS[1:]), strict=True)],
        "greedy": of("all-host", GREEDY, "bars"),
        "workload": [max(row) for row in zip(*(of("all-host", name, "bars") for name in FIXED), strict=True)],
        "greedy-rows": [min(row) for row in zip(*fixed, strict=True)],
        "optimum": [_reached(texts[f"batch {batch}"], costs) for batch in (4, 16)],
        "prefetch": of(GREEDY, PREFETCH, "bars"),
        "random": of(RANDOM, GREEDY, "bars"),
        "sizes": [found.ratios(name, kind="sizes", policy=SIZES[0])[0] for name in SIZES[1:]],
        "cache": of(PREFETCH, "dali", "bars"),
        "score": of(CACHED[1], "dali", "caches"),
        "hits": of(CACHED[1], "dali", "caches", "hits") + of(CACHED[2], "dali", "caches", "hits"),
        "more": _quotients(found, 0.75, 0.25),
        "often": [found.ratios(WINDOWS[4], "hits", kind="windows", policy=WINDOWS[0])[0]],
        "many": [found.ratios(WINDOWS[2], "hits", kind="windows", policy=WINDOWS[3])[0]],
        "windows": [
            found.ratios(name, kind="windows", policy=WINDOWS[2])[0] for name in WINDOWS if name != WINDOWS[2]
        ],
        "longer": found.ratios("layerwise", kind="whole", policy="dali", text="batch 16"),
        "planning": found.get("planning", kind="whole", policy="dali")[1:3],
        "residual": [after - before for pairs in gains.values() for before, after in pairs],
    }
    words = {
        "static": _shown(of(PREFETCH, KEPT, "bars")),
        "belady": _shown(of("dali+belady", "dali", "caches", "hits")),
        "hybrimoe": _shown(found.get("planning", kind="whole", policy="hybrimoe", text="batch 4")),
        "raw": _shown([before for pairs in gains.values() for before, _ in pairs]),
        "two_ended": _shown(of(f"hybrimoe:{ALONE}", GREEDY, "bars")),
    }
    titles = "Whole systems at a cache of 50 %", "The paper's bars at 25 %", "Prompts of DeepSeek's shape"
    figures = ("whole", "tok_s"), ("bars", "tok_s"), ("prefill", "prefill")
    tables = [
        found.table(f"{title}: tok/s, and over all-host", "all-host", "text", figure=figure, kind=kind)
        for title, (kind, figure) in zip(titles, figures, strict=True)
    ]
    tables.append(found.table("Replacements: hits", "dali", "cache", figure="hits", kind="caches"))
    return write("dali", ours, words, tables)


def _quotients(found: Results, large: float, small: float) -> list[float]:
    """Returns the speeds of DALI with a large cache over those with a small one."""
    speeds = (found.get("tok_s", kind="caches", policy="dali", cache=cache) for cache in (large, small))
    return [a / b for a, b in zip(*speeds, strict=True)]


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _decoded(text: Text) -> list[TracedStep]:
    return [step for step in text.text.steps[text.text.begin :] if step.phase == "decode"]


def _named(text: Text, most: int) -> tuple[float, float]:
    """Returns the share of the experts with most rows that the next layer's router names as such on the
    layer's input, raw and corrected by the calibration's residual (its tables 2 and 5)."""
    known = text.text.calibration
    assert known is not None
    experts, right, of = text.header.shape.experts, np.zeros(2), 0
    for step in _decoded(text):
        for layer, (traced, following) in enumerate(zip(step.layers, step.layers[1:], strict=False)):
            true = _most(following.router_routing, experts, most)
            raw = traced.predictions[0].astype(np.float32)
            for place, logits in enumerate((raw, raw + known.residual_logits[layer])):
                right[place] += len(true & _most(text.header.router(logits, layer + 1), experts, most))
            of += most
    return float(right[0] / of), float(right[1] / of)


def _most(routing: Routing, experts: int, most: int) -> set[int]:
    return set(np.argsort(-routing.workload(experts), kind="stable")[:most].tolist())


def _reached(text: Text, costs: Costs) -> float:
    """Returns the time of the best assignment over the greedy one's, of layers without a cache (its figure 15
    and table 4): every one of at most 2^8 is tried."""
    known: dict[tuple[int, ...], tuple[float, float]] = {}
    taken = np.zeros(2)
    for step in _decoded(text):
        for layer in step.layers:
            rows = tuple(sorted(layer.router_routing.active.counts.tolist()))
            if rows not in known:
                known[rows] = _times(rows, costs.for_tiles(1))
            taken += known[rows]
    return float(taken[1] / taken[0])


def _times(rows: Sequence[int], costs: Costs) -> tuple[float, float]:
    """Returns seconds of the greedy assignment and of the best one."""
    host = [costs.host_at[row] for row in rows]
    device = [max(costs.link, costs.device_at[row]) for row in rows]

    def longer(on_device: Sequence[bool]) -> float:
        sides = [sum(d for d, on in zip(device, on_device, strict=True) if on), costs.round_trip]
        sides[1] += sum(h for h, on in zip(host, on_device, strict=True) if not on)
        return max(sides)

    every = product((False, True), repeat=len(rows))
    return longer(greedy(device, host, costs.round_trip, costs.launch)), min(map(longer, every))
