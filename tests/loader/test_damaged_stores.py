"""Damaged stores, in memory and on disk, are found, reported in one line and written again, but never while
an engine uses them."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_checkpoint
from loader_harness import Supervisor, assert_right, exists, in_memory

from shm.locks import StoreLease
from shm.segment import unlink
from shm.store import store_name

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


def overwrite(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


BROKEN: dict[str, Callable[[Path], None]] = {
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "cut to its header": lambda path: os.truncate(path, 4096),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "too long": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "garbage": lambda path: overwrite(path, 0, os.urandom(8192)),
    "unfinished": lambda path: overwrite(path, 12, bytes(4)),
}


def test_invalid_segment_is_replaced(supervisor, model, loaded):
    for kind, damage in BROKEN.items():
        damage(in_memory(loaded))
        outcome = supervisor.load(model)
        assert outcome.source == "cache", kind
        assert len(outcome.lines) == 1, kind
        assert "it is removed and made again" in outcome.lines[0]
        assert_right(loaded, TENSORS)


@pytest.mark.parametrize("kind", ["cut to nothing", "garbage"])
def test_invalid_segment_in_use_is_kept(supervisor, model, loaded, kind):
    with used(supervisor, loaded):
        BROKEN[kind](in_memory(loaded))
        outcome = supervisor.load(model)
        assert outcome.code == 1
        assert "cannot be used: " in outcome.failed.text
        assert "another engine uses it" in outcome.failed.text
        assert exists(loaded)
    assert not exists(loaded)  # an invalid store is removed even with keep=True


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "flipped": flip,
    "foreign": lambda path: path.write_bytes(b"\x7fELF" + path.read_bytes()[4:]),
    "other version": lambda path: overwrite(path, 8, struct.pack("<I", 2)),
    "folder": folder,
    "unreadable": loop,
    "writable": lambda path: path.chmod(0o666),
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


def test_cached_file_of_another_model_is_made_again(supervisor, model, loaded):
    other = supervisor.load(model, tile=16).ready.fingerprint
    for fingerprint in (loaded, other):
        unlink(store_name(fingerprint))
    shutil.copy(on_disk(supervisor, other), on_disk(supervisor, loaded))
    outcome = supervisor.load(model)
    assert outcome.source == "checkpoint"
    assert len(outcome.lines) == 1
    assert "another model" in outcome.lines[0]
    assert_right(loaded, TENSORS)


def test_unfinished_files_of_killed_loaders_are_removed(supervisor, model, loaded):
    """Unfinished files of any model: their own model may never be loaded again."""
    half = supervisor.cache / ("0" * 64) / "store.tmp"
    half.parent.mkdir()
    half.write_bytes(bytes(5000))
    own = supervisor.cache / loaded / "store.tmp"
    own.write_bytes(bytes(5000))
    (supervisor.cache / ("1" * 64)).mkdir()
    outcome = supervisor.load(model)
    assert outcome.source == "attached"
    assert [str(half) in outcome.lines[0], str(own) in outcome.lines[1]] == [True, True]
    assert [path.name for path in supervisor.cache.iterdir()] == [loaded]
    assert sorted(path.name for path in (supervisor.cache / loaded).iterdir()) == ["about.json", "store.bin"]
