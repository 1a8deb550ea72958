"""The planner's own time: what a policy adds to a layer of one token.

    python -m benchmarks.planner
    python -m benchmarks.planner --policy dali daop --json
    python -m benchmarks.planner --runs 1 --tokens 16        a first impression

For every preset, on three models' shapes: 32 layers of 8, 64
and 128 experts, half of them resident. The timed code is the `PolicyDriver` in one layer with all its calls
of the policy, without the model's router, which the model itself runs anyway. Fetched tiles land at once.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.planner_input import LAYERS, MODELS, Model, Text, calibrated
from pipeline.arrays import FloatArray, Phase
from pipeline.engine.driver import LayerDecision, PolicyDriver
from pipeline.models.routing import Softmax
from pipeline.policies.presets import PRESETS, make_policy
from pipeline.policies.view import Ahead, ModelShape, Policy, PolicyRequest, Routing, Signals, Target, View
from shm.mask import Mask

LIMIT_US = 20  # at the median, a layer
PROMPT = 16  # tokens of one untimed prefill step


class TimedRouter:
    """The model's router, timed. One call a layer is the model's own time; further calls, for predictions,
    are the policy's."""

    def __init__(self, top_k: int) -> None:
        self._router = Softmax(top_k, rescaled=True)
        self.seconds = 0.0
        self.begun = False  # the layer's own routing was computed

    def __call__(self, logits: FloatArray) -> Routing:
        started = time.perf_counter()
        routing = self._router(logits)
        if not self.begun:
            self.seconds += time.perf_counter() - started
            self.begun = True
        return routing


class Machine:
    """Executes a policy's answers with arrays alone: a `LayerExecutor` that counts its own time, which is not
    the planner's. Fetched tiles land at once."""

    def __init__(self, model: Model, policy: Policy, text: Text, tokens: int) -> None:
        shape = ModelShape(LAYERS, model.experts, model.layout.shape.tiles, model.top_k)
        self.policy, self.text, self.tokens = policy, text, tokens
        self.router = TimedRouter(model.top_k)
        self.target = np.zeros((LAYERS, model.experts), np.int32)
        self.capacity = LAYERS * model.experts // 2 * shape.tiles
        self.seconds = 0.0  # spent here and not in the policy
        view = View(
            shape=shape,
            phase="prefill",
            capacity=self.capacity,
            residency=self.target,  # all targets have landed
            target=self.target,
            popularity=np.ones((LAYERS, model.experts), np.int64),
            step=0,
            costs=model.costs,
            router=self.router,
            calibration=calibrated(model, text),
            staging=1,
        )
        self.driver = PolicyDriver[bool](policy, view)
        self.target[:] = self.driver.placement

    def run(self) -> list[float]:
        """Read the prompt, then decode; microseconds of each layer of each decoded token."""
        self._step("prefill", slice(0, PROMPT))
        return [
            microseconds
            for token in range(PROMPT, PROMPT + self.tokens)
            for microseconds in self._step("decode", slice(token, token + 1))
        ]

    def _step(self, phase: Phase, tokens: slice) -> list[float]:
        """Microseconds of each layer."""
        self._tokens = tokens
        microseconds: list[float] = []
        self.driver.begin_step(phase, (0,) * (tokens.stop - tokens.start))
        for layer in range(LAYERS):
            self.seconds, self.router.seconds, self.router.begun = 0.0, 0.0, False
            started = time.perf_counter()
            self.driver.layer(layer, self)
            spent = time.perf_counter() - started - self.seconds - self.router.seconds
            microseconds.append(spent * 1e6)
        self.driver.end_step(0, 0)
        return microseconds

    def read(self, layer: int, probes: Sequence[int], own: bool) -> Signals:
        started = time.perf_counter()
        logits = self.text.logits[self._tokens, layer] if own else None
        signals = Signals(logits, {of: self.text.probe(self._tokens, layer, of) for of in probes})
        self.seconds += time.perf_counter() - started
        return signals

    def begin(self, decision: LayerDecision[bool]) -> None:
        self._apply(decision.targets)

    def begin_early(self, layer: int, ahead: Ahead, mask: Mask) -> bool:
        return True

    def prefetch(self, targets: Sequence[Target], no_room: int) -> None:
        self._apply(targets)

    def prefetch_channels(self, layer: int, routing: Routing, mask: Mask) -> None:
        """Channels are no part of this benchmark."""

    def compute(self, decision: LayerDecision[bool]) -> None:
        """Tiles are no part of this benchmark."""

    def end(self, targets: Sequence[Target]) -> None:
        self._apply(targets)

    def _apply(self, targets: Sequence[Target]) -> None:
        if not targets:
            return
        started = time.perf_counter()
        for target in targets:
            self.target[target.layer, target.expert] = target.tiles
        if self.target.sum() > self.capacity:
            raise SystemExit(f"{self.policy.name} keeps more tiles than its capacity")
        self.seconds += time.perf_counter() - started


def timed(model: Model, name: str, options: dict[str, str], tokens: int) -> tuple[float, float]:
    """Microseconds a layer in one run: the median and the 9th decile."""
    policy = make_policy(PolicyRequest(name, options), 0)
    machine = Machine(model, policy, Text(model, PROMPT + tokens), tokens)
    times = machine.run()[LAYERS * 2 :]  # the first tokens fill caches of all kinds
    return statistics.median(times), statistics.quantiles(times, n=10)[-1]


def planner_times(
    model: Model, asked: list[tuple[str, dict[str, str]]], tokens: int, runs: int
) -> Iterator[dict[str, Any]]:
    """Each policy's fastest of some runs: other load of the machine only adds to the time. The policies take
    turns, so that a slow minute does not hit a single one."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", nargs="+", choices=list(PRESETS), help="only these")
    parser.add_argument("--tokens", type=int, default=64, help="decoded; the first two are not timed")
    parser.add_argument("--runs", type=int, default=5, help="of each policy; the quickest counts")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    arguments = parser.parse_args()
    asked: list[tuple[str, dict[str, str]]] = [(name, {}) for name in arguments.policy or PRESETS]

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
    if arguments.json:
        found = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        print(json.dumps(found | {"planner": times}))


if __name__ == "__main__":
    main()
