"""Decode steps on a GPU: attention by our kernels, CUDA graphs, greedy choices. On machines without one
tests/pipeline/test_step_graphs.py and test_decode_rows.py run the same on a stand-in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from families import ATTENDING, PLAIN, Case, save
from step_runs import compare, through

from pipeline.backbone.backbone import Backbone, EagerLayers
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.backbone.step import greedy
from pipeline.checkpoint.open import open_model
from pipeline.device import Device, open_device
from pipeline.engine.observer import Probing
from pipeline.errors import PipelineError
from pipeline.models.registry import model_spec
from pipeline.text.logprobs import Greedy, best_margin
from pipeline.text.sampler import Sampler
from protocol.messages import Sampling

pytestmark = pytest.mark.gpu

CONTEXT = 96


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cuda")


def model(folder: Path, family: str, dtype: str, device: Device) -> Backbone:
    save(Case(family, "plain"), folder)
    source = open_model(folder)
    return Backbone(source, model_spec(source.config), Precision(dtype, device), CONTEXT)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("family", ATTENDING)
@torch.inference_mode()
def test_steps_by_graphs_are_those_without(family: str, dtype: str, tmp_path: Path, device: Device) -> None:
    made = compare(model(tmp_path, family, dtype, device), device, len(family), exact=False)
    assert made.status.startswith("on: ")
    assert made.captured > 0


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("family", PLAIN)
@torch.inference_mode()
def test_attention_by_kernels_is_that_of_torch(
    family: str, dtype: str, tmp_path: Path, device: Device
) -> None:
    backbone = model(tmp_path, family, dtype, device)
    kernels, found, probing = backbone.kernels, [], Probing(backbone, device.torch_device, None)
    assert kernels is not None
    for chosen in (None, kernels):
        backbone.kernels = chosen
        kv = KVCache(backbone.spec, backbone.dtype, device.torch_device, 200)
        sequences = [kv.allocate(40), kv.allocate(90)]
        for sequence, prompt in zip(sequences, ([5, 6, 7], list(range(60))), strict=True):
            inputs = [StepInput(TokenSpan(sequence, prompt), "none")]
            layers = EagerLayers(backbone, [inputs[0].span], probing.logits)
            through(layers, backbone, inputs, False)
            sequence.advance(len(prompt))
        inputs = [StepInput(TokenSpan(sequence, [9]), "last") for sequence in sequences]
        spans = [item.span for item in inputs]
        layers = EagerLayers(backbone, spans, probing.logits)
        found.append(through(layers, backbone, inputs, False))
    limit = 1e-4 if dtype == "f32" else 0.05
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=limit, atol=limit)


def test_greedy_choices_are_the_samplers(device: Device) -> None:
    """Ties, infinities and numbers that are none, in a vocabulary that many blocks of threads search."""
    random = np.random.default_rng(0)
    logits = random.integers(-3, 4, (40, 50_001)).astype(np.float32)
    logits[3, [7, 30_000]], logits[4, 11], logits[5, 50_000] = np.inf, np.nan, 9.0
    logits[6], logits[7, 0] = -np.inf, 1.0
    logits[6, 0] = 2.0
    (found,) = device.to_host(greedy(device.from_host(logits)))
    for row, made in zip(logits, found, strict=True):
        try:
            token = Sampler(Sampling(0.0), 0).next(row, ())
        except PipelineError as e:
            with pytest.raises(PipelineError, match=str(e)):
                Greedy.read(made, len(row))
            continue
        assert Greedy.read(made, len(row)) == (token, *best_margin(row))


def test_a_failed_capture_leaves_torch_able_to_give_memory_back_and_to_capture(device: Device) -> None:
    made, x = device.graphs(), torch.ones((1, 3), device=device.torch_device)
    assert made is not None

    def reads() -> None:
        x.fill_(float(x[0, 0].item()))

    def doubles() -> None:
        x.mul_(2)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            made.capture(reads)
        device.free_cached()
    made.capture(doubles)()
    (found,) = device.to_host(x)
    np.testing.assert_array_equal(found, [[4, 4, 4]])
