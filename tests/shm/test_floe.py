"""The formats that are read by channel: every number at its place, odd sizes, padding, heads in the store;
and the recorded bytes of the formats without heads."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from decoding import decode, decode_matrix, decode_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import write_cache

from shm.disk_cache import CachedStore
from shm.floe import FLOE_FORMATS, FloeFormat
from shm.layout import NO_HEAD, ExpertShape, Float32
from shm.segment import unlink
from shm.store import Store, StoreBuilder, StoreManifest

formats = st.sampled_from(FLOE_FORMATS)
seeds = st.integers(0, 2**32 - 1)
WORST = {2: 0.75, 4: 0.35, 8: 0.01, 16: 0.004}  # of the largest weight, by bits
IDS = [f.name for f in FLOE_FORMATS]


def normal(n: int, k: int, seed: int) -> Float32:
    return (np.random.default_rng(seed).standard_normal((n, k)) * 0.02).astype(np.float32)


def number(fmt: FloeFormat, data: bytes, hidden: int, channel: int, part: int, place: int) -> float:
    """One number of gate (part 0) or down (1) in a body, from the drawing of `shm/floe.py` alone."""

    def lines(nbytes: int) -> int:
        return -(-nbytes // 64) * 64

    def bf16(at: int) -> float:
        return struct.unpack("<f", b"\0\0" + record[at : at + 2])[0]

    bits, (group, inside) = fmt.rows.bits, divmod(place, 64)
    b, i = divmod(inside, 16)
    if bits == 16:
        size = lines(2 * hidden)
    elif bits == 8:
        groups = lines(hidden) // 64
        size = lines(4 * groups) + 64 * groups
    else:
        groups = -(-hidden // 128) * 2
        size = 2 * lines(2 * groups) + 32 * groups
    start = (2 * channel + part) * size
    record = data[start : start + size]
    if bits == 16:
        return bf16(2 * place)
    if bits == 8:
        scale = struct.unpack("<f", record[4 * group : 4 * group + 4])[0]
        return scale * (record[lines(4 * groups) + 64 * group + 4 * i + b] - 128)
    byte = record[2 * lines(2 * groups) + 64 * (group // 2) + 4 * i + b]
    code = byte >> 4 if group % 2 else byte & 15
    return bf16(2 * group) * (code - bf16(lines(2 * groups) + 2 * group))


@settings(max_examples=40)
@given(formats, st.integers(1, 300), st.integers(1, 2), seeds)
def test_every_number_is_at_its_documented_place(
    fmt: FloeFormat, hidden: int, blocks: int, seed: int
) -> None:
    tile = 16 * blocks
    gate, up, down = (normal(tile, hidden, seed + n) for n in range(3))
    body = np.full(fmt.tile_bytes(hidden, tile), 0xAB, np.uint8)
    head = np.full(fmt.head_bytes(hidden, tile), 0xAB, np.uint8)
    fmt.encode(gate, up, down, body, head)
    decoded = decode(fmt, body, hidden, tile, head)
    drawn = [
        [
            [number(fmt, body.tobytes(), hidden, channel, part, place) for place in range(0, hidden, 7)]
            for channel in range(tile)
        ]
        for part in range(2)
    ]
    np.testing.assert_allclose(decoded[::2, :, ::7], drawn, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(decoded[1], decode_matrix(fmt.up, head, tile, hidden))
    for part, w, bits in zip(
        decoded, (gate, up, down), (fmt.rows.bits, fmt.up.bits, fmt.rows.bits), strict=True
    ):
        assert np.abs(part - w).max() <= WORST[bits] * np.abs(w).max()


@settings(max_examples=40)
@given(formats, st.integers(1, 300), seeds)
def test_what_pads_a_row_is_fixed(fmt: FloeFormat, hidden: int, seed: int) -> None:
    size, bits = fmt.rows.row_bytes(hidden), fmt.rows.bits
    rows = np.full((16, size), 0xAB, np.uint8)
    fmt.rows.encode(normal(16, hidden, seed), rows)
    codes_bytes = -(-hidden * bits // 512) * 64
    assert np.isfinite(decode_rows(fmt.rows, rows, hidden)).all()
    head, codes = rows[:, : size - codes_bytes], rows[:, size - codes_bytes :]
    if bits == 16:
        assert not codes[:, 2 * hidden :].any()
        return
    scale = bits // 2  # bytes
    for part in np.split(head, 2 if bits == 4 else 1, axis=1):  # scales; zeros
        assert not part[:, scale * -(-hidden // 64) :].any()
    fields = [codes & 15, codes >> 4] if bits == 4 else [codes]
    halves = np.stack([f.reshape(16, -1, 16, 4) for f in fields], axis=2)  # row, line, half, i, b
    numbers = halves.swapaxes(-1, -2).reshape(16, -1)
    assert (numbers[:, hidden:] == (0 if bits == 4 else 128)).all()


@pytest.mark.parametrize("fmt", FLOE_FORMATS, ids=IDS)
def test_what_does_not_fit_is_refused(fmt: FloeFormat) -> None:
    with pytest.raises(ValueError, match="channels, not 40"):
        fmt.tile_bytes(64, 40)
    body, head = np.zeros(fmt.tile_bytes(64, 16), np.uint8), np.zeros(fmt.head_bytes(64, 16), np.uint8)
    for wrong in ((body, NO_HEAD), (body[:-1], head), (body, head[:-1]), (NO_HEAD, head)):
        with pytest.raises(ValueError, match="does not fit"):
            fmt.fill_random(np.random.default_rng(0), 64, 16, 1.0, *wrong)


@pytest.mark.parametrize("name_of_format", ["floe", "floe-u8-int4"])
def test_store_and_disk_cache_keep_the_heads(
    name: str, fingerprint: str, name_of_format: str, tmp_path: Path
) -> None:
    shape = ExpertShape(2, 3, 100, 40, 16)
    builder = StoreBuilder.create(name, StoreManifest(fingerprint, shape, name_of_format, "a test"))
    layout, progress = builder.layout, []
    for layer, expert in np.ndindex(2, 3):
        wide = (normal(40, 100, 6 * layer + 2 * expert), normal(40, 100, 6 * layer + 2 * expert + 1))
        layout.encode_expert(*wide, wide[0].T, builder.expert(layer, expert), builder.heads(layer, expert))
    builder.finish()
    with Store.attach(name, fingerprint) as store:
        up = normal(40, 100, 6 + 2 + 1)
        head, body = store.heads(1, 1, 2, 3), store.tiles(1, 1, 2, 3)
        decoded = decode(layout.format, body, 100, 16, head)
        assert np.abs(decoded[1, :8] - up[32:]).max() <= 0.75 * np.abs(up).max()
        assert not decoded[1, 8:].any()
        assert len(store.heads(0, 2, 0, 3)) == 3 * layout.head_bytes
        assert not store.heads(0, 2, 1, 1).size
        with pytest.raises(ValueError, match="read-only"):
            store.heads(0, 0, 0, 1)[0] = 1
        write_cache(tmp_path, store, lambda done: None)
        again = StoreBuilder.create(f"{name}-again", store.manifest)
        try:
            cached = CachedStore.open(tmp_path, fingerprint)
            assert cached is not None
            with cached:
                cached.fill(again, progress.append)
            assert progress[-1] == layout.total_bytes
            again.finish()
            with Store.attach(f"{name}-again", fingerprint) as other:
                assert (other.all_tiles() == store.all_tiles()).all()
        finally:
            unlink(f"{name}-again")
        for place in ((2, 0, 0, 1), (0, 3, 0, 1), (0, 0, 0, 4), (0, 0, 2, 1)):
            with pytest.raises(IndexError):
                store.heads(*place)
        store.close()
        with pytest.raises(ValueError, match="closed"):
            store.heads(0, 0, 0, 1)
