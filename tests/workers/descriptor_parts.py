"""The parts of a descriptor, as C reads them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shm.descriptor import (
    GENERATION,
    HEADER,
    ITEMS,
    LAYER,
    SEQ,
    SHARE,
    THRESHOLD,
    X_ROWS,
    Descriptor,
    Int32,
    head_of,
)
from shm.formats import Float32


class Parts(NamedTuple):
    """The parts of a descriptor; the arrays are the descriptor's own memory."""

    generation: int
    seq: int
    layer: int
    items: Int32
    offsets: Int32
    rows: Int32
    weights: Float32
    x_rows: int
    mask: tuple[float, float]  # threshold, share


def parts_of(descriptor: Descriptor) -> Parts:
    """Raises IndexError where the parts would not lie in the descriptor; the numbers in them are not
    checked."""
    if len(descriptor) < HEADER:
        raise IndexError("arrays larger than their memory")
    head = head_of(descriptor).tolist()
    items, rows, x_rows = head[ITEMS : X_ROWS + 1]
    offsets, first = HEADER + 3 * items, HEADER + 4 * items + 1
    if min(items, rows, x_rows) < 0 or first + 2 * rows > len(descriptor):
        raise IndexError("arrays larger than their memory")
    floats = descriptor.view(np.float32)
    return Parts(
        head[GENERATION],
        head[SEQ],
        head[LAYER],
        descriptor[HEADER:offsets].reshape(items, 3),
        descriptor[offsets:first],
        descriptor[first : first + rows],
        floats[first + rows : first + 2 * rows],
        x_rows,
        (float(floats[THRESHOLD]), float(floats[SHARE])),
    )
