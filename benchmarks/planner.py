"""The planner's own time: what a policy adds to a layer of one token.

    python benchmarks/planner.py
    python benchmarks/planner.py --policy dali daop --json
    python benchmarks/planner.py --runs 1 --tokens 16        a first impression

For every preset, and dali with its assignments for comparison, on three models' shapes: 32 layers of 8, 64
and 128 experts, half of them resident. Timed is what the engine asks of a policy in one layer (probes, gate,
plan, ahead, predict and after), without the model's router, which the model itself runs anyway. What a
policy answers is carried out as the engine would, and everything it fetches lands at once.

Beside it, how good the greedy assignment is: its time over the optimum's, on random layers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from planner_input import LAYERS, MODELS, Model, Text, calibrated

from pipeline.arrays import FloatArray, IntArray
from pipeline.models.routing import Softmax
from pipeline.policies import balance
from pipeline.policies.presets import PRESETS, make_policy
from pipeline.policies.view import Gated, ModelShape, Policy, PolicyRequest, Routing, Signals, Target, View

LIMIT_US = 60  # at the median, a layer
PROMPT = 16  # tokens, one step of prefill before what is timed
COMPARED = [("dali", {"assignment": "optimum"}), ("dali", {"assignment": "beam"})]


class TimedRouter:
    """The model's own, with a clock. One call a layer is the model's and not the policy's time; what a
    prediction asks beyond that is."""

    def __init__(self, top_k: int) -> None:
        self._router = Softmax(top_k, rescaled=True)
        self.seconds = 0.0
        self.begun = False  # the layer's own routing was asked for

    def __call__(self, logits: FloatArray) -> Routing:
        started = time.perf_counter()
        routing = self._router(logits)
        if not self.begun:
            self.seconds += time.perf_counter() - started
            self.begun = True
        return routing


class Machine:
    """Carries out what a policy answers, and times the policy alone."""

    def __init__(self, model: Model, policy: Policy, text: Text, tokens: int) -> None:
        shape = ModelShape(LAYERS, model.experts, model.layout.shape.tiles, model.top_k)
        self.policy, self.text, self.tokens = policy, text, tokens
        self.router = TimedRouter(model.top_k)
        self.target = np.zeros((LAYERS, model.experts), np.int32)
        self.view = View(
            shape=shape,
            phase="prefill",
            capacity=LAYERS * model.experts // 2 * shape.tiles,
            residency=_read_only(self.target),  # what is to be resident has landed
            target=_read_only(self.target),
            popularity=np.ones((LAYERS, model.experts), np.int64),
            step=0,
            costs=model.costs,
            router=self.router,
            calibration=calibrated(model, text),
            sequences=(0,) * PROMPT,
        )
        self.target[:] = policy.placement(self.view)

    def run(self) -> list[float]:
        """Read the prompt, then decode; microseconds of each layer of each decoded token."""
        for layer in range(LAYERS):
            logits = self.text.logits[:PROMPT, layer]
            gated = self.policy.gate(layer, Signals(logits, {}), self.view)
            self._apply(self.policy.plan(layer, gated.routing, self.view).targets)
            self._apply(self.policy.after(layer, gated.routing, self.view))
        microseconds: list[float] = []
        for token in range(self.tokens):
            self.view = replace(self.view, phase="decode", step=token + 1, sequences=(0,))
            microseconds += self._step(PROMPT + token)
        return microseconds

    def _step(self, token: int) -> Iterator[float]:
        policy, view, now = self.policy, self.view, time.perf_counter
        early: Gated | None = None
        for layer in range(LAYERS):
            self.router.seconds, self.router.begun = 0.0, False
            started = now()
            wanted = policy.probes(layer, view)
            spent = now() - started

            own = None if early else self.text.logits[token, layer][None]
            signals = Signals(own, {of: self.text.probe(token, layer, of) for of in wanted})
            targets: tuple[Target, ...] = ()
            started = now()
            if early is None:
                gated = policy.gate(layer, signals, view)
                targets = policy.plan(layer, gated.routing, view).targets
            else:
                gated = early
            spent += now() - started
            self._apply(targets)

            started = now()
            ahead = policy.ahead(layer, signals, view)
            targets = policy.predict(layer, signals, gated, view)
            spent += now() - started
            self._apply(targets)
            early = None if ahead is None else ahead.gated

            started = now()
            targets = policy.after(layer, gated.routing, view)
            spent += now() - started
            self._apply(targets)
            yield (spent - self.router.seconds) * 1e6

    def _apply(self, targets: tuple[Target, ...]) -> None:
        for target in targets:
            self.target[target.layer, target.expert] = target.tiles
        if targets and self.target.sum() > self.view.capacity:
            raise SystemExit(f"{self.policy.name} keeps more than there is room for")


def _read_only(array: IntArray) -> IntArray:
    view = array.view()
    view.flags.writeable = False
    return view


def timed(model: Model, name: str, options: dict[str, str], tokens: int) -> tuple[float, float]:
    """Microseconds a layer in one run: the median and the 9th decile."""
    policy = make_policy(PolicyRequest(name, options), 0)
    machine = Machine(model, policy, Text(model, PROMPT + tokens), tokens)
    times = machine.run()[LAYERS * 2 :]  # the first tokens fill caches of all kinds
    return statistics.median(times), statistics.quantiles(times, n=10)[-1]


def planner_times(
    model: Model, asked: list[tuple[str, dict[str, str]]], tokens: int, runs: int
) -> Iterator[dict[str, Any]]:
    """Of each policy the quickest of some runs: what else the machine does only adds to it. The policies
    take turns, so that a slow minute is not one policy's."""
    rounds = [[timed(model, name, options, tokens) for name, options in asked] for _ in range(runs)]
    tenth = model.kernel_us / 10
    for (name, options), *found in zip(asked, *rounds, strict=True):
        median, p90 = min(found)
        yield {
            "model": model.name,
            "experts": model.experts,
            "top_k": model.top_k,
            "policy": " ".join([name, *(f"{key}={value}" for key, value in options.items())]),
            "median_us": round(median, 1),
            "p90_us": round(p90, 1),
            "tenth_of_kernel_us": round(tenth, 1),
            "over_limit": median > LIMIT_US,
            "over_tenth": median > tenth,
        }


