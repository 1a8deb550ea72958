"""The loader caches stores on disk where that is faster; invalid stores and damaged files are reported in one
line and made again, but never while an engine uses them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_checkpoint
import torch
from loader_harness import SECONDS, Supervisor, assert_right, exists, in_memory

from pipeline.checkpoint.open import Checkpoint
from pipeline.loader import Loading
from shm.locks import StoreLease, sweep
from shm.segment import allocated_bytes, unlink
from shm.store import Store, store_name


@pytest.mark.parametrize(
    ("dtype", "same"), [(torch.bfloat16, ["bf16"]), (torch.float32, ["f32"]), (torch.float16, [])]
)
def test_store_with_the_checkpoints_bits_is_not_worth_keeping(tmp_path, dtype, same):
    tensors, formats = tiny_checkpoint.expert_tensors(dtype), ["bf16", "f32", "int8", "int4"]
    model = Checkpoint(tiny_checkpoint.write(tmp_path / "one", tensors))
    assert [name for name in formats if not model.worth_keeping(name)] == same
    model.own_format = "int4-f16"  # of a quantized one
    assert [name for name in (*formats, "int4-f16") if not model.worth_keeping(name)] == [*same, "int4-f16"]
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


def test_experts_that_memory_does_not_hold_are_written_to_disk(supervisor: Supervisor, model: Path) -> None:
    made = supervisor.load(model, format="bf16", host_memory=1 << 20)
    name = store_name(made.ready.fingerprint)
    with Store.attach(name, made.ready.fingerprint) as store:
        assert store.partial
        assert len(store.all_tiles()) == store.manifest.frames * store.layout.expert_pages <= 1 << 20
    again = supervisor.load(model, format="bf16", host_memory=1 << 20)
    assert (made.source, again.source) == ("checkpoint", "disk")
    unlink(name)
    (file,) = supervisor.cache.glob("*/store.bin")
    whole = supervisor.load(model, format="bf16").ready.fingerprint
    assert whole == file.parent.name != made.ready.fingerprint
    with Store.attach(store_name(whole)) as store:
        assert file.read_bytes()[-store.layout.total_bytes :] == store.all_tiles().tobytes()


class Nobody:
    """Is told how far a load is."""

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        return lambda done: None


def test_a_partial_store_that_is_being_made_is_swept_by_nobody(supervisor: Supervisor, model: Path) -> None:
    class OtherStarts:
        def stage(self, name: str, total: int) -> Callable[[int], None]:
            """Another engine starts whenever this one tells how far it is."""
            return lambda done: removed.extend(sweep())

    removed: list[str] = []
    loading = Loading(supervisor.config(model, format="bf16", host_memory=1 << 20), OtherStarts())
    for _ in ("from the checkpoint", "from the file"):
        loading.load()
        assert not removed
        StoreLease.acquire(loading.fingerprint).release(keep=False)


def test_what_is_loaded_is_leased_before_the_start_of_another_engine_can_remove_it(
    supervisor: Supervisor, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire, removed = StoreLease.acquire, list[str]()

    def beside_another(fingerprint: str) -> StoreLease:
        removed.extend(sweep())
        return acquire(fingerprint)

    monkeypatch.setattr(StoreLease, "acquire", beside_another)
    for budget in (None, 1 << 20):
        loading = Loading(supervisor.config(model, format="bf16", host_memory=budget), Nobody())
        lease = loading.load_leased()
        removed.extend(sweep())
        assert not removed
        assert lease.release(keep=False)


def test_a_partial_store_is_made_again_in_the_memory_of_one_that_was_left(
    supervisor: Supervisor, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    for again in range(3):  # each as after a SIGKILL of the one before
        loading = Loading(supervisor.config(model, format="bf16", host_memory=1 << 40), Nobody())
        loading.least, name = 0, loading.name
        monkeypatch.setattr(
            "pipeline.loader.free_space", lambda reserve, name=name: (1 << 25) - allocated_bytes(name)
        )
        loading.load()
        made.append(loading.manifest.frames)
        if again == 1:
            Path(loading.manifest.file).unlink()
            loading.load()
            made.append(loading.manifest.frames)
    assert made[0] > 0
    assert set(made) == {made[0]}
    StoreLease.acquire(loading.fingerprint).release(keep=False)


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


# --- damaged stores and files -----------------------------------------------------------------------------

TENSORS = tiny_checkpoint.expert_tensors()


@pytest.fixture
def loaded(supervisor: Supervisor, model: Path) -> str:
    """The fingerprint of an unused store, in memory and on disk."""
    return supervisor.load(model).ready.fingerprint


@contextmanager
def used(supervisor: Supervisor, fingerprint: str) -> Iterator[None]:
    """Hold the store in use, as another engine does."""
    lease = StoreLease.acquire(fingerprint)
    try:
        yield
    finally:
        lease.release(keep=True)


def on_disk(supervisor: Supervisor, fingerprint: str) -> Path:
    return supervisor.cache / fingerprint / "store.bin"


def flip(path: Path, place: int = -9000) -> None:
    """Flip a bit of an expert, by default of the last layer."""
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END)
        byte = file.read(1)
        file.seek(place, os.SEEK_END)
        file.write(bytes([byte[0] ^ 16]))


BROKEN: dict[str, Callable[[Path], None]] = {
    "cut to nothing": lambda path: os.truncate(path, 0),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 4096),
}


def test_invalid_segment_is_replaced(supervisor, model, loaded):
    for kind, damage in BROKEN.items():
        damage(in_memory(loaded))
        outcome = supervisor.load(model)
        assert outcome.source == "cache", kind
        assert len(outcome.lines) == 1, kind
        assert "it is removed and made again" in outcome.lines[0]
        assert_right(loaded, TENSORS)


@pytest.mark.parametrize("kind", BROKEN)
def test_invalid_segment_in_use_is_kept(supervisor, model, loaded, kind):
    with used(supervisor, loaded):
        BROKEN[kind](in_memory(loaded))
        outcome = supervisor.load(model)
        assert outcome.code == 1
        assert "cannot be used: " in outcome.failed.text
        assert "another engine uses it" in outcome.failed.text
        assert exists(loaded)
    assert not exists(loaded)  # an invalid store is removed even with keep=True


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "flipped": flip,
}


def test_damaged_cached_file_is_made_again_with_a_warning(supervisor, model, loaded):
    path = on_disk(supervisor, loaded)
    good = path.read_bytes()
    for kind, damage in DAMAGE.items():
        unlink(store_name(loaded))
        damage(path)
        outcome = supervisor.load(model)
        assert outcome.source == "checkpoint", kind
        assert len(outcome.lines) == 1, kind
        assert "made again from the checkpoint" in outcome.lines[0]
        assert_right(loaded, TENSORS)
        assert path.read_bytes() == good
        assert path.stat().st_mode & 0o7777 == 0o600
