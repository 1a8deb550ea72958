"""Parts of the backbone by themselves: a batch's positions and masks, rotary tables, probes, progress."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_calibration import plain_calibration
from safetensors.torch import load_file, save_file
from test_engine import Notes

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import StepInput, TokenSpan, logit_rows
from pipeline.backbone.kv_cache import KVCache, TransientKV
from pipeline.backbone.linear import FEW_ROWS, BiasedLinear, DenseLinear, Precision
from pipeline.backbone.rope import RopeTables, rotate
from pipeline.calibration.trained_gates import GateMlps
from pipeline.checkpoint.open import open_model
from pipeline.device import open_device
from pipeline.device.cpu import CpuDevice
from pipeline.engine.observer import Probing, with_observers
from pipeline.errors import ModelError, PlanError
from pipeline.models.registry import model_spec
from pipeline.models.spec import Rope

CONTEXT = 16
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


@pytest.fixture(scope="module")
def backbone(tiny_model: Path, device: CpuDevice) -> Backbone:
    """Its first layer has a window of three tokens."""
    source = open_model(tiny_model)
    spec = replace(model_spec(source.config), windows=(3, None))
    return Backbone(source, spec, Precision("f32", device), CONTEXT)


def span(kv: KVCache, filled: int, *tokens: int) -> TokenSpan:
    sequence = kv.allocate(CONTEXT)
    sequence.advance(filled)
    return TokenSpan(sequence, tokens)


def angles(positions: list[int], width: int, theta: float) -> np.ndarray:
    """[R, width / 2]"""
    return np.array(positions)[:, None] * theta ** -(np.arange(0, width, 2) / width)


def test_batch_has_positions_and_masks_of_each_span(backbone: Backbone) -> None:
    kv = KVCache(backbone.spec, torch.float32, CPU, 1024)
    spans = [span(kv, 4, 1, 2), span(kv, 2, 7), span(kv, 3, 8), span(kv, 0, 5)]
    batch = backbone.batch(spans)
    assert (batch.rows, batch.decodes, batch.tokens.tolist()) == (5, False, [1, 2, 7, 8, 5])
    no, yes = False, True
    two = [[no, no, yes, yes, yes, no], [no, no, no, yes, yes, yes]]
    windowed = [two, None, None, None]  # a single token needs none: it is given the last 3 of its tokens
    assert [None if m is None else m.tolist() for m in batch.masks[3]] == windowed
    causal = [[[yes] * 5 + [no], [yes] * 6], None, None, None]
    assert [None if m is None else m.tolist() for m in batch.masks[None]] == causal
    width, theta = backbone.spec.attention.rope_dim, backbone.spec.rope.theta
    expected = angles([4, 5, 2, 3, 0], width, theta)
    cos, sin = (table[:, 0].numpy() for table in batch.cos_sin)
    np.testing.assert_allclose(cos, np.concatenate((np.cos(expected),) * 2, axis=1), atol=1e-5)
    np.testing.assert_allclose(sin, np.concatenate((-np.sin(expected), np.sin(expected)), axis=1), atol=1e-5)
    assert backbone.batch(spans[1:]).decodes


def test_rows_that_need_logits_are_counted_for_each_input(backbone: Backbone) -> None:
    kv = KVCache(backbone.spec, torch.float32, CPU, 1024)
    inputs = [
        StepInput(span(kv, 0, 1, 2), "last"),
        StepInput(span(kv, 0, 1, 2, 3), "none"),
        StepInput(span(kv, 0, 1, 2), "all"),
        StepInput(span(kv, 0, 1), "last"),
    ]
    assert logit_rows(inputs) == ([1, 5, 6, 7], [1, 0, 2, 1])


@pytest.mark.parametrize("name", ["layers.1.block_sparse_moe.gate", "layers.0.input_layernorm", "norm"])
def test_router_or_norm_that_is_not_finite_is_named(
    tiny_model: Path, device: CpuDevice, tmp_path: Path, name: str
) -> None:
    """A router's NaN would choose experts without a word."""
    tensors = load_file(tiny_model / "model.safetensors")
    tensors[f"model.{name}.weight"].view(-1)[3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(tiny_model / "config.json", tmp_path)
    source = open_model(tmp_path)
    with pytest.raises(ModelError, match=rf"^the tensor model\.{name}\.weight holds numbers that are not"):
        Backbone(source, model_spec(source.config), Precision("f32", device), CONTEXT)


def test_progress_of_loading_ends_with_the_backbones_bytes(tiny_model: Path, device: CpuDevice) -> None:
    source, seen = open_model(tiny_model), []
    spec = model_spec(source.config)
    backbone = Backbone(source, spec, Precision("bf16", device), CONTEXT, seen.append)
    assert (backbone.dtype, backbone.differentiable, len(seen)) == (torch.bfloat16, True, spec.layers)
    assert seen == sorted(seen)
    assert seen[-1] == backbone.bytes > 0


@pytest.mark.parametrize(("context", "lengths"), [(8, 2), (6, 1)])
def test_rotary_tables_of_long_sequences_follow_those_of_short_ones(context: int, lengths: int) -> None:
    """Where the context has more tokens than the switch, 6."""
    rope = Rope("default", 100.0, switch=6, scales=(1.0, 3.0))
    tables = RopeTables(rope, {}, 4, context, open_device("cpu"))
    rows = tables.rows([(range(2, 5), False), *([(range(1, 3), True)] * (lengths - 1))])
    assert rows == [2, 3, 4, *[context + 1, context + 2] * (lengths - 1)]
    cos, sin = tables[rows]
    at, scale = angles([2, 3, 4, 1, 2], 4, 100.0), np.array([1, 1, 1, 3, 3])[:, None]
    np.testing.assert_allclose(cos[:, 0, :2], (np.cos(at) * scale)[: len(rows)], atol=1e-6)
    np.testing.assert_allclose(sin[:, 0, 2:], (np.sin(at) * scale)[: len(rows)], atol=1e-6)
    assert len(tables[list(range(context * lengths))][0]) == context * lengths
    for found, addresses in zip((cos, sin), tables.addresses(rows), strict=True):
        for row, address in zip(found, addresses, strict=True):
            assert list((ctypes.c_float * 4).from_address(address)) == row.flatten().tolist()
    for outside in (-1, context * lengths):
        with pytest.raises(IndexError, match=f"of {context * lengths}"):
            tables.addresses([0, outside])


def test_rotation_turns_each_pair_by_its_angle() -> None:
    tables = RopeTables(Rope("default", 100.0), {}, 4, 9, open_device("cpu"))
    x = torch.arange(1.0, 9.0).view(1, 2, 4)
    found = rotate(x, tables[[7]]).numpy()
    (first, second) = angles([7], 4, 100.0)[0]
    for head in (0, 1):
        a, b, c, d = x[0, head].tolist()
        turned = (complex(a, c) * np.exp(1j * first), complex(b, d) * np.exp(1j * second))
        expected = [turned[0].real, turned[1].real, turned[0].imag, turned[1].imag]
        np.testing.assert_allclose(found[0, head], expected, rtol=1e-5)


def test_frequencies_of_another_width_are_refused() -> None:
    config = {"model_type": "mixtral", "rope_theta": 1e4, "hidden_size": 64, "num_attention_heads": 4}
    rope = Rope("linear", 1e4)
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ModelError, match=r"RoPE has 8 factors for 4 pairs of numbers"):
        RopeTables(rope, config, 8, 4, open_device("cpu"))


