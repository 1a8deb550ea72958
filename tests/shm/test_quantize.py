"""The quantizer: its bytes, its errors against rounding to nearest, and weights at the edges."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from decoding import decode_matrix, decode_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.blocks import Int2, Int4, Int8
from shm.errors import NotCompiled, WeightsUnusable
from shm.floe import QuantizedRows
from shm.formats import Bytes, Float32
from shm.layout import format_named
from shm.quantize import STEPS, VERSION, encode_blocks, encode_rows, library

NORM = 0.7
WEIGHTS = ("normal", "heavy", "spread", "positive", "few values", "outliers", "tiny")


def weights(kind: str, n: int, k: int, seed: int) -> Float32:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((n, k))
    match kind:
        case "heavy":
            w = rng.standard_t(1.5, (n, k))
        case "spread":
            w = w * np.exp(rng.uniform(-80, 75, (n, k)))
        case "positive":
            w = np.abs(w) + 3
        case "few values":
            w = rng.choice([-1.0, 0.0, 0.25], (n, k))
        case "outliers":
            w = np.where(rng.random((n, k)) < 0.02, 1e4 * w, w)
        case "tiny":
            w = w * 10.0 ** rng.integers(-45, -34, (n, 1))
    return w.astype(np.float32)


matrices = st.builds(
    weights, st.sampled_from(WEIGHTS), st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**32 - 1)
)
groups = st.sampled_from([64, 128])


def int4(w: Float32, group: int, **how: object) -> Bytes:
    out = np.full(Int4(group).matrix_bytes(*w.shape), 0xAB, np.uint8)
    encode_blocks(w, 4, group, out, **how)
    return out


def int8(w: Float32, **how: object) -> Bytes:
    out = np.full(Int8().matrix_bytes(*w.shape), 0xAB, np.uint8)
    encode_blocks(w, 8, 128, out, **how)
    return out


def int2(w: Float32, **how: object) -> Bytes:
    out = np.full(Int2(64).matrix_bytes(*w.shape), 0xAB, np.uint8)
    encode_blocks(w, 2, 64, out, **how)
    return out


def rows(w: Float32, bits: int, **how: object) -> Bytes:
    """Records that lie in every second place, as gate's among down's."""
    out = np.full((len(w), 2, QuantizedRows(bits).row_bytes(w.shape[1])), 0xAB, np.uint8)
    encode_rows(w, bits, out[:, 0], **how)
    assert (out[:, 1] == 0xAB).all()
    return out[:, 0]


def errors(w: Float32, data: Bytes, group: int, bits: int = 4) -> np.ndarray:
    """What the optimisation minimises, for each group: float64 [n, groups]."""
    blocks = Int4(group) if bits == 4 else Int2(group)
    off = np.abs(decode_matrix(blocks, data, *w.shape).astype(np.float64) - w) ** (NORM if bits == 4 else 2)
    return np.add.reduceat(off, range(0, w.shape[1], group), axis=1)


def test_two_bits_come_near_the_least_squared_error() -> None:
    """Of all scales and zeros on a fine grid; for most groups alternating ends in the best of its minima."""
    random = np.random.default_rng(3)
    w = (random.standard_normal((48, 64)) * random.choice([1, 1, 1, 4], (48, 64))).astype(np.float32)
    width = (w.max(axis=1) - w.min(axis=1)) / 3
    best = np.full(len(w), np.inf)
    for share in np.linspace(0.3, 1.1, 41):
        scale = (share * width)[:, None]
        for zero in np.linspace(-0.5, 3.5, 65):
            codes = np.clip(np.rint(w / scale + zero), 0, 3)
            best = np.minimum(best, (((codes - zero) * scale - w) ** 2).sum(axis=1))
    found, nearest = (errors(w, int2(w, steps=n), 64, bits=2)[:, 0] for n in (STEPS, 0))
    assert found.mean() < 1.03 * best.mean() < 0.7 * nearest.mean()


GOLDEN = {
    "normal": "a7c0972297dbaa8a",
    "heavy": "2050df3b7d9cfdb7",
    "spread": "2267f5a0f9ae8967",
    "positive": "6945af2a48fd0253",
    "few values": "e50248f2eee620eb",
    "outliers": "e109587f24c9f16c",
    "tiny": "14b0160f219c273a",
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_bytes_are_those_of_every_processor_and_version(kind: str) -> None:
    """numpy computed the same, step by step, when this was written. Other bytes make stores on disk stale."""
    digest = hashlib.sha256()
    for n, k in ((40, 300), (1, 1), (17, 129)):
        w = weights(kind, n, k, seed=n)
        for steps in (0, 1, STEPS):
            for data in (int4(w, 64, steps=steps), int4(w, 128, steps=steps), int2(w, steps=steps)):
                digest.update(data)
        for data in (int8(w), rows(w, 4), rows(w, 8)):
            digest.update(data.tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[kind]


@settings(max_examples=40)
@given(matrices)
def test_rows_have_the_numbers_of_the_blocks(w: Float32) -> None:
    """A group's scale, zero and codes depend on its weights alone, not on where it is stored."""
    for bits, blocks in ((4, Int4(64)), (8, Int8(64))):
        out = np.empty(blocks.matrix_bytes(*w.shape), np.uint8)
        blocks.encode_matrix(w, out)
        expected = decode_matrix(blocks, out, *w.shape)
        np.testing.assert_array_equal(decode_rows(QuantizedRows(bits), rows(w, bits), w.shape[1]), expected)


