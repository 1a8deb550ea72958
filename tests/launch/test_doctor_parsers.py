"""The doctor's parsers, on other machines' files: processors, control groups, memory, mounts, versions."""

from __future__ import annotations

import importlib.metadata
import sys
from email.message import Message
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from machines import ARM, GB, INTEL, two_threads_a_core, words, write
from packaging.requirements import Requirement

from launch.doctor import cpu, memory, places, software
from launch.doctor.finding import UNITS, parse_size
from shm.kernel_files import Limits, free_memory, limits, parse_cores, parse_quota


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 1 << 20), st.sampled_from(sorted(UNITS)))
def test_size_is_parsed_in_the_kernel_s_notation(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * UNITS[unit]
    assert parse_size(f" {count}{unit.lower()}\n") == count * UNITS[unit]


@settings(deadline=None)  # the machine may be busy
@given(st.sets(st.integers(0, 300), min_size=1))
def test_list_of_cores_is_parsed(cores: set[int]) -> None:
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and spans[-1][-1] == core - 1:
            spans[-1].append(core)
        else:
            spans.append([core])
    text = ",".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)
    assert parse_cores(text) == cores


@settings(deadline=None)  # the machine may be busy
@given(st.text("0179-,", max_size=9))
@example("1,,2")
@example("3-")
@example("-3")
@example("1-2-3")
@example(",")
@example("12345")
def test_malformed_list_of_cores_is_empty(text: str) -> None:
    expected: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.partition("-")
        numbers = (low, high) if dash else (low,)
        if not all(n.isdigit() and len(n) <= 4 for n in numbers):
            expected = set()
            break
        expected |= set(range(int(numbers[0]), int(numbers[-1]) + 1))
    assert parse_cores(text) == expected


def test_cpuinfo_of_x86_and_arm() -> None:
    model, flags = cpu.parse_cpuinfo(INTEL)
    assert model == "Intel(R) Xeon(R) w7-2495X"
    assert {"amx_bf16", "avx2"} <= flags
    model, flags = cpu.parse_cpuinfo(ARM)
    assert model == "implementer 0x41 part 0xd4f"
    assert "bf16" in flags
    assert cpu.parse_cpuinfo("") == ("unknown processor", frozenset())


def test_shared_caches_are_counted_once(tmp_path: Path) -> None:
    two_threads_a_core(tmp_path)
    assert cpu.caches(tmp_path) == {"L1d": cpu.Cache(2, 96 << 10), "L2": cpu.Cache(1, 2 << 20)}
    assert cpu.physical_cores(tmp_path) == 2
    second = "sys/devices/system/cpu/cpu{}/topology/physical_package_id"
    write(tmp_path, **{second.format(number): "1" for number in (2, 3)})
    assert cpu.physical_cores(tmp_path) == 4  # a core's number is unique in its socket alone


def test_limits_on_cores_are_reported(tmp_path: Path) -> None:
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
    assert "2 NUMA nodes: node0 2 threads, node1 2 threads" in facts
    assert "bf16 experts are multiplied by bf16 instructions" in facts
    assert "caches: L1d 96 KB in 2, L2 2 MB;" in facts
    write(
        tmp_path,
        sys__devices__system__cpu__cpu0__cpufreq__scaling_driver="intel_pstate",
        proc__cpuinfo=INTEL.replace("amx_bf16", "").replace("avx512_bf16", ""),
    )
    found = cpu.inspect(range(4), 2.5, tmp_path)
    notes = words(found, "note")
    assert "workers compute on 2 cores:" in notes
    assert "no bf16 instructions" in notes
    assert "--format" not in notes  # C computes bf16, torch f32
    assert "performance" not in notes  # this driver's clock follows the load by itself
    for usable, quota in ((range(2), 2.0), (range(4), None), (range(4), 4.0)):
        assert "quota" not in words(cpu.inspect(usable, quota, tmp_path))
    assert "each core runs 2 threads" not in words(cpu.inspect(range(2), None, tmp_path))
    assert "of 4 threads" not in words(cpu.inspect(range(4), None, tmp_path), "note")
    write(tmp_path, proc__cpuinfo=ARM)
    assert "no bf16 instructions" in words(cpu.inspect(range(4), None, tmp_path), "note")
    write(tmp_path, proc__cpuinfo=INTEL.replace("avx", "x").replace("amx", "x"))
    assert "instruction sets: none that the kernels use" in words(
        cpu.inspect(range(4), None, tmp_path), "note"
    )


