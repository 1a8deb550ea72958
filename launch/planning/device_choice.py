"""The choice of the device, before any process that imports torch is started."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

from launch.errors import WrongUsage
from pipeline.config import DeviceName
from protocol.program import COMMAND
from workers.lifetime import PYTHON, environment

log = logging.getLogger("tandem")

DRIVER_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the second under WSL
PROBE = "import torch; print(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else '')"
PROBE_LIMIT = 120.0  # seconds; a cold import of a CUDA build from a slow disk takes tens of them


def usable_device(asked: DeviceName) -> tuple[DeviceName, int | None]:
    """The device to use, and the bytes of its memory that are free for a process; None of cpu. Raises
    WrongUsage where cuda was asked for and is not usable; warns of a GPU that this torch cannot use."""
    if asked == "cpu":
        return "cpu", None
    driver = any(node.exists() for node in DRIVER_NODES)
    if not driver:
        reason = "no NVIDIA driver is loaded"
    elif (free := _free_on_gpu()) is None:
        reason = f"this torch cannot use the GPU; {COMMAND} doctor shows why, and what to install"
    else:
        return "cuda", free
    if asked == "cuda":
        raise WrongUsage(f"--device cuda: {reason}; or use --device cpu")
    if driver:
        log.warning(f"warning: computing on the CPU: {reason}")
    return "cpu", None


def _free_on_gpu() -> int | None:
    """Bytes that are free on the first GPU beside one process's context; None where torch cannot use it."""
    # In a process of its own: the supervisor stays small, and a driver that hangs does not hang it.
    try:
        probe = subprocess.run(
            [*PYTHON, "-c", PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_LIMIT,
            env=environment(1),
        )
    except subprocess.TimeoutExpired:
        return None
    words = probe.stdout.split()
    return int(words[-1]) if probe.returncode == 0 and words else None
