"""Places a store's tiles on a machine with several NUMA nodes.

Tile t of expert e, and its head, lie on node (e + t) % n of the n nodes that workers compute on: any range of
an expert's tiles, and experts of a single tile too, are then spread over all nodes' memory. The policy is set
before the pages are allocated (mbind on a shared mapping: the policy belongs to the segment and outlives the
mapping). A page goes with the tile or head that holds its first byte. It is a preference: if a node is full,
the kernel takes memory of another node.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from shm.layout import StoreLayout

MPOL_PREFERRED = 1
MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235}  # the system call's number
BATCH = 1024  # spans of one mapping: each is a memory area, and a process can have only so many
WORD = 64  # bits of a word of the kernel's set of nodes

Mbind = Callable[[int, int, int], int]  # address, length, node -> 0, or the error's number


@dataclass(frozen=True)
class Span:
    """Bytes of a segment, in whole pages, for one node (its position among the nodes)."""

    start: int
    length: int
    node: int


def node_of(expert: int, tile: int, nodes: int) -> int:
    """The position of a tile's node among `nodes` nodes."""
    return (expert + tile) % nodes


def spans(layout: StoreLayout, start: int, nodes: int, page: int = mmap.PAGESIZE) -> Iterator[Span]:
    """The pages of a store with experts from byte `start` on, in order."""

    def begin(offset: int) -> int:
        return -(-(start + offset) // page) * page

    shape = layout.shape
    parts = ((layout.head_offset, layout.head_stride), (layout.offset, layout.expert_stride))
    for layer in range(shape.layers):
        for place, stride in parts:
            for expert in range(shape.experts):
                starts = [place(layer, expert, tile) for tile in range(shape.tiles)]
                bounds = map(begin, (*starts, starts[0] + stride))
                for tile, (lo, hi) in enumerate(pairwise(bounds)):
                    if lo < hi:
                        yield Span(lo, hi - lo, node_of(expert, tile, nodes))


def interleave(
    descriptor: int, layout: StoreLayout, start: int, nodes: Sequence[int], mbind: Mbind | None = None
) -> str:
    """Set the policy of a store's segment so that its pages are allocated on these nodes (the kernel's
    numbers). `descriptor`: the open segment, of its full length and without pages. Returns "", or one line
    with the kernel's reason if it refuses; does nothing for one node."""
    if len(nodes) < 2:
        return ""
    place = mbind or kernel_mbind()
    if place is None:
        return f"tiles are not placed on NUMA nodes: how to is not known for {platform.machine()}"
    left = spans(layout, start, len(nodes))
    while batch := list(islice(left, BATCH)):
        first = batch[0].start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        last = batch[-1].start + batch[-1].length
        with mmap.mmap(descriptor, min(last, os.fstat(descriptor).st_size) - first, offset=first) as mapping:
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            for span in batch:
                error = place(address + span.start - first, span.length, nodes[span.node])
                if error:
                    return f"tiles are not placed on NUMA nodes: {os.strerror(error)}"
    return ""


def kernel_mbind() -> Mbind | None:
    """The system call; None on a machine for which its number is unknown."""
    number = MBIND.get(platform.machine())
    if number is None:
        return None
    syscall: Any = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long

    def mbind(address: int, length: int, node: int) -> int:
        words = node // WORD + 1
        mask = (ctypes.c_uint64 * words)()
        mask[node // WORD] = 1 << node % WORD
        bits = ctypes.c_ulong(words * WORD + 1)  # the kernel subtracts one from this number
        done = syscall(
            ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(length),
            ctypes.c_int(MPOL_PREFERRED), mask, bits, ctypes.c_uint(0),
        )  # fmt: skip
        return 0 if done == 0 else ctypes.get_errno()

    return mbind
