"""Memory in huge pages, shared memory too, without the administrator's help.

A processor finds a page's memory through a small table; with pages of 2 MB instead of 4 KB that table covers
everything, and weights are read 20 to 40 % faster. /dev/shm gives small pages unless it is mounted otherwise,
but since Linux 6.1 a process may have pages that are there joined into huge ones (MADV_COLLAPSE). What cannot
be joined stays as it is, and works.

A huge page is used as one only where it is mapped at a multiple of its size, which mmap sees to when it is
told an address: hence `map_shared`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref

import numpy as np

from shm.formats import Bytes

HUGE = 1 << 21
MADV_COLLAPSE = 25  # <asm-generic/mman-common.h>; the mmap module does not know it
MAP_FIXED = 0x10
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_shared(descriptor: int, size: int, writable: bool) -> Bytes:
    """A descriptor's first `size` bytes, shared, at a multiple of HUGE. They are unmapped when the array and
    all views of it are garbage. Raises OSError."""
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + HUGE
    reserved = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-reserved // HUGE) * HUGE
    end = start + room - HUGE
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _mmap(start, size, protection, mmap.MAP_SHARED | MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(reserved, room)
        raise
    for lo, hi in ((reserved, start), (end, reserved + room)):
        if lo < hi:
            _libc.munmap(lo, hi - lo)
    memory = (ctypes.c_uint8 * size).from_address(start)
    weakref.finalize(memory, _libc.munmap, start, size).atexit = False
    view = memoryview(memory)
    return np.frombuffer(view if writable else view.toreadonly(), np.uint8)


def private(size: int) -> Bytes:
    """New memory of this process, in huge pages where the system has them; given back with its last view."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:size]


def collapse(memory: Bytes) -> int:
    """Join the pages of a mapping of shared memory into huge ones, where at least one page of each is there;
    what is missing of those is made. Returns the bytes that are in huge pages now. A tenth of a second for a
    gigabyte, three times that where all pages are there and must be copied."""
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    joined = 0
    for at in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE):
        if _libc.madvise(at, HUGE, MADV_COLLAPSE) == 0:
            joined += HUGE
        elif ctypes.get_errno() != errno.EAGAIN:  # which is this page's own trouble
            break  # an older kernel, or no huge page is free: do not ask for each
    return joined


def _mmap(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    at: int | None = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if at is None or at == FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return at
