"""A decoder layer in one call of C, in every variant that runs here, equals the formula in float64, and a
row's bits depend neither on the other rows nor on the number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from attention_cases import TOLERANCES, as_cached, by_stream, numbers, read, storing_error
from decoding import decode_matrix
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_runs import bits, seeds
from layer_cases import Layer, Rows, Shape, shapes

from shm.fp8 import FP8
from shm.layout import DENSE
from workers.kernels.layer import KV_BLOCK
from workers.kernels.matrix import HostMatrix, quantized
from workers.kernels.native import Library, Team

FEW = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROUNDED = {"f32": 2e-4, "fp8": 2e-4, "bf16": 0.03}  # activations' rounding; of other formats 0.06


@pytest.fixture(params=[1, 3])
def team(request: pytest.FixtureRequest, library: Library) -> Iterator[Team | None]:
    made = library.team(request.param)
    yield made
    if made is not None:
        made.close()


def check(found: dict[str, np.ndarray], rows: Rows, row: int, at: int) -> None:
    s = rows.layer.shape
    streams, position = len(rows.caches[row]) // 2, rows.positions[row]
    caches = [found[f"cache {streams + n}"][at] for n in range(streams)]
    expected = rows.expected(row, caches)
    stored = expected.pop("stored")
    tolerance = ROUNDED.get(s.format, 0.06)
    for stream, new in zip(by_stream(caches, s.bits), stored, strict=True):
        rounding = tolerance if s.bits == 32 else max(tolerance, 2**-8)
        atol = 4 * rounding + (storing_error(new, s.bits) if s.bits == 8 else 0)
        np.testing.assert_allclose(stream[:, position].ravel(), new.ravel(), rounding, atol)
    tolerance = max(tolerance, TOLERANCES[s.bits][0])
    rounded = 1 if s.bits == 32 else 4  # a rounded query moves all of a head's weights, which may add up
    for name, wanted in expected.items():
        # A logit is a sum over the hidden numbers: where the only one is small by chance, its error is not.
        scale = max(s.hidden**0.5 if name == "logits" else 1.0, np.abs(wanted).max())
        np.testing.assert_allclose(found[name][at], wanted, rtol=tolerance, atol=rounded * tolerance * scale)
    for n, cache in enumerate(caches):
        before = rows.caches[row][streams + n]
        untouched = before.copy()
        untouched[:, position] = cache[:, position]
        np.testing.assert_array_equal(cache, untouched)  # nothing but the token's numbers was written
    for n in range(streams):  # of the other layer
        np.testing.assert_array_equal(found[f"cache {n}"][at], rows.caches[row][n])


@FEW
@given(seed=seeds, shape=shapes(), positions=st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_a_layer(library, team, seed, shape, positions) -> None:
    rows = Rows(Layer(shape, np.random.default_rng(seed)), positions)
    found = rows.compute(rows.layer.kernel(library, team), list(range(len(positions))))
    for row in range(len(positions)):
        check(found, rows, row, row)


@pytest.mark.parametrize("format", [name for name in DENSE if name != "f32"])
def test_formats_of_matrices(library, format) -> None:
    """Activations are rounded, which one odd number may change by a step: no draws."""
    common = {"hidden": 200, "heads": 6, "kv_heads": 2, "half": 16, "experts": 9, "channels": 130, "bits": 16}
    for extra in ({"norm": "head", "biases": True}, {"latent": (70, 24, 20, 48)}, {"gated": True}):
        layer = Layer(Shape(**common, **extra, format=format), np.random.default_rng(1))
        rows = Rows(layer, [5, 0, 12])
        found = rows.compute(layer.kernel(library, None), [0, 1, 2])
        for row in range(3):
            check(found, rows, row, row)


@FEW
@given(
    seed=seeds,
    shape=shapes(("bf16", "int8", "int4", "fp8", "f32")),
    positions=st.lists(st.integers(0, 200), min_size=1, max_size=16),
    data=st.data(),
)
def test_rows_do_not_mix(library, seed, shape, positions, data) -> None:
    rows = Rows(Layer(shape, np.random.default_rng(seed)), positions)
    every = list(range(len(positions)))
    alone = rows.layer.kernel(library, None)
    single = [rows.compute(alone, [row]) for row in every]
    for threads in (1, 2, 4):
        team = library.team(threads)
        order = data.draw(st.permutations(every))[: data.draw(st.integers(1, len(every)))]
        found = rows.compute(rows.layer.kernel(library, team), order)
        if team is not None:
            team.close()
        for at, row in enumerate(order):
            for name, array in found.items():
                assert array[at].tobytes() == single[row][name][0].tobytes(), name


def test_many_tokens_give_the_same_bits(library) -> None:
    """Sequences of several thousand tokens, beyond the scratch that was sized first."""
    shape = Shape(hidden=64, heads=12, kv_heads=2, half=16, experts=4, bits=16)
    rows = Rows(Layer(shape, np.random.default_rng(0)), [3, 3000, 1500, 0])
    alone, team = rows.layer.kernel(library, None), library.team(3)
    shared = rows.layer.kernel(library, team)
    single = [rows.compute(alone, [row]) for row in range(4)]
    for order in ([0], [2, 0], [1, 3, 2, 0], [3]):
        found = rows.compute(shared, order)
        for at, row in enumerate(order):
            np.testing.assert_array_equal(bits(found["out"][at]), bits(single[row]["out"][0]))
    check(single[1], rows, 1, 0)
    if team is not None:
        team.close()


@pytest.mark.parametrize("latent", [None, (4, 1, 1, 0)])
def test_positions_outside_the_cache_are_refused(library, latent) -> None:
    shape = Shape(hidden=4, heads=1, kv_heads=1, half=1, latent=latent, experts=2)
    rows = Rows(Layer(shape, np.random.default_rng(0)), [2, 2], spare=1)
    kernel = rows.layer.kernel(library, None)
    rows.compute(kernel, [0, 1])
    for position in (-1, KV_BLOCK, 1000):
        rows.positions = [2, position]
        with pytest.raises(IndexError, match="outside the KV cache"):
            rows.compute(kernel, [0, 1])


@pytest.mark.parametrize("name", ["bf16", "f32", "fp8"])
@FEW
@given(seed=seeds, rows=st.integers(0, 17), outputs=st.integers(1, 50), inputs=st.integers(1, 300))
@example(seed=0, rows=7, outputs=270, inputs=300)
def test_products_with_a_row_major_matrix(library, team, name, seed, rows, outputs, inputs) -> None:
    random, format, number_bits = np.random.default_rng(seed), DENSE[name], 16 if name == "bf16" else 32
    w, x = numbers(random, outputs, inputs), numbers(random, rows, inputs)
    if isinstance(format, FP8):
        data = quantized(format, w)
        plain = decode_matrix(format, data, outputs, inputs).astype(np.float64)
    else:
        data = as_cached(w, number_bits).view(np.uint8).reshape(-1)
        plain = read(as_cached(w, number_bits))
    matrix = HostMatrix(library, team, format, (outputs, inputs), data)
    y = matrix.product(x)
    exact = read(as_cached(x, number_bits)) @ plain.T
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-4)
    for row in range(rows):
        np.testing.assert_array_equal(bits(matrix.product(x[row : row + 1])), bits(y[row : row + 1]))
    with pytest.raises(ValueError, match="activations"):
        matrix.product(numbers(random, 1, inputs + 1))
    with pytest.raises(ValueError, match="weights"):
        HostMatrix(library, team, format, (outputs, inputs), data[1:])
