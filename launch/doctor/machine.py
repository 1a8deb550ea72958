"""Facts of this machine that need no measurement: processor, kernels, memory, folders. A file
that cannot be read makes its fact unknown, never an error."""

from __future__ import annotations

import os
import resource
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from launch.processes.cores import Cores
from launch.runtime import running_engines, sweep
from launch.terminal.format import count
from pipeline.experts.division import library as division
from pipeline.memory.plan import FREE_BYTES
from pipeline.models.shapes import short_name
from protocol.errors import ProtocolError
from protocol.program import COMMAND
from protocol.sockets import runtime_root
from shm.errors import NotCompiled, ShmError
from shm.kernel_files import contents, limits, parse_cpuinfo
from shm.lane import library as doorbells
from shm.locks import sweep as sweep_stores
from shm.quantize import library as quantizer
from shm.segment import SHM_FOLDER, available_memory, byte_size
from workers.kernels.native import VARIANTS, Library, load
from workers.lifetime import ROOT

Level = Literal["ok", "note", "problem"]

SLOW_GOVERNORS = {"powersave", "conservative", "ondemand"}
SELF_CLOCKED = ("intel_pstate", "amd-pstate")  # drivers: their "powersave" follows the load at once
CAP_IPC_LOCK = 1 << 14
OWN_FOLDER = "set XDG_RUNTIME_DIR to a folder of your own with a short name"


@dataclass(frozen=True)
class Finding:
    """`found`: a fact; `means`: its consequence for an engine on this machine; `do`: what to change, as
    sentences and commands, one a line, or "". `prevents`: engines may not run."""

    topic: str
    level: Level
    found: str
    means: str
    do: str = ""
    prevents: bool = False

    def to_map(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("topic", "level", "found", "means", "do")}


# --- processor ----------------------------------------------------------------------------------------------


def processor(cores: Cores) -> Iterator[Finding]:
    """Describes the cores and their clock."""
    model = parse_cpuinfo(contents(Path("/proc/cpuinfo")))
    logical, usable = psutil.cpu_count() or len(cores.numbers), len(cores.numbers)
    physical = psutil.cpu_count(logical=False)
    size = f"{physical} cores, {logical} threads" if physical else f"{logical} threads"
    yield Finding(
        "cpu", "ok", f"{model}: {size}, {usable} usable here", "workers use one thread of each usable core"
    )
    if usable < logical:
        means = "the memory bandwidth of the other cores is not used either"
        do = "if unintended, check: `taskset -c`, `docker run --cpuset-cpus`, a service's AllowedCPUs"
        yield Finding("cpu", "note", f"this process may use {usable} of {logical} threads", means, do)
    if cores.quota is not None and cores.quota < usable:
        means = f"workers compute on {count(max(1, int(cores.quota)), 'core')}: more would exhaust the quota"
        do = f"to use more cores, raise it: `docker run --cpus {usable}`"
        quota = f"the control group's CPU quota: {cores.quota:g} of {usable} usable cores"
        yield Finding("cpu", "note", quota, means, do)
    clock = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    governor, driver = contents(clock / "scaling_governor"), contents(clock / "scaling_driver")
    if governor in SLOW_GOVERNORS and not driver.startswith(SELF_CLOCKED):
        means = "workers sleep between tokens, and each token waits for the cores to reach full clock again"
        do = "sudo cpupower frequency-set -g performance"
        yield Finding("cpu", "note", f"frequency governor: {governor}", means, do)


def pip_install(arguments: str) -> str:
    """Returns a command that installs into the running environment."""
    return f"{shlex.quote(sys.executable)} -m pip install {arguments}"


# --- kernels ------------------------------------------------------------------------------------------------


def kernels() -> Iterator[Finding]:
    """Names the kernels that compute experts, and why others do not."""
    variants = {name: load(name) for name in VARIANTS}
    used = next((name for name, library in variants.items() if isinstance(library, Library)), "")
    fix = f"install a C compiler (Debian, Ubuntu: sudo apt install gcc)\n{pip_install(f'-e {ROOT}')}"
    unused = ", ".join(
        f"{VARIANTS[name]} ({'not faster' if isinstance(other, Library) else other})"
        for name, other in variants.items()
        if name != used
    )
    if used:
        yield Finding("kernels", "ok", VARIANTS[used], f"not used: {unused}")
    else:
        means = "no engine starts"
        yield Finding("kernels", "problem", f"no compiled kernels: {unused}", means, fix, prevents=True)
    for compiled in (quantizer, doorbells, division):
        try:
            compiled()
        except NotCompiled as e:
            yield Finding("kernels", "problem", str(e), "no engine starts", fix, prevents=True)


