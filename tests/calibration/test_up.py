"""u of an expert, from the heads of a store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from pipeline.calibration.observers import up_of
from shm.expert_math import ExpertMath
from shm.layout import ExpertShape
from shm.segment import unlink
from shm.store import Store, StoreBuilder, StoreManifest

SHAPE = ExpertShape(layers=2, experts=2, hidden=72, intermediate=40, tile=16)
UP = np.random.default_rng(0).normal(size=(2, 2, 40, 72)).astype(np.float32)


BIAS = np.random.default_rng(2).normal(size=40).astype(np.float32)


@contextmanager
def store_of(format_name: str, biased: bool = False) -> Iterator[Store]:
    """Experts with these up matrices, and others as gate and down."""
    name = f"/tandem-test-{uuid.uuid4().hex[:12]}"
    shape = replace(SHAPE, math=ExpertMath(bias=biased))
    builder = StoreBuilder.create(name, StoreManifest("ab" * 32, shape, format_name, "/models/tiny"))
    for layer, expert in np.ndindex(2, 2):
        up = UP[layer, expert]
        heads = builder.heads(layer, expert)
        biases = (-BIAS, BIAS) if biased else ()
        builder.layout.encode_expert(-up, up, up.T, builder.expert(layer, expert), heads, biases)
    builder.finish()
    try:
        with Store.attach(name) as store:
            yield store
    finally:
        unlink(name)


@pytest.mark.parametrize(("format_name", "error"), [("floe-u8", 0.02), ("floe-u4-int8", 0.2), ("floe", 0.6)])
def test_u_is_that_of_the_up_matrix_within_its_format(format_name: str, error: float) -> None:
    x = np.random.default_rng(1).normal(size=(3, 72)).astype(np.float32)
    with store_of(format_name) as store:
        up = up_of(store)
        assert up is not None
        for layer, expert in np.ndindex(2, 2):
            found, exact = up(layer, expert, x), x @ UP[layer, expert].T
            assert found.shape == (3, 40)  # without the channels that pad the last tile
            assert np.linalg.norm(found - exact) < error * np.linalg.norm(exact)


def test_u_has_its_bias() -> None:
    x = np.random.default_rng(1).normal(size=(3, 72)).astype(np.float32)
    with store_of("floe-u8") as store, store_of("floe-u8", biased=True) as biased:
        plain, found = up_of(store), up_of(biased)
        assert plain is not None
        assert found is not None
        np.testing.assert_allclose(found(1, 0, x), plain(1, 0, x) + BIAS, rtol=1e-6)


def test_other_formats_have_no_up_matrices_apart() -> None:
    with store_of("bf16") as store:
        assert up_of(store) is None
