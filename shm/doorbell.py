"""Numbers and doorbells in shared memory, by the C library `doorbell.c`.

A doorbell (8 bytes) wakes the one process that waits for it. Numbers (int64) tell what has happened: what a
process wrote before `store` is there for the process whose `load` returns that number. Waits release the GIL.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

VERSION = 4  # of the library's functions: one that an older checkout left behind is not used


class Library:
    """The compiled functions, on addresses in this process: store(number, value), load(number) -> value,
    next(first number, bytes to the next, count, after) -> index, wait(bell, seen, nanoseconds awake, in all)
    -> number of rings."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        number, pointer, count = ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32
        self.load: Any = functions.tandem_load
        self.load.argtypes, self.load.restype = (pointer,), number
        self.store: Any = functions.tandem_store
        self.store.argtypes, self.store.restype = (pointer, number), None
        self.next: Any = functions.tandem_next
        self.next.argtypes, self.next.restype = (pointer, number, number, number), number
        self._ring: Any = functions.tandem_ring
        self._ring.argtypes, self._ring.restype = (pointer, number), None
        self._rouse: Any = functions.tandem_rouse
        self._rouse.argtypes, self._rouse.restype = (pointer, number), number
        self.wait: Any = functions.tandem_wait
        self.wait.argtypes, self.wait.restype = (pointer, count, number, number), count

    def ring(self, bells: tuple[int, ...]) -> None:
        """Ring all of them. A process that sleeps on this thread's core is woken last."""
        self._ring(_pointers(bells), len(bells))

    def rouse(self, bells: tuple[int, ...]) -> int:
        """Ring those of processes that sleep on other cores than this thread's. The index of the first that
        sleeps on this one; -1 where none does."""
        beside: int = self._rouse(_pointers(bells), len(bells))
        return beside


@lru_cache(64)
def _pointers(bells: tuple[int, ...]) -> Any:
    return (ctypes.c_void_p * len(bells))(*bells)


@cache
def library() -> Library | None:
    """None where it was not compiled, or not for this version."""
    found = PathFinder.find_spec("_doorbell", [str(Path(__file__).parent)])
    if found is None:
        return None
    try:
        functions = ctypes.CDLL(found.origin)
        return Library(functions) if functions.tandem_doorbell_version() == VERSION else None
    except (OSError, AttributeError):
        return None
