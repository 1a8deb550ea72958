"""The energy that computing takes: by the machine's counters where they can be read, else by a model.

The counters are RAPL's, of each processor package (Linux shows them to root alone, mostly), and NVML's, of
each GPU. Both are of the whole machine, whoever computes on it. The model is power by time: a processor and a
GPU take one power while they compute and another while they do not. It says how two policies compare on such
a machine, and not what a machine takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
PROCESSORS, GPUS = "processors", "gpus"

# Watts, idle and computing: about those of a workstation with a GPU of DAOP's class (an i9 and an RTX A6000).
PROCESSOR_WATTS = (50.0, 150.0)
GPU_WATTS = (60.0, 300.0)
MODEL = (
    f"modelled: {PROCESSOR_WATTS[1]:.0f} W of the processor while workers compute, else"
    f" {PROCESSOR_WATTS[0]:.0f}; {GPU_WATTS[1]:.0f} W of the GPU while it computes, else {GPU_WATTS[0]:.0f}"
)


def modelled_watts(host_busy: float, device_busy: float, gpu: bool) -> float:
    """The mean power by the model, from the shares of the time in which the workers and the device compute.
    Without a `gpu` the device is the processor as well."""
    idle, busy = PROCESSOR_WATTS
    if not gpu:
        return idle + (busy - idle) * min(1.0, host_busy + device_busy)
    return idle + (busy - idle) * host_busy + GPU_WATTS[0] + (GPU_WATTS[1] - GPU_WATTS[0]) * device_busy


class EnergyMeter:
    """Joules since it was made."""

    def __init__(self, powercap: Path = POWERCAP, gpus: Callable[[], list[float]] | None = None) -> None:
        """`gpus`: gives the joules of each GPU so far; by default NVML's, and none without."""
        self._packages = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self._packages = [zone for zone in self._packages if _number(zone / "energy_uj") is not None]
        self._last = [_number(zone / "energy_uj") or 0 for zone in self._packages]
        self._processors = 0  # microjoules
        self._gpus = gpus or _nvml()
        self._first = sum(self._gpus())

    def joules(self) -> dict[str, float]:
        """What processors and GPUs took, those that have counters."""
        found = {}
        for index, zone in enumerate(self._packages):
            now = _number(zone / "energy_uj")
            if now is None:
                continue
            gone = now - self._last[index]
            if gone < 0:  # the counter began again
                gone += _number(zone / "max_energy_range_uj") or -gone
            self._processors += gone
            self._last[index] = now
        if self._packages:
            found[PROCESSORS] = self._processors / 1e6
        if of_gpus := self._gpus():
            found[GPUS] = sum(of_gpus) - self._first
        return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _nvml() -> Callable[[], list[float]]:
    """A function that returns the joules of each GPU since its driver was loaded, none where NVML or such a
    counter is missing."""
    try:
        library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return list
    except (OSError, AttributeError):
        return list
    handles = [ctypes.c_void_p() for _ in range(count.value)]
    if any(library.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(one)) for i, one in enumerate(handles)):
        return list

    def joules() -> list[float]:
        read, found = ctypes.c_ulonglong(), []
        for one in handles:
            if library.nvmlDeviceGetTotalEnergyConsumption(one, ctypes.byref(read)):
                return []
            found.append(read.value / 1e3)
        return found

    return joules
