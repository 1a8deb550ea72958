"""A Work and its answer in one piece of memory, as a ring has it (`ring.py`) and C computes it
(`workers/kernels/c/slot.h`). Numbers are in the machine's byte order; arrays are contiguous, in C order.

    offset 0    written by the coordinator, 64 bytes of int64:
                  0 posted   8 abandoned   16 seq   24 layer   32 items n   40 rows k   48 rows of x R
                 56 threshold float32   60 share float32: the Work's mask
           64   written by the worker, 64 bytes:
                  0 answered int64   8 result int64   16 busy float64, seconds
                 24 mass float64   32 left float64   40 kept int64   48 channels int64: what the mask left out
           128  the request: items int32 [n, 3], offsets int32 [n + 1], rows int32 [k], weights float32 [k],
                then from the next multiple of 64 bytes x float32 [R, hidden]
           ...  the answer: y float32 [R, hidden]

Request and answer have room for a fixed number of numbers of 4 bytes, whole lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.messages import Partial, Work
from shm.layout import Float32
from shm.mask import Tally

LINE = 64  # bytes: no two writers share a cache line
POSTED, ABANDONED, SEQ, LAYER, ITEMS, ROWS, X_ROWS = range(7)  # of a slot's numbers
RESULT, BUSY = 9, 10
MASS, LEFT, KEPT, CHANNELS = range(11, 15)
THRESHOLD, SHARE = 14, 15  # of its numbers of 4 bytes
ITEMS_PER_ROW = 16  # of a Work with few rows; a wide Work shares experts among its rows


@dataclass(frozen=True)
class SlotShape:
    """Rows of `hidden` numbers; room for request and answer in numbers of 4 bytes."""

    hidden: int
    request: int
    answer: int

    @classmethod
    def for_rows(cls, rows: int, hidden: int) -> SlotShape:
        """For Works of up to `rows` rows."""
        lists = 6 * rows * ITEMS_PER_ROW + 1
        return cls(hidden, _lines(lists) + _lines(rows * hidden), _lines(rows * hidden))

    @classmethod
    def for_work(cls, work: Work, hidden: int) -> SlotShape:
        lists, x = 4 * len(work.items) + 1 + 2 * len(work.rows), _lines(len(work.x) * hidden)
        return cls(hidden, _lines(lists) + x, x)

    @property
    def bytes(self) -> int:
        return 2 * LINE + 4 * (self.request + self.answer)

    def fits(self, work: Work) -> bool:
        x = len(work.x) * self.hidden
        lists = _lines(4 * len(work.items) + 1 + 2 * len(work.rows))
        return lists + x <= self.request and x <= self.answer


class Slot:
    """A slot of this process's memory or of a ring."""

    def __init__(self, shape: SlotShape, memory: NDArray[np.uint8]) -> None:
        """`memory`: uint8 [shape.bytes], at the beginning of a cache line."""
        self.shape = shape
        self.address = int(memory.ctypes.data)
        self.head = memory[: 2 * LINE].data.cast("q")
        self._doubles = memory[: 2 * LINE].data.cast("d")  # `BUSY`, `MASS` and `LEFT` of them
        self._singles = memory[:LINE].data.cast("f")  # `THRESHOLD` and `SHARE` of them
        area = memory[2 * LINE : shape.bytes].view(np.int32)
        self._lists: NDArray[np.int32] = area[: shape.request]
        self._weights = self._lists.view(np.float32)
        self._y = area[shape.request :].view(np.float32)

    @property
    def seq(self) -> int:
        return self.head[SEQ]

    @property
    def items(self) -> int:
        """The number of items."""
        return self.head[ITEMS]

    @property
    def x_rows(self) -> int:
        return self.head[X_ROWS]

    @property
    def busy(self) -> float:
        """Seconds that the Work was computed."""
        return self._doubles[BUSY]

    @busy.setter
    def busy(self, seconds: float) -> None:
        self._doubles[BUSY] = seconds

    @property
    def tally(self) -> Tally:
        """What the Work's mask kept and left out."""
        head, doubles = self.head, self._doubles
        return Tally(doubles[MASS], doubles[LEFT], head[KEPT], head[CHANNELS])

    @tally.setter
    def tally(self, tally: Tally) -> None:
        head, doubles = self.head, self._doubles
        doubles[MASS], doubles[LEFT], head[KEPT], head[CHANNELS] = (
            tally.mass, tally.left, tally.kept, tally.channels,
        )  # fmt: skip

    def partial(self, incarnation: int, in_place: bool = False) -> Partial:
        """The answer; its y is a copy, or the slot's own."""
        head, doubles = self.head, self._doubles
        return Partial(
            self.seq, incarnation, doubles[BUSY], self.y() if in_place else self.y().copy(),
            doubles[MASS], doubles[LEFT], head[KEPT], head[CHANNELS],
        )  # fmt: skip

    def write(self, work: Work) -> None:
        """A Work that fits: all but `posted`."""
        items, rows, x_rows = len(work.items), len(work.rows), len(work.x)
        head, lists = self.head, self._lists
        head[SEQ], head[LAYER], head[ITEMS], head[ROWS], head[X_ROWS] = (
            work.seq, work.layer, items, rows, x_rows,
        )  # fmt: skip
        self._singles[THRESHOLD], self._singles[SHARE] = work.threshold, work.share
        offsets, first = 3 * items, 4 * items + 1
        lists[:offsets] = work.items.ravel()
        lists[offsets:first] = work.offsets
        lists[first : first + rows] = work.rows
        self._weights[first + rows : first + 2 * rows] = work.weights
        self._x(first + 2 * rows, x_rows)[:] = work.x

    def read(self) -> Work:
        """The Work; its arrays are the slot's. Raises IndexError where they would not lie in it."""
        seq, layer, items, rows, x_rows = self.head[SEQ : X_ROWS + 1].tolist()
        lists, offsets, first = self._lists, 3 * items, 4 * items + 1
        x = x_rows * self.shape.hidden
        if min(items, rows, x_rows) < 0 or _lines(first + 2 * rows) + x > len(lists) or x > len(self._y):
            raise IndexError("arrays larger than their memory")
        return Work(
            seq,
            layer,
            lists[:offsets].reshape(items, 3),
            lists[offsets:first],
            lists[first : first + rows],
            self._weights[first + rows : first + 2 * rows],
            self._x(first + 2 * rows, x_rows),
            self._singles[THRESHOLD],
            self._singles[SHARE],
        )

    def y(self) -> Float32:
        """float32 [R, hidden]: the answer's place."""
        rows = self.head[X_ROWS]
        return self._y[: rows * self.shape.hidden].reshape(rows, self.shape.hidden)

    def _x(self, lists: int, rows: int) -> Float32:
        start = _lines(lists)
        return self._weights[start : start + rows * self.shape.hidden].reshape(rows, self.shape.hidden)


