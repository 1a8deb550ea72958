"""Child processes for measurements, so that a crash or a hang cannot affect the parent; and the choice of
kernels, and of what carries work to the workers, which the first start on a machine measures and keeps."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from launch.errors import LaunchError
from pipeline.config import ExchangeName
from shm.doorbell import library
from workers.interpreter import CHILD_PROCESS, environment
from workers.kernels.choice import DEFAULT, Choice
from workers.kernels.tuning import Tuning
from workers.kernels.tuning_file import Machine, Record, find, keep
from workers.lifetime import pack_config

KERNELS = "workers.kernels.tuning"
KERNELS_LIMIT = 10.0  # seconds; it takes one
MAX_REASON = 200  # characters of a failed child's last line that are shown

log = logging.getLogger("tandem")


class TrialFailed(LaunchError):
    """Raised where a trial ends without a result or exceeds its time limit; the text is the reason."""


class Trial:
    """A running child, which writes one JSON value a line and may wait for `go`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def result(self, limit: float) -> Any:
        """The next value, within `limit` seconds. Raises TrialFailed with the last line of its stderr."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            async with asyncio.timeout(limit):
                line = await self._process.stdout.readline()
                if line:
                    return json.loads(line)
                errors = (await self._process.stderr.read()).decode("utf-8", "replace").split("\n")
                code = await self._process.wait()
        except TimeoutError:
            raise TrialFailed(f"no result within {limit:g} s") from None
        except ValueError:
            raise TrialFailed(f"unexpected output: {line[:MAX_REASON]!r}") from None
        words = [text.strip() for text in errors if text.strip()]
        raise TrialFailed(words[-1][:MAX_REASON] if words else f"ended with exit code {code}")

    async def go(self) -> None:
        """Let the child continue; without effect where it has ended."""
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.write(b"\n")
            await self._process.stdin.drain()


@asynccontextmanager
async def trial(module: str, config: dict[str, Any], pass_fds: tuple[int, ...] = ()) -> AsyncIterator[Trial]:
    """`python -m MODULE` with this configuration during the block. Raises TrialFailed."""
    for_child, lifeline = os.pipe()
    try:
        try:
            os.write(lifeline, pack_config(config))
            process = await asyncio.create_subprocess_exec(
                *(*CHILD_PROCESS, module, "--lifeline", str(for_child)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal signals the parent alone
                pass_fds=(for_child, *pass_fds),
                env=environment(1),
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


# --- kernels ------------------------------------------------------------------------------------------------


async def kept_or_measured(cache: Path, measuring: Callable[[], None]) -> Tuning | None:
    """Returns the tuning for an engine. Where it was not measured, the log says why."""
    record = await kernel_record(cache, measuring)
    if record is not None and record.tuning is None:
        log.warning(f"the kernels could not be measured, the usual ones are used: {record.failure}")
    return None if record is None else record.tuning


def choice_of(tuning: Tuning | None) -> Choice:
    """Returns the choice for all processes of an engine."""
    return DEFAULT if tuning is None else tuning.choice


def exchange_of(wanted: ExchangeName, workers: int, tuning: Tuning | None) -> str:
    """Returns what carries work to the workers: "zmq" or "shm"; empty without workers. `auto` is what was
    measured to be faster, shared memory where nothing was."""
    if not workers:
        return ""
    if wanted != "auto":
        return wanted
    trips = {} if tuning is None else tuning.round_trips
    return "zmq" if library() is None or (len(trips) == 2 and trips["zmq"] < trips["shm"]) else "shm"


async def kernel_record(cache: Path, measuring: Callable[[], None]) -> Record | None:
    """Returns what is kept of this machine, or else is measured in a child process and then kept; also a
    failure, with its reason: one that hangs would otherwise delay every start. None where nothing can be
    chosen."""
    machine = Machine.here()
    load = os.getloadavg()[0]
    kept = find(cache, machine)
    if kept is not None and not kept.stale(time.time(), load):
        return kept
    measuring()
    tuning, failure = None, ""
    try:
        async with trial(KERNELS, {}) as child:
            measured = await child.result(KERNELS_LIMIT)
        if measured is None:
            return None
        tuning = msgspec.convert(measured, Tuning)
    except (TrialFailed, msgspec.ValidationError) as e:
        failure = str(e)
    load = max(load, os.getloadavg()[0])  # programs that have just begun are seen only afterwards
    record = Record(machine, tuning, time.time(), load, failure)
    keep(cache, record)
    return record
