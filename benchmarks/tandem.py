"""The two models of the tables of drawn routing, and what a replay takes of Python for them.

python -m benchmarks.tandem --model qwen3 --layers 24 --share 0.5     microseconds a layer
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple, Self

from pipeline.arrays import PHASES
from pipeline.models.routing import Softmax
from pipeline.policies.costs import MACHINES, Costs, derived
from pipeline.policies.presets import make_policy
from pipeline.policies.view import ModelShape, PolicyRequest
from pipeline.replay.machine import DividedText, Outcome, Replay
from pipeline.replay.steps import counts_of
from pipeline.traces.synthetic import EMBEDDED, SyntheticText
from pipeline.traces.trace import Header, TracedStep

BITS = 4.25  # of a weight of an expert, with its scales


class Model(NamedTuple):
    """A model's sizes."""

    layers: int
    experts: int
    top_k: int
    tiles: int
    weights: int  # of an expert
    other: int  # weights of a layer beside its routed experts, 16 bits each


MODELS = {
    "mixtral": Model(32, 8, 2, 8, 3 * 4096 * 14336, 41_900_000),
    "qwen3": Model(48, 128, 8, 6, 3 * 2048 * 768, 18_900_000),
}


class Recorded(NamedTuple):
    """A text by a name. Placements go by the routing of the steps that warm, as of an engine's earlier
    requests."""

    name: str
    header: Header
    text: DividedText

    @classmethod
    def of(cls, name: str, header: Header, warm: Sequence[TracedStep], steps: Sequence[TracedStep]) -> Self:
        counts = counts_of(list(warm), header.shape.layers, header.shape.experts)
        return cls(name, header, DividedText([*warm, *steps], len(warm), counts))


def seconds_of(outcome: Outcome) -> dict[str, float]:
    """Seconds of the measured steps, by phase."""
    return {phase: sum(outcome.measured[phase]["seconds"].values()) for phase in PHASES}


def speed(recorded: Recorded, costs: Costs, share: float, policy: str = "tandem") -> float:
    """Microseconds of this process's time for a layer of a measured decode step: the policy, the simulated
    cache and the driver together, without reading the trace. The median of five runs."""
    shape = recorded.header.shape
    capacity = round(share * shape.layers * shape.experts * shape.tiles)
    text = recorded.text
    steps = [step for step in text.steps[text.begin :] if step.phase == "decode"]
    found = []
    for _ in range(5):
        replay = Replay(recorded.header, make_policy(PolicyRequest(policy), 0), costs, capacity)
        replay.run(text.steps[: text.begin])
        for known in (vars(layer.router_routing) for step in steps for layer in step.layers):
            known.pop("active", None)  # it belongs to what a replay computes
        started = time.process_time()
        replay.run(steps)
        found.append(time.process_time() - started)
    return median(found) / len(steps) / shape.layers * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="qwen3")
    parser.add_argument("--machine", nargs="*", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--policy", nargs="*", default=["tandem"])
    parser.add_argument("--share", nargs="*", type=float, default=[0.5], help="of the expert tiles")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    model = MODELS[given.model]
    shape = ModelShape(given.layers, model.experts, model.tiles, model.top_k)
    header = Header("synthetic", "", "", shape, 1, Softmax(model.top_k, rescaled=True), 3)
    text = SyntheticText(header, EMBEDDED)
    recorded = Recorded.of("synthetic", header, text.steps(0, 1, 40), text.steps(0, 1, given.steps))
    for machine in given.machine:
        costs = derived(
            MACHINES[machine], model.weights * BITS / 8, model.weights, 2 * model.other, model.other
        )
        for share in given.share:
            for policy in given.policy:
                us = speed(recorded, costs, share, policy)
                print(f"{machine:12}{share:5.2f} {policy:16}{us:7.1f} us a layer", flush=True)


if __name__ == "__main__":
    main()
