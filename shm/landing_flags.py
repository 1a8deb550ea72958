"""Which tiles have landed, as the device and the host can both see it: one number for each slot of a slab.

    uint32 [slots + SPARE]   the number of the slot's latest landing; page-locked where a GPU uses it

Every order of a slot has a number: even, larger than the one before, in a cycle of 2**32. Whoever copies the
tile writes the number behind the tile's last byte. A device that waits goes on once the flag has reached the
number, `reached`; so it does when the number after it, which is odd, is written instead: the tile will not
land, and what the device computes from its slot is dropped. A plain store of the host does that, without a
call of the driver, which a waiting device may hold up.

A slot has one order at a time, and numbers are counted for each slot by itself: a flag is never further than
two orders away from the number that is waited for, however long a tile stays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shm.errors import ShmError
from shm.segment import Segment

SPARE = 2  # flags behind those of the slots, with which each side tries whether the device can use them
NONE = 0  # the number of an order without a flag
CYCLE = 1 << 32
FLAG = 4  # bytes


def next_number(number: int) -> int:
    """The number of a slot's next order: even, and never NONE."""
    following = ((number | 1) + 1) % CYCLE
    return following or 2


def reached(flag: int, number: int) -> bool:
    """Whether a device that waits for the number goes on: the flag is at it or after it, in the cycle."""
    return (flag - number) % CYCLE < CYCLE // 2


class LandingFlags:
    """The flags of one slab, shared by the processes that attach them."""

    def __init__(self, segment: Segment, slots: int) -> None:
        """Use `create` or `attach`."""
        self.segment = segment
        self.slots = slots
        self.array: NDArray[np.uint32] = segment.array[: (slots + SPARE) * FLAG].view(np.uint32)

    @classmethod
    def create(cls, name: str, slots: int) -> LandingFlags:
        """New flags, all NONE. Raises NotEnoughMemory, and ShmError where the name is taken."""
        return cls(Segment.create(name, (slots + SPARE) * FLAG), slots)

    @classmethod
    def attach(cls, name: str, slots: int) -> LandingFlags:
        """Another process's flags. Raises SegmentMissing, and ShmError where they are those of another
        slab."""
        segment = Segment.attach(name, writable=True)
        if segment.size != (slots + SPARE) * FLAG:
            segment.close()
            raise ShmError(f"the segment {name} does not hold the flags of {slots} slots")
        return cls(segment, slots)

    def landed(self, slot: int, number: int) -> bool:
        """The slot's order of this number has landed."""
        return int(self.array[slot]) == number

    def abort(self, slot: int, number: int) -> None:
        """Whatever waits for this number goes on. The order must not be under way any more, or what is
        computed from its slot must be dropped."""
        self.array[slot] = number + 1

    def close(self) -> None:
        """End this process's use; its creator unlinks `segment.name`."""
        del self.array
        self.segment.close()
