"""The slab of a device that is a CPU: fixed-size slots for resident tiles, in one shared-memory segment.

    byte 0       stride       2*stride               slots*stride
    | slot 0     | slot 1     | ...                  |      stride = slot_bytes rounded up to 64

64 bytes are a cache line: no two slots share one, so filling a slot does not disturb the readers of its
neighbours, and vector loads stay aligned. Pages would waste up to 4095 bytes a slot, and nothing here works
page by page. Only the coordinator's expert cache knows the contents of the slots.
"""

from __future__ import annotations

from collections.abc import Callable

from shm.errors import ShmError
from shm.layout import Bytes
from shm.segment import Segment

CACHE_LINE = 64


class Slab:
    """`slots` writable slots of `slot_bytes` bytes each, shared by the processes that attach them."""

    def __init__(self, segment: Segment, slots: int, slot_bytes: int) -> None:
        """View a segment as slots. Use `create` or `attach`."""
        self.segment = segment
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = _stride(slot_bytes)

    @classmethod
    def create(
        cls, name: str, slots: int, slot_bytes: int, progress: Callable[[int], None] | None = None
    ) -> Slab:
        """A new slab; `progress` as in Segment.create. Raises NotEnoughMemory, and ShmError where the name is
        taken."""
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"a slab needs slots and bytes, not {slots} slots of {slot_bytes} bytes")
        return cls(Segment.create(name, slots * _stride(slot_bytes), progress), slots, slot_bytes)

    @classmethod
    def attach(cls, name: str, slots: int, slot_bytes: int) -> Slab:
        """Another process's slab. Raises SegmentMissing, and ShmError where it has another size."""
        segment = Segment.attach(name, writable=True)
        if segment.size != slots * _stride(slot_bytes):
            segment.close()
            raise ShmError(f"the slab {name} does not hold {slots} slots of {slot_bytes} bytes")
        return cls(segment, slots, slot_bytes)

    def slot(self, index: int) -> Bytes:
        """uint8 [slot_bytes], writable. Raises IndexError outside the slab."""
        if not 0 <= index < self.slots:
            raise IndexError(f"the slab has {self.slots} slots and no slot {index}")
        start = index * self._stride
        return self.segment.array[start : start + self.slot_bytes]

    def close(self) -> None:
        """End this process's use (see Segment.close); its creator unlinks `segment.name`."""
        self.segment.close()

    def __enter__(self) -> Slab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // CACHE_LINE) * CACHE_LINE
