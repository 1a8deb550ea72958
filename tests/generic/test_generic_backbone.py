"""A model of any family on transformers' modules, with its experts computed outside it, gives what
transformers' own eager forward gives."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma4 import modeling_gemma4

from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import SequenceKV
from pipeline.backbone.linear import Precision, QuantizedLinear
from pipeline.backbone.protocol import LayerCall
from pipeline.checkpoint.decoder import TOKENS, without_memory
from pipeline.checkpoint.model_source import OwnMatrix
from pipeline.checkpoint.random_parameters import RandomTable
from pipeline.checkpoint.reader import numbers_of
from pipeline.checkpoint.tables import Parameters
from pipeline.config import KvDType
from pipeline.device.cpu import CpuDevice
from pipeline.errors import ModelError, PolicyError, StepFailed
from pipeline.generic import attention
from pipeline.generic.backbone import GenericBackbone
from pipeline.generic.describe import describe
from pipeline.generic.modules import OwnLinear
from pipeline.generic.trial import new_cache, sequence
from shm.codes import Codes, rounded
from tests.tiny_families import FAMILIES, REFUSED, tiny_model

SAMPLE = ("gpt_oss", "deepseek_v3", "qwen3_next", "gemma4", "lfm2_moe")  # others in parity/test_survey.py
OWN_CHOICES = {"inkling", "kolibri1", "zaya"}  # no formula of ours
CLOSE = 2e-3  # of the deviation of logits
PROMPTS = [[(i * a + b) % 120 + 3 for i in range(n)] for a, b, n in ((5, 3, 30), (7, 11, 26), (3, 1, 20))]
PLAN = [(12, 0, 0), (1, 10, 0), (1, 6, 9), (6, 1, 1), (1, 1, 1), (1, 1, 1)]  # new tokens, by step
WHOLE = [(12, 0, 0), (1, 10, 0), (1, 1, 9), (1, 1, 1), (1, 1, 1)]  # for prompts that cannot come in parts


class Outside:
    """Experts of a model, computed by transformers from what reaches the call."""

    def __init__(self, model: nn.Module, backbone: GenericBackbone) -> None:
        decoder = model.get_decoder()
        self.modules = [copy.copy(decoder.get_submodule(layer.name)) for layer in backbone.layers]
        self.backbone = backbone
        self.fails_at: int | None = None
        for module in self.modules:  # their down biases are the backbone's to add
            if getattr(module, "down_proj_bias", None) is not None:
                module._parameters = dict(module._parameters)
                module.down_proj_bias = nn.Parameter(torch.zeros_like(module.down_proj_bias))

    def __call__(self, call: LayerCall) -> Tensor:
        if call.layer == self.fails_at:
            raise StepFailed("as a test wants")
        call.attend(True, ())
        x, logits = call.read()
        assert call.shared() is None
        routing = self.backbone.router_math(logits, call.layer)
        experts, weights = torch.from_numpy(routing.experts).long(), torch.from_numpy(routing.weights)
        y = self.modules[call.layer](torch.from_numpy(x), experts, weights)
        bias = call.expert_bias(routing.experts, routing.weights)
        return y if bias is None else y + bias


@cache
def device() -> CpuDevice:
    return CpuDevice()


class InMemory(dict[str, Tensor], Parameters):
    """Parameters of a model, and its tables."""

    def table(self, name: str, shape: tuple[int, ...]) -> RandomTable:
        assert self[name].shape == shape
        return RandomTable(self[name].numpy())


class CodesOf(InMemory):
    """Parameters of a model whose file has matrices as codes."""

    @property
    def own(self) -> dict[str, OwnMatrix]:
        return {
            n: OwnMatrix("q8_0", tuple(w.shape)) for n, w in self.items() if is_matrix(n) and w.dim() == 2
        }

    def float32(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return numbers_of(self.stacked([(name, shape)]))

    def stacked(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> Codes:
        ((name, shape),) = tensors
        assert is_matrix(name)
        assert self[name].shape == shape
        return rounded(self[name].numpy(), "q8_0")


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def loaded(family: str, dtype: str = "f32", kv_dtype: KvDType | None = None) -> tuple[Any, GenericBackbone]:
    model = tiny_model(family)
    precision = Precision(dtype, device(), kv=kv_dtype)
    facts = describe(without_memory(type(model), model.config))
    return model, GenericBackbone(facts, type(model), model.config, InMemory(model.state_dict()), precision)


def alone(model: Any, tokens: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """Logits [T, vocabulary] by the model's own forward with its own cache."""
    own, at, found = new_cache(model.get_decoder()), 0, []
    for count in filter(None, counts):
        ids = torch.tensor([tokens[at : at + count]])
        found.append(model(input_ids=ids, cache=own, use_cache=True).logits[0].numpy())
        at += count
    return np.concatenate(found)


