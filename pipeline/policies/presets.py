"""The tables of parts and presets: adding one is adding a class and its row here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pipeline.arrays import IntArray
from pipeline.errors import PolicyError
from pipeline.policies import assignments, gates, placements, predictions, replacements
from pipeline.policies.calibration import SPARSITY_OPTIONS, Sparsity
from pipeline.policies.composed import Composed, PreGated
from pipeline.policies.daop import Daop
from pipeline.policies.options import Choice, Option, Seed, Value, did_you_mean, parse_options
from pipeline.policies.parts import Gate, Part, Parts
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
        placements.Random,
        placements.Sized,
    ),
    "gate": _named(*gates.GATES),
    "prediction": _named(
        predictions.NoPrediction,
        predictions.NextGate,
        predictions.NextChannels,
        predictions.WholeLayer,
        predictions.Residual,
        predictions.Lookahead,
        predictions.Impact,
    ),
    "assignment": _named(*assignments.ASSIGNMENTS),
    "replacement": _named(
        replacements.Keep, replacements.Lru, replacements.Workload, replacements.Score, Split
    ),
}


ROLES = {
    "placement": "which experts are resident at the start",
    "gate": "which of the routed experts are computed",
    "prediction": "which experts of later layers are fetched ahead",
    "assignment": "what the host computes, and what the device",
    "replacement": "which experts stay on the device",
}


class Preset(ABC):
    """A row of the table of presets."""

    name: str
    help: str  # one line for a person, without a full stop
    exact: bool  # by default; an option may change that
    parts: dict[str, str]  # by role; empty for a preset that is one algorithm
    defaults: dict[str, Value]  # of options with other defaults than their part's own
    options: tuple[Option, ...]  # that can be set, as long as no part is exchanged

    @abstractmethod
    def values(self, given: Mapping[str, object], seed: int) -> list[tuple[Option, Value]]:
        """Every option that can be set beside these, with its value. Raises PolicyError as `make`."""

    def make(self, given: Mapping[str, object], seed: int) -> Policy:
        """A new policy object. Raises PolicyError for options that are invalid or cannot be combined."""
        values = {option.name: value for option, value in self.values(given, seed)}
        policy = self._make(given, values, seed)
        policy.sparsity = Sparsity.of(values)
        policy.exact = policy.exact and policy.sparsity.dense
        policy.needs_calibration = policy.needs_calibration or policy.sparsity.wished is None
        return policy

    @abstractmethod
    def _make(self, given: Mapping[str, object], values: Mapping[str, Value], seed: int) -> Policy:
        """The policy with these options' values, without its sparsity."""


class ComposedPreset(Preset):
    """A preset of five parts, given in the order of PARTS. Its options are those of its parts, and for each
    role one that exchanges the part."""

    def __init__(self, name: str, help: str, parts: tuple[str, ...], **defaults: Value) -> None:
        self.name, self.help, self.defaults = name, help, defaults
        self.parts = dict(zip(PARTS, parts, strict=True))
        gate = PARTS["gate"][self.parts["gate"]]
        assert issubclass(gate, Gate)
        self.exact = gate.exact and not defaults.get("sparsity")
        self._roles = tuple(
            Choice(role, ROLES[role], default=self.parts[role], choices=tuple(PARTS[role])) for role in PARTS
        )
        self.options = self._options(self._classes({}))

    def _make(self, given: Mapping[str, object], values: Mapping[str, Value], seed: int) -> Policy:
        classes = self._exchanged(given, seed)
        made: dict[str, Any] = {}
        for role, part in classes.items():
            build: Callable[..., Part] = part
            made[role] = build(**{option.name: values[option.name] for option in part.options})
        parts = Parts(**made)
        if reason := clash(parts):
            raise PolicyError(f"policy {self.name}: {reason}")
        return (PreGated if parts.gate.pre_gated else Composed)(self.name, parts)

    def values(self, given: Mapping[str, object], seed: int) -> list[tuple[Option, Value]]:
        options = self._options(self._exchanged(given, seed))
        values = parse_options(self.name, options, given, seed, _owner_of)
        return [(option, values[option.name]) for option in options]

    def _exchanged(self, given: Mapping[str, object], seed: int) -> dict[str, type[Part]]:
        exchanged = {name: given[name] for name in given if name in PARTS}
        return self._classes(parse_options(self.name, self._roles, exchanged, seed, _owner_of))

    def _classes(self, chosen: Mapping[str, Value]) -> dict[str, type[Part]]:
        return {role: parts[str(chosen.get(role, self.parts[role]))] for role, parts in PARTS.items()}

    def _options(self, classes: Mapping[str, type[Part]]) -> tuple[Option, ...]:
        """Options with these parts. One that two parts have is one option."""
        options: dict[str, Option] = {o.name: o for part in classes.values() for o in part.options}
        options |= {option.name: option for option in SPARSITY_OPTIONS}
        for name in self.defaults.keys() & options.keys():
            option: Any = options[name]
            options[name] = replace(option, default=self.defaults[name])
        return *self._roles, *options.values()


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
        Seed(),
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


