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
from pipeline.config import KV_BLOCK, KvDType
from pipeline.device.cpu import CpuDevice
from pipeline.models.registry import model_spec

CONTEXT = 96
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [3] * (KV_BLOCK - 1), [11, 2, 30, 4]]
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
    between = kv.allocate(3 * KV_BLOCK)
    made = [kv.allocate(tokens) for tokens in (20, KV_BLOCK, 33)]
    kv.release(between)
    return made


KINDS = [(family, "f32", None) for family in PLAIN]
ROUNDED = [(family, "bf16", None) for family in ("mixtral", "gpt_oss", "deepseek_v2", "qwen3_next")]
ROUNDED += [(family, "f32", "int8") for family in ("qwen3_next", "deepseek_v2")]


@pytest.mark.parametrize(("family", "dtype", "kv_dtype"), KINDS + ROUNDED)
@torch.inference_mode()
def test_steps_are_those_of_torch(
    family: str, dtype: str, kv_dtype: KvDType | None, tmp_path: Path, device: FakeCudaDevice
) -> None:
    """Of sequences of several lengths, some of which grow on the way, and whose blocks are in no order."""
    save(Case(family, "plain"), tmp_path)
    source = open_model(tmp_path)
    precision = Precision(dtype, device, kv=kv_dtype)
    backbone = Backbone(source, model_spec(source.config), precision, CONTEXT)
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
                made[1].grow(KV_BLOCK + 3)
            logits.append(through(backbone, [TokenSpan(s, [t]) for s, t in zip(made, tokens, strict=True)]))
        found.append(logits)
    rounded = dtype == "bf16" or kv_dtype is not None
    limits = {"rtol": 0.05, "atol": 0.05} if rounded else {"rtol": 1e-4, "atol": 1e-4}
    for (ours, our_routers), (theirs, their_routers) in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **limits)
        for mine, other in zip(our_routers, their_routers, strict=True):
            torch.testing.assert_close(mine, other, **limits)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "qwen3_next"])
@torch.inference_mode()
def test_a_rounded_cache_is_near_the_exact_one(family: str, kv_dtype: KvDType, tmp_path: Path) -> None:
    """On the host, of prompts and of single tokens."""
    save(Case(family, "plain"), tmp_path)
    source, host, found = open_model(tmp_path), CpuDevice(), []
    for dtype in ("f32", kv_dtype):
        precision = Precision("f32", host, kv=dtype)
        backbone = Backbone(source, model_spec(source.config), precision, CONTEXT)
        kv = KVCache(backbone.spec, backbone.dtype, CPU, 1000)
        made = sequences(kv)
        logits = [through(backbone, [TokenSpan(s, p)])[0] for s, p in zip(made, PROMPTS, strict=True)]
        for tokens in STEPS:
            for sequence in made:
                sequence.grow(sequence.length + 1)
            spans = [TokenSpan(s, [token]) for s, token in zip(made, tokens, strict=True)]
            logits.append(through(backbone, spans)[0])
        found.append(torch.cat(logits))
    exact, rounded = found
    error = (rounded - exact).abs().mean() / exact.std()
    assert 0 < error < 0.02
    host.close()