def test_unreadable_files_make_facts_unknown(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = [
        *cpu.inspect([0], None, tmp_path),
        *memory.inspect(1, None, None, 1024, tmp_path),
        *memory.inspect_shared(1, 0, tmp_path),
        *places.cache_findings(tmp_path / "file" / "cache"),
    ]
    assert "unknown processor" in words(found)
    assert "memory: unknown" in words(found)
    assert f"cache {tmp_path}/file/cache: Not a directory" in words(found, "note")
    assert "/dev/shm: No such file or directory" in words(found, "problem")
    assert limits(tmp_path) == Limits(None, None)
    assert free_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").mkdir()  # reading it is an error
    (tmp_path / "proc/meminfo").write_bytes(b"MemTotal: \xff kB\nMemFree\n:::\n")
    assert words(cpu.inspect([0], None, tmp_path))
    assert words(memory.inspect(1, None, None, 1024, tmp_path))


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("150000 100000", 1.5), ("50000", 0.5), ("", None), ("1 0", None), ("x y", None)],
)
def test_cpu_quota_is_parsed(text: str, cores: float | None) -> None:
    assert parse_quota(text) == cores


def test_cgroup_v2_limits_of_a_service(tmp_path: Path) -> None:
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
    assert limits(tmp_path) == Limits(2.5, 8 * GB)
    assert free_memory(tmp_path) is None  # memory.current is missing
    folder = tmp_path / "sys/fs/cgroup/system.slice"
    (folder / "memory.current").write_text("5000000000\n")
    (folder / "memory.stat").write_text("anon 1\ninactive_file 600000000\nactive_file 400000000\n")
    assert free_memory(tmp_path) == 4 * GB
    # The lowest limit binds, on whichever level.
    (folder / "cpu.max").write_text("200000 100000\n")
    (folder / "tandem.service/memory.max").write_text("6000000000\n")
    assert limits(tmp_path) == Limits(2.0, 6 * GB)
    (folder / "tandem.service/memory.current").write_text("3000000000\n")
    assert free_memory(tmp_path) == 3 * GB
    (folder / "memory.max").write_text("5500000000\n")
    assert limits(tmp_path) == Limits(2.0, 5_500_000_000)
    assert free_memory(tmp_path) == 1_500_000_000


