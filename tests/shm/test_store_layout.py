"""The bytes of tiles: their offsets, encoding and decoding, and padding without effect."""

import numpy as np
import torch
from decoding import decode
from hypothesis import given, settings
from hypothesis import strategies as st

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


@given(shapes, formats, st.integers(0, 2**32))
@settings(deadline=None)
def test_every_number_decodes_and_padding_is_zero(shape, fmt, seed):
    layout = StoreLayout(shape, fmt)
    gate, up, down = matrices(shape, seed)
    out = np.full(layout.expert_stride, 0xAB, dtype=np.uint8)
    layout.encode_expert(gate, up, down, out)
    tiles = [
        decode(fmt, out[t * layout.tile_bytes : (t + 1) * layout.tile_bytes], shape.hidden, shape.tile)
        for t in range(shape.tiles)
    ]
    decoded = np.concatenate(tiles, axis=1)  # [3, padded, H]
    expected = np.stack((gate, up, down.T))
    if fmt.name == "bf16":
        expected = torch.from_numpy(expected).bfloat16().float().numpy()
    np.testing.assert_array_equal(decoded[:, : shape.intermediate], expected)
    assert not decoded[:, shape.intermediate :].any()
    assert not out[layout.tile_bytes * shape.tiles :].any()


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
