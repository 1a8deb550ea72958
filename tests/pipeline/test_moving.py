"""A backbone that is used from its files computes the same while it moves into memory, and after."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.random_checkpoint import write
from pipeline.backbone import embedding as table
from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.disk_cache import NAME, BackboneCache
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.backbone.materialize import start_moving
from pipeline.checkpoint.source import Checkpoint
from pipeline.config import BackboneDType, EngineConfig
from pipeline.device.cpu import CpuDevice
from pipeline.memory.needs import needs
from pipeline.models.registry import model_spec
from workers.kernels.matrix import HostMatrix

LIMIT = 30.0
FINGERPRINT = "cd" * 32
CONFIG = {
    **{"model_type": "qwen2_moe", "hidden_act": "silu", "hidden_size": 128, "num_hidden_layers": 3},
    **{"intermediate_size": 192, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
    **{"vocab_size": 320, "max_position_embeddings": 64, "rms_norm_eps": 1e-6},
}
TOKENS = [3, 319, 0, 3, 77]


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moving") / "model"
    write(folder, CONFIG | {"tie_word_embeddings": request.param}, fused=False)
    return folder


def backbone_of(model: Path, device: CpuDevice, dtype: BackboneDType, cache: Path | None = None) -> Backbone:
    """As an engine's start makes it. Where `cache` is given, what is quantized is kept there, or found."""
    source = Checkpoint(model)
    kept = None if cache is None else BackboneCache(cache, FINGERPRINT)
    backbone = Backbone(source, model_spec(source.config), Precision(dtype, device, kept), 64)
    if kept is not None:
        kept.finish()
    return backbone


def quantized_before(model: Path, device: CpuDevice, cache: Path) -> Backbone:
    """A second start's."""
    backbone_of(model, device, "int8", cache)
    until = time.monotonic() + LIMIT
    while not (cache / FINGERPRINT / NAME).exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    return backbone_of(model, device, "int8", cache)


@torch.inference_mode()
def answer(backbone: Backbone) -> np.ndarray:
    """Logits of a prompt, without the routed experts."""
    kv = KVCache(backbone.spec, backbone.dtype, torch.device("cpu"), 64).allocate(len(TOKENS))
    kv.serve(len(TOKENS))
    batch = backbone.batch([TokenSpan(kv, TOKENS)])
    h = backbone.embed(batch)
    for layer in range(len(backbone.spec.moe_layers)):
        h = backbone.attention(layer, h, batch)
        shared = backbone.shared_experts(layer, backbone.moe_input(layer, h))
        assert shared is not None
        h = h + shared
    return backbone.head(backbone.finish(h, batch)).numpy()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "int4"])
def test_a_checkpoints_backbone_is_as_large_as_was_planned(
    model: Path, device: CpuDevice, dtype: BackboneDType
) -> None:
    backbone = backbone_of(model, device, dtype)
    planned = needs(Checkpoint(model), EngineConfig(device="cpu", backbone_dtype=dtype), "bf16").backbone
    assert backbone.bytes == planned
    assert backbone.unmoved <= planned


def test_what_was_made_now_is_in_memory_but_for_the_table(model: Path, device: CpuDevice) -> None:
    tied = model_spec(Checkpoint(model).config).tied_embeddings
    for dtype, expected in (("f32", 0 if tied else 4 * 320 * 128), ("int8", 2 * 320 * 128)):
        backbone = backbone_of(model, device, dtype)
        assert backbone.unmoved == expected
        before = answer(backbone)
        backbone.move(lambda: True)
        assert backbone.unmoved == 0
        np.testing.assert_array_equal(answer(backbone), before)


def test_what_was_kept_is_used_from_its_file_until_it_has_moved(
    model: Path, device: CpuDevice, tmp_path: Path
) -> None:
    wanted = answer(backbone_of(model, device, "int8"))
    backbone = quantized_before(model, device, tmp_path)
    assert 2 * 320 * 128 < backbone.unmoved <= backbone.bytes
    maps = Path("/proc/self/maps")
    assert str(tmp_path) in maps.read_text()
    np.testing.assert_array_equal(answer(backbone), wanted)
    backbone.move(lambda: True)
    assert backbone.unmoved == 0
    assert str(tmp_path) not in maps.read_text()
    np.testing.assert_array_equal(answer(backbone), wanted)


def test_steps_are_computed_while_it_moves_and_several_may_move_it(
    model: Path, device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "READ_NUMBERS", 128)
    wanted = answer(backbone_of(model, device, "int8"))
    backbone = quantized_before(model, device, tmp_path)
    seen = set()

    def slowly() -> bool:
        time.sleep(0.0005)
        return True

    movers = [threading.Thread(target=backbone.move, args=(slowly,)) for _ in range(2)]
    for mover in movers:
        mover.start()
    until = time.monotonic() + LIMIT
    while any(mover.is_alive() for mover in movers):
        seen.add(backbone.unmoved)
        np.testing.assert_array_equal(answer(backbone), wanted)
        assert time.monotonic() < until
    assert backbone.unmoved == 0
    assert len(seen) > 2


def test_the_thread_ends_when_it_is_told_to(
    model: Path, device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = quantized_before(model, device, tmp_path)
    everything = backbone.unmoved
    begun = threading.Event()

    def move(self: HostMatrix, going: object) -> None:
        assert callable(going)
        begun.set()
        until = time.monotonic() + LIMIT
        while going() and time.monotonic() < until:
            time.sleep(0.01)

    with monkeypatch.context() as patched:
        patched.setattr(HostMatrix, "move", move)
        stop = start_moving(backbone)
        assert begun.wait(LIMIT)
        stop()
        assert "moving" not in {thread.name for thread in threading.enumerate()}
    assert 0 < backbone.unmoved < everything  # the table was first
    start_moving(backbone)()
    stop = start_moving(backbone)
    until = time.monotonic() + LIMIT
    while backbone.unmoved:
        assert time.monotonic() < until
        time.sleep(0.01)
    stop()


def test_what_cannot_be_moved_stays_and_the_rest_moves(
    model: Path,
    device: CpuDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = answer(backbone_of(model, device, "int8"))
    backbone = quantized_before(model, device, tmp_path)
    real, asked = HostMatrix.move, []

    def move(self: HostMatrix, going: object) -> None:
        asked.append(self)
        if len(asked) == 2:
            raise OSError(12, "Cannot allocate memory")
        real(self, going)  # type: ignore[arg-type]

    monkeypatch.setattr(HostMatrix, "move", move)
    backbone.move(lambda: True)
    assert caplog.text.count("stays in its file: [Errno 12] Cannot allocate memory") == 1
    assert len(asked) > 5
    assert backbone.unmoved == 0
    np.testing.assert_array_equal(answer(backbone), wanted)
