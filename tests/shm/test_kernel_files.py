"""Small files of /proc and /sys as other machines have them: lists of cores, processors, control groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.kernel_files import Limits, free_memory, limits, parse_cores, parse_cpuinfo, parse_quota

GB = 1_000_000_000

INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) w7-2495X
flags\t\t: fpu vme avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
"""
ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes asimddp i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd4f
"""


def write(root: Path, **files: str) -> None:
    """Files under a root; "__" in a name is "/"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


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


@pytest.mark.parametrize("text", ["", "1,,2", "3-", "-3", "1-2-3", ",", "12345", "a"])
def test_malformed_list_of_cores_is_empty(text: str) -> None:
    assert parse_cores(text) == frozenset()


def test_cpuinfo_of_x86_and_arm() -> None:
    assert parse_cpuinfo(INTEL) == "Intel(R) Xeon(R) w7-2495X"
    assert parse_cpuinfo(ARM) == "implementer 0x41 part 0xd4f"
    assert parse_cpuinfo("") == "unknown processor"


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
