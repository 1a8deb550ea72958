"""`launch.py serve`: an engine for other programs, until a signal."""

from __future__ import annotations

import asyncio

from launch.command_line.options import Options
from launch.connect import CLIENT, started
from launch.terminal.format import count
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import show
from protocol.client import Client
from protocol.errors import ProtocolError

ANSWER_SECONDS = 1.0  # for the engine to say what it has served; a hung one must not delay its end


async def serve(options: Options, interrupts: Interrupts) -> int:
    """One line on stdout, `NAME ENDPOINT`, when the engine is ready; SIGINT or SIGTERM ends it with 0."""
    served, name = "", ""
    try:
        async with started(options, interrupts) as engine:
            name = engine.name
            show(f"{name} {engine.endpoint}\n")
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                served = await _served(engine.endpoint) if interrupts.received else ""
    except asyncio.CancelledError:
        if not interrupts.received:
            raise
    if name:
        notice(f"engine {name} stopped by {interrupts.received}{served}")
    return 0


async def _served(endpoint: str) -> str:
    """The number of requests that the engine has ended, after a colon; "" where it does not answer."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            async with Client.connect(endpoint, name=CLIENT) as client:
                stats = await client.stats()
    except (ProtocolError, TimeoutError):
        return ""
    return f": {count(stats['scheduler']['ended'], 'request')} served"
