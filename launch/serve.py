"""`launch.py serve`: an engine for other programs, until a signal."""

from __future__ import annotations

import asyncio

from launch.command_line.options import Options
from launch.connect import started
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import announce


async def serve(options: Options, interrupts: Interrupts) -> int:
    """One line on stdout, `NAME ENDPOINT`, when the engine is ready; SIGINT or SIGTERM ends it with 0."""
    name = ""
    try:
        async with started(options, interrupts) as engine:
            name = engine.name
            announce(f"{name} {engine.endpoint}")
            await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        if not interrupts.received:
            raise
    which = f"engine {name}" if name else "the engine, which was not ready,"
    notice(f"{which} stopped by {interrupts.received}")
    return 0
