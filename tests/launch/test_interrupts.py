"""The receiver of a SIGINT: the innermost block that handles it, the session between two, else the
command."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from launch.terminal.interrupts import Interrupts


async def interrupt() -> None:
    """Deliver a SIGINT."""
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.05)


async def test_first_signal_goes_to_the_innermost_block_and_the_second_ends_the_command() -> None:
    got: list[str] = []

    async def command() -> None:
        interrupts = Interrupts()
        with interrupts.installed(), interrupts.otherwise(lambda: got.append("between")):
            await interrupt()
            await interrupt()  # any number of them
            with interrupts.handled_by(lambda: got.append("answer")):
                await interrupt()
                with interrupts.handled_by(lambda: got.append("cancelling")):
                    await interrupt()
            with suppress(KeyError), interrupts.handled_by(lambda: got.append("failed")):
                raise KeyError
            await interrupt()
            assert not interrupts.received
            with interrupts.handled_by(lambda: got.append("stuck")):
                await interrupt()
                await interrupt()  # the first had no effect
            got.append("not reached")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(command())
    assert got == ["between", "between", "answer", "cancelling", "between", "stuck"]


async def test_without_a_session_the_command_ends() -> None:
    async def command() -> None:
        with Interrupts().installed():
            await interrupt()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(command())
