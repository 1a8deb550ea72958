"""A file-backed backbone computes the same before, while and after its weights are copied into memory."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from random_checkpoint import write
from waiting import wait_until

from pipeline.backbone import embedding
from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.disk_cache import NAME, BackboneCache
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.backbone.materialize import start_materializing
from pipeline.checkpoint.hf_checkpoint import Checkpoint
from pipeline.config import BackboneDType, EngineConfig
from pipeline.device.cpu import CpuDevice
from pipeline.memory.needs import needs
from pipeline.models.registry import model_spec
from workers.kernels.matrix import HostMatrix

LIMIT = 30.0  # seconds
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
    folder = tmp_path_factory.mktemp("materialize") / "model"
    write(folder, CONFIG | {"tie_word_embeddings": request.param}, fused=False)
    return folder


def backbone_of(model: Path, device: CpuDevice, dtype: BackboneDType, cache: Path | None = None) -> Backbone:
    """As at an engine's start; `cache`: the folder of its disk cache."""
    source = Checkpoint(model)
    kept = None if cache is None else BackboneCache(cache, FINGERPRINT)
    backbone = Backbone(source, model_spec(source.config), Precision(dtype, device, kept), 64)
    if kept is not None:
        kept.finish()
    return backbone


def from_disk_cache(model: Path, device: CpuDevice, cache: Path) -> Backbone:
    """As at the second start, with matrices mapped from the disk cache."""
    backbone_of(model, device, "int8", cache)
    assert wait_until((cache / FINGERPRINT / NAME).exists, LIMIT)
    return backbone_of(model, device, "int8", cache)


@torch.inference_mode()
def answer(backbone: Backbone) -> np.ndarray:
    """Logits of a prompt, without the routed experts."""
    kv = KVCache(backbone.spec, backbone.dtype, torch.device("cpu"), 64).allocate(len(TOKENS))
    kv.select_rope(len(TOKENS))
    batch = backbone.batch([TokenSpan(kv, TOKENS)])
    h = backbone.embed(batch)
    for layer in range(len(backbone.spec.moe_layers)):
        attended = backbone.attend(layer, h, batch)
        shared = attended.shared()
        assert shared is not None
        h = attended.h + shared
    return backbone.head(backbone.finish(h, batch)).numpy()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "int4"])
def test_first_start_has_only_the_embedding_pending(model, device, dtype) -> None:
    """And takes the planned memory."""
    tied = model_spec(Checkpoint(model).config).tied_embeddings
    backbone = backbone_of(model, device, dtype)
    config = EngineConfig(device="cpu", backbone_dtype=dtype)
    assert backbone.bytes == needs(Checkpoint(model), config, "bf16").backbone
    copied = tied and not dtype.startswith("int")  # by the head
    assert backbone.pending_bytes == (0 if copied else 320 * 128 * (4 if dtype == "f32" else 2))
    before = answer(backbone)
    backbone.materialize(lambda: True)
    assert backbone.pending_bytes == 0
    np.testing.assert_array_equal(answer(backbone), before)


def test_cached_matrices_are_mapped_until_materialized(model: Path, device: CpuDevice, tmp_path) -> None:
    wanted = answer(backbone_of(model, device, "int8"))
    backbone = from_disk_cache(model, device, tmp_path)
    assert 2 * 320 * 128 < backbone.pending_bytes <= backbone.bytes
    maps = Path("/proc/self/maps")
    assert str(tmp_path) in maps.read_text()
    np.testing.assert_array_equal(answer(backbone), wanted)
    backbone.materialize(lambda: True)
    assert backbone.pending_bytes == 0
    assert str(tmp_path) not in maps.read_text()
    np.testing.assert_array_equal(answer(backbone), wanted)


def test_steps_between_any_two_copies_compute_the_same(model, device, tmp_path, monkeypatch) -> None:
    """Copying waits at every poll of `proceed` until a step is computed. The first thread is stopped once, in
    the middle; the second one finishes."""
    monkeypatch.setattr(embedding, "CHUNK_NUMBERS", 64 * 128)
    wanted = answer(backbone_of(model, device, "int8"))
    backbone = from_disk_cache(model, device, tmp_path)
    everything = backbone.pending_bytes
    polls: queue.Queue[str] = queue.Queue()
    verdicts: queue.Queue[bool] = queue.Queue()

    def proceed() -> bool:
        polls.put(threading.current_thread().name)
        return verdicts.get(timeout=LIMIT)

    threads = [
        threading.Thread(target=lambda: (backbone.materialize(proceed), polls.put("done")), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    seen, pollers, done = [], [], 0
    while done < len(threads):
        poller = polls.get(timeout=LIMIT)
        if poller == "done":
            done += 1
            continue
        pollers.append(poller)
        seen.append(backbone.pending_bytes)
        np.testing.assert_array_equal(answer(backbone), wanted)
        verdicts.put(len(pollers) != 12)
    assert seen[0] == everything
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 5  # one weight after the other, each with a step before and after
    assert [poller == pollers[0] for poller in pollers] == [i < 12 for i in range(len(pollers))]
    assert backbone.pending_bytes == 0
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    np.testing.assert_array_equal(answer(backbone), wanted)


def test_steps_that_race_with_copies_compute_the_same(model: Path, device: CpuDevice, tmp_path: Path) -> None:
    wanted = answer(backbone_of(model, device, "int8"))
    backbone = from_disk_cache(model, device, tmp_path)
    threads = [threading.Thread(target=backbone.materialize, args=(lambda: True,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    until, after = time.monotonic() + LIMIT, 0
    while after < 3:
        np.testing.assert_array_equal(answer(backbone), wanted)
        assert time.monotonic() < until
        after += not any(thread.is_alive() for thread in threads)
    assert backbone.pending_bytes == 0


def test_materializing_thread_stops_on_request(model: Path, device: CpuDevice, tmp_path, monkeypatch) -> None:
    backbone = from_disk_cache(model, device, tmp_path)
    everything = backbone.pending_bytes
    begun = threading.Event()

    def endless(self: HostMatrix, proceed: object) -> None:
        assert callable(proceed)
        begun.set()
        until = time.monotonic() + LIMIT
        while proceed() and time.monotonic() < until:
            time.sleep(0.01)

    with monkeypatch.context() as patched:
        patched.setattr(HostMatrix, "materialize", endless)
        stop = start_materializing(backbone)
        assert begun.wait(LIMIT)
        stop()
        assert "materialize" not in {thread.name for thread in threading.enumerate()}
    assert 0 < backbone.pending_bytes < everything  # the embedding was first
    start_materializing(backbone)()
    stop = start_materializing(backbone)
    assert wait_until(lambda: not backbone.pending_bytes, LIMIT)
    stop()


def test_weight_with_a_failed_copy_stays_in_its_file_and_others_are_copied(
    model: Path,
    device: CpuDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = answer(backbone_of(model, device, "int8"))
    backbone = from_disk_cache(model, device, tmp_path)
    real, calls = HostMatrix.materialize, []

    def second_fails(self: HostMatrix, proceed: object) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise OSError(12, "Cannot allocate memory")
        real(self, proceed)  # type: ignore[arg-type]

    monkeypatch.setattr(HostMatrix, "materialize", second_fails)
    backbone.materialize(lambda: True)
    assert caplog.text.count("stays in its file: [Errno 12] Cannot allocate memory") == 1
    assert len(calls) > 5
    assert backbone.pending_bytes == 0
    np.testing.assert_array_equal(answer(backbone), wanted)
