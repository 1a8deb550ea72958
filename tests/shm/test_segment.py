"""Segments, the slab and page-locking, on real shared memory."""

import os
from pathlib import Path
from types import SimpleNamespace

import posix_ipc
import pytest
from small_store import run

from shm.errors import NotEnoughMemory, SegmentMissing, ShmError
from shm.segment import Segment, check_space, unlink
from shm.slab import Slab


def file_of(name: str) -> Path:
    return Path("/dev/shm") / name[1:]


def test_segment_is_private_allocated_and_zeroed(name):
    old = os.umask(0o777)  # a umask that would remove every bit
    try:
        segment = Segment.create(name, 10_000)
    finally:
        os.umask(old)
    with segment:
        status = file_of(name).stat()
        assert status.st_mode & 0o7777 == 0o600
        assert status.st_size == segment.size == 10_000
        assert status.st_blocks * 512 >= 10_000  # allocated, not sparse
        assert not segment.array.any()
        assert segment.array.shape == (10_000,)


def test_other_attachments_see_what_is_written_and_cannot_write(name):
    with Segment.create(name, 4096) as segment, Segment.attach(name) as reader:
        segment.array[5] = 77
        assert reader.array[5] == 77
        assert not reader.array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            reader.array[5] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            reader.array.flags.writeable = True  # the mapping itself is read-only
        with Segment.attach(name, writable=True) as writer:
            writer.array[6] = 78
        assert segment.array[6] == 78


def test_closing_unmaps_once_no_view_is_left(name):
    def mapped() -> bool:
        return name[1:] in Path("/proc/self/maps").read_text()

    segment = Segment.create(name, 8192)
    view = segment.array[:10]
    assert mapped()
    segment.close()
    assert mapped()
    del view
    assert not mapped()


def test_a_name_is_created_once(name):
    with Segment.create(name, 100), pytest.raises(ShmError, match="exists already"):
        Segment.create(name, 100)
    assert file_of(name).exists()  # the failed attempt did not remove the first one's


def test_a_missing_segment_is_named(name):
    with pytest.raises(SegmentMissing, match=name):
        Segment.attach(name)
    unlink(name)  # quiet


def test_an_empty_segment_is_refused(name):
    file_of(name).touch()
    with pytest.raises(ShmError, match="empty"):
        Segment.attach(name)


def test_another_users_segment_is_refused(name):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    Segment.create(name, 100).close()
    os.chown(file_of(name), 12345, 12345)
    try:
        with pytest.raises(ShmError, match="belongs to user 12345, not to you"):
            Segment.attach(name)
        unlink(name)  # does nothing
        assert file_of(name).exists()
    finally:
        file_of(name).unlink()


def test_a_segment_of_no_bytes_or_that_may_not_be_opened_is_refused(name, monkeypatch):
    with pytest.raises(ValueError, match="positive size, not 0"):
        Segment.create(name, 0)
    Segment.create(name, 100).close()

    def denied(*_, **__):
        raise posix_ipc.PermissionsError

    monkeypatch.setattr("shm.segment.posix_ipc.SharedMemory", denied)
    with pytest.raises(ShmError, match=f"{name} may not be opened by this user"):
        Segment.attach(name)


def test_too_large_a_segment_is_refused_with_numbers(monkeypatch):
    # Allocating more than fits would fill the memory first, so test the check alone and, in a child with a
    # limited file size, the kernel.
    folder = SimpleNamespace(f_blocks=9 << 10, f_bfree=8 << 10, f_bavail=3 << 10, f_frsize=1 << 10)
    monkeypatch.setattr("shm.segment.os.statvfs", lambda path: {"/dev/shm": folder}[path])
    monkeypatch.setattr("shm.segment.available_memory", lambda: 5 << 20)
    check_space(3 << 20, 2 << 20)  # exactly what there is of both
    reserved = r"^3\.1 MB .* but of the 5\.2 MB .* 2\.1 MB must stay free.*--format"
    with pytest.raises(NotEnoughMemory, match=reserved):
        check_space(3 << 20, (2 << 20) + 1)
    full = r"^4\.2 MB .* has 3\.1 MB free.*: mount -o remount,size=74m /dev/shm$"  # 9 - 3 + 4, and 64
    with pytest.raises(NotEnoughMemory, match=full):
        check_space(4 << 20, 1 << 20)


def test_a_failed_allocation_removes_the_segment(name):
    code = (
        "import resource, signal, sys\n"
        "from shm.segment import Segment\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "Segment.create(sys.argv[1], 8 << 20)\n"
    )
    result = run(code, name)
    assert result.returncode == 1
    assert "larger than a file may be here" in result.stderr
    assert not file_of(name).exists()


def test_pages_are_placed_before_any_is_allocated(name):
    order = []

    def place(descriptor):
        status = os.fstat(descriptor)
        order.append((status.st_size, status.st_blocks, status.st_mode & 0o7777))

    Segment.create(name, 1 << 20, order.append, place).close()
    assert order == [(1 << 20, 0, 0o600), 1 << 20]


def test_slots_are_disjoint_aligned_and_shared(name):
    with Slab.create(name, 5, 100) as slab, Slab.attach(name, 5, 100) as other:
        for index in range(5):
            slab.slot(index)[:] = index + 1
        for index in range(5):
            assert other.slot(index).shape == (100,)
            assert (other.slot(index) == index + 1).all()
            assert other.slot(index).ctypes.data % 64 == 0
        other.slot(2)[:] = 99
        assert (slab.slot(2) == 99).all()
        for bad in (-1, 5):
            with pytest.raises(IndexError):
                slab.slot(bad)


def test_a_slab_of_another_size_is_refused(name):
    with Slab.create(name, 5, 100):
        for slots, size in ((4, 100), (6, 100), (5, 64), (5, 129)):
            with pytest.raises(ShmError, match=f"{slots} slots of {size}"):
                Slab.attach(name, slots, size)
    with pytest.raises(ValueError, match="slots"):
        Slab.create(name, 0, 100)


def test_a_limit_on_locking_is_reported_and_not_fatal(name):
    """A child without CAP_IPC_LOCK and with a limit of 2 MB locks that much of 8 MB."""
    code = (
        "import os, re, resource, sys\n"
        "from pathlib import Path\n"
        "import shm.segment\n"
        "shm.segment.LOCKED_TOGETHER = 1 << 20\n"
        "segment = shm.segment.Segment.attach(sys.argv[1])\n"
        "print(shm.segment.lock_pages(segment.array[: 1 << 20]))\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (2 << 20, 2 << 20))\n"
        "if os.geteuid() == 0: os.setresuid(12345, 12345, 12345)\n"  # drops the capability
        "print(shm.segment.lock_pages(segment.array))\n"
        "print(re.search(r'VmLck:\\s*(\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
    )
    with Segment.create(name, 8 << 20):
        result = run(code, name)
    assert result.returncode == 0, result.stderr
    whole, limited, kilobytes = result.stdout.splitlines()
    assert whole == "1.0 MB locked in memory"
    assert limited.startswith("2.1 MB of 8.4 MB locked in memory (")
    assert "ulimit -l" in limited
    assert kilobytes == "2048"
