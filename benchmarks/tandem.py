"""Tandem beside every exact preset, by replay: over cache shares, batch sizes and machines.

    python benchmarks/tandem.py --trace run.trace --model mixtral
    python benchmarks/tandem.py --synthetic 1,4,16,64 --model qwen3 --machine a100-pcie4
    python benchmarks/tandem.py --trace run.trace --costs costs.json
    python benchmarks/tandem.py --speed --model qwen3 --layers 48      tandem's replay itself, in us a layer

A trace's routing is timed as if its experts were those of the named model, with the costs derived from the
rates of the named machines (`pipeline/policies/costs.py`), or with a cost file as it is. For each
setting and phase a line has the two fastest other exact presets, and tandem's speed over theirs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

from pipeline.models.routing import Softmax
from pipeline.policies.costs import MACHINES, Costs, derived
from pipeline.policies.presets import PRESETS, make_policy
from pipeline.policies.view import ModelShape, PolicyRequest
from pipeline.replay.machine import DividedText, Outcome, Replay
from pipeline.replay.steps import counts_of
from pipeline.traces.synthetic import EMBEDDED, SyntheticText
from pipeline.traces.trace import Header, Trace, TracedStep

PHASES = ("prefill", "decode")
CHUNK = 256  # tokens of a prompt's step
BITS = 4.25  # of a weight of an expert, with its scales
OPTIONS = {"dali": {"prediction": "next-gate"}, "moepic": {"theta": "0.3"}}  # without a calibration
NAMES = [name for name, preset in PRESETS.items() if preset.exact and name not in ("random", "tandem")]


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
    def of(cls, name: str, header: Header, warm: list[TracedStep], steps: list[TracedStep]) -> Self:
        counts = counts_of(warm, header.shape.layers, header.shape.experts)
        return cls(name, header, DividedText([*warm, *steps], len(warm), counts))


def divided(name: str, header: Header, steps: Sequence[TracedStep], measured: dict[str, int]) -> Recorded:
    """The last so many steps of each phase are measured, as many before them warm the caches."""
    warm: list[TracedStep] = []
    counted: list[TracedStep] = []
    left = {phase: 2 * count for phase, count in measured.items()}
    for step in reversed(steps):
        if left[step.phase]:
            left[step.phase] -= 1
            (counted if left[step.phase] >= measured[step.phase] else warm).append(step)
    return Recorded.of(name, header, warm[::-1], counted[::-1])


def read(path: Path, model: Model, measured: dict[str, int]) -> Recorded:
    """A trace, as if it were the model's."""
    trace = Trace(path)
    header = replace(trace.header, shape=replace(trace.header.shape, tiles=model.tiles))
    return divided(path.stem, header, list(trace.steps()), measured)


def synthetic(batch: int, model: Model, layers: int, measured: dict[str, int]) -> Recorded:
    """Routing of texts that were never computed, and that have the same popular experts."""
    shape = ModelShape(layers, model.experts, model.tiles, model.top_k)
    header = Header("synthetic", "", "", shape, 1, Softmax(model.top_k, rescaled=True), 3)
    text = SyntheticText(header, EMBEDDED)

    def part() -> list[TracedStep]:
        prompts = text.steps(measured["prefill"] * CHUNK, CHUNK, 1)[:-1]
        return prompts + text.steps(1, 1, measured["decode"], batch)[batch:]

    return Recorded.of(f"synthetic-{batch}", header, part(), part())


@dataclass(frozen=True)
class Setting:
    machine: str
    costs: Costs
    share: float  # of the expert tiles, in the cache
    name: str
    options: dict[str, str]


def seconds(recorded: Recorded, setting: Setting) -> dict[str, float]:
    """Returns figures of the measured steps of each phase."""
    header, shape = recorded.header, recorded.header.shape
    capacity = round(setting.share * shape.layers * shape.experts * shape.tiles)
    policy = make_policy(PolicyRequest(setting.name, setting.options), 0)
    return seconds_of(recorded.text.replay(header, policy, setting.costs, capacity))


