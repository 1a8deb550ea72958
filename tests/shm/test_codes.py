"""Codes of quantized files: the numbers that they mean, and their way through a store's bytes."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from decoding import decode_matrix
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.blocks import FILE_FORMATS, FileFormat
from shm.codes import CODE_FORMATS, E4M3, E8M0, Codes, format_of_all, rounded
from shm.errors import WeightsUnusable
from shm.formats import Bytes
from shm.layout import format_named

TYPES = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "mxfp4": gguf.GGMLQuantizationType.MXFP4,
    "nvfp4": gguf.GGMLQuantizationType.NVFP4,
}
seeds = st.integers(0, 2**32 - 1)
formats = st.sampled_from(FILE_FORMATS)


def finite_scales(format: str, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    kind = CODE_FORMATS[format]
    if kind.bits == np.float32:
        return random.standard_normal(shape, np.float32)
    if kind.bits == np.uint16:
        bits = random.integers(0, 0x10000, shape).astype(np.uint16)
        bits[bits & 0x7C00 == 0x7C00] &= 0x83FF  # infinite or no number
        return bits
    bits = random.integers(0, 240 if format == "mxfp4" else 256, shape).astype(np.uint8)
    return np.where(np.isnan(E4M3[bits]), 3, bits).astype(np.uint8) if format == "nvfp4" else bits


def drawn(format: str, n: int, k: int, seed: int) -> Codes:
    random, kind = np.random.default_rng(seed), CODE_FORMATS[format]
    groups = n, -(-k // kind.group)
    zeros = random.integers(0, 17, groups).astype(np.uint8) if kind.zeros else None
    codes = random.integers(0, len(kind.values), (n, k)).astype(np.uint8)
    factor = float(np.float32(random.uniform(1e-4, 2))) if format == "nvfp4" else 1.0
    return Codes(format, codes, finite_scales(format, groups, random), zeros, factor)


def unpacked(format: str, blocks: Bytes) -> Codes:
    """A file's blocks [n, bytes], as llama.cpp has them, of one format."""
    size = {"q4_0": 18, "q8_0": 34, "mxfp4": 17, "nvfp4": 36}[format]
    n = len(blocks)
    each = blocks.reshape(n, -1, size)
    head = {"q4_0": 2, "q8_0": 2, "mxfp4": 1, "nvfp4": 4}[format]
    scales, codes = each[..., :head], each[..., head:]
    if format == "q8_0":
        codes = codes ^ 128  # from int8
    elif format == "nvfp4":  # 4 groups of 16, each the low nibbles, then the high ones
        groups = codes.reshape(n, -1, 4, 1, 8)
        codes = np.concatenate((groups & 15, groups >> 4), axis=3)
    else:
        codes = np.concatenate((codes & 15, codes >> 4), axis=2)
    scales = np.ascontiguousarray(scales).view(CODE_FORMATS[format].bits)
    return Codes(format, codes.reshape(n, -1), scales.reshape(n, -1))


@pytest.mark.parametrize("format", TYPES)
def test_values_are_those_of_llama_cpp_bit_for_bit(format: str) -> None:
    """Of blocks of any bytes, but for scales that are no numbers."""
    random = np.random.default_rng(1)
    size = gguf.GGML_QUANT_SIZES[TYPES[format]][1]
    blocks = random.integers(0, 256, (50, 8 * size)).astype(np.uint8)
    if format == "nvfp4":  # its package has scales without a sign
        blocks.reshape(50, 8, size)[..., :4] &= 0x7F
    found = unpacked(format, blocks).values()
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = dequantize(blocks, TYPES[format])
    if format == "mxfp4":  # 255 is not a number in OCP's specification
        blank = (blocks.reshape(50, 8, size)[..., 0] == 255).repeat(32, axis=1)
        assert np.isnan(found[blank]).all()
        wanted[blank] = found[blank] = 0
    if format == "nvfp4":
        no_number = (blocks.reshape(50, 8, size)[..., :4].reshape(50, -1) == 0x7F).repeat(16, axis=1)
        assert np.isnan(found[no_number]).all()
        wanted[no_number] = found[no_number] = 0
    equal = found.view(np.uint32) == wanted.view(np.uint32)
    both_nan = np.isnan(found) & np.isnan(wanted)
    both_zero = (found == 0) & (wanted == 0)  # its table of E2M1 has no negative zero
    assert (equal | both_nan | both_zero).all()
    assert np.isfinite(found).mean() > 0.9


