"""A client that reconnects when the coordinator is restarted, and resumes its requests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from launch.command_line.options import Options
from launch.connect.session import CLIENT, endpoint
from launch.terminal.interrupts import Interrupts
from protocol.client import Client
from protocol.errors import ProtocolError

log = logging.getLogger("tandem")

RETRY_SECONDS = 60.0  # a large model's backbone is read again, and costs are measured
WAITING = f"the engine does not answer; waiting for it, {RETRY_SECONDS:.0f} s at most"
ANSWERS = "the engine answers again"


@asynccontextmanager
async def reconnecting_client(options: Options, interrupts: Interrupts) -> AsyncIterator[Client]:
    """Logs the begin and end of a wait for the engine. Raises as `endpoint` and Client.connect."""
    async with (
        endpoint(options, interrupts) as where,
        Client.connect(where, name=CLIENT, retry=RETRY_SECONDS) as client,
    ):
        client.on_pause = _on_pause
        client.on_reconnect = lambda: log.warning(ANSWERS)
        yield client


def _on_pause(lost: ProtocolError) -> None:
    log.warning(WAITING)
    log.debug("%s", lost)
