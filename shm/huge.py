"""Memory in huge pages, shared memory too, without the administrator's help.

The TLB has few entries; with pages of 2 MB instead of 4 KB it covers much more memory, and weights are read
20 to 40 % faster. /dev/shm gives small pages unless it is mounted otherwise, but since Linux 6.1 a process
can have existing pages collapsed into huge ones (MADV_COLLAPSE). Pages that cannot be collapsed stay small.

A huge page is mapped as one only at a multiple of its size. mmap does not choose such an address by itself:
hence `_place`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

import numpy as np

from shm.formats import Bytes

HUGE = 1 << 21
MADV_REMOVE, MADV_HUGEPAGE, MADV_POPULATE_WRITE, MADV_COLLAPSE = (
    9,
    14,
    23,
    25,
)  # <asm-generic/mman-common.h>; the mmap module may not know them
MAP_FIXED = 0x10
PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
MOST_ADDED = 1 / 3  # of private memory: so much more, at most, for its last page to be huge too
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_shared(descriptor: int, size: int, writable: bool) -> Bytes:
    """Map a descriptor's first `size` bytes, shared, at a multiple of HUGE. They are unmapped when the array
    and all views of it are garbage. Raises OSError."""
    memory = _place(size, mmap.MAP_SHARED, descriptor, writable)
    view = memoryview(memory)
    return np.frombuffer(view if writable else view.toreadonly(), np.uint8)


def private(size: int) -> Bytes:
    """New private memory, released with its last view; from HUGE bytes on at a multiple of HUGE, and in huge
    pages if the system has them. Raises OSError."""
    if size < HUGE:
        return np.frombuffer(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE), np.uint8)[:size]
    whole = -(-size // HUGE) * HUGE
    length = whole if whole - size <= size * MOST_ADDED else size
    memory = _place(length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, True)
    _libc.madvise(ctypes.addressof(memory), length, MADV_HUGEPAGE)  # some kernels have none
    return np.frombuffer(memoryview(memory), np.uint8)[:size]


def collapse(memory: Bytes) -> int:
    """Collapse the pages of a mapping of shared memory into huge ones, if at least one page of each is
    allocated; the kernel allocates the missing ones. Returns the bytes in huge pages. It takes a tenth of a
    second a gigabyte, three times that if all pages are allocated and must be copied."""
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    joined = 0
    for at in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE):
        if _libc.madvise(at, HUGE, MADV_COLLAPSE) == 0:
            joined += HUGE
        elif ctypes.get_errno() != errno.EAGAIN:  # EAGAIN concerns this page alone
            break  # an older kernel, or no huge page is free: the next call would fail, too
    return joined


def populate(memory: Bytes) -> None:
    """Allocate the pages of a writable mapping, where the kernel can and has the memory (Linux 5.14)."""
    start = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(start, memory.ctypes.data + memory.nbytes - start, MADV_POPULATE_WRITE)


def give_back(memory: Bytes) -> None:
    """Free the pages of a part of a writable mapping of shared memory, for all processes that map it: it is
    whole pages, and reads as zeros. Raises OSError."""
    if _libc.madvise(memory.ctypes.data, memory.nbytes, MADV_REMOVE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _place(size: int, flags: int, descriptor: int, writable: bool) -> ctypes.Array[ctypes.c_uint8]:
    """A new mapping at a multiple of HUGE, unmapped with its last view. Raises OSError."""
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + HUGE
    reserved = _mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-reserved // HUGE) * HUGE
    end = start + length - HUGE
    try:
        protection = PROTECTION if writable else mmap.PROT_READ
        _mmap(start, size, protection, flags | MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(reserved, length)
        raise
    for lo, hi in ((reserved, start), (end, reserved + length)):
        if lo < hi:
            _libc.munmap(lo, hi - lo)
    return _owned(start, size)


def _owned(start: int, size: int) -> ctypes.Array[ctypes.c_uint8]:
    """A mapping's bytes; it is unmapped with their last view."""
    memory = (ctypes.c_uint8 * size).from_address(start)
    weakref.finalize(memory, _libc.munmap, start, size).atexit = False
    return memory


def _mmap(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    at: int | None = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if at is None or at == FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return at
