"""Encodes a checkpoint's experts into the store, on all cores.

A core reads and encodes a chunk (`chunks.py`) without the interpreter's lock. Meanwhile the kernel reads the
next experts ahead, and drops the encoded ones from the page cache: they are not read again, and would evict
what the engine's start reads next.

Memory beyond the store and the page cache: two `down` matrices, or READ_AHEAD_BYTES / 3 of smaller ones (none
for formats of quantized blocks), and CHUNK_BYTES for each core, whatever the model's size.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from pipeline.checkpoint.chunks import expert_chunks
from pipeline.checkpoint.reader import TensorReader
from pipeline.models.architecture import ExpertRows
from shm.store import StoreBuilder

READ_AHEAD_BYTES = 1 << 27  # of experts that are not yet encoded; two experts in any case
DOWN_READERS = 2  # threads that read whole `down` matrices

LocateExpert = Callable[[int, int], ExpertRows]  # layer of the store, expert -> location in the checkpoint


class _Pending(NamedTuple):
    layer: int
    expert: int
    rows: ExpertRows
    nbytes: int  # in the checkpoint
    chunks: list[Future[None]]


def encode_experts(
    reader: TensorReader, locate: LocateExpert, builder: StoreBuilder, progress: Callable[[int], None]
) -> None:
    """`progress` is called in this thread with the bytes of the store encoded so far. Raises ModelError where
    a tensor is missing, has another shape or weights that cannot be encoded, or its file changed."""
    layout = builder.layout
    shape = layout.shape
    stride = layout.layer_stride // shape.experts
    pending: deque[_Pending] = deque()
    checksums: list[Future[None]] = []

    def retire(pool: ThreadPoolExecutor) -> int:
        """Wait for the oldest expert's chunks, then start its checksums; its bytes in the checkpoint."""
        oldest = pending.popleft()
        begin = layout.before(oldest.layer, oldest.expert)
        for done, chunk in enumerate(oldest.chunks, 1):
            chunk.result()
            progress(begin + stride * done // len(oldest.chunks))
        checksums.extend(pool.submit(task) for task in builder.checksum_tasks(oldest.layer, oldest.expert))
        for rows in oldest.rows:
            reader.advise(rows, os.POSIX_FADV_DONTNEED)
        return oldest.nbytes

    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(DOWN_READERS) as downs, ThreadPoolExecutor(cores) as pool:
        try:
            ahead = nbytes = 0
            for layer in range(shape.layers):
                for expert in range(shape.experts):
                    # All experts have one size: this one has that of the one before it.
                    while len(pending) >= 2 and ahead + nbytes > READ_AHEAD_BYTES:
                        ahead -= retire(pool)
                    matrices = locate(layer, expert)
                    target = builder.expert(layer, expert), builder.heads(layer, expert)
                    chunks = expert_chunks(reader, downs, layout, matrices, *target)
                    submitted = [pool.submit(chunk) for chunk in chunks]
                    nbytes = sum(reader.advise(rows, os.POSIX_FADV_WILLNEED) for rows in matrices)
                    pending.append(_Pending(layer, expert, matrices, nbytes, submitted))
                    ahead += nbytes
            while pending:
                retire(pool)
            for checksum in checksums:
                checksum.result()
        except BaseException:
            for threads in (downs, pool):
                threads.shutdown(wait=False, cancel_futures=True)
            raise