class OwnPreset(Preset):
    """A preset that is one class, with an algorithm that spans the roles."""

    def __init__(self, policy: type[Daop] | type[RandomPlan] | type[Tandem]) -> None:
        self._policy = policy
        self.name, self.help, self.exact = policy.name, policy.help, policy.exact
        self.parts, self.defaults, self.options = {}, {}, (*policy.options, *SPARSITY_OPTIONS)

    def values(self, given: Mapping[str, object], seed: int) -> list[tuple[Option, Value]]:
        def why_not(name: str) -> str:
            return f"it is one algorithm and has no {name} to exchange" if name in PARTS else ""

        values = parse_options(self.name, self.options, given, seed, why_not)
        return [(option, values[option.name]) for option in self.options]

    def _make(self, given: Mapping[str, object], values: Mapping[str, Value], seed: int) -> Policy:
        build: Callable[..., Policy] = self._policy
        return build(**{option.name: values[option.name] for option in self._policy.options})


def _owner_of(option: str) -> str:
    """The part that has this option, as the reason why the preset does not have it."""
    for role, parts in PARTS.items():
        for part in parts.values():
            if option in (declared.name for declared in part.options):
                return f"it belongs to {role}={part.name}"
    return ""


def clash(parts: Parts) -> str:
    """The reason why these parts cannot work together, "" where they can: no other part would use the work of
    one."""
    if parts.gate.pre_gated and isinstance(parts.replacement, replacements.Score):
        return "replacement=score goes by the layers' own routers, and gate=pre-gated does not run them"
    placement, prediction = parts.placement.name, parts.prediction.name
    assignment, replacement = parts.assignment.name, parts.replacement.name
    predicts, fills = not isinstance(parts.prediction, predictions.NoPrediction), parts.replacement.fills
    empty = isinstance(parts.placement, placements.Empty)
    if not parts.assignment.uses_device:
        for role, part, idle in (
            ("placement", placement, empty),
            ("prediction", prediction, not predicts),
            ("replacement", replacement, not fills),
        ):
            if not idle:
                return f"{role}={part} is for the device, and assignment={assignment} computes nothing there"
    elif fills == "swapped" and empty:
        return f"replacement={replacement} only swaps experts, and placement={placement} leaves it none"
    elif not parts.assignment.fetches and not predicts:
        if fills == "fetched":
            return f"replacement={replacement} keeps what is fetched; assignment={assignment} fetches nothing"
        if empty:
            return f"placement={placement} is no start where assignment={assignment} fetches nothing"
    return ""


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        ComposedPreset(
            "all-host",
            "All experts on the host, read from the store in place",
            ("empty", "own", "none", "host", "keep"),
        ),
        ComposedPreset(
            "on-demand",
            "All experts on the device; missing ones are fetched",
            ("empty", "own", "none", "device", "lru"),
        ),
        ComposedPreset(
            "mixtral-offloading",
            "On-demand, and the next layer's experts are prefetched",
            ("empty", "own", "next-gate", "device", "lru"),
        ),
        ComposedPreset(
            "whole-layer",
            "Whole layers are fetched, each one layer ahead",
            ("first-layers", "own", "whole-layer", "device", "keep"),
        ),
        ComposedPreset(
            "pre-gated",
            "Each layer decides the next one's experts",
            ("empty", "pre-gated", "next-gate", "device", "lru"),
        ),
        ComposedPreset(
            "layerwise",
            "The first layers on the device, the others on the host",
            ("first-layers", "own", "none", "resident", "keep"),
        ),
        ComposedPreset(
            "fiddler",
            "Popular experts resident, missing ones where faster",
            ("known", "own", "none", "cheaper", "keep"),
        ),
        ComposedPreset(
            "hybrimoe",
            "Heavy experts to the device; prefetch by impact",
            ("popular", "own", "impact", "two-ended", "score"),
        ),
        ComposedPreset(
            "bandwidth-split",
            "Missing experts divided between link and host",
            ("popular", "own", "none", "bandwidth", "keep"),
        ),
        OwnPreset(Daop),
        ComposedPreset(
            "dali",
            "Greedy by cost, residual prefetch, cache by workload",
            ("random", "own", "residual", "greedy", "workload"),
        ),
        ComposedPreset(
            "adapmoe",
            "Skips minor experts, prefetches three layers",
            ("sized", "adaptive", "lookahead", "device", "lru"),
            sizes="dp",
        ),
        ComposedPreset(
            "moepic",
            "Parts of more experts resident, the rest prefetched",
            ("sized", "own", "next-gate", "device", "split"),
        ),
        OwnPreset(Tandem),
        ComposedPreset(
            "floe",
            "The channels that matter, on the device",
            ("known", "own", "next-channels", "device", "keep"),
            sparsity=0.8,
        ),
        ComposedPreset(
            "floe-host",
            "The channels that matter, on the host",
            ("empty", "own", "none", "host", "keep"),
            sparsity=0.8,
        ),
        OwnPreset(RandomPlan),
    )
}


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
