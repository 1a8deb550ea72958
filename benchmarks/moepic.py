"""MoEpic's page: the embedded model's routing, and routing drawn for Mixtral.

The costs are derived from the rates of the paper's RTX A6000; how long a layer takes beside its experts, and
so how much it hides, our text of the paper does not say: several values are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from benchmarks.evidence_commands import COSTS, Commands, Row, paces, relative
from benchmarks.papers import Job, Results, Text, drawn, recorded, replayed, write
from pipeline.calibration.observers import TokenOrder
from pipeline.engine.driver import LayerDecision
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs, Rates, derived
from pipeline.policies.view import Gated, ModelShape, Signals
from pipeline.traces.synthetic import PROFILES
from pipeline.traces.trace import Header, TracedStep

A6000 = Rates(160.0, 25.0, 614.0, 1.5, 75.0)  # PCIe 4.0 x16; 80 % of 768 GB/s, half of the arithmetic
WEIGHTS, BESIDE = (
    3 * 4096 * 14336,
    84e6,
)  # of an expert of Mixtral's, at 4.5 bits each; bytes of a layer beside them
SHAPE = ModelShape(32, 8, 10, 2)
LAYERS = {"embedded": (0.1, 2, 8), "drawn, 84 %": (2, 6), "drawn, 97 %": (2, 6)}  # ms beside the experts
CACHES = (0.25, 0.5)
MOEPIC, WHOLE = "moepic:pause=0", "moepic:pause=0:theta=1"
BASELINES = ("whole-layer:pause=0", "on-demand", "mixtral-offloading:pause=0")
THETAS = tuple(f"{MOEPIC}:theta={theta}" for theta in (0.2, 0.3, 0.4, 0.6))
LCP = "moepic:theta=1:prediction=none"
MEASURED = ",".join([*BASELINES[1:], MOEPIC, WHOLE, *(f"{MOEPIC}:theta={t}" for t in (0.25, 0.5, 0.75))])


def costs_of(layer: float) -> Costs:
    """Returns costs with so many milliseconds of a layer beside its experts."""
    return derived(replace(A6000, layer=layer / 1e3), WEIGHTS * 4.5 / 8, WEIGHTS, BESIDE)


def calibrated(header: Header, steps: Sequence[TracedStep], accuracy: float) -> Calibration:
    """Returns what `launch.py calibrate` would find on these steps, as far as MoEpic uses it."""
    shape, order = header.shape, TokenOrder(header.shape)
    for step in steps:
        order.begin(step.phase, step.sequences)
        for index, layer in enumerate(step.layers):
            gated, nothing = Gated.from_router(layer.router_routing), np.zeros(shape.experts, np.int32)
            order.layer(
                LayerDecision(index, Signals(None, {}), gated, nothing, nothing), np.zeros((1, 1), np.float32)
            )
        order.end()
    named = np.full(shape.layers, accuracy, np.float32)
    named[0] = 0
    empty = np.zeros((0, 0), np.float32)
    return Calibration(
        decode_counts=order.decode_counts(),
        residual_logits=empty,
        accuracy={"raw": named},
        kept=np.zeros((0, 0, 0), np.float32),
        gated_accuracy={},
        sensitivity=None,
        threshold=None,
        first_gate=None,
        hit_rates=order.hit_rates(),
    )


def _drawn(accuracy: float) -> Text:
    """Returns drawn routing of which so much is predicted, with the calibration of what warms it."""
    made = drawn(SHAPE, replace(PROFILES["mixtral-8x7b"], accuracy=accuracy), 0, 32)
    known = calibrated(made.header, made.text.steps[: made.text.begin], accuracy)
    return Text(made.header, replace(made.text, calibration=known, counts=known.decode_counts))


def page(c: Commands) -> str:
    """Returns MoEpic's page."""
    texts = {"embedded": recorded(c.trace(1), 8), "drawn, 84 %": _drawn(0.84), "drawn, 97 %": _drawn(0.97)}
    jobs = [
        Job(text, policy, costs_of(layer), cache, (("layer", layer),))
        for text in texts
        for layer, cache in product(LAYERS[text], CACHES)
        for policy in (*BASELINES, MOEPIC, WHOLE, *THETAS[1::2], *(LCP, "on-demand+belady") * (layer == 2))
    ]
    jobs += [Job("drawn, 97 %", one, costs_of(6), 0.25, (("layer", 6),)) for one in THETAS[::2]]
    found = replayed(texts, jobs)

    def less(baseline: str) -> list[float]:
        return [1 - 1 / ratio for ratio in found.ratios(baseline, policy=MOEPIC)]

    half = [
        found.get("tok_s", policy=MOEPIC, text=text, layer=layer, cache=0.25)[0]
        / found.get("tok_s", policy="on-demand", text=text, layer=layer, cache=0.5)[0]
        for text in texts
        for layer in LAYERS[text]
    ]
    ours = {
        **dict(zip(("whole", "demand", "offloading"), map(less, BASELINES), strict=True)),
        "half": half,
        "theta": [
            _best(found, text, cache, layer) for text in texts for layer in LAYERS[text] for cache in CACHES
        ],
        "lcp": found.ratios("on-demand", "hits", policy=LCP),
        "split": found.ratios(WHOLE, policy=MOEPIC),
    }
    bound = found.ratios("on-demand", "hits", policy="on-demand+belady")
    words = {
        "belady": f"{min(bound):.2f} to {max(bound):.2f}",
    }
    tables = [
        found.table(f"{text}: tok/s, and over on-demand", "on-demand", "layer", "cache", text=text)
        for text in texts
    ]
    tables += [found.table("hits", "on-demand", "text", "cache", figure="hits", layer=2)]
    return write("moepic", ours, words, tables)


def _best(found: Results, text: str, cache: float, layer: float) -> float:
    """Returns the theta for all layers that is fastest in a setting."""
    speeds = {
        row["policy"]: row["tok_s"]
        for row in found.rows
        if (row["text"], row["cache"], row["layer"]) == (text, cache, layer) and "theta" in row["policy"]
    }
    speeds.pop(LCP, None)
    return float(max(speeds, key=speeds.__getitem__).rpartition("=")[2])


def emulated(c: Commands) -> dict[str, list[Row]]:
    """Experts of eight tiles on an engine paced as an A6000 whose layers take 2 ms beside their experts."""
    given = COSTS["a6000-2"]
    pace = paces(c, given["link"], given["host"][0], given["other"][0] + 2 * given["device"][0])
    short = ("--prompt-len", "64", "--gen-len", "32", "--rounds", "3", "--tile", "32", *pace)
    engines = []
    for cache in ("0.25", "0.5", "0.75"):
        found = c.measure(f"emulated-moepic-{cache}", MEASURED, "--expert-cache", cache, *short)
        engines += [{"cache": cache} | row for row in found]
    relative(engines, "on-demand", "cache")
    return {"MoEpic, emulated": engines}
