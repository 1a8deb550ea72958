"""Damaged stores, in memory and on disk, are found, reported in one line and written again, but never while
an engine uses them."""

from __future__ import annotations

import os
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
