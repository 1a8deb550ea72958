"""From a checkpoint's expert tensors to the store's bytes.

One thread reads, in the order of the store; all cores encode what has been read, in blocks of whole tiles,
so that the float32 numbers of a block (not of an expert) are all the memory a core needs beside the
tensors in flight. numpy releases the interpreter's lock while it converts.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from pipeline.checkpoint.reader import RawTensor, TensorReader, to_float32
from pipeline.errors import ModelError
from shm.errors import WeightsUnusable
from shm.layout import Bytes, StoreLayout
from shm.store import StoreBuilder

BLOCK_NUMBERS = 1 << 20  # of one matrix in one block: 4 MB of float32, which a core's caches can hold
IN_FLIGHT_BYTES = 1 << 29  # tensors that have been read and not yet encoded, beside the newest expert

ExpertNames = Callable[[int, int], tuple[str, str, str]]  # layer, expert -> gate, up, down


def encode_experts(
    reader: TensorReader, names: ExpertNames, builder: StoreBuilder, progress: Callable[[int], None]
) -> None:
    """Fill a store with every expert of a checkpoint. `progress` is given the bytes of the store encoded so
    far, in this thread. Raises ModelError where a tensor is missing or has another shape."""
    layout = builder.layout
    shape = layout.shape
    pending: deque[tuple[int, int, int, list[Future[None]]]] = deque()  # layer, expert, bytes, blocks
    sums: list[Future[int]] = []
    in_flight = 0

    def retire(pool: ThreadPoolExecutor) -> int:
        """Wait for the oldest expert's blocks; a layer's last one starts its checksum."""
        layer, expert, nbytes, blocks = pending.popleft()
        for block in blocks:
            block.result()
        if expert == shape.experts - 1:
            sums.append(pool.submit(builder.checksum, layer))
        progress(layout.offset(layer, expert) + layout.expert_stride)
        return nbytes

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for layer in range(shape.layers):
                for expert in range(shape.experts):
                    tensors = names(layer, expert)
                    matrices = _read_expert(reader, tensors, layout)
                    nbytes = sum(m.bits.nbytes for m in matrices)
                    blocks = _submit(pool, layout, tensors, matrices, builder.expert(layer, expert))
                    pending.append((layer, expert, nbytes, blocks))
                    in_flight += nbytes
                    while in_flight - nbytes > IN_FLIGHT_BYTES:
                        in_flight -= retire(pool)
            while pending:
                retire(pool)
            for layer_sum in sums:
                layer_sum.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _read_expert(reader: TensorReader, names: tuple[str, str, str], layout: StoreLayout) -> list[RawTensor]:
    wide = (layout.shape.intermediate, layout.shape.hidden)  # gate and up [I, H]; down is [H, I]
    matrices = []
    for name, expected in zip(names, (wide, wide, wide[::-1]), strict=True):
        matrix = reader.raw(name)
        if matrix.shape != expected:
            raise ModelError(
                f"the tensor {name} has the shape {list(matrix.shape)}; config.json says {list(expected)}"
            )
        matrices.append(matrix)
    return matrices


def _submit(
    pool: ThreadPoolExecutor,
    layout: StoreLayout,
    names: tuple[str, str, str],
    matrices: list[RawTensor],
    out: Bytes,
) -> list[Future[None]]:
    """Encode one expert, block by block. A block of whole tiles is laid out like a smaller expert."""
    shape = layout.shape
    out[layout.tile_bytes * shape.tiles :] = 0
    tiles = max(1, BLOCK_NUMBERS // (shape.tile * shape.hidden))
    blocks = []
    for first in range(0, shape.tiles, tiles):
        last = min(first + tiles, shape.tiles)
        lo, hi = first * shape.tile, min(last * shape.tile, shape.intermediate)
        block = replace(layout, shape=replace(shape, layers=1, experts=1, intermediate=hi - lo))
        part = out[first * layout.tile_bytes : last * layout.tile_bytes]
        blocks.append(pool.submit(_encode_block, block, names, matrices, lo, hi, part))
    return blocks


def _encode_block(
    layout: StoreLayout,
    names: tuple[str, str, str],
    matrices: list[RawTensor],
    lo: int,
    hi: int,
    out: Bytes,
) -> None:
    gate, up, down = matrices
    # A tile holds down's columns as rows: turning them over while they are narrow is a quarter faster.
    columns = np.ascontiguousarray(down.bits[:, lo:hi].T)
    try:
        layout.encode_expert(
            to_float32(gate.dtype, gate.bits[lo:hi]),
            to_float32(up.dtype, up.bits[lo:hi]),
            to_float32(down.dtype, columns).T,
            out,
        )
    except WeightsUnusable as e:
        raise ModelError(f"{e}, in one of the tensors {', '.join(names)}") from None