# --- memory -------------------------------------------------------------------------------------------------


def memory(needed: int) -> Iterator[Finding]:
    """Describes main memory, how much of it can be locked, and /dev/shm. `needed`: bytes of the embedded
    model's store."""
    total, available, group = psutil.virtual_memory().total, available_memory(), limits().memory
    size = f"{byte_size(total)}, {byte_size(available)} available"
    if available < needed + FREE_BYTES:
        means = f"even the embedded model needs {byte_size(needed + FREE_BYTES)}"
        yield Finding("memory", "problem", size, means, "close other programs", prevents=True)
    else:
        means = f"experts of up to {byte_size(available - FREE_BYTES)} fit; {byte_size(FREE_BYTES)} stay free"
        yield Finding("memory", "ok", size, means)
    if group is not None and group < total:
        means = "experts in shared memory count; beyond the limit the kernel kills a process of the engine"
        do = "choose a model that fits, or raise the limit (`docker run --memory`, MemoryMax)"
        yield Finding("memory", "note", f"the control group allows {byte_size(group)}", means, do)
    yield _locking(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], total)
    shm = os.statvfs(SHM_FOLDER)
    whole, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    yield capacity(whole, free, needed, min(total, group or total))


def _locking(lockable: int, total: int) -> Finding:
    capabilities = contents(Path("/proc/self/status")).partition("CapEff:")[2].split()[:1]
    if not 0 <= lockable < total or any(int(each, 16) & CAP_IPC_LOCK for each in capabilities):
        return Finding("memory", "ok", "pages can be locked without limit", "experts cannot be swapped out")
    means = "larger models work too, but the rest of their experts can be swapped out"
    do = (
        "ulimit -l unlimited\n"
        "or for good, in /etc/security/limits.conf: `* - memlock unlimited`, then log in again\n"
        "in a container: `docker run --ulimit memlock=-1`"
    )
    return Finding("memory", "note", f"{byte_size(lockable)} can be locked (memlock limit)", means, do)


def capacity(size: int, free: int, needed: int, total: int) -> Finding:
    """Tells which models' experts fit /dev/shm; all arguments in bytes, `total`: of memory."""
    shm = f"{SHM_FOLDER}: {byte_size(size)}, {byte_size(free)} free"
    half = max(total // 2 // 2**20, 1024)
    enlarge = (
        f"sudo mount -o remount,size={half}m {SHM_FOLDER}\n"
        f"for a container: `docker run --shm-size={half}m` (or `--ipc=host`)"
    )
    if free < needed:
        means = f"even the embedded model's experts need {byte_size(needed)}"
        return Finding("shared memory", "problem", shm, means, enlarge, prevents=True)
    means = f"experts of up to {byte_size(free)} fit"
    if size < total // 3:
        return Finding("shared memory", "note", shm, means + "; the memory could hold more", enlarge)
    return Finding("shared memory", "ok", shm, means)


# --- folders ------------------------------------------------------------------------------------------------


def places() -> Iterator[Finding]:
    """Examines the runtime directory, names running engines, and removes what killed ones left behind, as
    every start does."""
    try:
        swept = [*sweep(), *sweep_stores()]
        engines = running_engines()
    except (ProtocolError, ShmError, OSError) as e:
        # These errors end in what to do, after the last semicolon.
        text, _, do = str(e).rpartition("; ")
        do = do.removeprefix("run: ") if text else OWN_FOLDER
        means = "it holds the engines' sockets, in folders with mode 0700"
        yield Finding("places", "problem", text or str(e), means, do, prevents=True)
        return
    if swept:
        names = ", ".join(name.lstrip("/") for name in swept)
        yield Finding("places", "note", f"leftovers of killed engines: {names}", "they have been removed")
    for engine in engines:
        words = f"engine {engine.name} runs: {short_name(engine.model)}"
        do = f"{COMMAND} chat --connect {engine.name}\nto stop it: kill {engine.pid}"
        yield Finding("places", "note", words, "it competes for cores and memory: figures are too low", do)
    if not engines:
        words = f"runtime directory {runtime_root()} is private"
        yield Finding("places", "ok", words, "no engine is running")
