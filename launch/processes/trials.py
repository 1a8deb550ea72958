"""Child processes for measurements, so that a crash or a hang cannot affect the parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from launch.errors import LaunchError
from workers.lifetime import CHILD_PROCESS, environment, pack_config

MAX_LINE = 1 << 24  # bytes of a value: a liaison's has lines of the logs of all machines
MAX_REASON = 200  # characters of a failed child's last line that are shown


class TrialFailed(LaunchError):
    """Raised where a trial ends without a result or exceeds its time limit; the text is the reason."""


class Trial:
    """A running child, which writes one JSON value a line and may wait for `go`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def result(self, limit: float | None) -> Any:
        """The next value, within `limit` seconds, if there is a limit. Raises TrialFailed with the last line
        of its stderr."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            async with asyncio.timeout(limit):
                line = await self._process.stdout.readline()
                if line:
                    return json.loads(line)
                errors = (await self._process.stderr.read()).decode("utf-8", "replace").split("\n")
        except TimeoutError:
            raise TrialFailed(f"no result within {limit:g} s") from None
        except ValueError:
            raise TrialFailed(f"unexpected output: {line[:MAX_REASON]!r}") from None
        words = [text.strip() for text in errors if text.strip()]
        raise TrialFailed(words[-1][:MAX_REASON] if words else "it ended without a result")

    async def go(self) -> None:
        """Let the child continue; without effect where it has ended."""
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.write(b"\n")
            await self._process.stdin.drain()


@asynccontextmanager
async def trial(
    module: str, config: dict[str, Any], pass_fds: tuple[int, ...] = (), env: dict[str, str] | None = None
) -> AsyncIterator[Trial]:
    """`python -m MODULE` with this configuration during the block. `env`: its environment, if it is not that
    of other children. Raises TrialFailed."""
    for_child, lifeline = os.pipe()
    try:
        try:
            os.write(lifeline, pack_config(config))
            process = await asyncio.create_subprocess_exec(
                *(*CHILD_PROCESS, module, "--lifeline", str(for_child)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE,
                start_new_session=True,  # Ctrl-C in the terminal signals the parent alone
                pass_fds=(for_child, *pass_fds),
                env=env or environment(1),
            )
        except OSError as e:
            raise TrialFailed(f"no process could be started: {e.strerror}") from e
        finally:
            os.close(for_child)
        try:
            yield Trial(process)
        finally:
            if process.returncode is None:
                # Its own children too: one that still had its pipes open would let `wait` wait for it.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    finally:
        os.close(lifeline)
