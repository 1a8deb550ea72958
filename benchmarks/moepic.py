"""MoEpic's figures on routing that is drawn for the shapes of its own models, by replay.

    python -m benchmarks.moepic [--tokens N] [--accuracy A] [--model NAME]

The paper measures Mixtral-8x7B and Qwen1.5-MoE on an RTX A6000. Their routing is not here, so it is drawn
with the embedded model's unevenness and the accuracy of predictions that is given
(`pipeline/traces/synthetic.py`). The costs are derived from that machine's rates; how long a layer takes
beside its experts, and so how much it hides, the paper's summary does not say: several values are tried.
Times are of the layers alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.evidence_commands import COSTS, Commands, Row, paces, relative
from pipeline.calibration.observers import TokenOrder
from pipeline.engine.driver import LayerDecision
from pipeline.models.routing import Softmax
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs, Rates, derived
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Gated, ModelShape, PolicyRequest, Signals
from pipeline.replay.machine import Replay
from pipeline.traces.synthetic import EMBEDDED, Skew, SyntheticText
from pipeline.traces.trace import Header, TracedStep

A6000 = Rates(160.0, 25.0, 614.0, 1.5, 75.0)  # PCIe 4.0 x16; 80 % of 768 GB/s, half of the arithmetic
BITS = 4.5  # of a weight, with scales: half-quadratic quantization in groups of 64
TILES = 10
WARM = 40  # tokens before those that are measured
CACHES = (0.25, 0.5, 0.75)
THETAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Drawn:
    """A model's shape: hidden size and the experts' channels, and the bytes of a layer beside its experts."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    channels: int
    other_bytes: float

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.layers, self.experts, TILES, self.top_k)

    def costs(self, layer: float) -> Costs:
        """Returns costs with so many seconds of a layer beside its experts."""
        weights = 3 * self.hidden * self.channels
        rates = replace(A6000, layer=layer)
        return derived(rates, weights * BITS / 8, weights, self.other_bytes).for_tiles(TILES)


MODELS = {
    "mixtral-8x7b": Drawn(32, 8, 2, 4096, 14336, 84e6),
    "qwen1.5-moe": Drawn(24, 60, 4, 2048, 1408, 68e6),  # with its shared expert
}
LAYERS = {"mixtral-8x7b": (1e-4, 2e-3, 4e-3, 6e-3), "qwen1.5-moe": (1e-4, 3e-4, 6e-4)}
BASELINES: dict[str, PolicyRequest] = {
    "on-demand": PolicyRequest("on-demand"),
    "whole-layer": PolicyRequest("whole-layer", {"pause": "0"}),
    "mixtral-offloading": PolicyRequest("mixtral-offloading", {"pause": "0"}),
    "no split": PolicyRequest("moepic", {"theta": "1", "pause": "0"}),
}
ABLATIONS: dict[str, PolicyRequest] = {
    "moepic": PolicyRequest("moepic", {"pause": "0"}),
    **{f"theta {t:g}": PolicyRequest("moepic", {"theta": str(t), "pause": "0"}) for t in THETAS},
}

MOEPIC = ",".join(
    ["on-demand", "mixtral-offloading:pause=0", "moepic:pause=0", "moepic:pause=0:theta=1"]
    + [f"moepic:pause=0:theta={eighths / 8}" for eighths in range(1, 8)]
)
MOEPIC_MEASURED = ",".join(
    [*MOEPIC.split(",")[:4], *(f"moepic:pause=0:theta={t}" for t in (0.25, 0.5, 0.75))]
)


def header_of(model: Drawn) -> Header:
    shape = model.shape
    return Header("drawn", "0" * 64, "0" * 64, shape, 1, Softmax(shape.top_k, rescaled=True), 1)


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