def test_probes_are_routers_and_the_calibrations_first_gate(backbone: Backbone) -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32))
    gate = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    plain = Probing(backbone, CPU, plain_calibration(2, 4, hidden=64))
    gated = Probing(backbone, CPU, plain_calibration(2, 4, hidden=64, first_gate=gate))
    assert (Probing(backbone, CPU, None).has_first_gate, plain.has_first_gate, gated.has_first_gate) == (
        False,
        False,
        True,
    )
    assert torch.equal(plain.logits(1, x), backbone.router(1, x))
    assert torch.equal(gated.logits(1, x), backbone.router(1, x))
    np.testing.assert_allclose(gated.logits(0, x), x.numpy() @ gate.T, rtol=1e-4, atol=1e-4)
    with pytest.raises(PlanError, match="trained gate 0 needs a calibration"):
        plain.logits(0, x)


def test_probes_of_an_mlp_are_what_it_adds_to_the_next_gate(backbone: Backbone) -> None:
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.standard_normal((3, 64)).astype(np.float32))
    inner, outer = (random.standard_normal(shape).astype(np.float32) for shape in ((1, 5, 64), (1, 4, 5)))
    found = Probing(backbone, CPU, plain_calibration(2, 4, hidden=64, mlp_inner=inner, mlp_outer=outer))
    hidden = x.numpy().astype(np.float64) @ inner[0].T
    wanted = (hidden / (1 + np.exp(-hidden))) @ outer[0].T
    np.testing.assert_allclose(found.logits(-1, x), wanted, rtol=1e-3, atol=1e-3)
    history, seen = np.ones((1, 4, 4), np.float32), np.eye(3, 4, dtype=np.float32)
    added = GateMlps(inner, outer, history).logits(1, x.numpy(), seen)
    np.testing.assert_allclose(added, wanted + 1, rtol=1e-3, atol=1e-3)
    with pytest.raises(PlanError, match="trained gate -2 needs a calibration"):
        found.logits(-2, x)


def test_observers_add_the_probes_that_the_policy_lacks() -> None:
    class More(Notes):
        def probes(self, layer: int) -> tuple[int, ...]:
            return (3, layer + 1, 2)

    assert with_observers(0, (), []) == []
    assert with_observers(0, (2,), [Notes(), More(), Notes()]) == [2, 1, 3]
    assert with_observers(1, [2, 0], [Notes(), More()]) == [2, 0, 3]


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_linear_layers_compute_in_their_dtype_and_add_their_bias(rows) -> None:
    """On the host C computes a few rows, and torch more."""
    device = CpuDevice()
    weight, bias = torch.tensor([[1.0, 0.0], [0.5, 2.0]]), torch.tensor([10.0, 20.0])
    x = torch.tensor([[1.0 + 2.0**-10, 4.0]]).repeat(rows, 1)
    rounded = DenseLinear(weight.to(torch.bfloat16), device)(x)
    assert (rounded.dtype, rounded.tolist()) == (torch.float32, rows * [[1.0, 8.5]])
    assert DenseLinear(weight, device)(x).tolist() == rows * [[1.0 + 2.0**-10, 8.5 + 2.0**-11]]
    biased = BiasedLinear(DenseLinear(weight.to(torch.bfloat16), device), bias)
    assert biased(x).tolist() == rows * [[11.0, 28.5]]
    device.close()


def test_transient_sequence_stores_nothing() -> None:
    new = [torch.ones(2, 3, 4), torch.zeros(2, 3, 4)]
    for tokens, long in ((5, False), (6, True)):
        sequence = TransientKV(tokens, switch=5)
        assert sequence.long == long
        found = sequence.write(1, *new)
        assert [a is b for a, b in zip(found, new, strict=True)] == [True, True]
        assert sequence.length == 0