def step(backbone: GenericBackbone, spans: Sequence[TokenSpan], experts: Outside) -> list[np.ndarray]:
    """Logits of all tokens, one step for each span where the family wants that."""
    found = []
    for together in [spans] if backbone.several else [[span] for span in spans]:
        run = backbone.step(together, backbone.router)
        run.run(experts)
        found += run.answers([StepInput(span, "all") for span in together])
        for span in together:
            span.kv.advance(len(span.tokens))
    return found


def check(family: str) -> GenericBackbone:
    """Prefill, chunks, and decode of three sequences at once, with a step that fails between."""
    model, backbone = loaded(family)
    plan = PLAN if backbone.chunks else WHOLE
    experts = Outside(model, backbone)
    sequences: list[SequenceKV] = [
        sequence(backbone.kept, 32, torch.float32, torch.device("cpu")) for _ in PROMPTS
    ]
    found: list[list[np.ndarray]] = [[] for _ in PROMPTS]
    for number, counts in enumerate(plan):
        chosen = [i for i, count in enumerate(counts) if count]
        if number == 3:
            other = [TokenSpan(sequences[i], [9] * counts[i]) for i in chosen]
            experts.fails_at = len(experts.modules) - 1
            with pytest.raises(StepFailed):
                step(backbone, other[:1], experts)
            experts.fails_at = None
        starts = [sequences[i].length for i in chosen]
        spans = [
            TokenSpan(sequences[i], PROMPTS[i][at : at + counts[i]])
            for i, at in zip(chosen, starts, strict=True)
        ]
        for i, logits in zip(chosen, step(backbone, spans, experts), strict=True):
            found[i].append(logits)
    for i, (parts, tokens) in enumerate(zip(found, PROMPTS, strict=True)):
        wanted = alone(model, tokens, [counts[i] for counts in plan])
        error = np.abs(np.concatenate(parts) - wanted).max() / wanted.std()
        assert error < CLOSE, f"sequence {i}: {error}"
    return backbone


@pytest.mark.parametrize("family", SAMPLE)
def test_sample(family: str) -> None:
    with torch.inference_mode():
        backbone = check(family)
    assert backbone.several
    assert backbone.chunks
    assert not backbone.own_choices
    assert len(backbone.fused) > 2  # norms
    assert tuple(kept.streams for kept in backbone.kept) == backbone.facts.kv_streams
    assert tuple(kept.states for kept in backbone.kept) == backbone.facts.state_shapes
    backbone.check_probes("some")
    backbone.check_choices("some")


@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),
    [
        ("qwen3_moe", "bf16", None),
        ("deepseek_v3", "int8", None),
        ("qwen3_moe", "f32", "int8"),
        ("deepseek_v3", "f32", "int8"),
    ],
)
def test_rounded_weights_and_caches(family: str, dtype: str, kv_dtype: KvDType | None) -> None:
    with torch.inference_mode():
        model, backbone = loaded(family, dtype, kv_dtype)
        assert len(backbone._packing.cache.in_place) == len(backbone.kept)  # one token copies nothing
        experts = Outside(model, backbone)
        kv = sequence(backbone.kept, 32, backbone.dtype, torch.device("cpu"))
        parts = [PROMPTS[0][:9], PROMPTS[0][9:10], PROMPTS[0][10:12]]
        found = np.concatenate([step(backbone, [TokenSpan(kv, part)], experts)[0] for part in parts])
        wanted = alone(model, PROMPTS[0], [12])
    errors = np.abs(found - wanted).mean() / wanted.std()
    assert errors < 0.05


