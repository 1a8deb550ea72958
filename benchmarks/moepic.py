"""MoEpic's page: the embedded model's routing, and routing drawn for Mixtral and for Qwen1.5-MoE.

Neither the GPU nor how long a layer takes beside its experts, and so how much it hides, is in our text of the
paper: costs are derived from an RTX A6000's rates, with several times of a layer.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from benchmarks.evidence_commands import Commands
from benchmarks.papers import Job, Results, Text, Words, calibrated, drawn, recorded, replayed, write
from pipeline.policies.costs import Costs, Rates, derived
from pipeline.policies.view import ModelShape
from pipeline.traces.synthetic import PROFILES

A6000 = Rates(160.0, 25.0, 614.0, 1.5, 75.0)  # PCIe 4.0 x16; 80 % of 768 GB/s, half of the arithmetic
# Weights of an expert, at 4.5 bits each, and bytes of a layer beside its experts; Qwen1.5-MoE's second
SIZES = {"Mixtral": (3 * 4096 * 14336, 84e6), "Qwen": (3 * 2048 * 1408, 55e6)}
SHAPES = {"Mixtral": ModelShape(32, 8, 10, 2), "Qwen": ModelShape(24, 60, 10, 4)}
DRAWN = {"Mixtral": "mixtral-8x7b", "Qwen": "olmoe-1b-7b"}  # whose published locality
LAYERS = {  # ms beside the experts
    "embedded": (0.1, 2, 8),
    "Mixtral, 84 %": (2, 6),
    "Mixtral, 97 %": (2, 6),
    "Qwen, 84 %": (0.1, 0.5),
}
DISTINCT = ("embedded", "Mixtral, 84 %", "Qwen, 84 %")  # predictions do not change what a text uses
CACHES = (0.25, 0.5)
MOEPIC, WHOLE, READY = "moepic:pause=0", "moepic:pause=0:theta=1", "moepic:pause=0:objective=ready"
BASELINES = ("whole-layer:pause=0", "on-demand", "mixtral-offloading:pause=0")
THETAS = (*(f"{MOEPIC}:theta={theta}" for theta in (0.2, 0.4, 0.6, 0.8)), WHOLE)
OMEGAS = (8, 32, 128, 512)  # steps in which LCP's priority falls to a quarter


def costs_of(layer: float, model: str) -> Costs:
    """Returns costs with so many milliseconds of a layer beside its experts."""
    weights, beside = SIZES[model]
    return derived(replace(A6000, layer=layer / 1e3), weights * 4.5 / 8, weights, beside)


def _drawn(model: str, accuracy: float) -> Text:
    """Returns drawn routing of which so much is predicted, with the calibration of what warms it."""
    skew = replace(PROFILES[DRAWN[model]], accuracy=accuracy)
    return calibrated(drawn(SHAPES[model], skew, 0, 32), accuracy)


def page(c: Commands) -> str:
    """Returns MoEpic's page."""
    texts = {"embedded": recorded(c.trace(1), 8)}
    for name in list(LAYERS)[1:]:
        model, accuracy = name.split(", ")
        texts[name] = _drawn(model, int(accuracy[:2]) / 100)
    jobs = [
        Job(
            text, policy, costs_of(layer, "Qwen" if "Qwen" in text else "Mixtral"), cache, (("layer", layer),)
        )
        for text in texts
        for layer, cache in product(LAYERS[text], CACHES)
        for policy in (*BASELINES, MOEPIC, READY, *THETAS)
    ]
    found = replayed(texts, jobs)

    def less(baseline: str, policy: str = MOEPIC) -> list[float]:
        return [1 - 1 / ratio for ratio in found.ratios(baseline, policy=policy)]

    settings = [(text, layer) for text in texts for layer in LAYERS[text]]
    hits = {(text, cache): _hits(texts[text], cache) for text in DISTINCT for cache in CACHES}
    ours = {
        **dict(zip(("whole", "demand", "offloading"), map(less, BASELINES), strict=True)),
        "half": [_speed(found, MOEPIC, *s, 0.25) / _speed(found, "on-demand", *s, 0.5) for s in settings],
        "theta": [_best(found, *setting, cache) for setting in settings for cache in CACHES],
        "split": found.ratios(WHOLE, policy=MOEPIC),
        "lcp-lru": [rates[f"LCP {omega}"] / rates["LRU"] for rates in hits.values() for omega in OMEGAS],
        "lcp-lfu": [rates[f"LCP {omega}"] / rates["LFU"] for rates in hits.values() for omega in OMEGAS],
    }
    words: dict[str, Words] = {
        "ready": found.ratios(MOEPIC, policy=READY),
        "ready-whole": [100 * one for one in less(BASELINES[0], READY)],
        "nothing": [100 * one for one in less(BASELINES[1])[: len(CACHES)]],
    }
    tables = [
        found.table(f"{text}: tok/s, and over on-demand", "on-demand", "layer", "cache", text=text)
        for text in texts
    ]
    head = "| text, cache | " + " | ".join(next(iter(hits.values()))) + " |"
    lines = ["## Hits of decode by order of experts, without prediction and split", "", head]
    lines.append("|---" * (head.count("|") - 1) + "|")
    for (text, cache), rates in hits.items():
        lines.append(f"| {text}, {cache} | " + " | ".join(f"{rate:.0%}" for rate in rates.values()) + " |")
    return write("moepic", ours, words, [*tables, "\n".join(lines)])


def _speed(found: Results, policy: str, text: str, layer: float, cache: float) -> float:
    return found.get("tok_s", policy=policy, text=text, layer=layer, cache=cache)[0]


def _best(found: Results, text: str, layer: float, cache: float) -> float:
    """Returns the theta for all layers that is fastest in a setting."""
    fastest = max(THETAS, key=lambda policy: _speed(found, policy, text, layer, cache))
    return float(fastest.rpartition("=")[2])


def _hits(text: Text, share: float) -> dict[str, float]:
    """Returns the hits of the measured decoding in caches that hold this share of each layer's experts, those
    that an order has first: by their latest use, by uses, and by LCP's priority, which is mu * rho ** (nu /
    omega) with rho a quarter."""
    shape = text.header.shape
    size, found = round(share * shape.experts), {}
    decay = {"LRU": np.inf, "LFU": 0.0, **{f"LCP {omega}": np.log(4) / omega for omega in OMEGAS}}
    for name, recency in decay.items():
        uses, last = np.zeros((2, shape.layers, shape.experts))
        hit = asked = 0
        for number, step in enumerate(text.text.steps, start=1):
            for layer, traced in enumerate(step.layers):
                active = traced.router_routing.active
                if number > text.text.begin and step.phase == "decode":
                    with np.errstate(divide="ignore"):
                        order = (
                            last[layer] if recency == np.inf else np.log(uses[layer]) + recency * last[layer]
                        )
                    cached = np.argsort(-order, kind="stable")[:size]
                    hit += int(np.isin(active.experts, cached).sum())
                    asked += len(active.experts)
                uses[layer, active.experts] += active.counts
                last[layer, active.experts] = number
        found[name] = hit / asked
    return found