def seen_by_float32(w: Float32, nearest: np.ndarray, group: int, bits: int) -> np.ndarray:
    """The largest errors that float32 may take for no larger than `nearest`. It sees each weight's error but
    for a few roundings of the group's largest weight: in the root of a sum of squares these add up as lengths
    do, and in a sum of powers below 1 as powers do. The power itself and the sum are within 0.05 %."""
    starts = range(0, w.shape[1], group)
    counts = np.diff([*starts, w.shape[1]])
    off = 2.0**-22 * np.maximum.reduceat(np.abs(w).astype(np.float64), starts, axis=1)
    if bits == 2:
        return (np.sqrt(nearest * 1.0005) + 2 * off * np.sqrt(counts)) ** 2
    return nearest * 1.0005 + 2 * counts * off**NORM


@settings(max_examples=60)
@given(matrices, groups)
def test_never_worse_than_rounding_to_nearest(w: Float32, group: int) -> None:
    found, nearest = errors(w, int4(w, group), group), errors(w, int4(w, group, steps=0), group)
    assert (found <= seen_by_float32(w, nearest, group, 4) + 1e-35).all()
    found, nearest = errors(w, int2(w), 64, bits=2), errors(w, int2(w, steps=0), 64, bits=2)
    assert (found <= seen_by_float32(w, nearest, 64, 2) + 1e-35).all()


@pytest.mark.parametrize("group", [64, 128])
def test_weights_at_the_edges(group: int) -> None:
    k = group
    rows = {
        "zeros": np.zeros(k),
        "all equal": np.full(k, -0.37),
        "denormal": np.linspace(-1e-40, 1e-40, k),
        "one outlier": np.where(np.arange(k) == 5, 1e30, 0.01),
        "largest": np.linspace(-1.3e36, 1.3e36, k),
        "two values": np.where(np.arange(k) % 2, 0.5, -0.5),
        "sixteen steps": np.arange(k) % 16 * 0.125 - 1,
        "negative zero": np.full(k, -0.0),
    }
    w = np.array(list(rows.values()), np.float32)
    with np.errstate(all="raise", under="ignore"):
        data = int4(w, group)
    found = dict(zip(rows, decode_matrix(Int4(group), data, *w.shape), strict=True))
    assert all(np.isfinite(row).all() for row in found.values())
    assert not found["zeros"].any()
    assert not found["negative zero"].any()
    assert np.abs(found["denormal"]).max() <= 1e-35
    np.testing.assert_allclose(found["all equal"], -0.37, rtol=2**-8)
    np.testing.assert_allclose(found["two values"], rows["two values"], rtol=2**-7)
    np.testing.assert_array_equal(found["sixteen steps"], rows["sixteen steps"].astype(np.float32))
    assert 0.2e30 < found["one outlier"][5] < 1.1e30
    assert np.abs(found["largest"] - rows["largest"]).max() <= 0.1e36
    wide = decode_matrix(Int8(), int8(w), *w.shape)
    assert (np.abs(wide - w).max(axis=1) <= np.abs(w).max(axis=1) / 253 + 1e-38).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, -(2.0**120)])
