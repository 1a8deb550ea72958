"""The tables of parts and presets: adding one is adding a class and its row here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pipeline.arrays import IntArray
from pipeline.errors import PolicyError
from pipeline.policies import assignments, gates, placements, predictions, replacements
from pipeline.policies.admission import Admission
from pipeline.policies.calibration import SPARSITY, Sparsity
from pipeline.policies.composed import Composed, PreGated
from pipeline.policies.daop import Daop
from pipeline.policies.options import SEED, Choice, Option, Value, did_you_mean, parse_options
from pipeline.policies.parts import Part, Parts
from pipeline.policies.split import Split
from pipeline.policies.tandem import Tandem
from pipeline.policies.view import Plan, Policy, PolicyRequest, Routing, Target, View


def _named(*parts: type[Part]) -> dict[str, type[Part]]:
    return {part.name: part for part in parts}


PARTS: dict[str, dict[str, type[Part]]] = {
    "placement": _named(
        placements.Empty,
        placements.FirstLayers,
        placements.Popular,
        placements.Calibrated,
        placements.Known,
        placements.Hot,
        placements.Random,
    ),
    "gate": _named(*gates.GATES),
    "prediction": _named(
        predictions.NoPrediction,
        predictions.NextGate,
        predictions.BeforeAttention,
        predictions.NextChannels,
        predictions.WholeLayer,
        predictions.Residual,
        predictions.Lookahead,
        predictions.Impact,
    ),
    "assignment": _named(*assignments.ASSIGNMENTS),
    "replacement": _named(
        replacements.Keep, replacements.Lru, Admission, replacements.Workload, replacements.Score, Split
    ),
}


ROLES = {
    "placement": "which experts are resident at the start",
    "gate": "which of the routed experts are computed",
    "prediction": "which experts of later layers are fetched ahead",
    "assignment": "what the host computes, and what the device",
    "replacement": "which experts stay on the device",
}


class Preset:
    """A row of the table of presets: five parts, in the order of PARTS, or `own`, an algorithm that spans the
    roles. Its options are those of its parts, and for each role one that exchanges the part."""

    def __init__(self, name: str, help: str, parts: str = "", defaults: str = "", own: Any = None) -> None:
        """`help`: one line for a person; `defaults`: of options whose default is not their part's own."""
        self.name, self.help, self._own = name, help, own
        self.parts = dict(zip(PARTS, parts.split(), strict=True)) if parts else {}
        self._defaults = dict(default.split("=") for default in defaults.split())
        self._roles = [
            Choice(role, ROLES[role], part, tuple(PARTS[role])) for role, part in self.parts.items()
        ]
        self.exact = self.make({}, 0).exact  # by default; an option may change that
        self.options = [option for option, _ in self.values({}, 0)]  # as long as no part is exchanged

    def values(self, given: Mapping[str, object], seed: int) -> list[tuple[Option, Value]]:
        """Every option that can be set beside these, with its value. Raises PolicyError as `make`."""
        exchanged = {name: given[name] for name in given if name in self.parts}
        chosen = parse_options(self.name, self._roles, exchanged, seed)
        classes = [self._own] if self._own else [PARTS[role][str(chosen[role])] for role in PARTS]
        options: dict[str, Option] = {o.name: o for o in self._roles}
        options |= {option.name: option for of in classes for option in of.options}
        options[SPARSITY.name] = SPARSITY
        for name in self._defaults.keys() & options.keys():
            option: Any = options[name]
            options[name] = replace(option, default=option.parse(self._defaults[name]))
        values = parse_options(self.name, options.values(), given, seed)
        return [(option, values[name]) for name, option in options.items()]

    def make(self, given: Mapping[str, object], seed: int) -> Policy:
        """A new policy object. Raises PolicyError for options that are invalid or cannot be combined."""
        values = {option.name: value for option, value in self.values(given, seed)}
        policy: Policy
        if self._own:
            policy = _built(self._own, values)
        else:
            parts = Parts(**{role: _built(PARTS[role][str(values[role])], values) for role in PARTS})
            if reason := clash(parts):
                raise PolicyError(f"policy {self.name}: {reason}")
            policy = (PreGated if parts.gate.pre_gated else Composed)(self.name, parts)
        policy.sparsity = Sparsity.of(values)
        policy.exact = policy.exact and policy.sparsity.dense
        policy.needs_calibration = policy.needs_calibration or policy.sparsity.wished is None
        return policy


