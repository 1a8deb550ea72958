"""Sensitivities equal those that torch's autograd finds on transformers' own whole model of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import Case, build, drawn_texts, save
from in_process import TorchDevice
from torch.nn import functional

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.linear import Precision
from pipeline.calibration.observers import Bring
from pipeline.calibration.sensitivity import sensitivities
from pipeline.checkpoint.open import Checkpoint
from pipeline.device import open_device
from pipeline.device.base import Device
from pipeline.device.cpu import CpuDevice
from pipeline.errors import UsageError
from pipeline.models.facts import expert_shape
from pipeline.models.registry import model_spec
from shm.layout import format_named
from shm.segment import unlink
from shm.store import Store, StoreBuilder, StoreManifest

WITHOUT_EXPERTS = {"mlp_only_layers": [0, 3], "num_hidden_layers": 4}  # before those with, and behind them
CASES = [
    Case("mixtral", "two-experts", {"sliding_window": 9}),
    Case("mixtral", "heads-of-keys", {"num_key_value_heads": 6, "num_experts_per_tok": 3}),
    Case("qwen3_moe", "norm-of-heads", {"num_experts_per_tok": 3, "norm_topk_prob": True}),
    Case("qwen3_moe", "dense-layers", {"norm_topk_prob": False, **WITHOUT_EXPERTS}),
    Case("qwen2_moe", "shared-experts", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    Case("olmoe", "norm-of-all", {"clip_qkv": 0.8, "num_experts_per_tok": 3}),
    Case("deepseek_v2", "dense-first", {"first_k_dense_replace": 1, "routed_scaling_factor": 1.7}),
    Case(
        "deepseek_v2",
        "groups",
        {
            **{"first_k_dense_replace": 0, "topk_method": "group_limited_greedy", "n_group": 3},
            **{"topk_group": 1, "num_experts_per_tok": 3, "q_lora_rank": 18},
        },
    ),
    Case("deepseek_v3", "chosen-with-a-bias", {"num_experts_per_tok": 3, "routed_scaling_factor": 1.7}),
    Case("minimax_m2", "not-in-groups"),
    Case("qwen3_next", "recurrent", {"linear_num_key_heads": 1}),
    Case("phimoe", "near", {"router_jitter_noise": 0.01, "attention_bias": True, "lm_head_bias": True}),
    Case("phimoe", "far", {"router_jitter_noise": 0.4}),
]
SHORT = (17, 12, 3)


def by_autograd(case: Case, windows: Sequence[Sequence[int]]) -> np.ndarray:
    """s [L]: every MoE block's output retains its gradient, one pass over each whole window."""
    model = build(case)  # not in training mode, where PhiMoE draws its experts at random with other gradients
    outputs: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    for layer in model.model.layers:
        block = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
        if hasattr(block, "experts"):
            block.register_forward_hook(keep)
    total: np.ndarray | float = 0.0
    for window in windows:
        outputs.clear()
        logits = model(torch.tensor([list(window)]), use_cache=False).logits[0]
        functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="sum").backward()
        total += np.array([float(y.grad.double().square().sum()) for y in outputs])
    return total / sum(len(w) - 1 for w in windows)


@contextmanager
def stored(folder: Path, name: str, tile: int = 0) -> Iterator[Store]:
    """A checkpoint's experts in this format."""
    source = Checkpoint(folder)
    shape = expert_shape(source.config, tile or None, format_named(name))
    segment = f"/tandem-test-sensitivity-{os.getpid()}"
    manifest = StoreManifest(source.fingerprint(name, shape.tile), shape, name, source.name)
    builder = StoreBuilder.create(segment, manifest)
    source.fill(builder, lambda done: None)
    builder.finish()
    try:
        with Store.attach(segment) as store:
            yield store
    finally:
        unlink(segment)


def found(
    folder: Path,
    device: Device,
    store: Store,
    windows: Sequence[Sequence[int]],
    dtype: str = "f32",
    calls: list[tuple[int, int]] | None = None,
    bring: Bring = lambda layer, expert: None,
) -> np.ndarray:
    source = Checkpoint(folder)
    spec = model_spec(source.config)
    backbone = Backbone(source, spec, Precision(dtype, device), spec.max_positions)
    progress = [] if calls is None else calls

    def report(done: int, of: int) -> None:
        progress.append((done, of))

    return sensitivities(backbone, device, store, windows, report, bring)


def windows_of(case: Case) -> list[tuple[int, ...]]:
    texts = drawn_texts(case, len(SHORT), 75)
    return [text[:length] for text, length in zip(texts, SHORT, strict=True)]


