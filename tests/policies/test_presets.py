"""Every preset's answers are valid on odd shapes; options and names that a person may get wrong."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_machine import Machine, capacities, make_view, shapes

from pipeline.errors import PolicyError
from pipeline.policies.presets import PRESETS, make_policy
from pipeline.policies.view import ModelShape, PolicyRequest

VARIANTS = [
    PolicyRequest("all-host"),
    PolicyRequest("on-demand"),
    PolicyRequest("on-demand", {"scope": "global"}),
    PolicyRequest("layerwise"),
    PolicyRequest("fiddler"),
    PolicyRequest("random"),
    PolicyRequest("random", {"churn": "1", "seed": "7"}),
]


def test_every_preset_is_tested() -> None:
    assert {request.name for request in VARIANTS} == set(PRESETS)


@pytest.mark.parametrize("request_", VARIANTS, ids=lambda r: r.name + "".join(r.options.values()))
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_answers_keep_the_contract(request_: PolicyRequest, data: st.DataObject) -> None:
    shape = data.draw(shapes())
    capacity = data.draw(capacities(shape))
    landing = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    machine = Machine(make_policy(request_, 3), make_view(shape, capacity), rng, landing)
    assert machine.policy.exact
    machine.start()
    for rows in (1, 2, 40, 1, 3):
        machine.step(rows)
    assert all("\n" not in note for note in machine.policy.notes(machine.view))


@pytest.mark.parametrize("request_", VARIANTS, ids=lambda r: r.name + "".join(r.options.values()))
def test_512_experts_in_94_layers(request_: PolicyRequest) -> None:
    shape = ModelShape(layers=94, experts=512, tiles=4, top_k=10)
    machine = Machine(make_policy(request_, 0), make_view(shape, 50_001), np.random.default_rng(0))
    machine.start()
    machine.step(2)


def test_no_torch() -> None:
    code = "import sys, pipeline.policies.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fidler", {}, r"unknown policy 'fidler'; did you mean fiddler\? \(there are all-host, on-demand, "),
        ("x\ny", {}, r"unknown policy 'x\\ny' \(there are all-host"),
        ("on-demand", {"scop": "layer"}, r"no option 'scop'; did you mean scope\? \(it has scope\)"),
        ("all-host", {"scope": "layer"}, r"no option 'scope' \(it has none\)"),
        ("on-demand", {"scope": "laier"}, r"scope='laier' must be layer\|global; did you mean layer\?"),
        ("random", {"seed": "1.5"}, r"seed='1.5' must be a whole number, 0\.\."),
        ("random", {"seed": "-1"}, "must be a whole number"),
        ("random", {"seed": "9" * 20}, "must be in 0"),
        ("random", {"seed": "9" * 5000}, "must be a whole number"),
        ("random", {"churn": "yes"}, r"must be 0\|1"),
    ],
)
def test_wrong_requests(name: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(PolicyError, match=words) as caught:
        make_policy(PolicyRequest(name, options), 0)
    assert "\n" not in str(caught.value)


def test_options_can_be_listed() -> None:
    """Each has a name, values, a default and a line of help, and its default is one of its values."""
    for preset in PRESETS.values():
        assert preset.__doc__
        for option in preset.options:
            assert option.name
            assert option.values
            assert option.help
            assert "\n" not in option.help
            if option.default is not None:
                make_policy(PolicyRequest(preset.name, {option.name: str(option.default)}), 0)