def test_cgroup_v1_limits_of_a_container(tmp_path: Path) -> None:
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
    assert limits(tmp_path) == Limits(None, 2 * GB)
    (tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes").write_text("1500000000")
    assert free_memory(tmp_path) == GB // 2


def test_memory_and_its_limits_are_reported(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo=("MemTotal: 16000000 kB\nMemAvailable: 8000000 kB"),
        proc__self__status="Name:\tpython\nCapEff:\t00000000a80425fb",
    )
    found = memory.inspect(25_000_000, 3 * GB, 8 << 20, 64, tmp_path)
    assert not any(f.prevents for f in found)
    assert "up to 1.00 GB fit" in words(found)  # the control group's 3 GB, less 2 GB that stay free
    notes = words(found, "note")
    for part in ("3.00 GB", "ulimit -l unlimited", "open files: 64"):
        assert part in notes
    assert any(f.prevents for f in memory.inspect(7 * GB, None, None, 1024, tmp_path))
    for limit, noted in ((15 * GB, True), (16_384_000_000, False), (17 * GB, False), (None, False)):
        found = memory.inspect(25_000_000, limit, None, 1024, tmp_path)
        assert ("control group" in words(found, "note")) is noted
    assert "up to 6.19 GB fit" in words(found)  # all that is available, less 2 GB
    for least, prevented in ((6_192_000_000, False), (6_192_000_001, True)):
        assert any(f.prevents for f in memory.inspect(least, None, None, 1024, tmp_path)) is prevented
    for lockable, free in ((16_384_000_000, True), (16_383_999_999, False), (None, True)):
        assert ("without limit" in words(memory.inspect(1, None, lockable, 1024, tmp_path))) is free
    for files, noted in ((255, True), (256, False)):
        assert ("open files" in words(memory.inspect(1, None, None, files, tmp_path), "note")) is noted


@pytest.mark.parametrize(("capabilities", "free"), [("000001ffffffffff", True), ("00000000a80425fb", False)])
def test_privileged_process_locks_pages_without_limit(tmp_path: Path, capabilities: str, free: bool) -> None:
    write(tmp_path, proc__self__status=f"CapEff:\t{capabilities}")
    assert ("without limit" in words(memory.inspect(1, None, 65536, 1024, tmp_path))) is free


def test_small_shared_memory_is_a_problem() -> None:
    small = memory.capacity(64 << 20, 64 << 20, 25_000_000, 32 * GB)
    assert (small.level, small.prevents) == ("problem", False)
    assert "--shm-size" in small.do
    assert "remount,size=" in small.do
    assert memory.capacity(64 << 20, 20_000_000, 25_000_000, 32 * GB).prevents
    assert memory.capacity(64 << 20, 20_000_000, 25_000_000, 32 << 30).do.count("=16384m") == 2
    assert "=1024m" in memory.capacity(64 << 20, 20_000_000, 25_000_000, 1 << 30).do
    for total, level in ((4 * GB, "note"), (10 * GB - 1, "note"), (10 * GB, "ok"), (16 * GB, "ok")):
        assert memory.capacity(total, total, 25_000_000, 30 * GB).level == level
    for free, prevented in ((25_000_000, False), (24_999_999, True)):
        assert memory.capacity(16 * GB, free, 25_000_000, 30 * GB).prevents is prevented


def test_mount_options_are_those_of_the_last_mount() -> None:
    text = (
        "25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=1k\n"
        "26 24 0:24 / /dev/pts rw - devpts devpts rw,mode=600\n"
        "30 25 0:27 / /dev/shm rw,nosuid shared:5 - tmpfs shm rw,size=65536k,huge=within_size"
    )
    options = memory.mount_options(text)
    assert options == ("rw", "nosuid", "size=65536k", "huge=within_size")
    assert "stored in huge pages" in words(memory.pages(options))
    assert "stored in small pages" in words(memory.pages(("rw", "huge=never")))
    assert "stored in small pages" in words(memory.pages(("rw",)))
    assert memory.pages(memory.mount_options("")) == []


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
        ("x>=1", "not a version", False),
    ],
)
def test_versions_are_compared_by_their_release(requirement: str, version: str, fits: bool) -> None:
    assert software.allows(Requirement(requirement).specifier, version) is fits


def test_requirements_of_this_project_are_parsed_and_installed() -> None:
    python, needed, cuda = software.requirements()
    assert python == ">=3.11"
    assert len(needed) >= 12
    assert [Requirement(text).name for text in cuda] == ["cuda-bindings"]
    (found,) = software.judge(needed)
    assert found.level == "ok"
    assert all(Requirement(text).name in found.found for text in needed)


def test_requirements_of_an_installation_without_a_checkout(tmp_path, monkeypatch) -> None:
    metadata = Message()
    metadata["Requires-Python"] = ">=3.11"
    for line in ("numpy>=2.0", 'uvloop>=0.21; sys_platform != "win32"'):
        metadata["Requires-Dist"] = line
    for line in ('cuda-bindings>=12.8; extra == "cuda"', 'pytest>=8.3; extra == "dev"'):
        metadata["Requires-Dist"] = line
    monkeypatch.setattr(software, "ROOT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    expected = (">=3.11", ["numpy>=2.0", "uvloop>=0.21"], ["cuda-bindings>=12.8"])
    assert software.requirements() == expected


def test_missing_or_old_library_is_reported_with_its_command() -> None:
    found = software.judge(["numpy>=99.1", "tandem-has-no-such-library", "weird; extra", "numpy"])
    assert [f.level for f in found] == ["problem", "problem", "note", "ok"]
    assert f'{sys.executable} -m pip install "numpy>=99.1"' == found[0].do
    assert found[0].prevents
    assert "is not installed" in found[1].found
    assert not software.judge(["numpy>=99"], optional=True)[0].prevents