@pytest.fixture
def device() -> Iterator[Device]:
    """With torch on one thread: tiny products take less time than waking another thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = CpuDevice()
    yield made
    made.close()
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sensitivities_equal_autograd_on_the_whole_model(case: Case, tmp_path: Path, device: Device) -> None:
    save(case, tmp_path)
    windows = windows_of(case)
    expected = by_autograd(case, windows)
    with stored(tmp_path, "f32", tile=16) as store:
        s = found(tmp_path, device, store, windows)
        plain = found(tmp_path, TorchDevice(), store, windows)
    assert s.dtype == np.float32
    assert (expected > 0).all()
    np.testing.assert_allclose(s, expected, rtol=1e-3)
    np.testing.assert_allclose(plain, expected, rtol=1e-3)


def test_an_expert_needs_to_be_in_memory_once_it_is_brought(tmp_path: Path, device: Device) -> None:
    save(CASES[0], tmp_path)
    windows = windows_of(CASES[0])
    with stored(tmp_path, "f32", tile=16) as store:
        expected = found(tmp_path, device, store, windows)
        whole, layout = store.all_tiles().copy(), store.layout
        layers, experts = layout.shape.layers, layout.shape.experts
        with Store.attach(store.segment.name, writable=True) as partial:
            partial.frame_of = np.full((layers, experts), -1, np.int32)

            def bring(layer: int, expert: int) -> None:
                partial.frame_of[:] = -1
                partial.frame_of[layer, expert] = 1
                for (at, size), frame in zip(layout.ranges(layer, expert), partial.frame(1), strict=True):
                    frame[:] = whole[at : at + size]

            assert found(tmp_path, device, partial, windows, bring=bring).tolist() == expected.tolist()


def test_grouping_of_windows_does_not_change_sensitivities(tmp_path, device: Device, monkeypatch) -> None:
    case = CASES[0]
    save(case, tmp_path)
    windows = windows_of(case)
    with stored(tmp_path, "f32") as store:
        calls: list[tuple[int, int]] = []
        together = found(tmp_path, device, store, windows, calls=calls)
        layers = len(together)
        assert calls == [(n, 2 * layers - 1) for n in range(1, 2 * layers)]
        each = [found(tmp_path, device, store, [window]) for window in windows]
        monkeypatch.setattr("pipeline.calibration.sensitivity.ROWS", 20)
        monkeypatch.setattr("pipeline.calibration.sensitivity.HEAD_ROWS", 5)
        calls.clear()
        apart = found(tmp_path, device, store, windows, calls=calls)
        assert calls[-1] == (2 * (2 * layers - 1),) * 2
    np.testing.assert_allclose(apart, together, rtol=1e-4)
    np.testing.assert_allclose(np.average(each, 0, [n - 1 for n in SHORT]), together, rtol=1e-4)


LARGE = replace(CASES[2], options={**CASES[2].options, "moe_intermediate_size": 128})


@pytest.mark.parametrize(
    ("case", "name", "dtype", "close"),
    [
        (LARGE, "bf16", "f32", 0.03),
        (LARGE, "int8", "f32", 0.03),
        (LARGE, "int4", "f32", 0.4),
        (LARGE, "floe-u8", "f32", 0.03),  # heads apart, gate and down by channel
        (LARGE, "floe-u8-int8", "f32", 0.03),
        (LARGE, "floe-u4-int4", "f32", 0.4),
        (CASES[0], "floe-u8", "f32", 0.03),  # channels and inputs that are no whole groups
        (replace(CASES[0], dtype=torch.bfloat16), "bf16", "bf16", 0.1),
    ],
)
def test_dequantized_experts_and_bf16_backbones_are_differentiable(
    case: Case, name: str, dtype: str, close: float, tmp_path: Path, device: Device
) -> None:
    save(case, tmp_path)
    windows = windows_of(case)
    with stored(tmp_path, name) as store:
        s = found(tmp_path, device, store, windows, dtype)
    np.testing.assert_allclose(s, by_autograd(case, windows), rtol=close)


def test_quantized_backbone_and_short_windows_are_refused(tmp_path: Path, device: Device) -> None:
    save(CASES[0], tmp_path)
    with stored(tmp_path, "f32") as store:
        with pytest.raises(UsageError, match="--backbone-dtype bf16 or f32"):
            found(tmp_path, device, store, windows_of(CASES[0]), dtype="int8")
        for windows in ([], [(1, 2)]):
            with pytest.raises(ValueError, match="windows of at least 3 tokens"):
                found(tmp_path, device, store, windows)


@pytest.mark.gpu
def test_gpu_sensitivities_equal_those_of_the_cpu(tmp_path: Path, device: Device) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    gpu = open_device("cuda")
    try:
        for case in (CASES[0], CASES[6]):
            folder = tmp_path / case.name
            save(case, folder)
            with stored(folder, "int4", tile=64) as store:
                expected = found(folder, device, store, windows_of(case))
                np.testing.assert_allclose(found(folder, gpu, store, windows_of(case)), expected, rtol=1e-3)
    finally:
        gpu.close()
