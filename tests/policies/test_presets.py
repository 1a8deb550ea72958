"""Every preset's decisions are valid on odd shapes; invalid options, parts and names are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_machine import Machine, capacities, make_calibration, make_view, shapes
from policy_machine import policy as make

from pipeline.arrays import IntArray, Phase
from pipeline.counters import LEAST, WINDOW, PrefetchMeter
from pipeline.engine.driver import PolicyDriver
from pipeline.errors import PolicyError, ShardFailed
from pipeline.policies.options import Number
from pipeline.policies.presets import PARTS, PRESETS, make_policy
from pipeline.policies.view import ModelShape, Policy, PolicyRequest

VARIANTS = [
    *(PolicyRequest(name) for name in PRESETS),
    PolicyRequest("on-demand", {"placement": "random", "prediction": "lookahead"}),
    PolicyRequest("mixtral-offloading", {"prediction": "residual", "prefetch": "3"}),
    PolicyRequest("layerwise", {"prediction": "next-gate", "replacement": "lru"}),
    PolicyRequest("layerwise", {"replacement": "workload", "window": "1", "swaps": "3"}),
    PolicyRequest("fiddler", {"gate": "adaptive", "replacement": "score"}),
    PolicyRequest("dali", {"window": "1"}),
    PolicyRequest("dali", {"prediction": "none"}),
    PolicyRequest("bandwidth-split", {"replacement": "lru", "prediction": "next-gate"}),
    PolicyRequest("moepic", {"prediction": "before-attention"}),
    PolicyRequest("dali", {"replacement": "score", "prediction": "before-attention"}),
    PolicyRequest("adapmoe", {"sizes": "even", "gate": "own"}),
    PolicyRequest("adapmoe", {"placement": "first-layers"}),
    PolicyRequest("dali", {"gate": "pre-gated"}),
    PolicyRequest("pre-gated", {"assignment": "greedy"}),
    PolicyRequest("daop", {"first_layer": "1", "swap": "0", "placement": "popular"}),
    PolicyRequest("daop", {"first_layer": "1", "early": "0"}),
    PolicyRequest("daop", {"predict": "0"}),
    PolicyRequest("moepic", {"theta": "0.3"}),
    PolicyRequest("moepic", {"theta": "0", "prediction": "lookahead"}),
    PolicyRequest("moepic", {"assignment": "two-ended", "prediction": "impact"}),
    PolicyRequest("daop", {"first_layer": "1", "sparsity": "0.5"}),
    PolicyRequest("tandem", {"sparsity": "0.9"}),
    PolicyRequest("random", {"churn": "1", "seed": "7"}),
]
each_variant = pytest.mark.parametrize(
    "request_", VARIANTS, ids=lambda r: ",".join([r.name, *r.options.values()])
)


def run(machine: Machine, steps: list[int]) -> None:
    """Steps with these numbers of rows; those with two or more are prompts."""
    for rows in steps:
        phase: Phase = "prefill" if rows > 1 else "decode"
        sequences = tuple(row % 3 for row in range(rows))
        machine.step(rows, phase, sequences)


@each_variant
@settings(max_examples=15)
@given(data=st.data())
def test_decisions_keep_the_contract(request_: PolicyRequest, data: st.DataObject) -> None:
    shape = data.draw(shapes())
    capacity = data.draw(capacities(shape))
    landing = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    view = make_view(shape, capacity)
    view = replace(view, calibration=make_calibration(shape, rng))
    machine = Machine(make_policy(request_, 3), view, rng, landing)
    machine.start()
    if data.draw(st.booleans()):
        machine.rest_prefetching()
        run(machine, [1, 1])
        machine.driver.prefetch = PrefetchMeter()
    run(machine, [1, 2, 40, 1, 1, 3, 1])
    machine.rest_prefetching()
    run(machine, [1, 1])
    assert all("\n" not in note for note in machine.policy.notes(machine.view))


@settings(max_examples=60)
@given(data=st.data())
def test_any_combination_of_parts_keeps_the_contract_or_is_refused(data: st.DataObject) -> None:
    """Any exchanged parts keep the contract, or are refused."""
    name = data.draw(st.sampled_from([name for name, preset in PRESETS.items() if preset.parts]))
    options = {role: data.draw(st.sampled_from(list(parts))) for role, parts in PARTS.items()}
    try:
        made = make(name, **options)
    except PolicyError:
        return  # for the reasons that `test_invalid_requests_are_refused` has
    shape = data.draw(shapes())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    view = replace(make_view(shape, data.draw(capacities(shape))), calibration=make_calibration(shape, rng))
    machine = Machine(made, view, rng, landing=0.7)
    machine.start()
    run(machine, [1, 9, 1, 1])


@settings(max_examples=10)
@given(data=st.data())
def test_policies_continue_after_a_failed_step(data: st.DataObject) -> None:
    """After a host share that cannot be computed, the driver calls neither `after` nor the later layers."""
    shape = data.draw(shapes())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    view = replace(make_view(shape, data.draw(capacities(shape))), calibration=make_calibration(shape, rng))
    for name in PRESETS:
        machine = Machine(make(name), replace(view, sequences=(0,)), rng)
        machine.start()
        for _ in range(6):
            machine.failing = int(rng.integers(shape.layers))
            step = machine.view.step
            with pytest.raises(ShardFailed):
                machine.step(1)
            assert machine.view.step == step
        machine.failing = None
        run(machine, [1, 5, 1])


NO_EXPERTS = "none", "next-channels"
PREDICTING = [name for name, p in PRESETS.items() if p.parts.get("prediction", "none") not in NO_EXPERTS]


def test_channels_are_predicted_of_the_next_layers_experts_while_they_are_left_out() -> None:
    shape = ModelShape(layers=6, experts=16, tiles=2, top_k=2)
    for sparsity in ("0.5", "0"):
        machine = Machine(make("floe", sparsity=sparsity), make_view(shape, 24), np.random.default_rng(1))
        off = "floe: prediction=next-channels is off: no channel is left out"
        assert (off in machine.policy.notes(machine.given)) == (sparsity == "0")
        machine.start()
        run(machine, [1] * 4)
        assert machine.named_channels == (4 * 5 * 2 if sparsity != "0" else 0)
        assert machine.predicted == machine.wanted == 0
        machine.named_channels = 0
        run(machine, [3] * 2)
        machine.rest_prefetching()
        run(machine, [1] * 3)
        assert machine.named_channels == 0


@pytest.mark.parametrize("name", PREDICTING)
def test_wanted_prefetches_are_issued_unless_they_pause(name: str) -> None:
    """A layer's predictions do not wait for the room that the layer before holds."""
    shape = ModelShape(layers=6, experts=16, tiles=2, top_k=2)
    rng = np.random.default_rng(1)
    whole = 72 if name == "whole-layer" else 24  # half of it has room for two layers
    view = replace(make_view(shape, 2 * whole), calibration=make_calibration(shape, rng))
    machine = Machine(make(name), view, rng)
    machine.start()
    run(machine, [1] * 40)
    assert machine.wanted > 100
    assert machine.predicted > 0.95 * machine.wanted
    machine.rest_prefetching()
    machine.wanted = 0
    run(machine, [1, 1, 1])
    assert machine.wanted == 0


