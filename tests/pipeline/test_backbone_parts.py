"""Parts of the backbone by themselves: rotary tables, probes, numbers that are not finite."""

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

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.linear import Precision
from pipeline.backbone.rope import RopeTables
from pipeline.calibration.trained_gates import GateMlps
from pipeline.checkpoint.open import open_model
from pipeline.device import open_device
from pipeline.device.cpu import CpuDevice
from pipeline.engine.observer import Probing
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


def angles(positions: list[int], width: int, theta: float) -> np.ndarray:
    """[R, width / 2]"""
    return np.array(positions)[:, None] * theta ** -(np.arange(0, width, 2) / width)


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
