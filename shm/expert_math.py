"""What an expert computes of its matrices' products, channel by channel: one formula for every gated kind.

An expert computes y = down @ a, where

    gated, three matrices:    a = f(g, u),      g = gate x (+ gate bias),  u = up x (+ up bias)
    ungated, two matrices:    a = max(u, 0)^2                              u = up x (+ up bias)

Every gated activation in use is f with other numbers:

    f(g, u) = s(g') * sigmoid(alpha * g' * (1 + cubic * g'^2)) * (u' + offset)
    g' = min(g, gate_max)                      s(g') = gate_softcap * tanh(g' / gate_softcap)
    u' = up_softcap * tanh(c / up_softcap)     c = max(min(u, up_limit), -up_limit)

A softcap of 0 is none: s(g') = g', u' = c.

SwiGLU: alpha 1 and nothing else. GELU in its tanh form: alpha 2 sqrt(2 / pi), cubic 0.044715, because
1 + tanh(z) = 2 sigmoid(2 z). f(0, u) is 0: channels of zeros that pad an expert add nothing.

The bias of an expert's output, where a model has one, is not here: what adds the experts' outputs adds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
GELU_ALPHA, GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


@dataclass(frozen=True)
class Glu:
    """f above. The numbers are float32 where they are used."""

    alpha: float = 1.0
    cubic: float = 0.0
    gate_max: float = math.inf
    up_limit: float = math.inf
    offset: float = 0.0
    gate_softcap: float = 0.0
    up_softcap: float = 0.0

    def __post_init__(self) -> None:
        finite = (self.alpha, self.cubic, self.offset, self.gate_softcap, self.up_softcap)
        above = (self.alpha, self.gate_max, self.up_limit)
        least = (self.cubic, self.gate_softcap, self.up_softcap)
        if not (all(map(math.isfinite, finite)) and all(n > 0 for n in above) and all(n >= 0 for n in least)):
            raise ValueError(f"no gated expert computes with these numbers: {self!r}")

    def __call__(self, g: Float32, u: Float32) -> Float32:
        """Returns f of arrays of one shape and dtype, in that dtype."""
        g, u = np.minimum(g, self.gate_max), np.clip(u, -self.up_limit, self.up_limit)
        with np.errstate(over="ignore"):  # of large negative g: 1 / inf is the right 0
            sigmoid = 1 / (1 + np.exp(-self.alpha * g * (1 + self.cubic * g * g)))
        s = self.gate_softcap * np.tanh(g / self.gate_softcap) if self.gate_softcap else g
        u = self.up_softcap * np.tanh(u / self.up_softcap) if self.up_softcap else u
        return s * sigmoid * (u + self.offset)

    def __str__(self) -> str:
        numbers = numbers_of(self)
        shape = (numbers.pop("alpha", 1.0), numbers.pop("cubic", 0.0))
        names = {(1.0, 0.0): "SwiGLU", (GELU_ALPHA, GELU_CUBIC): "GELU-GLU"}
        kind = names.get(shape, f"sigmoid-GLU of {shape[0]:g}" + (f" and {shape[1]:g}" if shape[1] else ""))
        more = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in numbers.items())
        return f"{kind} ({more})" if more else kind


@dataclass(frozen=True)
class Relu2:
    """max(u, 0)^2, without a gate."""

    def __call__(self, u: Float32) -> Float32:
        """Returns an array of u's shape and dtype."""
        return np.square(np.maximum(u, 0))

    def __str__(self) -> str:
        return "ungated relu^2"


def numbers_of(activation: Glu | Relu2) -> dict[str, float]:
    """Its numbers that are not SwiGLU's, by name; all of them are finite."""
    plain = asdict(Glu())
    return {name: value for name, value in asdict(activation).items() if value != plain[name]}


@dataclass(frozen=True)
class ExpertMath:
    """The kind of a model's routed experts."""

    activation: Glu | Relu2 = field(default_factory=Glu)
    bias: bool = False  # of up and, where there is one, of gate

    @property
    def gated(self) -> bool:
        return isinstance(self.activation, Glu)

    @property
    def matrices(self) -> int:
        """The matrices of an expert: gate, up and down, or up and down."""
        return 3 if self.gated else 2

    @property
    def biases(self) -> int:
        """The biases that lie in a tile, one number a channel each: gate's and up's, or up's; or none."""
        return self.matrices - 1 if self.bias else 0

    def plain(self) -> dict[str, Any]:
        """A dict of text and finite numbers, for `math_of`: equal for equal kinds."""
        kind = "glu" if self.gated else "relu2"
        return {"kind": kind, "bias": self.bias, **numbers_of(self.activation)}

    def __str__(self) -> str:
        return f"{self.activation}{' with biases' if self.bias else ''}"


def math_of(plain: Mapping[str, Any]) -> ExpertMath:
    """The kind that `plain` is of. Raises ValueError for anything that `ExpertMath.plain` does not return."""
    numbers = dict(plain)
    kind, bias = numbers.pop("kind", None), numbers.pop("bias", None)
    known = {"glu": set(asdict(Glu())), "relu2": set()}.get(kind) if isinstance(kind, str) else None
    if known is None or not isinstance(bias, bool) or not numbers.keys() <= known:
        raise ValueError(f"no kind of experts: {dict(plain)}")
    if any(type(value) not in (int, float) for value in numbers.values()):
        raise ValueError(f"no kind of experts: {dict(plain)}")
    activation = Glu(**{name: float(value) for name, value in numbers.items()}) if kind == "glu" else Relu2()
    return ExpertMath(activation, bias)


SWIGLU = ExpertMath()
