"""The gated delta rule: a layer in one call of C, in every variant that runs here, and the chunks and the one
token of torch equal transformers' own functions; a row's bits depend neither on the other rows nor on the
number of threads, and a layer writes nothing but its pending states."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from attention_cases import EPS, normed, numbers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from pipeline.backbone.gated_delta import CHUNK, DeltaInputs, delta_rule
from pipeline.models.spec import GatedDelta
from shm.layout import DENSE
from workers.kernels.c_types import Kept
from workers.kernels.layer import TOKEN, Delta, LayerKernel, LayerParts, NormOf, Projection, Tokens
from workers.kernels.matrix import HostMatrix
from workers.kernels.native import Library, Team

FEW = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
LAYER, LAYERS = 1, 3
HIDDEN = 20

shapes = st.builds(
    lambda keys, each, key_dim, value_dim, taps: GatedDelta(keys, keys * each, key_dim, value_dim, taps),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([1, 5, 16, 30, 64, 100]),
    st.integers(1, 5),
)


@dataclass
class Rows:
    """A dense layer with random weights, and states of some sequences in all layers."""

    spec: GatedDelta
    count: int
    random: np.random.Generator
    w: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.spec
        values = s.value_heads * s.value_dim
        first = s.channels + values + 2 * s.value_heads
        for name, shape in {
            "first": (first, HIDDEN), "output": (HIDDEN, values), "up": (6, HIDDEN), "down": (HIDDEN, 3),
            "taps": (s.taps, s.channels), "decay_bias": (s.value_heads,), "norm": (s.value_dim,),
            "attention_norm": (HIDDEN,), "mlp_norm": (HIDDEN,),
        }.items():  # fmt: skip
            self.w[name] = numbers(self.random, *shape) * np.float32(
                shape[-1] ** -0.5 if len(shape) > 1 else 1
            )
        self.w["decay"] = -np.exp(numbers(self.random, s.value_heads) - 1)
        self.h = numbers(self.random, self.count, HIDDEN)
        self.states = [
            [[numbers(self.random, *shape) for shape in s.state_shapes] for _ in range(LAYERS)]
            for _ in range(self.count)
        ]

    def compute(self, library: Library, team: Team | None, rows: list[int]) -> list[np.ndarray]:
        """Of these rows: what the layer gives [HIDDEN], and the two pending states."""
        s, w = self.spec, self.w

        def projection(name: str) -> Projection:
            data = w[name].view(np.uint8).reshape(-1)
            return Projection(HostMatrix(library, team, DENSE["f32"], w[name].shape, data))

        sizes = s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.taps
        addresses = (w[name].ctypes.data for name in ("taps", "decay", "decay_bias", "norm"))
        parts = LayerParts(
            hidden=HIDDEN,
            experts=0,
            attention_norm=NormOf(w["attention_norm"].ctypes.data, None, EPS),
            mlp_norm=NormOf(w["mlp_norm"].ctypes.data, None, EPS),
            attention=Delta(*sizes, *addresses, EPS),
            first=projection("first"),
            query=None,
            output=projection("output"),
            router=None,
            router_bias=None,
            up=projection("up"),
            down=projection("down"),
            gate=None,
        )
        tokens = np.zeros(len(rows), TOKEN)
        pending = [
            [[np.full(shape, np.nan, np.float32) for shape in s.state_shapes] for _ in range(LAYERS)]
            for _ in rows
        ]
        tables = []
        for at, row in enumerate(rows):
            both = zip(self.states[row], pending[at], strict=True)
            tables.append(np.array([[a.ctypes.data for a in (*now, *then)] for now, then in both], np.uint64))
            tokens[at] = 0, 0, 0, 0, tables[at].ctypes.data, 50, 7
        out, x = np.empty((2, len(rows), HIDDEN), np.float32)
        h = np.ascontiguousarray(self.h[rows])
        before = [[[a.copy() for a in layer] for layer in row] for row in self.states]
        kernel = LayerKernel(library, team, LAYER, parts, Kept())
        kernel(Tokens(tokens), h.ctypes.data, out.ctypes.data, x.ctypes.data, None, None)
        flat = [[a for row in all for layer in row for a in layer] for all in (self.states, before)]
        assert all(np.array_equal(a, b) for a, b in zip(*flat, strict=True))
        others = [a for row in pending for n, layer in enumerate(row) if n != LAYER for a in layer]
        assert all(np.isnan(a).all() for a in others)
        return [[out[at], *pending[at][LAYER]] for at in range(len(rows))]

    def expected(self, row: int) -> list[np.ndarray]:
        """The same, the rule by transformers and the rest in float64."""
        s, w = self.spec, {name: array.astype(np.float64) for name, array in self.w.items()}
        inputs, matrices = self.states[row][LAYER]
        h = self.h[row].astype(np.float64)
        values, keys = s.value_heads * s.value_dim, s.key_heads * s.key_dim
        ends = np.cumsum([s.channels, values, s.value_heads])
        new, z, b, a = np.split(w["first"] @ normed(h, w["attention_norm"]), ends)
        window = np.concatenate((inputs, new[None]))
        mixed = (window * w["taps"]).sum(axis=0)
        q, k, v = np.split(mixed / (1 + np.exp(-mixed)), [keys, 2 * keys])
        out, after = torch_recurrent_gated_delta_rule(
            *(torch.from_numpy(x.reshape(1, 1, s.key_heads, -1)) for x in (q, k)),
            torch.from_numpy(v.reshape(1, 1, s.value_heads, -1)),
            torch.from_numpy(w["decay"] * np.log1p(np.exp(a + w["decay_bias"])))[None, None],
            torch.from_numpy(1 / (1 + np.exp(-b)))[None, None],
            initial_state=torch.from_numpy(matrices)[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        heads = normed(out[0, 0].numpy(), w["norm"]) * (z / (1 + np.exp(-z))).reshape(s.value_heads, -1)
        h = h + w["output"] @ heads.ravel()
        gate, up = np.split(w["up"] @ normed(h, w["mlp_norm"]), 2)
        return [h + w["down"] @ (gate / (1 + np.exp(-gate)) * up), window[1:], after[0].numpy()]


@FEW
@given(seed=st.integers(0, 1000), spec=shapes, count=st.integers(1, 5), data=st.data())
def test_a_token_of_each_sequence(library, seed, spec, count, data) -> None:
    rows = Rows(spec, count, np.random.default_rng(seed))
    single = [rows.compute(library, None, [row])[0] for row in range(count)]
    for row, found in enumerate(single):
        for ours, wanted in zip(found, rows.expected(row), strict=True):
            np.testing.assert_allclose(
                ours, wanted, rtol=1e-3, atol=1e-3 * max(1.0, np.abs(wanted).max(initial=0))
            )
    order = data.draw(st.permutations(range(count)))
    team = library.team(3)
    together = rows.compute(library, team, list(order))
    if team is not None:
        team.close()
    for row, found in zip(order, together, strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, single[row], strict=True))


def drawn(spec: GatedDelta, tokens: int, forgets: float) -> tuple[DeltaInputs, torch.Tensor]:
    def unit(x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(x, dim=-1)

    q, k = (unit(torch.randn(tokens, spec.key_heads, spec.key_dim)) for _ in range(2))
    v = torch.randn(tokens, spec.value_heads, spec.value_dim)
    decay = -forgets * torch.rand(tokens, spec.value_heads)
    rate = torch.rand(tokens, spec.value_heads)
    state = torch.randn(spec.value_heads, spec.key_dim, spec.value_dim)
    return DeltaInputs(q * spec.key_dim**-0.5, k, v, decay, rate), state


@pytest.mark.parametrize("forgets", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_chunks_equal_transformers(tokens: int, forgets: float) -> None:
    torch.manual_seed(tokens)
    for spec in (GatedDelta(2, 6, 12, 20, 4), GatedDelta(3, 3, 7, 5, 4)):
        inputs, state = drawn(spec, tokens, forgets)
        out, after = delta_rule(inputs, state)
        given = (inputs.q * spec.key_dim**0.5, inputs.k, inputs.v, inputs.log_decay, inputs.rate)
        for theirs in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
            parts = (part[None] for part in given)
            wanted, wanted_after = theirs(*parts, initial_state=state[None], output_final_state=True)
            torch.testing.assert_close(out, wanted[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(after, wanted_after[0], rtol=1e-4, atol=1e-5)


def test_chunks_are_differentiable() -> None:
    """Calibration takes gradients through them."""
    torch.manual_seed(0)
    inputs, state = drawn(GatedDelta(1, 2, 3, 4, 4), 5, 0.5)
    arrays = [x.double().requires_grad_() for x in vars(inputs).values()]
    assert torch.autograd.gradcheck(lambda *x: delta_rule(DeltaInputs(*x), state.double()), arrays)
