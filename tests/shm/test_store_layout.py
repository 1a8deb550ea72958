"""The bytes of tiles: their offsets, encoding and decoding, and padding without effect."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.errors import UnknownFormat
from shm.formats import round_to_bf16
from shm.layout import PAGE, ExpertShape, StoreLayout, format_named

shapes = st.builds(
    ExpertShape,
    layers=st.integers(1, 3),
    experts=st.integers(1, 4),
    hidden=st.integers(1, 40),
    intermediate=st.integers(1, 50),
    tile=st.integers(1, 60),
)
formats = st.sampled_from(["f32", "bf16"]).map(format_named)


def matrices(shape: ExpertShape, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    wide = (shape.intermediate, shape.hidden)
    return tuple(rng.standard_normal(s).astype(np.float32) for s in (wide, wide, wide[::-1]))


def swiglu(gate: np.ndarray, up: np.ndarray, down: np.ndarray, x: np.ndarray) -> np.ndarray:
    """down @ (silu(gate x) * (up x)) in double precision; gate, up [T, H], down [H, T]."""
    gate, up, down, x = (a.astype(np.float64) for a in (gate, up, down, x))
    g = gate @ x
    return down @ (g / (1 + np.exp(-g)) * (up @ x))


@given(shapes, formats)
def test_tiles_are_disjoint_in_order_and_experts_aligned(shape, fmt):
    layout = StoreLayout(shape, fmt)
    end = 0
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            assert layout.offset(layer, expert) % PAGE == 0
            for tile in range(shape.tiles):
                begin = layout.offset(layer, expert, tile)
                assert begin == end if tile else 0 <= begin - end < PAGE
                end = begin + layout.tile_bytes
    assert end <= layout.total_bytes < end + PAGE


@given(shapes)
def test_offsets_outside_the_shape_are_refused(shape):
    layout = StoreLayout(shape, format_named("f32"))
    for place in ((shape.layers, 0, 0), (0, shape.experts, 0), (0, 0, shape.tiles + 1), (-1, 0, 0)):
        with pytest.raises(IndexError):
            layout.offset(*place)


@given(shapes, formats, st.integers(0, 2**32))
@settings(deadline=None)
def test_every_number_decodes_and_padding_is_zero(shape, fmt, seed):
    layout = StoreLayout(shape, fmt)
    gate, up, down = matrices(shape, seed)
    out = np.full(layout.expert_stride, 0xAB, dtype=np.uint8)
    layout.encode_expert(gate, up, down, out)
    tiles = [
        fmt.decode(out[t * layout.tile_bytes : (t + 1) * layout.tile_bytes], shape.hidden, shape.tile)
        for t in range(shape.tiles)
    ]
    decoded = np.concatenate(tiles, axis=1)  # [3, padded, H]
    expected = np.stack((gate, up, down.T))
    if fmt.name == "bf16":
        expected = torch.from_numpy(expected).bfloat16().float().numpy()
    np.testing.assert_array_equal(decoded[:, : shape.intermediate], expected)
    assert not decoded[:, shape.intermediate :].any()
    assert not out[layout.tile_bytes * shape.tiles :].any()


@given(shapes, st.integers(0, 2**32))
@settings(deadline=None)
def test_the_sum_of_the_tiles_is_the_expert(shape, seed):
    layout = StoreLayout(shape, format_named("f32"))
    gate, up, down = matrices(shape, seed)
    out = np.empty(layout.expert_stride, dtype=np.uint8)
    layout.encode_expert(gate, up, down, out)
    x = np.random.default_rng(seed + 1).standard_normal(shape.hidden).astype(np.float32)
    total = np.zeros(shape.hidden)
    for tile in range(shape.tiles):
        data = out[tile * layout.tile_bytes : (tile + 1) * layout.tile_bytes]
        g, u, d = layout.format.decode(data, shape.hidden, shape.tile)
        total += swiglu(g, u, d.T, x)
    np.testing.assert_allclose(total, swiglu(gate, up, down, x), rtol=1e-9, atol=1e-9)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_bf16_rounds_as_torch_does(patterns):
    edges = [
        0,
        1 << 31,
        1,
        0x807FFFFF,
        0x7F800000,
        0xFF800000,
        0x7F7FFFFF,
        0x7F800001,
        0x3F808000,
        0x3F818000,
    ]
    values = np.array(edges + patterns, dtype=np.uint32).view(np.float32)
    ours = round_to_bf16(values)
    theirs = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan((ours[nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_unknown_format_error_names_the_known_ones():
    with pytest.raises(UnknownFormat, match=r"int3.*f32, bf16"):
        format_named("int3")


def test_a_shape_needs_positive_sizes():
    with pytest.raises(ValueError, match="positive"):
        ExpertShape(1, 1, 1, 0, 1)