def test_nvfp4_and_zeros_written_out() -> None:
    """Factor 0.5: scales 1.75 (0x3e), 2^-9 (0x01), 448 (0x7e), -1 (0xb8)."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (1, 4))
    scales = np.array([[0x3E, 0x01, 0x7E, 0xB8]], np.uint8)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    wanted = [0.5 * scale * value for scale in (1.75, 2**-9, 448, -1) for value in table]
    assert Codes("nvfp4", codes, scales, factor=0.5).values()[0].tolist() == wanted
    third = Codes("nvfp4", codes, scales, factor=float(np.float32(1 / 3)))
    assert third.values()[0, 7] == np.float32(np.float32(1.75) * np.float32(1 / 3)) * np.float32(6)
    zeros = np.array([[16, 3]], np.uint8)
    half = np.array([[0.25, -2]], np.float16).view(np.uint16)
    found = Codes("int4-f16-g32", codes, half, zeros).values()[0]
    assert found[:3].tolist() == [-4, -3.75, -3.5]
    assert found[32:35].tolist() == [6, 4, 2]
    assert E8M0[[0, 127, 254]].tolist() == [2.0**-127, 1, 2.0**127]


def number(fmt: FileFormat, data: bytes, k: int, output: int, column: int) -> float:
    """One number of a matrix of k inputs, from the drawing of `shm/blocks.py` alone."""
    inputs, size = {"q4_0": (32, 288), "q8_0": (32, 544), "mxfp4": (64, 544), "nvfp4": (32, 288)}.get(
        fmt.name, (fmt.group, 64 + 8 * fmt.group)
    )
    start = (output // 16 * -(-k // inputs) + column // inputs) * size
    record, lane, place = data[start : start + size], output % 16, column % inputs
    lines = record[64:] if fmt.name.startswith("int4") else record[32:]
    if fmt.name == "q8_0":
        code = lines[64 * (place // 4) + 4 * lane + place % 4]
    else:
        code = lines[64 * (place // 8) + 4 * lane + place % 4] >> 4 * (place % 8 // 4) & 15
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    match fmt.name:
        case "q4_0" | "q8_0":
            return struct.unpack_from("<e", record, 2 * lane)[0] * (code - (8 if fmt.bits == 4 else 128))
        case "mxfp4":
            return 2.0 ** (record[16 * (place // 32) + lane] - 127) * table[code]
        case "nvfp4":
            factor = struct.unpack_from("<f", data, len(data) - 64)[0]
            scale = np.float32(factor) * E4M3[record[16 * (place // 16) + lane]]
            return float(scale * np.float32(table[code]))
    zero = struct.unpack("<f", b"\0\0" + record[32 + 2 * lane : 34 + 2 * lane])[0]
    return struct.unpack_from("<e", record, 2 * lane)[0] * (code - zero)


@settings(max_examples=30)
@given(formats, st.integers(1, 35), st.integers(1, 150), seeds)
def test_every_code_is_at_its_documented_place(fmt: FileFormat, n: int, k: int, seed: int) -> None:
    codes = drawn(fmt.name, n, k, seed)
    out = np.full(fmt.matrix_bytes(n, k), 0xAB, np.uint8)
    fmt.encode_matrix(codes, out)
    data = out.tobytes()
    found = [[number(fmt, data, k, output, column) for column in range(k)] for output in range(n)]
    np.testing.assert_array_equal(codes.values(), np.array(found, np.float32))
    np.testing.assert_array_equal(decode_matrix(fmt, out, n, k), codes.values())
    padded = decode_matrix(fmt, out, -(-n // 16) * 16, k)
    assert not padded[n:].any()


@settings(max_examples=30)
@given(st.sampled_from([*CODE_FORMATS]), st.integers(1, 40), st.integers(1, 300), seeds, st.data())
def test_slices_are_those_of_the_values(format: str, n: int, k: int, seed: int, data: st.DataObject) -> None:
    codes = drawn(format, n, k, seed)
    group, values = codes.kind.group, codes.values()
    lo, hi = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, -(-k // group))] * 2)))
    np.testing.assert_array_equal(codes.rows(lo, hi).values(), values[lo:hi])
    np.testing.assert_array_equal(codes[::-1].values(), values[::-1])
    part = codes.columns(first * group, last * group)
    np.testing.assert_array_equal(part.values(), values[:, first * group : last * group])
    if k > 1 and group > 1:
        with pytest.raises(ValueError, match="no whole groups"):
            codes.columns(1, k)
    if format != "fp8" or not np.isnan(values).any():
        wide = codes.padded(n + 3, k + group + 5).values()
        np.testing.assert_array_equal(wide[:n, :k], values)
        assert not wide[n:].any()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([*CODE_FORMATS]), st.integers(1, 40), st.integers(1, 300), seeds)
def test_codes_of_integers_are_codes_of_q8_0(format: str, n: int, k: int, seed: int) -> None:
    codes = drawn(format, n, k, seed)
    assert codes.kept_in(format) is codes
    kept = codes.kept_in("q8_0")
    assert (kept is not None) == (format_of_all({format, "q8_0"}) == "q8_0")
    if kept is not None:
        assert kept.format == "q8_0"
        np.testing.assert_array_equal(kept.values(), codes.values())


@pytest.mark.parametrize("format", ["q4_0", "q8_0", "mxfp4"])
def test_numbers_are_rounded_as_by_llama_cpp(format: str) -> None:
    w = (np.random.default_rng(5).standard_normal((64, 256)) * 0.03).astype(np.float32)
    w[3] = 0
    w[5, :32] = 2.0**-5 * np.arange(32)  # between two codes
    wanted = unpacked(format, quantize(w, TYPES[format]))
    found = rounded(w, format)
    np.testing.assert_array_equal(found.scales, wanted.scales)
    np.testing.assert_array_equal(found.codes, wanted.codes)


@settings(max_examples=25)
@given(formats, st.integers(1, 40), st.integers(1, 300), seeds, st.sampled_from([1e-3, 0.02, 30.0]))
def test_rounded_numbers_are_near(fmt: FileFormat, n: int, k: int, seed: int, scale: float) -> None:
    """Each within half of its group's widest step, but for scales that are rounded themselves: 127 steps of
    q8_0, each by 2^-11, are .06 of one."""
    w = (np.random.default_rng(seed).standard_normal((n, k)) * scale).astype(np.float32)
    out = np.empty(fmt.matrix_bytes(n, k), np.uint8)
    fmt.encode_matrix(w, out)
    most = np.maximum.reduceat(np.abs(w), range(0, k, fmt.group), axis=1).repeat(fmt.group, axis=1)[:, :k]
    share = {"q8_0": 1 / 225, "q4_0": 1 / 7.9, "nvfp4": 1 / 5.5, "mxfp4": 1 / 3.9}.get(fmt.name)
    off = np.abs(decode_matrix(fmt, out, n, k) - w)
    if share is None:  # optimised: outliers may be far off
        assert off.mean() <= 0.08 * most.mean()
    else:
        assert (off <= share * most + 4e-6 + 3e-6 * np.abs(w).max()).all()


@pytest.mark.parametrize("fmt", FILE_FORMATS, ids=lambda fmt: fmt.name)
def test_codes_of_another_format_are_quantized_as_their_numbers(fmt: FileFormat) -> None:
    w = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)
    other = rounded(w, "mxfp4" if fmt.name == "q4_0" else "q4_0")
    found, wanted = (np.zeros(fmt.matrix_bytes(16, 64), np.uint8) for _ in range(2))
    fmt.encode_matrix(other, found)
    fmt.encode_matrix(other.values(), wanted)
    np.testing.assert_array_equal(found, wanted)


def test_wrong_codes_are_refused() -> None:
    good = drawn("q4_0", 16, 64, 1)
    with pytest.raises(ValueError, match="no 16 x 64 codes"):
        Codes("q4_0", good.codes, good.scales[:, :1])
    with pytest.raises(ValueError, match="no factor"):
        Codes("q4_0", good.codes, good.scales, factor=2.0)
    with pytest.raises(ValueError, match="zeros"):
        Codes("int4-f16", good.codes, good.scales[:, :1])
    bad = {"q4_0": 0x7C00, "q8_0": 0xFE00, "mxfp4": 255, "nvfp4": 0x7F, "int4-f16": 0x7C00}
    for name, bits in bad.items():
        codes, fmt = drawn(name, 16, 64, 2), format_named(name)
        codes.scales[7, 0] = bits
        with pytest.raises(WeightsUnusable, match="not a number"):
            fmt.encode_matrix(codes, np.empty(fmt.matrix_bytes(16, 64), np.uint8))
    w = np.full((16, 64), np.nan, np.float32)
    for fmt in FILE_FORMATS:
        with pytest.raises(WeightsUnusable, match="not a number"):
            fmt.encode_matrix(w, np.empty(fmt.matrix_bytes(16, 64), np.uint8))
    large = np.full((16, 64), 7e4, np.float32)
    half = format_named("int4-f16")
    with pytest.raises(WeightsUnusable, match="beyond 65536"):
        half.encode_matrix(large, np.empty(half.matrix_bytes(16, 64), np.uint8))
