"""What an experts module of transformers computes, found by evaluating it: activations have many names and
few formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.errors import ModelError
from shm.expert_math import GELU_ALPHA, GELU_CUBIC, ExpertMath, Glu, Relu2

SHAPES = ((1.0, 0.0), (GELU_ALPHA, GELU_CUBIC), (1.702, 0.0))  # alpha and cubic: SiLU, GELU, quick GELU
MOST = 40.0  # of gate and up where a formula is compared
CLOSE = 1e-4  # relative and absolute


def found_math(experts: nn.Module) -> ExpertMath:
    """The kind of a module that `use_experts_implementation` decorates; its parameters are not read. Raises
    ModelError where no kind that we know computes the same."""
    module: Any = experts
    if module.has_post_expert_norm:
        raise ModelError(
            f"config.json: each expert's output is normalised ({type(experts).__name__}), which is no sum"
            " over an expert's tiles: models of this family cannot be run, use another one"
        )
    activation = _gated(module) if module.has_gate else _ungated(module)
    return ExpertMath(activation, bool(module.has_bias))


def matrices_of(module: Any, parts: Mapping[str, Tensor]) -> list[Tensor]:
    """An expert's gate [I, H], unless ungated, up [I, H] and down [H, I], then the biases [1, I] of gate and
    up, from its parts of the module's parameters."""
    wide, down = parts["gate_up_proj" if module.has_gate else "up_proj"], parts["down_proj"]
    if module.is_transposed:
        wide, down = wide.T, down.T
    matrices = [*_halves(module, wide), down]
    if module.has_bias:
        biases = parts["gate_up_proj_bias" if module.has_gate else "up_proj_bias"]
        matrices += [half[None] for half in _halves(module, biases)]
    return matrices


def _halves(module: Any, both: Tensor) -> tuple[Tensor, ...]:
    """Gate and up of a stacked matrix or bias, along its first axis; up alone without a gate."""
    if not module.has_gate:
        return (both,)
    if module.is_concatenated:
        return both[: len(both) // 2], both[len(both) // 2 :]
    return both[::2], both[1::2]


def _gated(experts: Any) -> Glu:
    """The numbers of f are among the module's and the config's own, whatever their combination."""
    gates, ups = (torch.linspace(-MOST, MOST, count) for count in (161, 81))
    g, u = (side.reshape(1, -1) for side in torch.meshgrid(gates, ups, indexing="ij"))
    both = torch.cat([g, u], -1) if experts.is_concatenated else torch.stack([g, u], -1).flatten(-2)
    with torch.no_grad():
        wanted = experts._apply_gate(both.clone())
    for glu in _candidates(experts):
        if _same(glu(g.numpy(), u.numpy()), wanted):
            return glu
    raise _unknown(experts)


def _candidates(experts: Any) -> Iterator[Glu]:
    limits = dict.fromkeys([math.inf, *_numbers(experts, "limit")])
    softcaps = dict.fromkeys([0.0, *_numbers(experts, "softcap")])
    shapes = [*SHAPES, *((alpha, 0.0) for alpha in _numbers(experts, "alpha"))]
    for (alpha, cubic), limit, offset in itertools.product(shapes, limits, (0.0, 1.0)):
        for gate_softcap, up_softcap in itertools.product(softcaps, repeat=2):
            yield Glu(alpha, cubic, limit, limit, offset, gate_softcap, up_softcap)


def _ungated(experts: Any) -> Relu2:
    u = torch.linspace(-MOST, MOST, 161)
    with torch.no_grad():
        if _same(Relu2()(u.numpy()), experts.act_fn(u)):
            return Relu2()
    raise _unknown(experts)


def _same(found: np.ndarray[Any, Any], wanted: Tensor) -> bool:
    return bool(np.allclose(found, wanted.numpy(), rtol=CLOSE, atol=CLOSE))


def _numbers(experts: Any, word: str) -> list[float]:
    """Positive numbers of the module and of its config whose names have this word."""
    config = experts.config.to_dict() if hasattr(experts, "config") else {}
    named = {**config, **vars(experts)}
    return [float(v) for k, v in named.items() if word in k and type(v) in (int, float) and 0 < v < math.inf]


def _unknown(experts: nn.Module) -> ModelError:
    return ModelError(
        f"config.json: no kind of experts that is known computes what {type(experts).__name__} does (SwiGLU"
        " and its like, relu^2): models of this family cannot be run, use another one"
    )
