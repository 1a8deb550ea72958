"""Decode steps whose attention the CUDA kernels compute, on the stand-in for a GPU: every family, against
torch's attention of one sequence after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeCudaDevice, fake_device
from families import PLAIN, Case, save
from torch import Tensor

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.open import open_model
from pipeline.device.cpu import CpuDevice
from pipeline.errors import OutOfDeviceMemory
from pipeline.models.registry import model_spec

CONTEXT = 96
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [3], [11, 2, 30, 4]]
STEPS = [[12, 13, 14], [1, 2, 3]]  # tokens of each sequence


@pytest.fixture
def device() -> Iterator[FakeCudaDevice]:
    with fake_device() as (device, _):
        device.attention = True
        yield device


def through(backbone: Backbone, spans: list[TokenSpan]) -> tuple[Tensor, list[Tensor]]:
    """One step without routed experts: the logits, and each layer's router's."""
    batch = backbone.batch(spans)
    h, routers = backbone.embed(batch), []
    for layer in range(len(backbone.spec.moe_layers)):
        attended = backbone.attend(layer, h, batch)
        routers.append(attended.logits())
        shared = attended.shared()
        h = attended.h if shared is None else attended.h + shared
    h = backbone.finish(h, batch)
    for span in spans:
        span.kv.advance(len(span.tokens))
    return backbone.head(h), routers


def sequences(kv: KVCache) -> list[SequenceKV]:
    return [kv.allocate(capacity) for capacity in (20, 9, 33)]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("family", PLAIN)
@torch.inference_mode()
def test_steps_are_those_of_torch(family: str, dtype: str, tmp_path: Path, device: FakeCudaDevice) -> None:
    """Of sequences of several lengths and capacities, some of them resized on the way."""
    save(Case(family, "plain"), tmp_path)
    source = open_model(tmp_path)
    backbone = Backbone(source, model_spec(source.config), Precision(dtype, device), CONTEXT)
    kernels, found = backbone.kernels, []
    assert kernels is not None
    for chosen in (None, kernels):
        backbone.kernels = chosen
        kv = KVCache(backbone.spec, backbone.dtype, CPU, 1000)
        made = sequences(kv)
        for sequence, prompt in zip(made, PROMPTS, strict=True):
            through(backbone, [TokenSpan(sequence, prompt)])
        logits = []
        for number, tokens in enumerate(STEPS):
            if number:
                kv.resize(made[1], 40)
            logits.append(through(backbone, [TokenSpan(s, [t]) for s, t in zip(made, tokens, strict=True)]))
        found.append(logits)
    limits = {"rtol": 1e-4, "atol": 1e-4} if dtype == "f32" else {"rtol": 0.05, "atol": 0.05}
    for (ours, our_routers), (theirs, their_routers) in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **limits)
        for mine, other in zip(our_routers, their_routers, strict=True):
            torch.testing.assert_close(mine, other, **limits)


@pytest.mark.parametrize("on_gpu", [False, True])
@torch.inference_mode()
def test_a_sequence_whose_growth_has_failed_goes_on(on_gpu, tmp_path, device, monkeypatch) -> None:
    """Some of its streams had grown and others not, and kernels take one capacity for all."""
    save(Case("mixtral", "plain"), tmp_path)
    source = open_model(tmp_path)
    chosen = device if on_gpu else CpuDevice()
    backbone = Backbone(source, model_spec(source.config), Precision("f32", chosen), CONTEXT)
    found = []
    for fails in (False, True):
        kv = KVCache(backbone.spec, backbone.dtype, CPU, 200)
        sequence = kv.allocate(12)
        through(backbone, [TokenSpan(sequence, [5, 6, 7])])
        new_empty, calls = torch.Tensor.new_empty, iter(range(3))

        def full(tensor: Tensor, shape: tuple[int, ...], calls=calls, new_empty=new_empty) -> Tensor:
            if next(calls, None) is None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. GPU 0 has. More")
            return new_empty(tensor, shape)

        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "new_empty", full)
                with pytest.raises(OutOfDeviceMemory):
                    kv.resize(sequence, 30)
            assert sequence.capacity == 12
        found.append([through(backbone, [TokenSpan(sequence, [token])])[0] for token in (8, 9)])
    for whole, mixed in zip(*found, strict=True):
        torch.testing.assert_close(mixed, whole, rtol=1e-4, atol=1e-4)