@pytest.mark.parametrize("place", [(0, 0), (20, 99), (15, 64)])
def test_weights_that_are_no_numbers_are_refused(bad: float, place: tuple[int, int]) -> None:
    w = weights("normal", 21, 100, 0)
    w[place] = bad
    every = (
        lambda: int4(w, 64),
        lambda: int8(w),
        lambda: rows(w, 4),
    )
    for encode in every:
        with pytest.raises(WeightsUnusable, match="not a number"):
            encode()
    w[place] = np.nextafter(np.float32(2.0**120), np.float32(0))  # the largest that is used
    for encode in every:
        encode()


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shm.quantize.VERSION", VERSION + 1)
    with pytest.raises(NotCompiled, match="_quantize is not compiled for this version"):
        library.__wrapped__()


@settings(max_examples=30)
@given(matrices, groups)
def test_any_strides_are_read(w: Float32, group: int) -> None:
    expected = int4(w, group), int8(w), rows(w, 4)
    turned = np.ascontiguousarray(w.T).T
    wide = np.full((w.shape[0] * 2, w.shape[1] * 3), np.nan, np.float32)
    wide[1::2, ::3] = w
    mirrored = np.ascontiguousarray(w[::-1, ::-1])[::-1, ::-1]
    shifted = np.frombuffer(b"x" + w.tobytes(), np.uint8)[1:].view(np.float32).reshape(w.shape)
    for same in (turned, wide[1::2, ::3], mirrored, shifted):
        np.testing.assert_array_equal(int4(same, group), expected[0])
        np.testing.assert_array_equal(int8(same), expected[1])
        np.testing.assert_array_equal(rows(same, 4), expected[2])


def test_what_does_not_fit_is_refused() -> None:
    w = weights("normal", 16, 64, 0)
    target = np.zeros(Int4(64).matrix_bytes(16, 64), np.uint8)
    fixed = target.copy()
    fixed.flags.writeable = False
    for out in (target[:-1], np.zeros(2 * len(target), np.uint8)[::2], target.view(np.int8), fixed):
        with pytest.raises(ValueError, match="records need"):
            encode_blocks(w, 4, 64, out)
    for out in (target[:16].reshape(1, -1), np.zeros((16, 2 * 192), np.uint8)[:, ::2], fixed.reshape(4, -1)):
        with pytest.raises(ValueError, match="records need"):
            encode_rows(w, 4, out)
    for bad in (w.astype(np.float64), w[0], w[:0], w[:, :0]):
        with pytest.raises(ValueError, match="float32"):
            encode_blocks(bad, 4, 64, target)
    for group in (0, 12, 512):
        with pytest.raises(ValueError, match="group"):
            encode_blocks(w, 4, group, target)
    assert not target.any()


def half(w: Float32, **how: object) -> Bytes:
    out = np.full(Int4(64).matrix_bytes(*w.shape), 0xAB, np.uint8)
    encode_blocks(w, 4, 64, out, half=True, **how)
    return out


def test_scales_in_binary16() -> None:
    """They are numpy's, also below the normal numbers, and with them the errors are as with bfloat16."""
    random = np.random.default_rng(2)
    w = random.standard_normal((160, 64)).astype(np.float32)
    w *= 10.0 ** np.linspace(-7, 4, 160, dtype=np.float32)[:, None]
    found = half(w, steps=0).reshape(10, -1)[:, :32].copy().view(np.float16).ravel()
    low, high = np.minimum(w.min(axis=1), 0), np.maximum(w.max(axis=1), 0)
    step = (high - low) / np.float32(15)
    wanted = np.where(step < 2.0**-22, np.float32(0), step).astype(np.float16)
    np.testing.assert_array_equal(found, wanted)
    assert 0 < (wanted == 0).sum() < (wanted < 2.0**-14).sum() < 80
    usual = (0.02 * random.standard_normal((48, 128))).astype(np.float32)
    blocks, out = format_named("int4-f16"), half(usual)
    off = np.abs(decode_matrix(blocks, out, *usual.shape).astype(np.float64) - usual) ** NORM
    assert off.sum() < 1.005 * errors(usual, int4(usual, 64), 64).sum()
