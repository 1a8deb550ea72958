"""The store: building, attaching, and its head against damage."""

import struct
import zlib

import numpy as np
import pytest
from decoding import decode
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack
from small_store import SHAPE, build, file_of, fill

from shm.errors import SegmentMissing, StoreInvalid
from shm.layout import PAGE
from shm.segment import Segment
from shm.store import (
    BUILDING,
    MAX_MANIFEST,
    READY,
    STATE_OFFSET,
    Store,
    StoreBuilder,
    StoreManifest,
    pack_head,
    read_head,
    store_bytes,
    store_name,
)


def test_a_store_gives_back_what_was_built(fingerprint):
    build(fingerprint)
    assert file_of(fingerprint).stat().st_mode & 0o7777 == 0o600
    with Store.attach(store_name(fingerprint), fingerprint) as store:
        assert store.fingerprint == fingerprint
        assert store.layout.shape == SHAPE
        assert store.manifest.source == "/models/tiny"
        rng = np.random.default_rng(0)
        for layer in range(SHAPE.layers):
            for expert in range(SHAPE.experts):
                gate = rng.standard_normal((SHAPE.intermediate, SHAPE.hidden)).astype(np.float32)
                rng.standard_normal(2 * SHAPE.intermediate * SHAPE.hidden)
                tile = store.tiles(layer, expert, 2, 3)
                assert tile.shape == (store.layout.tile_bytes,)
                assert not tile.flags.writeable
                decoded = decode(store.layout.format, tile, SHAPE.hidden, SHAPE.tile)
                np.testing.assert_allclose(decoded[0], gate[32:48], rtol=2**-8)
        whole = store.tiles(1, 2, 0, SHAPE.tiles)
        np.testing.assert_array_equal(whole[-store.layout.tile_bytes :], store.tiles(1, 2, 6, 7))
        assert store.tiles(0, 0, 3, 3).size == 0


class RecordedArray(np.ndarray):
    """Calls `wrote` after each assignment to it or to a view of it."""

    def __array_finalize__(self, source) -> None:
        self.wrote = getattr(source, "wrote", None)

    def __setitem__(self, key, value) -> None:
        super().__setitem__(key, value)
        if self.wrote is not None:
            self.wrote()


def test_store_becomes_ready_by_a_separate_last_write(fingerprint):
    """A write of more than the state could be seen in any order by another process."""
    manifest = StoreManifest(fingerprint, SHAPE, "bf16", "/models/tiny")
    builder = StoreBuilder.create(store_name(fingerprint), manifest)
    fill(builder)
    memory = builder.segment.array
    start = store_bytes(manifest) - builder.layout.total_bytes
    heads = [memory[:start].tobytes()]
    recorded = memory.view(RecordedArray)
    recorded.wrote = lambda: heads.append(memory[:start].tobytes())
    builder.segment._array = recorded
    builder.finish()
    state = slice(STATE_OFFSET, STATE_OFFSET + 4)
    assert [head[state] for head in heads[:-1]] == [BUILDING.to_bytes(4, "little")] * (len(heads) - 1)
    assert heads[-1][state] == READY.to_bytes(4, "little")
    changed = [at for at, pair in enumerate(zip(*heads[-2:], strict=True)) if pair[0] != pair[1]]
    assert set(changed) <= set(range(STATE_OFFSET, STATE_OFFSET + 4))
    written, _ = read_head(np.frombuffer(heads[-1], np.uint8), store_bytes(manifest))
    assert written.fingerprint == fingerprint
    Store.attach(store_name(fingerprint), fingerprint).close()


def test_tiles_outside_the_shape_and_after_closing(fingerprint):
    build(fingerprint)
    store = Store.attach(store_name(fingerprint))
    for bad in ((2, 0, 0, 1), (0, 3, 0, 1), (0, 0, 0, 8), (0, 0, 2, 1), (0, 0, -1, 1)):
        with pytest.raises(IndexError):
            store.tiles(*bad)
    view = store.tiles(0, 0, 0, 1)
    total = int(view.sum())
    store.close()
    store.close()
    assert int(view.sum()) == total
    with pytest.raises(ValueError, match="closed"):
        store.tiles(0, 0, 0, 1)


def test_an_unfinished_store_is_not_attached_and_discard_removes_it(fingerprint):
    builder = StoreBuilder.create(store_name(fingerprint), StoreManifest(fingerprint, SHAPE, "f32", ""))
    fill(builder)
    with pytest.raises(StoreInvalid, match="unfinished"):
        Store.attach(store_name(fingerprint))
    builder.discard()
    with pytest.raises(SegmentMissing):
        Store.attach(store_name(fingerprint))


def test_another_models_store_is_refused(fingerprint):
    build(fingerprint)
    with pytest.raises(StoreInvalid, match=r"another model \(/models/tiny\)"):
        Store.attach(store_name(fingerprint), "0" * 64)