def seconds_of(outcome: Outcome) -> dict[str, float]:
    """Seconds of the measured steps."""
    return {phase: sum(outcome.measured[phase]["seconds"].values()) for phase in PHASES}


RECORDED: list[Recorded] = []


def one(job: tuple[int, Setting]) -> dict[str, float]:
    return seconds(RECORDED[job[0]], job[1])


def compare(
    recorded: Sequence[Recorded],
    machines: dict[str, Costs],
    shares: Sequence[float],
    names: Iterable[str],
    tandem: dict[str, str],
) -> Iterator[dict[str, Any]]:
    RECORDED[:] = recorded
    jobs = []
    for index in range(len(recorded)):
        for machine, costs in machines.items():
            for share in shares:
                for name in [*names, "tandem"]:
                    options = tandem if name == "tandem" else OPTIONS.get(name, {})
                    jobs.append((index, Setting(machine, costs, share, name, options)))
    with get_context("fork").Pool(2) as pool:
        results = pool.imap(one, jobs)
        group: dict[str, dict[str, float]] = {}
        for (index, setting), found in zip(jobs, results, strict=True):
            group[setting.name] = found
            if setting.name == "tandem":
                yield {
                    "trace": recorded[index].name,
                    "machine": setting.machine,
                    "share": setting.share,
                    "seconds": group,
                }
                group = {}


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
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--synthetic", default="")
    parser.add_argument("--model", choices=list(MODELS), default="mixtral")
    parser.add_argument("--machine", nargs="*", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--costs", type=Path, nargs="*", default=[])
    parser.add_argument("--share", default="0,0.1,0.25,0.5,0.75,0.9,1")
    parser.add_argument("--steps", type=int, default=150, help="of decode that are measured")
    parser.add_argument("--prompts", type=int, default=4, help="steps of prefill that are measured")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--policy", nargs="*", default=NAMES)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--speed", action="store_true", help="time the replay of one row a step")
    arguments = parser.parse_args()
    model = MODELS[arguments.model]
    machines = {
        name: derived(MACHINES[name], model.weights * BITS / 8, model.weights, 2 * model.other, model.other)
        for name in arguments.machine
    }
    if arguments.costs:
        machines = {path.stem: Costs.load(path) for path in arguments.costs}
    measured = {"prefill": arguments.prompts, "decode": arguments.steps}
    if arguments.speed:
        single = synthetic(1, model, arguments.layers, measured)
        for name, costs in machines.items():
            for share in map(float, arguments.share.split(",")):
                print(f"{name:12}{share:5.2f} {speed(single, costs, share):7.1f} us a layer", flush=True)
        return
    recorded = [read(path, model, measured) for path in arguments.trace]
    for batch in map(int, filter(None, arguments.synthetic.split(","))):
        recorded.append(synthetic(batch, model, arguments.layers, measured))
    shares = [float(share) for share in arguments.share.split(",")]
    tandem = dict(item.split("=", 1) for item in arguments.set)
    worst: list[tuple[float, str]] = []
    for row in compare(recorded, machines, shares, arguments.policy, tandem):
        line = f"{row['trace']:14}{row['machine']:12}{row['share']:5.2f}"
        for phase in PHASES:
            of = {name: found[phase] for name, found in row["seconds"].items()}
            own = of.pop("tandem")
            ranked = sorted((seconds, name) for name, seconds in of.items() if seconds)
            if not own or not ranked:
                continue
            ratio = ranked[0][0] / own
            worst.append((ratio, f"{phase} {line}"))
            line += f"  {phase} {ratio:6.3f} of {ranked[0][1]:18} {ranked[1][1]:18}{ranked[1][0] / own:6.3f}"
        print(line, flush=True)
    worst.sort()
    print("\nleast ratios:")
    for ratio, where in worst[:8]:
        print(f"{ratio:.3f} {where[:60]}")


if __name__ == "__main__":
    main()
