"""Contextual sparsity as an option of every preset: the masks that it makes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plain_calibration import plain_calibration
from policy_machine import Machine, make_view
from policy_machine import policy as make

from pipeline.engine.driver import PolicyDriver
from pipeline.errors import PolicyError
from pipeline.policies.calibration import Calibration, quantiles
from pipeline.policies.presets import PRESETS
from pipeline.policies.view import ModelShape, View
from shm.mask import DENSE, Mask

SHAPE = ModelShape(layers=2, experts=4, tiles=2, top_k=2)
STEPS = np.array([[0, 1, 2, 4], [0, 3, 6, 7]], np.float32)  # |u| at the shares 0, 1/4, 1/2, 3/4


def measured(**fields: object) -> Calibration:
    known = {"magnitudes": STEPS, "up": "int2"}
    return plain_calibration(2, 4, **known | fields)


def view_with(calibration: Calibration | None, up: str = "int2") -> View:
    return replace(make_view(SHAPE, 8), calibration=calibration, up=up)


def masks(view: View, **options: str) -> list[Mask]:
    """Of each layer in decode, under all-host."""
    machine = Machine(make("all-host", **options), view, np.random.default_rng(0))
    machine.start()
    machine.step(1, "decode")
    return machine.masks


def test_thresholds_are_quantiles_of_the_calibration() -> None:
    assert masks(view_with(measured()), sparsity="0.5") == [Mask(2.0, 1.0), Mask(6.0, 1.0)]
    assert masks(view_with(measured()), sparsity="0.625") == [Mask(3.0, 1.0), Mask(6.5, 1.0)]
    assert masks(view_with(measured()), sparsity="0.9") == [Mask(4.0, 1.0), Mask(7.0, 1.0)]  # the last step
    assert masks(view_with(measured()), sparsity="0") == [DENSE, DENSE]
    assert quantiles(STEPS, 0.0).tolist() == [0, 0]


@pytest.mark.parametrize("calibration", [None, measured(up="int8"), plain_calibration(2, 4)])
def test_without_magnitudes_of_these_up_matrices_the_largest_are_kept(calibration) -> None:
    view = view_with(calibration)
    assert masks(view, sparsity="0.8") == [Mask(0.0, 0.2)] * 2
    (note,) = PolicyDriver[str](make("all-host", sparsity="0.8"), view).notes
    assert note.startswith("all-host: no calibration has |u| of this format's up matrices")
    assert PolicyDriver[str](make("all-host"), view).notes == ()
    assert PolicyDriver[str](make("all-host", sparsity="0.8"), view_with(measured())).notes == ()


def test_auto_takes_what_the_calibration_found_within_its_bound() -> None:
    bounded = measured(max_loss=2.0, sparsity=0.5)
    assert masks(view_with(bounded), sparsity="auto") == [Mask(2.0, 1.0), Mask(6.0, 1.0)]
    policy = make("daop", sparsity="auto", placement="popular")
    policy.check_calibration(bounded)
    for calibration in (None, measured()):
        with pytest.raises(PolicyError, match=r"^policy daop: sparsity=auto needs .* --max-loss 2"):
            policy.check_calibration(calibration)
    with pytest.raises(PolicyError, match=r"found no sparsity that adds at most 0\.1 % .*daop\.sparsity=X"):
        policy.check_calibration(measured(max_loss=0.1, sparsity=0.0))


@pytest.mark.parametrize("name", list(PRESETS))
def test_other_formats_refuse_it(name: str) -> None:
    view = view_with(measured(), up="")
    apart = rf"^policy {name}: sparsity=0.5 .* --format floe-int4, or give --set {name}\.sparsity=0$"
    with pytest.raises(PolicyError, match=apart):
        PolicyDriver[str](make(name, sparsity="0.5"), view)
    PolicyDriver[str](make(name, sparsity="0"), view)


def test_a_layer_begun_early_has_its_own_mask() -> None:
    """Machine compares it with the mask of the layer itself."""
    policy = make("daop", placement="popular", first_layer="1", sparsity="0.5")
    machine = Machine(policy, view_with(measured()), np.random.default_rng(0))
    machine.start()
    machine.step(1, "decode")
    assert machine.early == 1
    assert machine.masks == [Mask(2.0, 1.0), Mask(6.0, 1.0)]
