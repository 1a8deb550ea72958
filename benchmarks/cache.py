"""The preset cache beside others, by replay of drawn routing: hits, bytes and speed over caches and links.

    python -m benchmarks.cache --model qwen3 --link 25 12

Each setting reads a text, which warms its cache, and then other texts, which count. The routing has the
locality that was published for the model (`pipeline/traces/synthetic.py`), the machine is 4090-pcie4 with the
given links (`pipeline/policies/costs.py`). `cache` with its misses on the
device is llama.cpp's rule: a cache by recency for each layer, each miss uploaded and computed there.
`--speed`: what planning takes, the median of each call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

from benchmarks.tandem import BITS, MODELS
from launch.profile import PhaseProfile
from pipeline.models.routing import Softmax
from pipeline.policies.costs import MACHINES, Costs, derived
from pipeline.policies.presets import make_policy
from pipeline.policies.view import ModelShape, PolicyRequest
from pipeline.replay.machine import DividedText, Replay
from pipeline.traces.synthetic import PROFILES, SyntheticText
from pipeline.traces.trace import Header

TEXTS, TOKENS, WARM, HISTORY = 4, 100, 64, 4000
MACHINE = "4090-pcie4"
PROFILE = {"mixtral": "mixtral-8x7b", "qwen3": "qwen3-30b-a3b"}
SHARES = {"mixtral": (0.125, 0.25, 0.5, 0.75), "qwen3": (0.06, 0.12, 0.25, 0.4)}
POLICIES = [
    PolicyRequest("all-host"),
    PolicyRequest("fiddler"),
    PolicyRequest("on-demand"),
    PolicyRequest("cache", {"assignment": "device"}),
    PolicyRequest("cache"),
    PolicyRequest("cache", {"prediction": "next-gate"}),
    PolicyRequest("tandem"),
]


class Drawn:
    """Texts of one model."""

    def __init__(self, name: str, seed: int) -> None:
        self.model = MODELS[name]
        shape = ModelShape(self.model.layers, self.model.experts, self.model.tiles, self.model.top_k)
        self.header = Header(name, "", "", shape, 1, Softmax(shape.top_k, rescaled=True), 1)
        text = SyntheticText(self.header, PROFILES[PROFILE[name]], seed)
        counts = text.counts(HISTORY)  # of earlier requests
        every = [text.steps(0, 1, tokens) for tokens in (WARM, *(TOKENS,) * TEXTS)]
        self.text = DividedText([step for steps in every for step in steps], WARM, counts)

    def costs(self, link_gbps: float) -> Costs:
        rates, model = replace(MACHINES[MACHINE], link_gbps=link_gbps), self.model
        return derived(rates, model.weights * BITS / 8, model.weights, 2 * model.other, model.other)

    def capacity(self, share: float) -> int:
        """Returns the tiles of such a share of all."""
        shape = self.header.shape
        return round(share * shape.layers * shape.experts * shape.tiles)


def figures(drawn: Drawn, request: PolicyRequest, link_gbps: float, share: float) -> list[float]:
    """Returns seconds of a token, hits, experts moved in a layer of a token, and how busy the link was."""
    policy, costs = make_policy(request, 0), drawn.costs(link_gbps)
    outcome = drawn.text.replay(drawn.header, policy, costs, drawn.capacity(share))
    profile = PhaseProfile(outcome.measured["decode"], 1)
    seconds = profile.seconds / profile.steps
    shape = drawn.header.shape
    moved = profile.copied_per_token / (shape.tiles * shape.layers)
    return [seconds, profile.hit_rate or 0.0, moved, profile.link_busy]


def row(models: Sequence[Drawn], request: PolicyRequest, link_gbps: float, share: float) -> str:
    every = [figures(drawn, request, link_gbps, share) for drawn in models]
    seconds, hits, moved, busy = map(mean, zip(*every, strict=True))
    return (
        f"{share:6.1%} {hits:6.1%} {1 / seconds:7.1f} tok/s {moved:5.2f} moved {busy:4.0%}  {request.label}"
    )


def planning(drawn: Drawn, request: PolicyRequest, link_gbps: float, share: float) -> float:
    """Microseconds of planning a layer."""
    policy: Any = make_policy(request, 0)
    text = drawn.text
    replay = Replay(
        drawn.header, policy, drawn.costs(link_gbps), drawn.capacity(share), popularity=text.counts
    )
    replay.run(text.steps[:WARM])
    taken: dict[str, list[float]] = {name: [] for name in ("gate", "plan", "predict", "after")}

    def timed(call: Callable[..., object], times: list[float]) -> Callable[..., object]:
        def called(*given: object) -> object:
            began = time.perf_counter()
            answer = call(*given)
            times.append(time.perf_counter() - began)
            return answer

        return called

    for name, times in taken.items():
        setattr(policy, name, timed(getattr(policy, name), times))
    replay.run(text.steps[WARM:])
    return 1e6 * sum(map(median, taken.values()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", choices=list(PROFILE), default=list(PROFILE))
    parser.add_argument("--link", nargs="*", type=float, default=[25.0, 12.0], help="GB/s")
    parser.add_argument("--seed", nargs="*", type=int, default=[3, 5], help="of which the mean is shown")
    parser.add_argument("--speed", action="store_true")
    given = parser.parse_args(arguments)
    for name in given.model:
        models = [Drawn(name, seed) for seed in given.seed]
        for link in given.link:
            print(f"{name}, {MACHINE} with a link of {link:g} GB/s")
            for share in SHARES[name]:
                for request in POLICIES[1:] if share != SHARES[name][0] else POLICIES:
                    if given.speed:
                        us = planning(models[0], request, link, share)
                        print(f"{share:6.1%} {us:5.1f} us a layer  {request.label}", flush=True)
                    else:
                        print(row(models, request, link, share), flush=True)


if __name__ == "__main__":
    main()
