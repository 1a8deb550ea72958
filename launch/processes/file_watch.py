"""Detects that another program has removed files of a running engine: systemd-logind, when the user has
logged out, or a program that cleans /tmp. docs/faults.md describes what remains possible then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from launch.errors import EngineFailed
from launch.runtime import INFO, RuntimeDir
from shm.locks import StoreLease
from shm.segment import is_segment, segment_path

log = logging.getLogger("tandem")

SOCKETS = ("control.sock", "client.sock")
LOGOUT = "systemd-logind does that when a user has logged out; loginctl enable-linger prevents it"


async def watch_files(
    runtime: RuntimeDir, lease: StoreLease, control: str, publish: Callable[[], None], interval: float
) -> None:
    """Check every `interval` seconds. Removed segments (of the store and `control`) are one warning, because
    they stay mapped; a removed engine.json is written again by `publish`. Raises EngineFailed where the
    directory or a socket has been removed: no client can reach the engine any more."""
    sockets = [path for path in (runtime.path / name for name in SOCKETS) if path.exists()]
    unreachable = warned = False
    while True:
        await asyncio.sleep(interval)
        before, unreachable = unreachable, not (runtime.intact and all(path.exists() for path in sockets))
        if before and unreachable:  # twice: a restarted coordinator replaces its socket
            raise EngineFailed(
                f"another program has removed {runtime.path} or files in it, so no client can connect: the "
                f"engine has been stopped ({LOGOUT}; so does an XDG_RUNTIME_DIR that stays)"
            )
        if not unreachable and not (runtime.path / INFO).exists():
            with suppress(OSError):
                publish()
        if not warned and not (lease.intact and is_segment(segment_path(control))):
            warned = True
            log.warning(
                "another program has removed shared memory of this engine: its processes go on with it, but "
                f"one that exits cannot be started again, and the engine then stops ({LOGOUT})"
            )