def greedy_to_optimum(model: Model, layers: int) -> dict[str, Any]:
    """The greedy assignment's and the beam's time over the optimum's, on random layers: one row or more, as
    many as the optimum can be searched for, on machines of many kinds, half of the experts resident."""
    rng = np.random.default_rng(5)
    tiles = model.layout.shape.tiles
    greedy: list[float] = []
    beam: list[float] = []
    while len(greedy) < layers:
        rows = int(rng.integers(1, 17))
        chosen: NDArray[np.int64] = np.argsort(rng.random((rows, model.experts)), axis=1)[:, : model.top_k]
        _, counts = np.unique(chosen, return_counts=True)
        if len(counts) > balance.EXACT:
            continue
        host_rate, link_rate = rng.uniform(10, 80), rng.uniform(6, 60)
        widening = rng.uniform(0.02, 0.6)  # what another row adds on the host
        missing = np.where(rng.random(len(counts)) < 0.5, tiles, 0).tolist()
        host = ((1 + widening * (counts - 1)) / host_rate).tolist()
        device = [max(count / tiles / link_rate, 1 / 400) for count in missing]
        room = LAYERS * model.experts // 2 * tiles
        best = balance.makespan(balance.optimum(device, host, missing, room), device, host)
        greedy.append(balance.makespan(balance.greedy(device, host, missing, room), device, host) / best)
        beam.append(balance.makespan(balance.beam(device, host, missing, room, 2), device, host) / best)
    return {
        "model": model.name,
        "layers": layers,
        "greedy_to_optimum": round(statistics.mean(greedy), 4),
        "greedy_worst": round(max(greedy), 3),
        "greedy_is_optimal": round(sum(ratio < 1 + 1e-9 for ratio in greedy) / layers, 3),
        "beam_2_to_optimum": round(statistics.mean(beam), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", nargs="+", choices=list(PRESETS), help="only these")
    parser.add_argument("--tokens", type=int, default=64, help="decoded; the first two are not timed")
    parser.add_argument("--runs", type=int, default=5, help="of each policy; the quickest counts")
    parser.add_argument("--layers", type=int, default=2000, help="random layers for the greedy assignment")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    arguments = parser.parse_args()
    asked: list[tuple[str, dict[str, str]]] = [(name, {}) for name in arguments.policy or PRESETS]
    if not arguments.policy:
        asked += COMPARED

    times = []
    if not arguments.json:
        print(f"{'':34}{'E':>5}{'k':>3}{'median':>9}{'p90':>8} us a layer; a tenth of the kernels' time")
    for model in MODELS:
        for row in planner_times(model, asked, arguments.tokens, arguments.runs):
            times.append(row)
            if not arguments.json:
                marks = f"{' over ' + str(LIMIT_US) + ' us' if row['over_limit'] else ''}"
                marks += " over a tenth" if row["over_tenth"] else ""
                print(
                    f"{row['policy']:34}{row['experts']:5}{row['top_k']:3}{row['median_us']:9.1f}"
                    f"{row['p90_us']:8.1f} {row['tenth_of_kernel_us']:8.1f}{marks}"
                )
    ratios = [greedy_to_optimum(model, arguments.layers) for model in MODELS]
    if arguments.json:
        found = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        print(json.dumps(found | {"planner": times, "assignment": ratios}))
        return
    print("\ntime over the optimum's, mean:")
    for ratio in ratios:
        print(
            f"{ratio['model']:34} greedy {ratio['greedy_to_optimum']:.4f} (worst {ratio['greedy_worst']:.2f},"
            f" optimal in {ratio['greedy_is_optimal']:.0%}), beam of 2 {ratio['beam_2_to_optimum']:.4f}"
        )


if __name__ == "__main__":
    main()