def test_layers_are_kept_once_filled_and_the_store_is_their_bytes(fingerprint):
    builder = StoreBuilder.create(store_name(fingerprint), StoreManifest(fingerprint, SHAPE, "bf16", ""))
    fill(builder)
    builder.filled(0)  # `keep` is not set yet
    kept: list[tuple[int, bytes]] = []
    builder.keep = lambda layer, data: kept.append((layer, data.tobytes()))
    for layer in (1, 0):
        builder.filled(layer)
    builder.finish()
    assert [layer for layer, _ in kept] == [1, 0]
    with Store.attach(store_name(fingerprint), fingerprint) as store:
        assert store.all_tiles().tobytes() == kept[1][1] + kept[0][1]


def test_a_segment_that_is_no_store_is_refused(fingerprint):
    with Segment.create(store_name(fingerprint), 3 * PAGE) as segment:
        segment.array[:] = 1
    with pytest.raises(StoreInvalid, match="not a store"):
        Store.attach(store_name(fingerprint))


# --- the head against damage --------------------------------------------------------------------------

GOOD = StoreManifest("ab" * 32, SHAPE, "bf16", "/m", (1, 2))


@given(st.integers(0, len(pack_head(GOOD, READY)) - 1), st.integers(1, 255))
def test_changed_byte_of_the_head_is_refused_or_unused(place, change):
    head = np.frombuffer(pack_head(GOOD, READY), dtype=np.uint8).copy()
    head[place] ^= change
    if 36 <= place < PAGE:
        assert read_head(head, store_bytes(GOOD))[0] == GOOD  # the header page's unused rest
    else:
        with pytest.raises(StoreInvalid):
            read_head(head, store_bytes(GOOD))


@given(st.binary(max_size=6000), st.integers(0, 1 << 40))
def test_arbitrary_bytes_are_refused(data, size):
    with pytest.raises(StoreInvalid):
        read_head(np.frombuffer(data, dtype=np.uint8), size)


def head_of(packed: bytes) -> np.ndarray:
    offset = -(-(PAGE + len(packed)) // PAGE) * PAGE
    header = struct.pack("<8sIIQQI", b"TANDEMST", 2, READY, len(packed), offset, zlib.crc32(packed))
    return np.frombuffer(header.ljust(PAGE, b"\0") + packed, dtype=np.uint8)


FIELDS = msgpack.decode(GOOD.pack())
RELU2 = {"kind": "relu2", "bias": True}
UNREADABLE = "its manifest cannot be read"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (FIELDS | {"checksums": bytes(4)}, "its manifest lacks checksums"),
        (FIELDS | {"checksums": bytes(7)}, UNREADABLE),
        (FIELDS | {"shape": [2, 3, 4]}, UNREADABLE),
        (FIELDS | {"shape": FIELDS["shape"] | {"tile": 0}}, UNREADABLE),
        (FIELDS | {"shape": FIELDS["shape"] | {"depth": 1}}, UNREADABLE),
        (FIELDS | {"shape": FIELDS["shape"] | {"math": 1}}, UNREADABLE),
        (
            FIELDS | {"shape": FIELDS["shape"] | {"math": {"kind": "glu", "bias": False, "alpha": -1}}},
            UNREADABLE,
        ),
        (FIELDS | {"shape": FIELDS["shape"] | {"math": RELU2}, "format": "floe"}, "it needs gated experts"),
        ({name: value for name, value in FIELDS.items() if name != "source"}, UNREADABLE),
        (list(FIELDS), UNREADABLE),
        (FIELDS | {"format": "int3"}, "unknown format 'int3'"),
        (FIELDS | {"format": "int4"}, "a multiple of 64 channels, not 16"),
        (FIELDS | {"source": "s" * MAX_MANIFEST}, "its manifest does not fit"),
    ],
)
def test_a_manifest_that_describes_no_store_is_refused(fields, text):
    with pytest.raises(StoreInvalid, match=text):
        read_head(head_of(msgpack.encode(fields)), 1 << 30)


def test_a_head_cut_short_is_refused():
    head = np.frombuffer(pack_head(GOOD, READY), dtype=np.uint8)
    for length, text in ((PAGE - 1, "shorter than"), (PAGE, "does not fit"), (len(head) - 1, "does not fit")):
        with pytest.raises(StoreInvalid, match=text):
            read_head(head[:length], store_bytes(GOOD))


def test_a_store_cut_short_or_too_long_is_refused():
    head = np.frombuffer(pack_head(GOOD, READY), dtype=np.uint8)
    for size in (store_bytes(GOOD) - 1, store_bytes(GOOD) + 4096, 0):
        with pytest.raises(StoreInvalid):
            read_head(head, size)
