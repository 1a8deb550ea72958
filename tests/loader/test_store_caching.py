"""The loader caches stores on disk where that is faster, and survives a disk that it cannot write."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_checkpoint
import torch
from loader_harness import SECONDS, Supervisor, assert_right, exists, in_memory

from pipeline import loader
from pipeline.checkpoint.open import Checkpoint
from protocol.codec import decode
from shm.segment import unlink
from shm.store import Store, StoreBuilder, store_name


@pytest.mark.parametrize(
    ("dtype", "format_name", "worth"),
    [
        (torch.bfloat16, "bf16", False),
        (torch.float32, "f32", False),
        (torch.bfloat16, "f32", True),
        (torch.float32, "bf16", True),
        (torch.float16, "bf16", True),
        (torch.bfloat16, "int8", True),
    ],
)
def test_store_with_the_checkpoints_bits_is_not_worth_keeping(tmp_path, dtype, format_name, worth) -> None:
    folder = tiny_checkpoint.write(tmp_path / "model", tiny_checkpoint.expert_tensors(dtype))
    assert Checkpoint(folder).worth_keeping(format_name) is worth


def test_one_tensor_of_another_dtype_makes_a_store_worth_keeping(tmp_path: Path) -> None:
    """Even where all others have the format's dtype."""
    tensors = tiny_checkpoint.expert_tensors(torch.float32)
    assert not Checkpoint(tiny_checkpoint.write(tmp_path / "a", tensors)).worth_keeping("f32")
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    tensors[name] = tensors[name].to(torch.float16)
    assert Checkpoint(tiny_checkpoint.write(tmp_path / "b", tensors)).worth_keeping("f32")


def test_store_not_worth_keeping_is_read_again(supervisor: Supervisor, model: Path) -> None:
    first = supervisor.load(model, format="bf16")
    assert first.stages == ["allocating", "encoding the experts"]
    assert not list(supervisor.cache.glob("*"))
    unlink(store_name(first.ready.fingerprint))
    again = supervisor.load(model, format="bf16")
    assert (again.source, again.lines) == ("checkpoint", [])
    assert_right(again.ready.fingerprint, tiny_checkpoint.expert_tensors())


@pytest.mark.parametrize("format_name", ["f32", "int8", "int4"])
def test_cached_file_equals_the_segment(supervisor: Supervisor, model: Path, format_name: str) -> None:
    fingerprint = supervisor.load(model, format=format_name, tile=None).ready.fingerprint
    with Store.attach(store_name(fingerprint)) as store:
        size = store.layout.total_bytes
    cached = supervisor.cache / fingerprint / "store.bin"
    assert cached.read_bytes()[-size:] == in_memory(fingerprint).read_bytes()[-size:]


def test_unfinished_file_of_a_killed_loader_is_not_used(supervisor: Supervisor, tmp_path: Path) -> None:
    model = tiny_checkpoint.embedded(tmp_path / "embedded")
    child = supervisor.start(model, tile=None)
    deadline = time.monotonic() + SECONDS
    while not (half := list(supervisor.cache.glob("*/store.tmp"))):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    child.process.kill()
    child.end()
    while supervisor.control.poll(0):
        supervisor.control.recv_multipart()
    assert [path.name for path in half[0].parent.iterdir()] == ["store.tmp"]
    supervisor.fingerprints.add(half[0].parent.name)
    outcome = supervisor.load(model, tile=None)
    assert outcome.source == "checkpoint"
    assert f"removed the half-written {half[0]}" in outcome.lines[0]
    assert sorted(path.name for path in half[0].parent.iterdir()) == ["about.json", "store.bin"]
    unlink(store_name(outcome.ready.fingerprint))
    assert supervisor.load(model, tile=None).source == "cache"


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """A function that limits the size of the files that this process may write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_at_the_second_layer_is_a_warning(
    supervisor: Supervisor,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    file_limit: Callable[[int], None],
) -> None:
    """In this process, to limit the file size between the store's allocation and its second layer."""
    make = loader.Loading._builder

    def builder(self: loader.Loading) -> StoreBuilder:
        made = make(self)
        file_limit(made.segment.size - made.layout.layer_stride // 2)
        return made

    monkeypatch.setattr(loader.Loading, "_builder", builder)
    outcome = loader.main(supervisor.config(model))
    messages = []
    while supervisor.control.poll(100):
        messages.append(decode(supervisor.control.recv_multipart()[1:]))
    fingerprint = messages[-1].fingerprint
    supervisor.fingerprints.add(fingerprint)
    assert outcome == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "could not be kept on disk" in caplog.text
    assert "File too large" in caplog.text
    assert list(supervisor.cache.iterdir()) == []
    assert exists(fingerprint)
    assert_right(fingerprint, tiny_checkpoint.expert_tensors())
    assert supervisor.load(model).source == "attached"
