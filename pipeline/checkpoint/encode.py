"""From a checkpoint's expert tensors to the store's bytes, on all cores.

An expert is cut into pieces (`pieces.py`); each core reads the rows of a piece and encodes them, both
without the interpreter's lock. What is to be read next has been announced to the kernel, which fetches it
from the disk into the page cache meanwhile. What is encoded it is told to drop: nobody reads it again soon,
and it would drive out what the engine's start reads next. A virtual machine is also slow to get new pages
from its host, where those that were dropped just now are at hand.

Memory beyond the store and the page cache: two `down` matrices, or ANNOUNCED_BYTES / 3 of smaller ones, and
for each core PIECE_BYTES, whatever the model's size. Quantized formats need no `down` matrix as a whole.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from pipeline.checkpoint.pieces import Parts, expert_pieces
from pipeline.checkpoint.reader import TensorReader
from shm.store import StoreBuilder

ANNOUNCED_BYTES = 1 << 27  # of experts that are announced and not yet encoded; two experts in any case
DOWN_READERS = 2  # threads that read whole `down` matrices

ExpertParts = Callable[[int, int], Parts]  # layer of the store, expert -> gate, up, down


class _Pending(NamedTuple):
    layer: int
    expert: int
    parts: Parts
    nbytes: int  # in the checkpoint
    pieces: list[Future[None]]


def encode_experts(
    reader: TensorReader, parts: ExpertParts, builder: StoreBuilder, progress: Callable[[int], None]
) -> None:
    """Fill a store with every expert of a checkpoint. `progress` is given the bytes of the store encoded so
    far, in this thread. Raises ModelError where a tensor is missing, has another shape or weights that
    cannot be encoded, or where its file changed."""
    layout = builder.layout
    shape = layout.shape
    pending: deque[_Pending] = deque()
    settled: list[Future[None]] = []

    def retire(pool: ThreadPoolExecutor) -> int:
        """Wait for the oldest expert; what is then left to do with it is begun."""
        oldest = pending.popleft()
        begin = layout.offset(oldest.layer, oldest.expert)
        for done, piece in enumerate(oldest.pieces, 1):
            piece.result()
            progress(begin + layout.expert_stride * done // len(oldest.pieces))
        settled.extend(pool.submit(part) for part in builder.settle(oldest.layer, oldest.expert))
        for part in oldest.parts:
            reader.forget(part)
        return oldest.nbytes

    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(DOWN_READERS) as downs, ThreadPoolExecutor(cores) as pool:
        try:
            announced = nbytes = 0
            for layer in range(shape.layers):
                for expert in range(shape.experts):
                    # All experts are of one size: this one is going to be as large as the one before it.
                    while len(pending) >= 2 and announced + nbytes > ANNOUNCED_BYTES:
                        announced -= retire(pool)
                    found = parts(layer, expert)
                    pieces = expert_pieces(reader, downs, layout, found, builder.expert(layer, expert))
                    submitted = [pool.submit(piece) for piece in pieces]
                    nbytes = sum(reader.expect(part) for part in found)
                    pending.append(_Pending(layer, expert, found, nbytes, submitted))
                    announced += nbytes
            while pending:
                retire(pool)
            for part in settled:
                part.result()
        except BaseException:
            for threads in (downs, pool):
                threads.shutdown(wait=False, cancel_futures=True)
            raise