@pytest.mark.parametrize("name", PREDICTING)
def test_pauses_of_prefetching_can_be_switched_off(name: str) -> None:
    shape = ModelShape(layers=6, experts=16, tiles=2, top_k=2)
    rng = np.random.default_rng(1)
    view = replace(make_view(shape, 2 * 24), calibration=make_calibration(shape, rng))
    for pause in ("1", "0"):
        driver = PolicyDriver[str](make(name, pause=pause), view)
        for _ in range(WINDOW):
            driver.begin_step("decode", (0,))
            driver.end_step(LEAST, 0)
        driver.begin_step("decode", (0,))
        assert driver.view.prefetching == (pause == "0")


def test_unused_predictions_are_released_after_their_layer() -> None:
    """The reserve is empty once every layer has been computed, and the cache keeps its size."""
    shape = ModelShape(layers=4, experts=16, tiles=2, top_k=2)
    rng = np.random.default_rng(1)
    machine = Machine(make("mixtral-offloading"), make_view(shape, 2 * 24), rng)
    machine.start()
    run(machine, [1] * 60)
    assert machine.view.target.sum() == 2 * (24 - 4)  # of 24 experts 4 are the reserve
    full = Machine(make("on-demand"), make_view(shape, 2 * 24), rng)
    full.start()
    run(full, [1] * 60)
    assert full.view.target.sum() == 2 * 24


