"""An engine in its own processes, for benchmarks that measure its memory from outside."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from launch.runtime import EngineInfo, find_engine

LAUNCH = Path(__file__).parents[1] / "launch.py"
START_LIMIT, STOP_LIMIT = 300.0, 30.0  # seconds


@asynccontextmanager
async def served(name: str, options: list[str]) -> AsyncIterator[EngineInfo]:
    """`launch.py serve` with these options, for the length of the block; its log goes to stderr. Raises
    SystemExit where it does not start, or ends with an error."""
    command = (sys.executable, str(LAUNCH), "serve", "--name", name, "--log-level", "warning", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_LIMIT):
            if not await process.stdout.readline():
                raise SystemExit("the engine did not start")
        yield find_engine(name)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(STOP_LIMIT):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            code = await process.wait()
    if code:
        raise SystemExit(f"the engine ended with exit code {code}")
