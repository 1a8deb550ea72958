"""What the doctor makes of other machines' files: processors, control groups, memory, mounts, versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import ARM, GB, INTEL, two_threads_a_core, words, write

from launch.doctor import cpu, memory, places, shared_memory, software
from launch.doctor.finding import UNITS, parse_size
from shm import cgroup
from shm.kernel_files import parse_cores


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 1 << 20), st.sampled_from(sorted(UNITS)))
def test_sizes_are_read_as_the_kernel_writes_them(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * UNITS[unit]
    assert parse_size(f" {count}{unit.lower()}\n") == count * UNITS[unit]


@settings(deadline=None)  # the machine may be busy
@given(st.text(max_size=12))
def test_what_is_no_size_is_none(text: str) -> None:
    size = parse_size(text)
    assert size is None or (size >= 0 and text.strip()[0].isdigit())


@settings(deadline=None)  # the machine may be busy
@given(st.sets(st.integers(0, 300), min_size=1))
def test_lists_of_cores_are_read_back(cores: set[int]) -> None:
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][-1] == core - 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    text = ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    assert parse_cores(text) == cores


@settings(deadline=None)  # the machine may be busy
@given(st.text("0123456789-,", max_size=12))
def test_any_list_of_cores_is_read_or_empty(text: str) -> None:
    assert all(core >= 0 for core in parse_cores(text))


def test_processors_of_two_kinds() -> None:
    model, flags = cpu.parse_cpuinfo(INTEL)
    assert model == "Intel(R) Xeon(R) w7-2495X"
    assert {"amx_bf16", "avx2"} <= flags
    model, flags = cpu.parse_cpuinfo(ARM)
    assert model == "implementer 0x41 part 0xd4f"
    assert "bf16" in flags
    assert cpu.parse_cpuinfo("") == ("unknown processor", frozenset())


def test_caches_are_counted_once_for_the_cores_that_share_them(tmp_path: Path) -> None:
    two_threads_a_core(tmp_path)
    assert cpu.caches(tmp_path) == {"L1d": cpu.Cache(2, 96 << 10), "L2": cpu.Cache(1, 2 << 20)}
    assert cpu.physical_cores(tmp_path) == 2


def test_what_limits_the_cores_is_said(tmp_path: Path) -> None:
    two_threads_a_core(tmp_path)
    write(
        tmp_path,
        sys__devices__system__node__node0__cpulist="0-1",
        sys__devices__system__node__node1__cpulist="2-3",
        sys__devices__system__cpu__cpu0__cpufreq__scaling_governor="powersave",
        sys__devices__system__cpu__cpu0__cpufreq__scaling_driver="acpi-cpufreq",
    )
    found = cpu.inspect(range(3), 1.5, tmp_path)
    notes = words(found, "note")
    assert "3 of 4 threads" in notes
    assert "workers compute on 1 core:" in notes  # the quota
    assert "performance" in notes
    facts = words(found, "ok")
    assert "--workers 3" in facts  # the cores' other threads
    assert "2 NUMA nodes" in facts


def test_an_unreadable_machine_is_unknown_and_no_error(tmp_path: Path) -> None:
    found = [
        *cpu.inspect([0], None, tmp_path),
        *memory.inspect(1, None, None, 1024, tmp_path),
        *shared_memory.inspect(1, 0, tmp_path),
        *places.store_findings(tmp_path / "nothing"),
    ]
    assert "unknown processor" in words(found)
    assert "memory: unknown" in words(found)
    assert "/dev/shm: No such file or directory" in words(found, "problem")
    assert cgroup.limits(tmp_path) == cgroup.Limits(None, None)
    assert cgroup.free_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").mkdir()  # reading it is an error
    (tmp_path / "proc/meminfo").write_bytes(b"MemTotal: \xff kB\nMemFree\n:::\n")
    assert words(cpu.inspect([0], None, tmp_path))
    assert words(memory.inspect(1, None, None, 1024, tmp_path))


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("150000 100000", 1.5), ("50000", 0.5), ("", None), ("1 0", None), ("x y", None)],
)
def test_quotas(text: str, cores: float | None) -> None:
    assert cgroup.parse_quota(text) == cores


def test_limits_of_a_service_in_version_2(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="0::/system.slice/tandem.service",
        proc__self__mountinfo="31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw",
        **{
            "sys/fs/cgroup/system.slice/memory.max": "8000000000",
            "sys/fs/cgroup/system.slice/tandem.service/memory.max": "max",
            "sys/fs/cgroup/system.slice/cpu.max": "max 100000",
            "sys/fs/cgroup/system.slice/tandem.service/cpu.max": "250000 100000",
        },
    )
    assert cgroup.limits(tmp_path) == cgroup.Limits(2.5, 8 * GB)
    assert cgroup.free_memory(tmp_path) is None  # what is used is not told
    folder = tmp_path / "sys/fs/cgroup/system.slice"
    (folder / "memory.current").write_text("5000000000\n")
    (folder / "memory.stat").write_text("anon 1\ninactive_file 600000000\nactive_file 400000000\n")
    assert cgroup.free_memory(tmp_path) == 4 * GB


def test_limits_of_a_container_in_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/",
        proc__self__mountinfo=(
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro master:1 - cgroup cgroup rw,memory\n"
            "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
            "a line of another kind"
        ),
        **{
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    assert cgroup.limits(tmp_path) == cgroup.Limits(None, 2 * GB)
    (tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes").write_text("1500000000")
    assert cgroup.free_memory(tmp_path) == GB // 2


def test_memory_that_is_short_swapped_or_reserved(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo=(
            "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\nSwapTotal: 4000000 kB\nSwapFree: 1000000 kB\n"
            "HugePages_Total: 512\nHugePages_Free: 500\nHugepagesize: 2048 kB"
        ),
        proc__self__status="Name:\tpython\nCapEff:\t00000000a80425fb",
        sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never",
    )
    found = memory.inspect(25_000_000, 3 * GB, 8 << 20, 64, tmp_path)
    assert not any(f.prevents for f in found)
    assert "up to 1.00 GB fit" in words(found)  # the control group's 3 GB, less what is left free
    assert "4.10 GB, 3.07 GB used" in words(found)
    assert "transparent huge pages: madvise" in words(found)
    notes = words(found, "note")
    for part in ("3.00 GB", "ulimit -l unlimited", "vm.nr_hugepages=0", "64 open files"):
        assert part in notes
    assert any(f.prevents for f in memory.inspect(7 * GB, None, None, 1024, tmp_path))


@pytest.mark.parametrize(("capabilities", "free"), [("000001ffffffffff", True), ("00000000a80425fb", False)])
def test_a_privileged_process_locks_without_limit(tmp_path: Path, capabilities: str, free: bool) -> None:
    write(tmp_path, proc__self__status=f"CapEff:\t{capabilities}")
    found = words(memory.inspect(1, None, 65536, 1024, tmp_path))
    assert ("without limit" in found) is free


def test_the_default_of_a_container_is_a_problem() -> None:
    small = shared_memory.room(64 << 20, 64 << 20, 25_000_000, 32 * GB)
    assert (small.level, small.prevents) == ("problem", False)
    assert "--shm-size" in small.do
    assert "remount,size=" in small.do
    assert shared_memory.room(64 << 20, 20_000_000, 25_000_000, 32 * GB).prevents
    assert shared_memory.room(4 * GB, 4 * GB, 25_000_000, 32 * GB).level == "note"
    assert shared_memory.room(16 * GB, 16 * GB, 25_000_000, 32 * GB).level == "ok"


def test_mount_options_of_the_last_mount_count() -> None:
    text = (
        "25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=1k\n"
        "26 24 0:24 / /dev/pts rw - devpts devpts rw,mode=600\n"
        "30 25 0:27 / /dev/shm rw,nosuid shared:5 - tmpfs shm rw,size=65536k,huge=within_size"
    )
    options = shared_memory.mount_options(text)
    assert options == ("rw", "nosuid", "size=65536k", "huge=within_size")
    assert "huge pages" in words(shared_memory.pages(options))
    assert shared_memory.pages(shared_memory.mount_options("")) == []


@pytest.mark.parametrize(
    ("requirement", "version", "fits"),
    [
        ("torch>=2.11,<2.14", "2.13.0+cpu", True),
        ("torch>=2.11,<2.14", "2.14.0", False),
        ("torch>=2.11,<2.14", "2.9.1", False),
        ("numpy>=2.0", "2", True),
        ("prompt_toolkit>=3.0.48", "3.0.9", False),
        ("posix-ipc >= 1.2", "1.2.0rc1", True),
        ("x!=1.5", "1.5.0", False),
        ("x", "0", True),
    ],
)
def test_versions_are_compared_as_numbers(requirement: str, version: str, fits: bool) -> None:
    parsed = software.parse_requirement(requirement)
    assert parsed is not None
    assert parsed.allows(version) is fits


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=4),
    st.lists(st.integers(0, 999), min_size=1, max_size=4),
)
def test_the_order_of_versions_is_that_of_their_numbers(a: list[int], b: list[int]) -> None:
    text, bound = (".".join(map(str, v)) for v in (a, b))
    width = max(len(a), len(b))
    expected = a + [0] * (width - len(a)) >= b + [0] * (width - len(b))
    assert software.Requirement("x", ((">=", bound),)).allows(text) is expected


def test_what_this_project_requires_is_understood_and_installed() -> None:
    python, needed, cuda = software.requirements()
    assert python == ">=3.11"
    assert len(needed) >= 12
    assert all(software.parse_requirement(text) for text in [*needed, *cuda])
    assert [f.level for f in software.judge(needed)] == ["ok"]


def test_a_library_that_is_missing_or_old_comes_with_its_command() -> None:
    found = software.judge(["numpy>=99.1", "tandem-has-no-such-library", "weird; extra", "numpy"])
    assert [f.level for f in found] == ["problem", "problem", "note", "ok"]
    assert 'python -m pip install "numpy>=99.1"' in found[0].do
    assert found[0].prevents
    assert "is not installed" in found[1].found
    assert not software.judge(["numpy>=99"], optional=True)[0].prevents