def token_seconds(
    header: Header, request: PolicyRequest, costs: Costs, cache: float, known: Calibration, steps: Any
) -> tuple[float, float]:
    """Seconds a token, without those of the first WARM, and MoEpic's mean theta (or 1)."""
    shape = header.shape
    capacity = round(cache * shape.layers * shape.experts) * shape.tiles
    policy = make_policy(request, 0)
    machine = Replay(header, policy, costs, capacity, calibration=known, popularity=known.decode_counts)
    began = 0.0
    for place, step in enumerate(steps):
        if place == WARM:
            began = machine.now
        machine.step(step)
    target = machine.cache.target
    theta = float(target[target > 0].mean() / shape.tiles) if target.any() else 1.0
    return (machine.now - began) / (len(steps) - WARM), theta


def table(name: str, skew: Skew, tokens: int) -> list[Row]:
    """A row for each length of a layer and cache: milliseconds a token."""
    model = MODELS[name]
    header = header_of(model)
    steps = SyntheticText(header, skew).steps(prompt=0, chunk=1, tokens=2 * tokens + WARM)
    known = calibrated(header, steps[:tokens], skew.accuracy)
    rows = []
    for layer in LAYERS[name]:
        for cache in CACHES:
            row: Row = {"model": name, "layer_ms": 1e3 * layer, "cache": cache}
            requests: Mapping[str, PolicyRequest] = BASELINES | ABLATIONS
            for label, request in requests.items():
                given = header, request, model.costs(layer), cache, known, steps[tokens:]
                seconds, theta = token_seconds(*given)
                row[label] = 1e3 * seconds
                if label == "moepic":
                    row["mean theta"] = theta
            row |= {f"against {base}": row["moepic"] / row[base] - 1 for base in BASELINES}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def drawn(accuracies: Sequence[float] = (EMBEDDED.accuracy, 0.97), tokens: int = 100) -> list[Row]:
    """The tables of both models, with predictions of these accuracies."""
    return [
        {"accuracy": accuracy} | row
        for accuracy in accuracies
        for name in MODELS
        for row in table(name, replace(EMBEDDED, accuracy=accuracy), tokens)
    ]


def moepic(c: Commands) -> dict[str, list[Row]]:
    """Prints experts of eight tiles replayed with the costs of an A6000 whose layers take 0.1 to 8 ms beside
    their experts, and an engine paced as with 2 ms."""
    tiles = ("--tile", "32")
    words = ("--prompt-len", "256", "--gen-len", "256", "--rounds", "1", "--sweep", "batch=1")
    record = ("--record", str(c.file("tiles.trace")))
    c.run("record-tiles", "bench", "--policy", "all-host", *tiles, *words, *record)
    rows = []
    for costs in ("a6000", "a6000-2", "a6000-4", "a6000-8"):
        found = c.replay(f"moepic-{costs}", "tiles.trace", MOEPIC, costs, "--sweep", "cache=0.25,0.5,0.75")
        rows += [{"costs": costs} | row for row in found]
    relative(rows, "on-demand", "costs", "cache")
    given = COSTS["a6000-2"]
    block = given["other"][0] + 2 * given["device"][0]
    pace = paces(c, given["link"], given["host"][0], block)
    short = ("--prompt-len", "64", "--gen-len", "32", "--rounds", "3", *tiles, *pace)
    engines = []
    for cache in ("0.25", "0.5", "0.75"):
        found = c.measure(f"emulated-moepic-{cache}", MOEPIC_MEASURED, "--expert-cache", cache, *short)
        engines += [{"cache": cache} | row for row in found]
    relative(engines, "on-demand", "cache")
    return {"MoEpic, replayed": rows, "MoEpic, emulated": engines, "MoEpic, drawn routing": drawn()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200, help="measured, and before them as many calibrate")
    parser.add_argument("--accuracy", type=float, default=EMBEDDED.accuracy, help="of predictions")
    parser.add_argument("--model", choices=MODELS, action="append")
    arguments = parser.parse_args()
    skew = replace(EMBEDDED, accuracy=arguments.accuracy)
    tables = [table(name, skew, arguments.tokens) for name in arguments.model or MODELS]
    print(json.dumps([row for rows in tables for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