@pytest.mark.parametrize("module", ["policies.presets", "engine.driver", "replay.machine"])
def test_planning_imports_no_torch(module: str) -> None:
    code = f"import sys, pipeline.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "fidler",
            {},
            r"unknown policy 'fidler'; did you mean fiddler or floe\? \(supported: all-host, on-",
        ),
        ("x\ny", {}, r"unknown policy 'x\\ny' \(supported: all-host"),
        ("on-demand", {"size": "even"}, r"no option 'size'; did you mean sizes\? \(it has placement, "),
        ("all-host", {"sizes": "even"}, r"no option 'sizes' \(it has placement, "),
        ("on-demand", {"sizes": "evn"}, r"sizes='evn' must be even\|dp\|predicted; did you mean even\?"),
        ("dali", {"predction": "none"}, r"no option 'predction'; did you mean prediction"),
        ("dali", {"prediction": "residul"}, r"prediction='residul' must be .*; did you mean residual\?"),
        ("dali", {"window": "0"}, r"policy dali: window=0 must be in 1\.\."),
        ("daop", {"swap": "hot"}, r"swap='hot' must be a number, 0\.\.100"),
        ("daop", {"swap": "1_0"}, "must be a number"),
        ("daop", {"swap": "nan"}, "must be a number"),
        ("daop", {"swap": "-0.5"}, r"swap=-0.5 must be in 0\.\.100"),
        ("daop", {"prediction": "none"}, r"no option 'prediction'"),
        ("daop", {"placement": "random"}, r"placement='random' must be calibrated\|"),
        ("random", {"seed": "1.5"}, r"seed='1.5' must be a whole number, 0\.\."),
        ("random", {"seed": "-1"}, "must be in 0"),
        ("random", {"seed": "9" * 20}, "must be in 0"),
        ("random", {"seed": "9" * 5000}, "is too long"),
        ("random", {"churn": "yes"}, r"must be 0\|1"),
        # parts with work that the others cannot use
        ("all-host", {"prediction": "next-gate"}, "prediction=next-gate is for the device, and assig"),
        ("all-host", {"placement": "popular"}, "placement=popular is for the device, and assignment=host"),
        ("dali", {"assignment": "host"}, "placement=random is for the device"),
        ("layerwise", {"replacement": "lru"}, "replacement=lru keeps what is fetched; assignment=resident"),
        ("layerwise", {"placement": "empty"}, "placement=empty is no start where assignment=resident"),
        ("hybrimoe", {"gate": "pre-gated"}, "replacement=score goes by the layers' own routers"),
        ("dali", {"placement": "empty"}, "replacement=workload only swaps experts, and placement=empty"),
    ],
)
def test_invalid_requests_are_refused(name: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(PolicyError, match=words) as caught:
        make_policy(PolicyRequest(name, options), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("daop", {}, "policy daop needs a calibration of this model.*--set daop.placement=popular"),
        ("dali", {}, "policy dali needs a calibration of this model.*--set dali.prediction=next-gate"),
        ("adapmoe", {}, "--set adapmoe.gate=own --set adapmoe.sizes=even"),
        ("adapmoe", {"sizes": "even"}, "--set adapmoe.gate=own$"),
        ("on-demand", {"sizes": "dp"}, "--set on-demand.sizes=even$"),
        ("fiddler", {"placement": "calibrated"}, "--set fiddler.placement=popular$"),
        ("moepic", {}, "policy moepic needs a calibration of this model.*--set moepic.theta=0.3$"),
    ],
)
def test_missing_calibration_is_named_with_the_way_without(name, options, words) -> None:
    """The error names the command and the options that avoid the calibration; these options suffice."""
    view = make_view(ModelShape(layers=2, experts=8, tiles=2, top_k=2), 16)
    with pytest.raises(PolicyError, match=words) as caught:
        PolicyDriver[str](make(name, **options), view)
    assert "launch.py calibrate --text FILE" in str(caught.value)
    assert "\n" not in str(caught.value)
    offered = [word.partition(".")[2].partition("=") for word in str(caught.value).split() if "." in word]
    without = {name: value for name, equals, value in offered if equals}
    make(name, **(options | without)).placement(view)


def test_missing_calibration_parts_are_named_with_the_way_without() -> None:
    shape = ModelShape(layers=2, experts=8, tiles=2, top_k=2)
    calibration = make_calibration(shape, np.random.default_rng(0))
    calibration = replace(calibration, sensitivity=None, threshold=None, first_gate=None)
    view = replace(make_view(shape, 16), calibration=calibration)
    with pytest.raises(PolicyError, match=r"with sensitivities \(.*\): .* --set adapmoe\.gate=own"):
        PolicyDriver[str](make("adapmoe"), view)
    make("adapmoe", gate="own").placement(view)  # every token needs k experts: no other input is needed


def test_missing_costs_are_named() -> None:
    view = make_view(ModelShape(layers=1, experts=2, tiles=1, top_k=1), 1, costs=None)
    for name, preset in PRESETS.items():
        policy = make(name)
        if policy.needs_costs:
            with pytest.raises(PolicyError, match=f"policy {name} plans by costs.*--costs"):
                PolicyDriver[str](policy, view)
        assert preset.exact == policy.exact


