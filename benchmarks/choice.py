"""Which policy a GPU should have where none is named, by replay with planning counted.

    python -m benchmarks.choice --model qwen3 --machine 4090-pcie4

Routing has the published locality of the model (`pipeline/traces/synthetic.py`). Each setting reads one text
for each sequence, which warms the caches, and then others that count: a prompt and an answer each. Placements
begin with the counts of earlier texts. To the seconds of the layers comes what planning takes here: the
processor time of all its calls at the full depth of the model, the mean of a layer. A request is a prompt
of 256 tokens and an answer of as many. At the end: the geometric mean of all settings, and the least.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import geometric_mean

from benchmarks.tandem import BITS, MODELS, seconds_of
from launch.forecast import timed
from pipeline.arrays import PHASES
from pipeline.models.routing import Softmax
from pipeline.policies.costs import MACHINES, Costs, Rates, derived
from pipeline.policies.presets import make_policy
from pipeline.policies.view import ModelShape, PolicyRequest
from pipeline.replay.machine import DividedText, Replay
from pipeline.traces.synthetic import PROFILES, SyntheticText
from pipeline.traces.trace import Header, TracedStep

PROFILE = {"mixtral": "mixtral-8x7b", "qwen3": "qwen3-30b-a3b"}
PROMPT, TOKENS, TEXTS, HISTORY = 256, 64, 2, 4000
PARTS = (*PHASES, "request")
LAYERS = 8  # that are replayed, at even distances of the model's depth
RUNS = 3  # of planning
POLICIES = ("fiddler", "tandem", "cache", "hybrimoe", "layerwise", "bandwidth-split")
# Beside those that `advise` knows: a 3090 beside 2 channels of DDR4-3200, and the 4090 in a slower slot.
WORKSTATIONS = {
    "3090-pcie4": Rates(41.0, 25.0, 750.0, 0.6, 35.0),
    "4090-pcie3": replace(MACHINES["4090-pcie4"], link_gbps=12.0),
    **MACHINES,
}


@dataclass(frozen=True)
class Drawn:
    """Texts of one model: some that warm caches, and those that count."""

    header: Header
    text: DividedText  # its counts are of other texts
    steps: list[TracedStep]  # that are measured

    @classmethod
    def of(cls, name: str, layers: int, batch: int, seed: int, texts: int = TEXTS) -> Drawn:
        model = MODELS[name]
        shape = ModelShape(layers, model.experts, model.tiles, model.top_k)
        header = Header(name, "", "", shape, 1, Softmax(model.top_k, rescaled=True), 3)
        text = SyntheticText(header, PROFILES[PROFILE[name]], seed)
        history = text.counts(HISTORY)
        every = [text.steps(PROMPT, PROMPT, TOKENS, batch) for _ in range(1 + texts)]
        steps = [step for steps in every[1:] for step in steps]
        return cls(header, DividedText([*every[0], *steps], len(every[0]), history), steps)

    def capacity(self, share: float) -> int:
        """Returns the tiles of such a share of all."""
        shape = self.header.shape
        return round(share * shape.layers * shape.experts * shape.tiles)


def costs_of(machine: str, model: str) -> Costs:
    sizes = MODELS[model]
    expert = sizes.weights * BITS / 8
    return derived(WORKSTATIONS[machine], expert, sizes.weights, 2 * sizes.other, sizes.other)


def seconds(drawn: Drawn, name: str, costs: Costs, share: float) -> dict[str, float]:
    """Returns seconds of a token and layer, by phase."""
    policy = make_policy(PolicyRequest(name), 0)
    taken = seconds_of(drawn.text.replay(drawn.header, policy, costs, drawn.capacity(share)))
    rows = {phase: sum(len(s.sequences) for s in drawn.steps if s.phase == phase) for phase in PHASES}
    layers = drawn.header.shape.layers
    return {phase: taken[phase] / rows[phase] / layers for phase in PHASES}


def planning(drawn: Drawn, name: str, costs: Costs, share: float) -> dict[str, float]:
    """Returns seconds of planning a layer of a step, by phase: the least of some runs."""
    found = [_planning(drawn, name, costs, share) for _ in range(RUNS)]
    return {phase: min(each[phase] for each in found) for phase in PHASES}


def _planning(drawn: Drawn, name: str, costs: Costs, share: float) -> dict[str, float]:
    policy = make_policy(PolicyRequest(name), 0)
    text = drawn.text
    replay = Replay(drawn.header, policy, costs, drawn.capacity(share), popularity=text.counts)
    replay.run(text.steps[: text.begin])
    taken, steps = timed(policy), Counter(step.phase for step in drawn.steps)
    for step in drawn.steps:
        for layer in step.layers:
            vars(layer.router_routing).pop("active", None)  # every policy sorts anew, as in an engine
    replay.run(drawn.steps)
    return {phase: taken[phase] / steps[phase] / drawn.header.shape.layers for phase in PHASES}


SHARED: dict[tuple[str, int, int], Drawn] = {}
RATIOS: dict[tuple[str, str], list[float]] = {}  # by part and policy, to the first policy


def one(job: tuple[str, int, int, str, str, float]) -> dict[str, float]:
    model, batch, seed, machine, name, share = job
    return seconds(SHARED[model, batch, seed], name, costs_of(machine, model), share)


def table(model: str, batch: int, given: argparse.Namespace) -> Iterator[str]:
    """Lines of a model and a number of sequences: of each machine and cache the first policy's tokens a
    second, and the others' speeds relative to it."""
    full = Drawn.of(model, MODELS[model].layers, batch, given.seed[0], texts=3)
    plans = {name: planning(full, name, costs_of(given.machine[0], model), 0.4) for name in given.policy}
    for name, plan in plans.items():
        yield f"{model} x{batch} planning of {name}: " + ", ".join(
            f"{phase} {1e6 * plan[phase]:.0f} us" for phase in PHASES
        )
    SHARED.clear()
    SHARED.update({(model, batch, seed): Drawn.of(model, LAYERS, batch, seed) for seed in given.seed})
    settings = [(machine, share) for machine in given.machine for share in given.share]
    jobs = [(model, batch, s, m, name, c) for m, c in settings for name in given.policy for s in given.seed]
    rows = {"prefill": PROMPT, "decode": batch}
    with get_context("fork").Pool(2) as pool:
        answers = pool.imap(one, jobs)
        for machine, share in settings:
            of: dict[str, dict[str, float]] = {}
            for name in given.policy:
                found = [next(answers) for _ in given.seed]
                of[name] = {
                    phase: sum(each[phase] for each in found) / len(found) + plans[name][phase] / rows[phase]
                    for phase in PHASES
                }
            for each in of.values():
                each["request"] = (each["prefill"] + each["decode"]) / 2
            line = "   ".join(_line(of, part, model) for part in PARTS)
            yield f"{model} x{batch} {machine:11}{share:4.0%}  {line}"


def _line(of: dict[str, dict[str, float]], part: str, model: str) -> str:
    first, *others = of
    speed = 1 / (of[first][part] * MODELS[model].layers)
    ratios = {name: of[first][part] / of[name][part] for name in others}
    for name, ratio in ratios.items():
        RATIOS.setdefault((part, name), []).append(ratio)
    return f"{part}: {first} {speed:.1f}, " + ", ".join(f"{name} {r:.2f}" for name, r in ratios.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", choices=list(PROFILE), default=list(PROFILE))
    parser.add_argument("--machine", nargs="*", choices=list(WORKSTATIONS), default=list(WORKSTATIONS))
    parser.add_argument("--share", nargs="*", type=float, default=[0.25, 0.4, 0.5, 0.75])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--seed", nargs="*", type=int, default=[3, 5], help="of which the mean is shown")
    parser.add_argument("--policy", nargs="*", default=list(POLICIES))
    given = parser.parse_args(arguments)
    for model in given.model:
        for batch in given.batch:
            for line in table(model, batch, given):
                print(line, flush=True)
    for (part, name), ratios in RATIOS.items():
        print(f"{part}: {name} {geometric_mean(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
