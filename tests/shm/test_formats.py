"""The bytes of our own quantized formats, read one by one as they are drawn (`test_codes.py` has those of the
formats of files), and random tiles of every format."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from decoding import decode, decode_matrix
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.blocks import Int2, Int8
from shm.layout import DENSE, FORMATS, BlockFormat, FileFormat, Float32

LANES = 16
OWN = (f for f in DENSE.values() if isinstance(f, BlockFormat) and not isinstance(f, FileFormat))
BLOCK_FORMATS = [*OWN, Int2(64), Int8(64)]
formats = st.sampled_from(BLOCK_FORMATS)
sizes = st.builds(tuple, st.tuples(st.integers(1, 50), st.integers(1, 300)))
seeds = st.integers(0, 2**32 - 1)


def normal(n: int, k: int, seed: int) -> Float32:
    return (np.random.default_rng(seed).standard_normal((n, k)) * 0.02).astype(np.float32)


def encoded(fmt: BlockFormat, w: Float32) -> np.ndarray:
    out = np.full(fmt.matrix_bytes(*w.shape), 0xAB, np.uint8)
    fmt.encode_matrix(w, out)
    return out


def bf16(data: bytes) -> float:
    return struct.unpack("<f", b"\0\0" + data)[0]


def number(fmt: BlockFormat, data: bytes, inputs: int, output: int, column: int) -> float:
    """One number of a matrix of `inputs` inputs, from the drawing alone."""
    groups, group = -(-inputs // fmt.group), fmt.group
    size = 64 + 2 * fmt.bits * group
    start = (output // LANES * groups + column // group) * size
    record, lane, place = data[start : start + size], output % LANES, column % group
    if fmt.bits < 8:
        scale, zero = bf16(record[2 * lane : 2 * lane + 2]), bf16(record[32 + 2 * lane : 34 + 2 * lane])
        step = 32 // fmt.bits  # inputs of 64 bytes, of which 4 are next to each other
        byte = record[64 + 64 * (place // step) + 4 * lane + place % 4]
        return scale * ((byte >> place % step // 4 * fmt.bits) % (1 << fmt.bits) - zero)
    scale = struct.unpack("<f", record[4 * lane : 4 * lane + 4])[0]
    return scale * (record[64 + 64 * (place // 4) + 4 * lane + place % 4] - 128)


@settings(max_examples=25)
@given(formats, st.integers(1, 35), st.integers(1, 150), seeds)
def test_every_number_is_at_its_documented_place(fmt: BlockFormat, n: int, k: int, seed: int) -> None:
    data = encoded(fmt, normal(n, k, seed))
    decoded = decode_matrix(fmt, data, n, k)
    drawn = [[number(fmt, data.tobytes(), k, output, column) for column in range(k)] for output in range(n)]
    assert decoded.shape == (n, k)
    np.testing.assert_allclose(decoded, drawn, rtol=1e-6, atol=0)


@settings(max_examples=50)
@given(formats, sizes, seeds)
def test_padding_is_zero(fmt: BlockFormat, size: tuple[int, int], seed: int) -> None:
    n, k = size
    blocks, groups = -(-n // LANES), -(-k // fmt.group)
    data = encoded(fmt, normal(n, k, seed))
    wide = decode_matrix(fmt, data, blocks * LANES, groups * fmt.group)
    assert not wide[n:].any()
    records = data.reshape(blocks, groups, fmt.record_bytes)
    head = records[-1, :, :64].copy().view("<u2" if fmt.bits < 8 else "<u4")
    lanes = head.reshape(groups, -1, LANES)  # scales; zeros
    assert not lanes[..., (n - 1) % LANES + 1 :].any()
    codes = code_matrix(fmt, data, n, k)
    codes[:n, :k] = fmt.bits == 8 and 128
    assert (codes == (128 if fmt.bits == 8 else 0)).all()


def code_matrix(fmt: BlockFormat, data: np.ndarray, n: int, k: int) -> np.ndarray:
    """The codes with everything that pads them, [outputs, inputs]: with scale 1 and zero 0, what decodes."""
    blocks, groups = -(-n // LANES), -(-k // fmt.group)
    records = data.copy().reshape(blocks, groups, fmt.record_bytes)
    if fmt.bits < 8:
        records[..., :32].view("<u2")[:] = 0x3F80
        records[..., 32:64] = 0
    else:
        records[..., :64].view("<f4")[:] = 1
    return decode_matrix(fmt, records.reshape(-1), blocks * LANES, groups * fmt.group) + (
        0 if fmt.bits < 8 else 128
    )


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("hidden", [200, 37])
def test_random_tiles_have_the_scale_asked_for(fmt, hidden: int) -> None:
    tile = 256
    sizes = fmt.tile_bytes(hidden, tile), fmt.head_bytes(hidden, tile)
    first, again, other = ([np.full(size, 0xAB, np.uint8) for size in sizes] for _ in range(3))
    for seed, (out, head) in ((1, first), (1, again), (2, other)):
        fmt.fill_random(np.random.default_rng(seed), hidden, tile, 0.02, out, head)
    for one, same, differing in zip(first, again, other, strict=True):
        assert (one == same).all()
        assert len(one) == 0 or (one != differing).any()
    for part in decode(fmt, first[0], hidden, tile, first[1]):
        assert np.isfinite(part).all()
        assert abs(part.std() / 0.02 - 1) < 0.05
        assert abs(part.mean()) < 0.001
