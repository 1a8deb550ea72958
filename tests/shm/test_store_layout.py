"""The bytes of tiles: their offsets, encoding and decoding, and padding without effect."""

import numpy as np
import torch
from decoding import decode
from hypothesis import given
from hypothesis import strategies as st

from shm.blocks import Int2, Int8
from shm.expert_math import SWIGLU, ExpertMath, Relu2
from shm.formats import round_to_bf16
from shm.layout import FORMATS, PAGE, BlockFormat, ExpertShape, FloeFormat, StoreLayout, TileFormat

WORST = {2: 0.75, 4: 0.35, 8: 0.01, 16: 0.004, 32: 0, "fp8": 0.036}  # of the largest weight, by bits


@st.composite
def layouts(draw: st.DrawFn) -> StoreLayout:
    format = draw(st.sampled_from([*FORMATS.values(), Int2(64), Int8(64)]))
    tile = draw(st.integers(1, 2 if format.granularity > 1 else 60)) * format.granularity
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 150), st.integers(1, 150)))
    kinds = [SWIGLU, ExpertMath(bias=True)]
    if not isinstance(format, FloeFormat):
        kinds += [ExpertMath(Relu2()), ExpertMath(Relu2(), True)]
    return StoreLayout(ExpertShape(*sizes, tile, draw(st.sampled_from(kinds))), format)


def bits_of(format: TileFormat) -> tuple[int | str, int | str, int | str]:
    """Of gate, up and down, as keys of WORST."""
    if isinstance(format, FloeFormat):
        return format.rows.bits, format.up.bits, format.rows.bits
    plain = {"f32": 32, "bf16": 16}.get(format.name, format.name)
    bits = format.bits if isinstance(format, BlockFormat) else plain
    return bits, bits, bits


@given(layouts())
def test_tiles_and_heads_do_not_overlap_and_experts_are_aligned(layout: StoreLayout) -> None:
    shape = layout.shape
    written = np.zeros(layout.total_bytes, np.uint8)  # how often each byte is a tile's, a head's
    for place in np.ndindex(shape.layers, shape.experts, shape.tiles):
        begin, head = layout.offset(*place), layout.head_offset(*place)
        written[begin : begin + layout.tile_bytes] += 1
        written[head : head + layout.head_bytes] += 1
        assert place[2] or (begin % PAGE, head % PAGE) == (0, 0)
        layer = place[0] * layout.layer_stride
        heads_end = layer + shape.experts * layout.head_stride
        assert layer <= head <= heads_end <= begin < layer + layout.layer_stride
    assert written.max() == 1
    of_heads = layout.heads_bytes - layout.head_bytes * shape.tiles  # up's biases, behind them
    assert written.sum() == (layout.expert_bytes - of_heads) * shape.layers * shape.experts
    assert layout.heads_bytes <= layout.head_stride


@given(layouts(), st.integers(0, 2**32))
def test_experts_decode_and_padding_is_zero(layout: StoreLayout, seed: int) -> None:
    shape, format, rng = layout.shape, layout.format, np.random.default_rng(seed)
    wide = (shape.intermediate, shape.hidden)
    gate, up, down = (rng.standard_normal(s).astype(np.float32) for s in (wide, wide, wide[::-1]))
    biases = [rng.standard_normal(wide[0]).astype(np.float32) for _ in range(shape.math.biases)]
    out = np.full(layout.expert_stride, 0xAB, np.uint8)
    heads = np.full(layout.head_stride, 0xAB, np.uint8)
    layout.encode_expert(gate if shape.math.gated else None, up, down, out, heads, biases)
    tiles = [layout.tile_of(out, heads, tile) for tile in range(shape.tiles)]
    decoded = [decode(format, body, shape.hidden, shape.tile, head, shape.math) for body, head in tiles]
    together = np.concatenate(decoded, axis=1)  # [matrices, padded, H]
    skipped = 0 if shape.math.gated else 1
    for part, w, bits in zip(together, (gate, up, down.T)[skipped:], bits_of(format)[skipped:], strict=True):
        assert np.abs(part[: shape.intermediate] - w).max() <= WORST[bits] * np.abs(w).max()
    assert not together[:-1, shape.intermediate :].any()  # so whatever down's is, it adds nothing
    assert not out[layout.tile_bytes * shape.tiles :].any()
    assert not heads[layout.heads_bytes :].any()
    found = [layout.biases_of(out, heads, tile) for tile in range(shape.tiles)]
    for of_tiles, wanted in zip(zip(*found, strict=True), biases, strict=True):
        assert all(part.ctypes.data % 4 == 0 for part in of_tiles)
        np.testing.assert_array_equal(np.concatenate(of_tiles)[: shape.intermediate], wanted)
        assert not np.concatenate(of_tiles)[shape.intermediate :].any()
    for (body, _), numbers in zip(tiles, found, strict=True):  # the rest of what is beside the matrices is 0
        for part in numbers:
            part[:] = 0
        if isinstance(format, BlockFormat) and format.factors:
            size = format.matrices_bytes(shape.hidden, shape.tile, shape.math.matrices)
            factors = format.factors_of(body[:size])[: shape.math.matrices]
            assert (factors > 0).all()
            factors[:] = 0
        assert not format.beside_matrices(body, shape.hidden, shape.tile, shape.math).any()
    if not isinstance(format, FloeFormat) or shape.math.bias:
        return
    # The tiles of an expert together are as one tile, and 16 channels of a tile are a smaller tile.
    assert not together[2, shape.intermediate :].any()
    for channels in (shape.padded, 16):
        size, head = format.tile_bytes(shape.hidden, channels), format.head_bytes(shape.hidden, channels)
        found = decode(format, out[:size], shape.hidden, channels, heads[:head])
        np.testing.assert_array_equal(found, together[:, :channels])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_bf16_rounds_as_torch_does(patterns):
    edges = [0, 1 << 31, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F800001, 0x3F808000]
    edges.append(0x3F818000)
    values = np.array(edges + patterns, dtype=np.uint32).view(np.float32)
    ours = round_to_bf16(values)
    theirs = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan((ours[nan].astype(np.uint32) << 16).view(np.float32)).all()
