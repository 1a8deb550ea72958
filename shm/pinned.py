"""Locks pages in memory with mlock, and reports what could not be locked.

Shared memory may be swapped out like any other. Locking needs no privilege up to RLIMIT_MEMLOCK (often 8 MB,
"unlimited" on machines prepared for it) and none beyond with CAP_IPC_LOCK. What cannot be locked works all
the same, so a refusal is no error: the report has it in one line.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from shm.layout import Bytes
from shm.segment import byte_size

CHUNK = 1 << 28  # bytes for one call: where the limit ends, all whole chunks below it stay locked
SMALLEST = 1 << 20


@dataclass(frozen=True)
class LockReport:
    """What `lock_pages` did. `str` is one line for a person."""

    locked_bytes: int
    total_bytes: int
    reason: str  # why the rest is not locked; "" where everything is

    def __str__(self) -> str:
        if not self.reason:
            return f"{byte_size(self.total_bytes)} locked in memory"
        return (
            f"{byte_size(self.locked_bytes)} of {byte_size(self.total_bytes)} locked in memory "
            f"({self.reason}); raise the limit with `ulimit -l unlimited`"
        )


def lock_pages(memory: Bytes) -> LockReport:
    """Lock the pages of a segment's `array` as far as this process may, from its first byte on.

    They stay locked until they are unmapped or the process ends, and one process's lock keeps them in memory
    for all. Where a chunk fails, ever smaller ones are tried, so a limit is used to within a megabyte. Pages
    that have been written take about 80 ms a gigabyte.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address, total = memory.ctypes.data, memory.nbytes
    locked, step, reason = 0, CHUNK, ""
    while locked < total and step >= SMALLEST:
        size = min(step, total - locked)
        if libc.mlock(address + locked, size) == 0:
            locked += size
        else:
            reason = os.strerror(ctypes.get_errno()).lower()
            step //= 2
    return LockReport(locked, total, "" if locked == total else reason)
