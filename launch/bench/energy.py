"""Energy counters of this machine: RAPL, of processors and their memory, and NVML, of NVIDIA GPUs. They count
the whole machine, whichever program uses it.

Linux shows RAPL, of Intel and AMD, as zones in /sys/class/powercap: `intel-rapl:0` is a package (a processor
with its cores and caches), `intel-rapl:0:1` a part of it. Of these only `dram` is not in the package's sum.
`psys`, a whole laptop, has packages and memory in it, so it counts only where no package does.
`intel-rapl-mmio` shows the same packages again."""

from __future__ import annotations

import asyncio
import importlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from launch.errors import system_reason
from launch.planning.device_choice import DRIVER_NODES
from shm.kernel_files import contents, entries, number

POWERCAP = "sys/class/powercap"
PARTS = ("cpu", "dram", "system", "gpu")  # of the machine, in the order of a report
READABLE = f"sudo chmod a+r /{POWERCAP}/intel-rapl:*/energy_uj"  # until the next boot
COUNTS_WITHIN = 1.0  # seconds; RAPL counts every millisecond, a GPU every tenth of a second


class Counter(Protocol):
    """`part`: one of PARTS. Only differences of what `read` returns mean something."""

    part: str
    name: str

    def read(self) -> float:
        """Joules. Raises OSError."""
        ...


class RaplCounter:
    """A zone's `energy_uj`, which starts at 0 again after `max_energy_range_uj` microjoules: some minutes of
    full load, so that at most one such step is between two reads of a run."""

    def __init__(self, zone: Path, part: str, name: str) -> None:
        """Raises OSError where the zone cannot be read."""
        self.part, self.name = part, name
        self._file = zone / "energy_uj"
        self._range = _number(zone / "max_energy_range_uj")
        self._laps = 0
        self._last = _number(self._file)

    def read(self) -> float:
        found = _number(self._file)
        self._laps += found < self._last
        self._last = found
        return (self._laps * self._range + found) / 1e6


class NvmlCounter:
    """A GPU's energy since its driver was loaded."""

    part = "gpu"

    def __init__(self, nvml: Any, index: int) -> None:
        """`nvml`: the module pynvml. Raises OSError."""
        self._nvml = nvml
        try:
            self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
            self.name = str(nvml.nvmlDeviceGetName(self._handle))
        except nvml.NVMLError as e:
            raise OSError(0, str(e), f"GPU {index}") from None
        self.read()

    def read(self) -> float:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError as e:
            raise OSError(0, str(e), f"energy counter of {self.name}") from None


def rapl_counters(root: Path = Path("/")) -> tuple[list[Counter], list[str]]:
    """Those that can be read, and a line for what cannot: which file, and what to do."""
    zones = entries(root / POWERCAP, "intel-rapl:*")
    names = {zone: contents(zone / "name") for zone in zones}
    top = [zone for zone in zones if re.fullmatch(r"intel-rapl:\d+", zone.name)]
    packages = [zone for zone in top if names[zone].startswith("package")]
    memory = [zone for zone in zones if names[zone] == "dram" and _above(zone) in packages]
    parts = dict.fromkeys(packages, "cpu") | dict.fromkeys(memory, "dram")
    if not packages:
        parts = {zone: "system" for zone in top if names[zone] == "psys"}
    if not parts:
        why = "a container or virtual machine hides it; elsewhere: sudo modprobe intel_rapl_msr"
        return [], [f"no RAPL counter in {root / POWERCAP} ({why})"]
    found: list[Counter] = []
    unread: list[OSError] = []
    for zone, part in parts.items():
        of = f"{names[_above(zone)]} " if part == "dram" else ""
        try:
            found.append(RaplCounter(zone, part, of + names[zone]))
        except OSError as e:
            unread.append(e)
    if not unread:
        return found, []
    more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
    do = f"; to let it be read: {READABLE}" if isinstance(unread[0], PermissionError) else ""
    return found, [f"{system_reason(unread[0])}{more}{do}"]


def nvml_counters(root: Path = Path("/")) -> tuple[list[Counter], list[str]]:
    """Of every GPU that the driver shows: those that can be read, and a line for each reason why one cannot.
    Nothing where no NVIDIA driver is loaded."""
    if not any((root / str(node).lstrip("/")).exists() for node in DRIVER_NODES):
        return [], []
    try:
        nvml = importlib.import_module("pynvml")  # here, because it is optional
    except ImportError:
        return [], ["the GPU's counter needs the Python package nvidia-ml-py: pip install nvidia-ml-py"]
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as e:
        return [], [f"the NVIDIA driver's library NVML: {e}; nvidia-smi shows whether it works"]
    found: list[Counter] = []
    unread = []
    for index in range(count):
        try:
            found.append(NvmlCounter(nvml, index))
        except OSError as e:
            unread.append(f"{system_reason(e)} (NVML; GPUs count their energy since the generation Volta)")
    return found, unread


def _above(zone: Path) -> Path:
    """`intel-rapl:0` of `intel-rapl:0:1`."""
    return zone.with_name(zone.name.rpartition(":")[0])


def _number(file: Path) -> int:
    found = number(file.read_text("ascii", errors="replace").strip())
    if found is None:
        raise OSError(0, "no number in it", str(file))
    return found


async def counting(counters: Sequence[Counter]) -> tuple[list[Counter], list[str]]:
    """Those that count, and a line for the others: some machines show zones that stay as they are."""
    first = [counter.read() for counter in counters]
    until = time.monotonic() + COUNTS_WITHIN
    still = list(counters)
    while still and time.monotonic() < until:
        await asyncio.sleep(0.02)
        still = [c for c, before in zip(counters, first, strict=True) if c in still and c.read() == before]
    return [c for c in counters if c not in still], [f"{c.name} does not count here" for c in still]
