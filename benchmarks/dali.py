"""DALI's page: recorded and drawn routing at three batches, prompts drawn for DeepSeek's shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from statistics import mean

import numpy as np

from benchmarks.baselines import policy_of
from benchmarks.evidence_commands import Commands
from benchmarks.inputs import alike
from benchmarks.papers import Job, Results, Text, Words, calibrated, drawn, recorded, replayed, write
from launch.profile import PhaseProfile
from pipeline.policies.assignments import greedy
from pipeline.policies.costs import Costs
from pipeline.policies.view import ModelShape, Routing
from pipeline.traces.synthetic import PROFILES
from pipeline.traces.trace import TracedStep

BATCHES = (4, 16, 64)
# HybriMoE's assignment as DALI describes it, of which the paper does not say the workload
ROWS_ON_HOST = (2, 4, 8, 16)
THRESHOLDS = tuple(f"hybrimoe:assignment=threshold:rows={rows}" for rows in ROWS_ON_HOST)
LIGHTNING = "layerwise+lightning"  # whole layers are resident, and a share of each other one is streamed
WHOLE = ("dali", "hybrimoe", *THRESHOLDS, "fiddler", LIGHTNING, "layerwise", "all-host")
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
MIXTRAL, DEEPSEEK = ModelShape(32, 8, 4, 2), ModelShape(8, 64, 4, 6)
# An expert of DeepSeek-V2-Lite's and one of Qwen3-30B-A3B's, beside Mixtral's.
SMALLER, QWEN_SMALLER = 2048 * 1408 / (4096 * 14336), 2048 * 768 / (4096 * 14336)
PROMPTS = (64, 256, 1024)  # rows: batches of 1, 4 and 16 prompts of 64 tokens
PREFILL_ROWS = tuple(f"hybrimoe:assignment=threshold:rows={rows}" for rows in (1, 4, 16, 64))
PREFILL = ("dali", "hybrimoe", *PREFILL_ROWS, LIGHTNING, "layerwise", "all-host")
QWEN = ModelShape(8, 128, 4, 8)
QWEN_PARTS = tuple(f"dali:{part}" for part in ("replacement=score", "placement=popular", "prediction=none"))
LONG = "drawn 16, 128 tokens"
SOLVER, PLANNER = 0.55, 0.045  # shares of the time that the optimum's solver and the greedy plan take (6.3)


def _jobs(texts: Sequence[str], costs: Costs) -> Iterator[Job]:
    def all_of(text: str, policies: Sequence[str], cache: float, kind: str) -> Iterator[Job]:
        return (Job(text, policy, costs, cache, (("kind", kind),)) for policy in policies)

    for text in texts:
        yield from all_of(text, WHOLE, 0.5, "whole")
        yield from all_of(text, BARS, 0.25, "bars")
    for name in ("embedded", "drawn"):
        for cache in (0.25, 0.5, 0.75):
            yield from all_of(f"{name} 4", CACHED, cache, "caches")
        yield from all_of(f"{name} 16", (*WINDOWS, *THRESHOLDS), 0.5, "windows")
        yield from all_of(f"{name} 4", SIZES, 0.25, "sizes")
    yield from all_of(LONG, ("dali", *THRESHOLDS, "layerwise"), 0.5, "longer")
    fine = costs.of_tiles(QWEN_SMALLER, QWEN_SMALLER, QWEN_SMALLER)
    for batch, policy in product(BATCHES[:2], WHOLE):
        yield Job(f"Qwen3 {batch}", policy, fine, 0.5, (("kind", "qwen"),))
    for policy in ("dali", *QWEN_PARTS):
        yield Job(f"Qwen3 {BATCHES[0]}", policy, fine, 0.5, (("kind", "qwen parts"),))
    small = costs.of_tiles(SMALLER, SMALLER, SMALLER)
    for rows, policy in product(PROMPTS, PREFILL):
        yield Job(f"prompt {rows}", policy, small, 0.25, (("kind", "prefill"),))


def _texts(c: Commands) -> dict[str, Text]:
    """Returns the texts, those of decode first, recorded ones before drawn ones."""
    mixtral, deepseek = PROFILES["mixtral-8x7b"], PROFILES["olmoe-1b-7b"]
    qwen = PROFILES["qwen3-30b-a3b"]

    def of_mixtral(tokens: int, batch: int) -> Text:
        return calibrated(drawn(MIXTRAL, mixtral, 0, tokens, batch), mixtral.accuracy)

    return {
        **{f"embedded {batch}": recorded(c.trace(batch)) for batch in BATCHES},
        **{f"drawn {batch}": of_mixtral(32, batch) for batch in BATCHES},
        LONG: of_mixtral(128, 16),
        **{
            f"Qwen3 {batch}": calibrated(drawn(QWEN, qwen, 0, 32, batch), qwen.accuracy)
            for batch in BATCHES[:2]
        },
        **{
            f"prompt {rows}": calibrated(drawn(DEEPSEEK, deepseek, rows, 1, chunk=rows), deepseek.accuracy)
            for rows in PROMPTS
        },
    }


def page(c: Commands) -> str:
    """Returns DALI's page."""
    costs, texts = c.costs("dali"), _texts(c)
    decoded = list(texts)[: 2 * len(BATCHES)]
    found = replayed(texts, list(_jobs(decoded, costs)))

    def of(over: str, policy: str, kind: str, figure: str = "tok_s") -> list[float]:
        return found.ratios(over, figure, kind=kind, policy=policy)

    def means(ratios: Sequence[float]) -> list[float]:
        """Over the batches: of recorded routing and of drawn."""
        return [mean(ratios[: len(BATCHES)]), mean(ratios[len(BATCHES) :])]

    by_rows = [of(name, "dali", "whole") for name in THRESHOLDS]
    reached = [_reached(texts[name], costs) for name in ("embedded 4", "embedded 16", "drawn 4", "drawn 16")]
    named = {most: [_named(texts[name], most) for name in decoded] for most in (1, 2)}
    gains = [after - raw for pairs in named.values() for raw, after in pairs[: len(BATCHES)]]
    rising = [_rising(texts[name], costs) for name in ("embedded 4", "drawn 4")]
    known = alike()
    ours = {
        "rows": [one for row in by_rows for one in means(row)],
        "best": [min(row) for row in zip(*by_rows, strict=True)],
        "queue": of("hybrimoe", "dali", "whole"),
        "layers": of("layerwise", "dali", "whole"),
        "llama": of("layerwise", "dali", "whole"),
        "lightning": of(LIGHTNING, "dali", "whole"),
        "fiddler": of("fiddler", "dali", "whole"),
        "qwen-rows": [mean(of(name, "dali", "qwen")) for name in THRESHOLDS],
        "qwen-queue": of("hybrimoe", "dali", "qwen"),
        "qwen-layers": of("layerwise", "dali", "qwen"),
        "qwen-lightning": of(LIGHTNING, "dali", "qwen"),
        "pre-llama": of("layerwise", "dali", "prefill", "prefill"),
        "pre-layers": of("layerwise", "dali", "prefill", "prefill"),
        "pre-lightning": of(LIGHTNING, "dali", "prefill", "prefill"),
        "pre-rows": [mean(of(name, "dali", "prefill", "prefill")) for name in PREFILL_ROWS],
        "pre-queue": of("hybrimoe", "dali", "prefill", "prefill"),
        "greedy": of("all-host", GREEDY, "bars"),
        "workload": [one for name in FIXED for one in means(of("all-host", name, "bars"))],
        "greedy-rows": [one for name in FIXED for one in means(of(name, GREEDY, "bars"))],
        "optimum": reached,
        "opt-plan": [share * (1 - PLANNER) / (1 - SOLVER) for share in reached],
        "prefetch": of(GREEDY, PREFETCH, "bars"),
        "random": of(RANDOM, GREEDY, "bars"),
        "sizes": [one for name in SIZES[1:] for one in of(name, SIZES[0], "sizes")],
        "cache": of(PREFETCH, "dali", "bars"),
        "score": of(CACHED[1], "dali", "caches"),
        "hits-score": of(CACHED[1], "dali", "caches", "hits"),
        "hits-lru": of(CACHED[2], "dali", "caches", "hits"),
        "rate": found.get("hits", kind="caches", policy=CACHED[1]),
        "more": _quotients(found, 0.75, 0.25),
        "often": of(WINDOWS[4], WINDOWS[0], "windows", "hits"),
        "many": of(WINDOWS[2], WINDOWS[3], "windows", "hits"),
        "windows": [one for w in WINDOWS if w != WINDOWS[2] for one in of(w, WINDOWS[2], "windows")],
        "windows-rows": [one for name in THRESHOLDS for one in of(name, WINDOWS[2], "windows")],
        "rising": [after / hits for groups in rising for hits, after in pairwise(groups)],
        "full": [groups[-1] for groups in rising],
        "longer": of("layerwise", "dali", "longer"),
        "longer-llama": of("layerwise", "dali", "longer"),
        "longer-rows": [of(name, "dali", "longer")[0] for name in THRESHOLDS],
        "raw": [raw for raw, _ in named[1]],
        "raw-two": [raw for raw, _ in named[2]],
        "residual": gains,
        "cosine": [mean(known.cosine)],
        "cosine-gain": [mean(known.corrected) - mean(known.cosine)],
    }
    words: dict[str, Words] = {
        "static": of(PREFETCH, KEPT, "bars"),
        "belady": of("dali+belady", "dali", "caches", "hits"),
        "planning": [100 * one for one in found.get("planning", kind="whole", policy="dali")],
        "hybrimoe": [100 * one for one in found.get("planning", kind="whole", policy="hybrimoe")],
        "qwen-parts": [of("dali", name, "qwen parts")[0] for name in QWEN_PARTS],
        "two-ended": of(f"hybrimoe:{ALONE}", GREEDY, "bars"),
        "groups": "; ".join(", ".join(f"{hits:.0%}" for hits in groups) for groups in rising),
    }
    titles = (
        *("Whole systems at a cache of 50 %", "The same of Qwen3's shape"),
        *("The paper's bars at 25 %", "Prompts of DeepSeek's shape"),
    )
    figures = ("whole", "tok_s"), ("qwen", "tok_s"), ("bars", "tok_s"), ("prefill", "prefill")
    tables = [
        found.table(f"{title}: tok/s, and over all-host", "all-host", "text", figure=figure, kind=kind)
        for title, (kind, figure) in zip(titles, figures, strict=True)
    ]
    tables.append(found.table("Replacements: hits", "dali", "text", "cache", figure="hits", kind="caches"))
    return write("dali", ours, words, tables)


def _quotients(found: Results, large: float, small: float) -> list[float]:
    """Returns the speeds of DALI with a large cache over those with a small one."""
    speeds = (found.get("tok_s", kind="caches", policy="dali", cache=cache) for cache in (large, small))
    return [a / b for a, b in zip(*speeds, strict=True)]


def _rising(text: Text, costs: Costs) -> list[float]:
    """Returns the hits of every 8 tokens of an answer, one group after the other (its figure 18d)."""
    header, divided, found = *text, []
    tiles = header.shape.layers * header.shape.experts // 2 * header.shape.tiles
    first = next(n for n in range(divided.begin, len(divided.steps)) if divided.steps[n].phase == "decode")
    for begin in range(first, len(divided.steps) - 7, 8):
        part = replace(divided, steps=divided.steps[: begin + 8], begin=begin)
        outcome = part.replay(header, policy_of("dali:window=8:swaps=1", part), costs, tiles)
        found.append(PhaseProfile(outcome.measured["decode"], header.tile_bytes).hit_rate or 0.0)
    return found


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
