"""A small store for tests, and processes that use it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import shm
from shm.disk_cache import CacheWriter
from shm.layout import ExpertShape
from shm.store import Store, StoreBuilder, StoreManifest, store_name

ROOT = Path(shm.__file__).parent.parent  # where child processes find the packages
SHAPE = ExpertShape(layers=2, experts=3, hidden=48, intermediate=100, tile=16)


def file_of(fingerprint: str) -> Path:
    return Path("/dev/shm") / store_name(fingerprint)[1:]


def fill(builder: StoreBuilder, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for layer in range(SHAPE.layers):
        for expert in range(SHAPE.experts):
            wide = (SHAPE.intermediate, SHAPE.hidden)
            parts = (rng.standard_normal(s).astype(np.float32) for s in (wide, wide, wide[::-1]))
            builder.layout.encode_expert(*parts, builder.expert(layer, expert))


def build(fingerprint: str) -> None:
    builder = StoreBuilder.create(
        store_name(fingerprint), StoreManifest(fingerprint, SHAPE, "bf16", "/models/tiny")
    )
    fill(builder)
    builder.finish()


def write_cache(folder: Path, store: Store, progress: Callable[[int], object]) -> None:
    """Write a finished store to disk."""
    with CacheWriter(folder, store.manifest) as writer:
        for layer, data in enumerate(store.all_tiles().reshape(store.layout.shape.layers, -1)):
            writer.write(layer, data)
        writer.finish(progress)


def flip(path: Path, place: int) -> None:
    """Flip a bit of a file's byte; `place` counts from its end."""
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END)
        byte = file.read(1)
        file.seek(place, os.SEEK_END)
        file.write(bytes([byte[0] ^ 128]))


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in another process until its end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)


@contextmanager
def running(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs code; it is killed at the end of the block."""
    pipe, command = subprocess.PIPE, [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
