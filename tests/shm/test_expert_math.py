"""The kinds of experts: the written-out formulas, their names, and what a manifest may say of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from shm.expert_math import GELU_ALPHA, GELU_CUBIC, SWIGLU, ExpertMath, Glu, Relu2, math_of

GELU = Glu(GELU_ALPHA, GELU_CUBIC)
CLAMPED = Glu(1.702, gate_max=7, up_limit=7, offset=1)
SOFT = Glu(gate_softcap=15, up_softcap=20)
X = np.linspace(-200, 200, 801)
G, U = (part.ravel() for part in np.meshgrid(X, X[::7]))


def sigmoid(z: float) -> float:
    return 0.5 * (1 + math.tanh(z / 2))


@pytest.mark.parametrize(
    ("glu", "written"),
    [
        (Glu(), lambda g, u: g * sigmoid(g) * u),
        (GELU, lambda g, u: 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u),
        (CLAMPED, lambda g, u: min(g, 7) * sigmoid(1.702 * min(g, 7)) * (max(min(u, 7), -7) + 1)),
        (SOFT, lambda g, u: 15 * math.tanh(g / 15) * sigmoid(g) * 20 * math.tanh(u / 20)),
    ],
)
def test_the_formula_is_each_known_activation(glu: Glu, written) -> None:
    wanted = [written(g, u) for g, u in zip(G.tolist(), U.tolist(), strict=True)]
    assert_allclose(glu(G, U), wanted, rtol=1e-9, atol=1e-9)
    narrow = glu(G.astype(np.float32), U.astype(np.float32))
    assert narrow.dtype == np.float32
    assert_allclose(narrow, wanted, rtol=1e-5, atol=1e-4)


def test_relu2_squares_what_is_above_zero() -> None:
    assert_allclose(Relu2()(np.array([-3, 0, 2], np.float32)), [0, 0, 4])


@pytest.mark.parametrize("activation", [Glu(), GELU, CLAMPED, SOFT, Relu2()])
@pytest.mark.parametrize("bias", [False, True])
def test_a_kind_survives_being_written_as_json(activation: Glu | Relu2, bias: bool) -> None:
    kind = ExpertMath(activation, bias)
    assert math_of(json.loads(json.dumps(kind.plain(), allow_nan=False))) == kind


def test_kinds_have_names_for_a_person() -> None:
    assert str(SWIGLU) == "SwiGLU"
    assert str(ExpertMath(GELU)) == "GELU-GLU"
    wanted = "sigmoid-GLU of 1.702 (gate max 7, up limit 7, offset 1) with biases"
    assert str(ExpertMath(CLAMPED, True)) == wanted
    assert str(ExpertMath(Relu2())) == "ungated relu^2"


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"kind": "glu"},
        {"kind": "glu", "bias": 1},
        {"kind": "tanh", "bias": False},
        {"kind": ["glu"], "bias": False},
        {"kind": "relu2", "bias": False, "alpha": 1.0},
        {"kind": "glu", "bias": False, "beta": 1.0},
        {"kind": "glu", "bias": False, "alpha": "1"},
        {"kind": "glu", "bias": False, "alpha": True},
        {"kind": "glu", "bias": False, "alpha": math.nan},
        {"kind": "glu", "bias": False, "alpha": 0.0},
        {"kind": "glu", "bias": False, "gate_max": math.nan},
        {"kind": "glu", "bias": False, "up_limit": math.nan},
        {"kind": "glu", "bias": False, "up_limit": -1.0},
        {"kind": "glu", "bias": False, "gate_softcap": -1.0},
        {"kind": "glu", "bias": False, "offset": math.inf},
    ],
)
def test_what_is_no_kind_is_refused(plain: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no "):
        math_of(plain)