class OwnSlot:
    """A slot in this process's own memory, which grows with the Works that are put into it."""

    def __init__(self, hidden: int) -> None:
        self._slot = _new(SlotShape.for_rows(1, hidden))

    def put(self, work: Work) -> Slot:
        """The slot with this Work; valid until the next. Raises ValueError where the Work's arrays do not
        fit each other, MemoryError."""
        hidden = self._slot.shape.hidden
        items, rows = work.items, len(work.rows)
        if work.x.shape[1] != hidden:
            raise ValueError(f"rows of {work.x.shape[1]} numbers instead of {hidden}")
        if items.shape[1] != 3 or len(work.offsets) != len(items) + 1 or rows != len(work.weights):
            raise ValueError(
                f"items {items.shape}, offsets {work.offsets.shape}, rows {work.rows.shape} and "
                f"weights {work.weights.shape} do not fit each other"
            )
        if not self._slot.shape.fits(work):
            self._slot = _new(SlotShape.for_work(work, hidden))
        self._slot.write(work)
        return self._slot


def _new(shape: SlotShape) -> Slot:
    memory = np.empty(shape.bytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    memory[start : start + 2 * LINE] = 0
    return Slot(shape, memory[start : start + shape.bytes])


def _lines(numbers: int) -> int:
    """Numbers of 4 bytes in whole lines."""
    return -(-numbers // (LINE // 4)) * (LINE // 4)