def _built(of: Any, values: Mapping[str, Value]) -> Any:
    """A policy or a part of this class, with the values of its options."""
    return of(**{option.name: values[option.name] for option in of.options})


# added to the seed of each generator, so that the draws are independent of each other
_PLACEMENT, _CUT, _BEFORE, _AFTER = range(4)


class RandomPlan(Policy):
    """Every residency and every cut is drawn from 0..n, independently, so that 0 < p < r and r < p < n both
    occur. Residencies are drawn in a random order of experts until the cache is full. The draws depend on
    the seed and the model's shape alone; with `churn` some targets also change in each step, before and
    after the layer is computed, depending on the seed, the step and the layer."""

    name = "random"
    help: ClassVar[str] = "Random plans, to test that any plan executes"
    options: ClassVar[tuple[Option, ...]] = (
        SEED,
        Choice(name="churn", help="1: residencies change at every step", default="0", choices=("0", "1")),
    )

    def __init__(self, *, seed: int, churn: str) -> None:
        self._seed = seed
        self._churn = churn == "1"
        self._cuts: IntArray | None = None  # [L, E]

    def placement(self, view: View) -> IntArray:
        shape = view.shape
        rng = np.random.default_rng((self._seed, _PLACEMENT))
        count = shape.layers * shape.experts
        order = rng.permutation(count)
        drawn = rng.integers(0, shape.tiles, size=count, endpoint=True)
        before = np.cumsum(drawn) - drawn  # tiles of the experts earlier in the order
        target = np.zeros(count, dtype=np.int32)
        target[order] = np.clip(view.capacity - before, 0, drawn)
        return target.reshape(shape.layers, shape.experts)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        if self._cuts is None:
            size = (view.shape.layers, view.shape.experts)
            rng = np.random.default_rng((self._seed, _CUT))
            self._cuts = rng.integers(0, view.shape.tiles, size=size, dtype=np.int32, endpoint=True)
        targets: tuple[Target, ...] = ()
        if self._churn:
            # this layer's experts: this step's own fetches may reach a larger target wholly or in part
            experts = 1 + view.shape.experts // 8
            targets = self._redraw(_BEFORE, layer, (layer, layer + 1), experts, view)
        return Plan(self._cuts[layer].copy(), targets)

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        if not self._churn:
            return ()
        return self._redraw(_AFTER, layer, (0, view.shape.layers), 1, view)

    def _redraw(
        self, kind: int, layer: int, among: tuple[int, int], count: int, view: View
    ) -> tuple[Target, ...]:
        """New targets for `count` experts of the layers among[0] to among[1] - 1, each within the capacity
        that the ones before it leave."""
        rng = np.random.default_rng((self._seed, kind, view.step, layer))
        first = among[0] * view.shape.experts
        size = (among[1] - among[0]) * view.shape.experts
        free = view.capacity - int(view.target.sum())
        targets = []
        for index in first + rng.choice(size, size=min(count, size), replace=False):
            layer_of, expert = divmod(int(index), view.shape.experts)
            now = int(view.target[layer_of, expert])
            tiles = min(int(rng.integers(0, view.shape.tiles, endpoint=True)), now + free)
            free -= tiles - now
            targets.append(Target(layer_of, expert, tiles))
        return tuple(targets)


