"""CUDA's multi-process service: kernels and copies of its clients share the GPU, where those of other
processes take turns. The driver makes a process a client at its first CUDA call, if a control daemon answers
in its pipe directory, and otherwise goes on without it.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
ANSWER_LIMIT = 1.0  # seconds
NO_MPS = (
    "--prefetcher mps needs a GPU and MPS's control daemon, which does not run here: start it with"
    " `nvidia-cuda-mps-control -d`, or use --prefetcher auto"
)


def offered() -> bool:
    """Whether a control daemon runs for this process."""
    control = Path(os.environ.get(PIPES) or DEFAULT_PIPES) / "control"
    try:
        if not stat.S_ISSOCK(control.stat().st_mode):
            return True
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(ANSWER_LIMIT)
            probe.connect(str(control))
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        return False  # a daemon that was killed leaves its socket
    except OSError:
        return True  # another kind of socket, or a busy daemon
    return True


def decline(runtime: Path) -> None:
    """This process and its children are no clients: for before the first CUDA call. `runtime`: a folder in
    which there is no daemon."""
    os.environ[PIPES] = str(runtime / "no-mps")
