"""The loader caches stores on disk where that is faster, and survives a disk that it cannot write."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tiny_checkpoint
import torch
from loader_harness import SECONDS, Supervisor, assert_right, in_memory

from pipeline.checkpoint.open import Checkpoint
from shm.segment import unlink
from shm.store import Store, store_name


@pytest.mark.parametrize(
    ("dtype", "same"), [(torch.bfloat16, ["bf16"]), (torch.float32, ["f32"]), (torch.float16, [])]
)
def test_store_with_the_checkpoints_bits_is_not_worth_keeping(tmp_path, dtype, same):
    tensors, formats = tiny_checkpoint.expert_tensors(dtype), ["bf16", "f32", "int8", "int4"]
    model = Checkpoint(tiny_checkpoint.write(tmp_path / "one", tensors))
    assert [name for name in formats if not model.worth_keeping(name)] == same
    last = list(tensors)[-1]
    tensors[last] = tensors[last].to(torch.float32 if dtype != torch.float32 else torch.bfloat16)
    assert all(map(Checkpoint(tiny_checkpoint.write(tmp_path / "two", tensors)).worth_keeping, formats))


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