def clash(parts: Parts) -> str:
    """The reason why these parts cannot work together, "" where they can: no other part would use the work of
    one."""
    if parts.gate.pre_gated and isinstance(parts.replacement, replacements.Score):
        return "replacement=score goes by the layers' own routers, and gate=pre-gated does not run them"
    name = {role: f"{role}={part.name}" for role, part in vars(parts).items()}
    fills, empty = parts.replacement.fills, isinstance(parts.placement, placements.Empty)
    predicts = not isinstance(parts.prediction, predictions.NoPrediction)
    if not parts.assignment.uses_device:
        works = {"placement": not empty, "prediction": predicts, "replacement": bool(fills)}
        if idle := [role for role, of in works.items() if of]:
            return f"{name[idle[0]]} is for the device, and {name['assignment']} computes nothing there"
    elif fills == "swapped" and empty:
        return f"{name['replacement']} only swaps experts, and {name['placement']} leaves it none"
    elif not parts.assignment.fetches and not predicts and fills != "admitted":
        if fills == "fetched":
            return f"{name['replacement']} keeps what is fetched; {name['assignment']} fetches nothing"
        if empty:
            return f"{name['placement']} is no start where {name['assignment']} fetches nothing"
    return ""


OWN = {policy.name: policy for policy in (Daop, Tandem, RandomPlan)}
# name | placement gate prediction assignment replacement | defaults of options | for a person
TABLE = """
all-host | empty own none host keep | | All experts on the host, read from the store in place
on-demand | empty own none device lru | | All experts on the device; missing ones are fetched
mixtral-offloading | empty own next-gate device lru | | On-demand, and the next layer's experts are prefetched
whole-layer | first-layers own whole-layer device keep | | Whole layers are fetched, each one layer ahead
pre-gated | empty pre-gated next-gate device lru | | Each layer decides the next one's experts
layerwise | first-layers own none resident keep | | The first layers on the device, the others on the host
fiddler | known own none cheaper keep | | Popular experts resident, missing ones where faster
hybrimoe | popular own impact two-ended score | | Heavy experts to the device; prefetch by impact
bandwidth-split | popular own none bandwidth keep | | Missing experts divided between link and host
daop
dali | random own residual greedy workload | | Greedy by cost, residual prefetch, cache by workload
adapmoe | known adaptive lookahead device lru | sizes=dp | Skips minor experts, prefetches three layers
moepic | known own next-gate device split | | Parts of more experts resident, the rest prefetched
tandem
cache | hot own none cheaper admission | | A cache by recency, filled behind what the host computes
floe | known own next-channels device keep | sparsity=0.8 | The channels that matter, on the device
floe-host | empty own none host keep | sparsity=0.8 | The channels that matter, on the host
random
"""


def _presets() -> Iterator[Preset]:
    for line in TABLE.strip().splitlines():
        name, *columns = (column.strip() for column in line.split("|"))
        if columns:
            parts, defaults, help_ = columns
            yield Preset(name, help_, parts, defaults)
        else:
            yield Preset(name, OWN[name].help, own=OWN[name])


PRESETS = {preset.name: preset for preset in _presets()}


def make_policy(request: PolicyRequest, seed: int) -> Policy:
    """A new policy object. `seed` is the engine's, for options that are not given one.

    Raises PolicyError, one line with the nearest names, for an unknown preset, part, option or value, and
    for parts that cannot work together.
    """
    return _preset(request.name).make(request.options, seed)


def canonical(request: PolicyRequest, seed: int) -> PolicyRequest:
    """The same request with its options' values as text that is written from what was read. Raises as
    `make_policy`."""
    values = {o.name: str(value) for o, value in _preset(request.name).values(request.options, seed)}
    return PolicyRequest(request.name, {name: values[name] for name in request.options})


def _preset(name: str) -> Preset:
    preset = PRESETS.get(name)
    if preset is None:
        raise PolicyError(
            f"unknown policy {name[:40]!r}{did_you_mean(name, PRESETS)} (supported: {', '.join(PRESETS)})"
        )
    return preset