@pytest.mark.parametrize("family", ["deepseek_v4", "unlimited_ocr"])
def test_refused(family: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[family]):
        loaded(family)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "inkling2"])
def test_scores_and_expanded_latents_in_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two queries of four heads at a time, and one head's keys; inkling2 has biases by query."""
    monkeypatch.setattr(attention, "EXPANDED_KV_BYTES", 2 * 4 * 4 * 32)
    monkeypatch.setattr(attention, "EXPANDED_ROWS", 6)
    with torch.inference_mode():
        check(family)


def test_attention_is_ours_where_it_computes_the_same() -> None:
    """Module by module, even where rounded weights hide what sinks and biases of positions change."""
    for family, layers in (("mimo_v2_flash", 6), ("inkling2", 6)):
        _, backbone = loaded(family, "bf16")
        modules = [m for m in backbone._decoder.modules() if hasattr(m, "scaling")]
        assert len(modules) == layers
        for module in modules:
            plain = family == "mimo_v2_flash" and module.sinks is None
            assert hasattr(module, attention.KIND) == plain


@pytest.mark.parametrize(
    ("changes", "same"),
    [({"scaling": 0.3}, True), ({"scaling": 0.3, "softcap": 50.0}, False), ({}, False)],
)
def test_attention_functions_are_compared(changes: dict[str, Any], same: bool) -> None:
    """A cap of scores far above those of random vectors; without a scaling, one by the family's own rule."""
    module = nn.Module().eval()
    module.num_key_value_groups, module.head_dim = 2, 9
    shape = torch.Size((1, 2, TOKENS, 16))
    mask = torch.zeros(1, 1, TOKENS, TOKENS)
    call = attention.Call(
        modeling_gemma4.eager_attention_forward, torch.Size((1, 4, TOKENS, 16)), shape, shape, mask, changes
    )
    assert attention.suits(module, [call], torch.device("cpu")) == same


def test_routers_of_other_layers() -> None:
    _, backbone = loaded("gemma4")
    tap, other = (layer.router for layer in backbone.layers[:2])
    x = torch.randn(5, 64)
    with torch.inference_mode():
        wanted = other.proj(other.norm(x) * other.scale * other.scalar_root_size).softmax(1)
        found = backbone.router(1, x).softmax(1)
    assert tap is not other
    torch.testing.assert_close(found, wanted)


def test_policies_that_need_more_than_own_choices_are_refused() -> None:
    _, backbone = loaded("inkling")
    for check_it in (backbone.check_probes, backbone.check_choices):
        with pytest.raises(PolicyError, match="routes in a way of its own"):
            check_it("some")
    with pytest.raises(PolicyError):
        backbone.router(1, torch.randn(5, 64))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    with torch.inference_mode():
        backbone = check(family)
    assert bool(backbone.own_choices) == (family in OWN_CHOICES)


def test_matrices_stay_as_the_file_has_quantized_them() -> None:
    """All but an expansion of latents, which is multiplied otherwise, and what is not quantized."""
    model = tiny_model("deepseek_v3")
    state = CodesOf(model.state_dict())
    facts = describe(without_memory(type(model), model.config))
    precision = Precision("own", device(), None, state.own)
    backbone = GenericBackbone(facts, type(model), model.config, state, precision)
    linears = {n: m for n, m in backbone._model.named_modules() if isinstance(m, OwnLinear)}
    quantized = {n for n, m in linears.items() if isinstance(m._matrix, QuantizedLinear)}
    assert quantized == {n for n in linears if is_matrix(f"{n}.weight") and "kv_b" not in n} != {*linears}
    for name in quantized:
        x = torch.randn(3, linears[name].in_features)
        weight = torch.from_numpy(rounded(state[f"{name}.weight"].numpy(), "q8_0").values())
        wanted = x @ weight.T
        found = linears[name](x) - (0 if linears[name].bias is None else linears[name].bias)
        assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()
