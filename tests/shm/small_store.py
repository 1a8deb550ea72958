"""A small store for tests."""

from pathlib import Path

import numpy as np

import shm
from shm.layout import ExpertShape
from shm.manifest import StoreManifest
from shm.store import StoreBuilder, store_name

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
