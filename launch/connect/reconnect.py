"""A client that outlives the engine's coordinator: what was asked goes on as soon as there is another."""

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
BACK = "the engine is back"


@asynccontextmanager
async def patient(options: Options, interrupts: Interrupts) -> AsyncIterator[Client]:
    """That it waits, and no longer, is said on stderr. Raises what `endpoint` and Client.connect raise."""
    async with (
        endpoint(options, interrupts) as where,
        Client.connect(where, name=CLIENT, retry=RETRY_SECONDS) as client,
    ):
        client.on_pause = _waiting
        client.on_reconnect = _back
        yield client


def _waiting(lost: ProtocolError) -> None:
    log.warning(WAITING)
    log.debug("%s", lost)


def _back() -> None:
    log.warning(BACK)