def test_options_change_what_a_policy_declares() -> None:
    assert not make("adapmoe").exact
    assert make("adapmoe", gate="own").exact
    assert not make("daop").exact
    assert make("daop", predict="0").exact
    assert not make("daop", predict="0", sparsity="0.5").exact
    assert not make("floe-host").exact
    assert make("floe-host", sparsity="0").exact
    assert make("tandem", sparsity="auto").needs_calibration
    assert make("fiddler", assignment="device").needs_costs is False
    assert make("layerwise", assignment="greedy").needs_costs
    assert make("daop", placement="popular").needs_calibration is False
    assert not make("all-host").uses_device
    assert not make("on-demand").uses_host
    assert make("on-demand", assignment="cheaper").uses_host
    assert make("dali", prediction="none").name == "dali"


def test_presets_options_and_parts_can_be_listed() -> None:
    """Each has a line of help; an option's default is one of its values."""
    parts = [(name, part) for parts in PARTS.values() for name, part in parts.items()]
    assert all(part.name == name and part.__doc__ for name, part in parts)
    options = [option for preset in PRESETS.values() for option in preset.options]
    helped = [*PRESETS.values(), *(part for _, part in parts), *options]
    assert all(one.help and "\n" not in one.help for one in helped)
    for preset in PRESETS.values():
        names = [option.name for option in preset.options]
        assert len(set(names)) == len(names)
        for option in preset.options:
            assert option.values
            assert option.default is not None or isinstance(option, Number)
            if option.default is not None:
                make_policy(PolicyRequest(preset.name, {option.name: str(option.default)}), 0)


@pytest.mark.parametrize("name", list(PRESETS))
def test_placement_forgets_what_earlier_steps_left(name: str) -> None:
    """A policy that is placed again decides as a new one does: no use, score, count or prediction is left."""
    shape = ModelShape(layers=5, experts=6, tiles=2, top_k=2)
    rng = np.random.default_rng(3)
    view = replace(make_view(shape, 2 * 17), calibration=make_calibration(shape, rng))
    made = make(name)

    def run(of: Policy, seed: int) -> tuple[list[IntArray], list[IntArray]]:
        machine, targets = Machine(of, view, np.random.default_rng(seed)), []
        machine.start()
        for rows in (5, 1, 1, 3, 1, 4, 1):
            machine.step(rows, "decode" if rows == 1 else "prefill", (rows,) * rows)
            targets.append(machine.view.target)
        machine.failing = 1  # the rest of this step is not called: what it predicted is held
        with pytest.raises(ShardFailed):
            machine.step(1, "decode", (1,))
        return targets, machine.cuts

    run(made, 1)
    for again, new in zip(run(made, 2), run(make(name), 2), strict=True):
        assert np.array_equal(again, new)


@pytest.mark.parametrize(
    ("name", "option", "least", "most"),
    [
        ("dali", "window", 1, 1 << 20),
        ("dali", "swaps", 1, 1024),
        ("dali", "prefetch", 1, 64),
        ("dali", "seed", 0, 2**63 - 1),
        ("daop", "first_layer", 1, 4096),
        ("daop", "swap", 0, 100),
        ("adapmoe", "threshold", 0, 1e9),
        ("moepic", "theta", 0, 1),
        ("floe", "sparsity", 0, 0.95),
    ],
)
def test_bounds_of_options_are_allowed_values(name: str, option: str, least: float, most: float) -> None:
    for value, allowed in ((least, True), (most, True), (least - 1, False), (most * 2, False)):
        if allowed:
            make(name, **{option: str(value)})
        else:
            with pytest.raises(PolicyError, match=f"{option}="):
                make(name, **{option: str(value)})


@pytest.mark.parametrize(
    ("whole", "cached"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (7, 4), (8, 4), (9, 5), (30, 26)]
)
def test_reserve_is_at_most_half_of_a_small_cache(whole: int, cached: int) -> None:
    """A token uses two experts: the reserve has room for those of two layers in a cache of eight or more. A
    smaller one is named."""
    shape = ModelShape(layers=4, experts=8, tiles=2, top_k=2)
    view = make_view(shape, 2 * whole + 1)
    made = make("mixtral-offloading", placement="first-layers", replacement="keep")
    assert made.placement(view).sum() == 2 * cached
    assert make("on-demand", placement="first-layers", replacement="keep").placement(view).sum() == 2 * whole
    assert bool(made.probes(0, view)) == (whole > 1)
    notes = made.notes(view)
    assert any("not all of them are prefetched" in note for note in notes) == (2 <= whole < 8)
    assert any("is off: half of the cache" in note for note in notes) == (whole < 2)
