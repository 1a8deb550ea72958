"""Other machines, as files under a root: what the doctor's tests read instead of this one."""

from __future__ import annotations

from pathlib import Path

from launch.doctor.finding import Finding

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


def words(findings: list[Finding], level: str | None = None) -> str:
    return "\n".join(f"{f.found}; {f.means}; {f.do}" for f in findings if level in (None, f.level))


def two_threads_a_core(root: Path) -> None:
    """Two cores of two threads, each core with its own L1 and one L2 for all; no L3."""
    write(root, proc__cpuinfo=INTEL)
    for number in range(4):
        folder = f"sys/devices/system/cpu/cpu{number}"
        pair = f"{number % 2},{number % 2 + 2}"
        caches = (
            (0, "1", "Data", "48K", pair),
            (1, "1", "Instruction", "32K", pair),
            (2, "2", "Unified", "2M", "0-3"),
        )
        files = {f"{folder}/topology/core_id": str(number % 2), f"{folder}/topology/physical_package_id": "0"}
        for index, level, kind, size, shared in caches:
            cache = f"{folder}/cache/index{index}"
            files |= {f"{cache}/level": level, f"{cache}/type": kind, f"{cache}/size": size}
            files |= {f"{cache}/shared_cpu_list": shared}
        write(root, **files)
    write(root, **{"sys/devices/system/cpu/online": "0-3"})
