"""The format fp8: its numbers are torch's and transformers', its bytes where they are drawn."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoding import decode_matrix, fp8_codes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from shm.codes import E4M3, Codes
from shm.errors import WeightsUnusable
from shm.formats import Float32
from shm.fp8 import FP8, encode_rows, nearest_e4m3, transposed
from workers.kernels.matrix import HostMatrix
from workers.kernels.native import Library

FORMAT = FP8()
EVERY = np.arange(256, dtype=np.uint8)
NUMBERS = EVERY[(EVERY & 0x7F) != 0x7F]


def of_torch(codes: np.ndarray) -> Float32:
    numbers: Float32 = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    return numbers


def test_every_pattern_is_torchs_number() -> None:
    found, wanted = E4M3, of_torch(EVERY)
    assert (np.isnan(found) == np.isnan(wanted)).all()
    np.testing.assert_array_equal(found[NUMBERS].view(np.uint32), wanted[NUMBERS].view(np.uint32))


def test_every_pattern_is_that_number_in_kernels(library: Library) -> None:
    """In each variant: products with rows of the identity, whatever the place within a vector."""
    inputs = len(NUMBERS)
    rows = np.stack([np.roll(NUMBERS, shift) for shift in range(0, inputs, 7)])
    scales = np.full((len(rows), 2), [[2.0, 0.25]], np.float32)
    codes, data = Codes("fp8", rows, scales), np.empty(FORMAT.matrix_bytes(*rows.shape), np.uint8)
    FORMAT.encode_matrix(codes, data)
    matrix = HostMatrix(library, None, FORMAT, rows.shape, data)
    for x in np.array_split(np.eye(inputs, dtype=np.float32), 12):
        at = x.argmax(axis=1)
        wanted = of_torch(rows)[:, at].T * np.where(at < 128, np.float32(2), np.float32(0.25))[:, None]
        np.testing.assert_array_equal(matrix.product(x), wanted)
        np.testing.assert_array_equal(matrix.product(x[:1]), wanted[:1])


def test_magnitudes_are_rounded_as_torch_does() -> None:
    random = np.random.default_rng(0)
    middles = (E4M3[:126] + E4M3[1:127]) / 2
    beside = [np.nextafter(middles, np.float32(to)) for to in (0, 1000)]
    some = np.exp2(random.uniform(-20, 8.8, 1 << 16)).astype(np.float32)
    size = np.concatenate([E4M3[:127], middles, *beside, some])
    wanted = torch.from_numpy(size).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(nearest_e4m3(size), wanted)
    assert nearest_e4m3(np.array([449, 1e30], np.float32)).tolist() == [0x7E, 0x7E]


def test_blocks_are_quantized_and_dequantized_as_by_transformers() -> None:
    random = np.random.default_rng(1)
    w = (random.standard_normal((256, 384)) * np.exp(random.standard_normal((256, 1)))).astype(np.float32)
    w[:128, 128:256] = 0
    w[128:, :128] *= 1e-30
    found = fp8_codes(w)
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    wanted = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert(
        {"a.weight": torch.from_numpy(w)}
    )
    of_theirs = wanted["a.weight"].view(torch.uint8).numpy()
    np.testing.assert_array_equal(found.codes, of_theirs)
    np.testing.assert_array_equal(found.scales[::128], wanted["a.weight_scale_inv"].numpy())
    numbers = Fp8Dequantize(None)._dequantize_one(*wanted.values(), torch.float32).numpy()
    np.testing.assert_array_equal(found.values().view(np.uint32), numbers.view(np.uint32))
    data = np.empty(FORMAT.matrix_bytes(*w.shape), np.uint8)
    FORMAT.encode_matrix(found, data)
    np.testing.assert_array_equal(decode_matrix(FORMAT, data, *w.shape), numbers)


def drawn(n: int, k: int, seed: int) -> Codes:
    """Any numbers, in blocks."""
    random = np.random.default_rng(seed)
    scales = random.standard_normal((-(-n // 128), -(-k // 128))).astype(np.float32)
    return Codes("fp8", random.choice(NUMBERS, (n, k)), scales.repeat(128, axis=0)[:n])


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=15)
@given(st.integers(1, 300), st.integers(1, 300), seeds)
@example(256, 256, 0)
def test_every_number_is_at_its_documented_place(n: int, k: int, seed: int) -> None:
    codes = drawn(n, k, seed)
    out = np.full(FORMAT.matrix_bytes(n, k), 0xAB, np.uint8)
    FORMAT.encode_matrix(codes, out)
    data, begin, values = out.tobytes(), -(-n * k // 64) * 64, codes.values()
    for i, j in np.random.default_rng(seed).integers(0, (n, k), (20, 2)).tolist():
        (scale,) = struct.unpack_from("<f", data, begin + 4 * (i // 128 * -(-k // 128) + j // 128))
        assert np.float32(scale) * E4M3[data[i * k + j]] == values[i, j]
    end = begin + 4 * -(-n // 128) * -(-k // 128)
    assert len(data) == -(-end // 64) * 64
    assert not any(data[n * k : begin] + data[end:])


@settings(max_examples=10)
@given(st.integers(1, 2), st.integers(1, 300), st.booleans(), seeds)
def test_tiles_keep_codes_and_down_transposed(blocks: int, hidden: int, gated: bool, seed: int) -> None:
    channels, matrices = 128 * blocks, 2 + gated
    down = drawn(hidden, channels, seed)
    turned = transposed(down, np.ascontiguousarray(down.codes.T))
    assert turned is not None
    parts = [*(drawn(channels, hidden, seed + 1 + i) for i in range(matrices - 1)), turned]
    out = np.full(FORMAT.matrices_bytes(hidden, channels, matrices), 0xAB, np.uint8)
    FORMAT.clear_padding(out, channels, hidden, matrices)
    codes, scales = FORMAT.parts(out, channels, hidden, matrices)
    for n, part in enumerate(parts):
        encode_rows(part, codes[n], scales[n])
    for n, part in enumerate(parts):
        np.testing.assert_array_equal(codes[n], part.codes)
        np.testing.assert_array_equal(scales[n].repeat(128, axis=0), part.scales)
    np.testing.assert_array_equal(turned.values().T, down.values())
    assert not out[matrices * channels * hidden + scales.nbytes :].any()


def test_rows_that_share_no_scale_are_rounded_and_what_is_no_number_refused() -> None:
    codes = drawn(130, 140, 3)
    uneven = Codes("fp8", codes.codes, codes.scales * np.linspace(1, 2, 130, dtype=np.float32)[:, None])
    out = np.empty(FORMAT.matrix_bytes(130, 140), np.uint8)
    FORMAT.encode_matrix(uneven, out)
    values = uneven.values()
    assert np.abs(decode_matrix(FORMAT, out, 130, 140) - values).max() <= 2**-4 * np.abs(values).max()
    assert transposed(uneven, uneven.codes.T) is None
    for code in (0x7F, 0xFF):
        spoiled = codes.codes.copy()
        spoiled[129, 139] = code
        with pytest.raises(WeightsUnusable, match="cannot be kept in fp8"):
            FORMAT.encode_matrix(Codes("fp8", spoiled, codes.scales), out)
    for number in (np.nan, np.inf, 1e37):
        w = codes.values()
        w[5, 7] = number
        with pytest.raises(WeightsUnusable):
            FORMAT.encode_matrix(w, out)
        with pytest.raises(WeightsUnusable):
            FORMAT.encode_matrix(Codes("fp8", codes.codes, np.full_like(codes.scales, number)), out)
    with pytest.raises(ValueError, match="multiple of 128"):
        FORMAT.matrices_bytes(64, 64)
