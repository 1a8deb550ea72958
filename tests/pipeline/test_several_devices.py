"""Layers that are divided between devices give what one device gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_presets import COSTS, DIVIDING, EXACT_PRESETS
from families import Case, save
from plain_calibration import plain_calibration
from step_runs import through
from whole_engine import OPTIONS, WholeEngine, whole_engine

from pipeline.backbone.backbone import Backbone, EagerLayers
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.backbone.stages import StagedBackbone, StagedLayers, devices_of
from pipeline.calibration.file import calibration_path
from pipeline.calibration.file import save as save_calibration
from pipeline.checkpoint.open import open_model
from pipeline.device.cpu import CpuDevice
from pipeline.models.registry import model_spec
from pipeline.policies.presets import PRESETS
from pipeline.policies.view import PolicyRequest
from protocol.messages import Calibrate, Done, Error, Generate, Token
from shm.layout import FORMATS

LAYERS, STAGES = 4, (3, 1)
ASKED = Generate(1, token_ids=tuple(range(5, 15)), max_tokens=8, ignore_eos=True)
CUT_IS_FIXED = {"all-host", "on-demand"}  # the bits are the same, whatever is resident


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(Case("mixtral", "plain", {"num_hidden_layers": LAYERS}), folder)
    return folder


@contextmanager
def engine(model: Path, folder: Path, several: bool, **options: Any) -> Iterator[WholeEngine]:
    folder.mkdir()
    costs = folder / "costs.json"
    costs.write_text(json.dumps(COSTS))
    config = replace(OPTIONS, costs=costs, **options)
    if several:
        config = replace(config, device="cpu:3000000000,cpu:1000000000", stages=STAGES)
    with whole_engine(model, folder, config) as whole:
        yield whole


def answer(whole: WholeEngine) -> list[tuple[int, float]]:
    """The tokens and margins of ASKED."""
    before = len(whole.sent())
    sent = whole.serve(ASKED)[before:]
    assert isinstance(sent[-1], Done), sent[-1]
    return [(token.token, token.margin) for token in sent if isinstance(token, Token)]


def test_tokens_of_every_exact_preset_are_those_of_one_device(model: Path, tmp_path: Path) -> None:
    presets = [*EXACT_PRESETS, *DIVIDING.items(), ("random", {"seed": "3"})]
    found: dict[bool, list[list[tuple[int, float]]]] = {}
    for several in (False, True):
        with engine(model, tmp_path / str(several), several) as whole:
            found[several] = []
            for name, options in presets:
                whole.config = replace(
                    whole.config,
                    options=replace(whole.config.options, policy=name, policy_options=options),
                )
                found[several].append(answer(whole))
            stages = whole.parts.engine.stages
            if several:
                assert [len(stage.layers) for stage in stages] == list(STAGES)
                for stage in stages:
                    stage.memory.mover.wait_idle()
                    stage.memory.audit()
                    assert 0 < stage.memory.residency.sum() <= stage.memory.capacity
                    outside = np.delete(stage.memory.residency, list(stage.layers), axis=0)
                    assert not outside.any()
    for (name, _), one, both in zip(presets, found[False], found[True], strict=True):
        assert [token for token, _ in one] == [token for token, _ in both], name
        if name in CUT_IS_FIXED:
            assert one == both, name


def test_presets_plan_with_a_calibration_of_their_own_layers(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path / "engine", True) as whole:
        path = calibration_path(whole.config.cache, whole.parts.source)
        facts = whole.parts.facts
        save_calibration(path, plain_calibration(LAYERS, facts.experts, hidden=facts.hidden), {})
        policies = whole.policies()
        for name in PRESETS:
            policies.set(PolicyRequest(name, {"sparsity": "0"}))
            whole.prefill()
        last = whole.parts.engine.stages[1].driver.view.calibration
        assert last is not None
        assert last.decode_counts.shape == (1, facts.experts)


def test_each_link_has_its_own_rate_and_costs(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.calibration.cost_probe.BUDGET", 0.0)
    with engine(model, tmp_path / "engine", True) as whole:
        policies = whole.policies(costs=None, link_gbps=(10.0, 0.002))
        policies.set(PolicyRequest("fiddler"))
        fast, slow = (stage.driver.view.costs for stage in whole.parts.engine.stages)
        assert fast is not None
        assert slow is not None
        least = whole.parts.engine.layout.tile_bytes / 0.002e9
        assert fast.link < least <= slow.link


def test_calibrations_are_refused(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path / "engine", True) as whole:
        (refused,) = whole.serve(Calibrate(2, token_ids=tuple(range(100)), tokens=50))
        assert isinstance(refused, Done | Error)
        assert "several devices" in str(refused)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("mixtral", "f32"), ("deepseek_v3", "int8"), ("gpt_oss", "bf16"), ("qwen3_next", "f32")],
)
@torch.inference_mode()
def test_parts_of_a_backbone_compute_what_the_whole_computes(tmp_path: Path, family: str, dtype: str) -> None:
    """The bits of x, logits and answers, for a prompt and for single tokens; dense layers, recurrent states
    and biases are in their part."""
    save(Case(family, "plain"), tmp_path)
    source, device = open_model(tmp_path), CpuDevice()
    spec, precision = model_spec(source.config), Precision(dtype, device)
    layers = len(spec.moe_layers)
    bounds = [range(layers - 1), range(layers - 1, layers)]
    parts = [Backbone(source, spec, precision, 64, layers=each) for each in bounds]
    whole, staged = Backbone(source, spec, precision, 64), StagedBackbone(parts)
    assert [i for part in parts for i in part.decoder_layers] == list(range(spec.layers))
    assert staged.router_math == whole.router_math
    if dtype not in FORMATS or not spec.tied_embeddings:
        assert staged.bytes == whole.bytes
    found = []
    for backbone in (whole, staged):
        kv = KVCache(backbone.facts, backbone.dtype, devices_of(backbone), 128, 4)
        sequence, read = kv.allocate(32), []
        for tokens in ([5, 6, 7, 8], [9], [10]):
            inputs = [StepInput(TokenSpan(sequence, tokens), "last")]
            step: Any
            if backbone is whole:
                step = EagerLayers(whole, [inputs[0].span], whole.router)
            else:
                step = StagedLayers(staged.stages([inputs[0].span], staged.router))
            read += through(step, whole, inputs, False)
            sequence.advance(len(tokens))
        found.append(read)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    device.close()
