"""NUMA placement of tiles: every page of the experts belongs to one node, and its policy is set."""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.formats import F32
from shm.layout import FORMATS, PAGE, ExpertShape, StoreLayout
from shm.numa import interleave, kernel_mbind, node_of, spans
from shm.segment import SHM_FOLDER
from shm.store import Store, StoreBuilder, StoreManifest

START = 2 * PAGE


@st.composite
def layouts(draw: st.DrawFn) -> StoreLayout:
    size = st.integers(1, 5)
    hidden, tile_format = draw(st.integers(1, 600)), draw(st.sampled_from([F32(), FORMATS["floe-int4"]]))
    tile = draw(st.integers(1, 9)) * tile_format.granularity
    intermediate = draw(st.integers(1, 40 * tile_format.granularity))
    return StoreLayout(ExpertShape(draw(size), draw(size), hidden, intermediate, tile), tile_format)


@settings(max_examples=150)
@given(layouts(), st.integers(1, 5), st.sampled_from([PAGE, 16 * PAGE]))
def test_every_page_goes_with_the_tile_of_its_first_byte(layout: StoreLayout, nodes: int, page: int) -> None:
    found = list(spans(layout, START, nodes, page))
    shape = layout.shape
    at = -(-START // page) * page
    for span in found:
        assert span.start == at  # consecutive
        assert span.length > 0
        assert span.length % page == 0
        at += span.length
    assert at == -(-(START + layout.total_bytes) // page) * page
    of_page = {start: s.node for s in found for start in range(s.start, s.start + s.length, page)}
    for start, node in of_page.items():
        layer, rest = divmod(start - START, layout.layer_stride)
        if layer < shape.layers:  # the last large page may begin where the experts end
            heads = shape.experts * layout.head_stride
            stride, nbytes = layout.expert_stride, layout.tile_bytes
            if rest < heads:
                stride, nbytes = layout.head_stride, layout.head_bytes
            expert, rest = divmod(rest if rest < heads else rest - heads, stride)
            tile = min(rest // nbytes, shape.tiles - 1)  # then there is padding
            assert node == node_of(expert, tile, nodes)


@pytest.fixture
def descriptor() -> Iterator[int]:
    fd = os.memfd_create("tandem-test-numa")
    yield fd
    os.close(fd)


def test_one_node_sets_no_policy_and_a_refusal_is_one_line(descriptor: int) -> None:
    layout = StoreLayout(ExpertShape(1, 2, 1024, 4, 1), F32())
    os.ftruncate(descriptor, START + layout.total_bytes)
    asked = []

    def refuse(address: int, length: int, node: int) -> int:
        asked.append(node)
        return errno.EPERM

    assert interleave(descriptor, layout, START, (0,), refuse) == ""
    assert interleave(descriptor, layout, START, (), refuse) == ""
    assert asked == []
    note = interleave(descriptor, layout, START, (0, 1), refuse)
    assert note == "tiles are not placed on NUMA nodes: Operation not permitted"
    assert len(asked) == 1


def policy(name: str, start: int) -> str:
    """The kernel's policy of a page of a segment, and the page's node: /proc describes a mapping by the
    policy of its first page."""
    with (
        Path(SHM_FOLDER, name.lstrip("/")).open("rb") as file,
        mmap.mmap(file.fileno(), PAGE, prot=mmap.PROT_READ, offset=start) as mapping,
    ):
        assert mapping[0] == 1
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        for line in Path("/proc/self/numa_maps").read_text().splitlines():
            if int(line.split()[0], 16) == address:
                placed = re.search(r" (N\d+)=1 ", line + " ")
                return f"{line.split()[1]} {placed[1] if placed else ''}"
    raise AssertionError("the mapping is not listed")


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_kernel_places_the_pages_of_a_store_by_its_policy(name: str) -> None:
    """Both of the "nodes" are node 0, so that it works anywhere; the policy of the pages shows the call."""
    mbind = kernel_mbind()
    assert mbind is not None
    with mmap.mmap(-1, PAGE) as mapping:
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        if error := mbind(address, PAGE, 0):
            pytest.skip(f"mbind is refused here: {os.strerror(error)}")
        assert mbind(address, PAGE, 1000) == errno.EINVAL
    shape = ExpertShape(1, 3, 1024, 8, 1)
    builder = StoreBuilder.create(name, StoreManifest("ab" * 32, shape, "f32", "a test"), nodes=(0, 0))
    assert builder.notes == ()
    builder.layer(0)[:] = 1
    for tile in range(8):
        assert policy(name, START + builder.layout.offset(0, 2, tile)) == "prefer:0 N0"
    builder.finish()
    with Store.attach(name) as store:
        assert (store.tiles(0, 2, 0, 8) == 1).all()
