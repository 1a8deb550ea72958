"""The engine's thread: builds the engine, then alternates between the event loop's calls and rounds of the
scheduler. Everything it built is its own; others reach it by `call` alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from pipeline.coordinator_config import CoordinatorConfig
from pipeline.errors import PipelineError, UsageError
from pipeline.experts.peers import ExitEvents
from pipeline.serving.assembly import Assembly
from pipeline.serving.calibration_service import Calibrations
from pipeline.serving.clients import Clients
from pipeline.serving.engine_inbox import EngineInbox
from shm.errors import NotEnoughMemory, ShmError
from workers.cuda import CudaError

log = logging.getLogger(__name__)

IDLE_WAIT = 0.5  # seconds an idle engine waits for a call before it looks after itself
MOVING_WAIT = 0.01  # the same while tiles move in the background
PAUSE = 0.005  # seconds until a round is tried again when all requests wait for their clients
CALLS_SECONDS = 0.01  # of calls between two rounds
LAST_CALLS_SECONDS = 0.5  # of those that wait when the engine is stopped
JOIN_LIMIT = 2.0  # seconds for the engine's thread to end its step
GIVE_UP_LIMIT = 1.0  # seconds for it to end after its peers were given up


class EngineThread:
    """One thread, started by `start` and ended by `stop` and `join`."""

    def __init__(
        self,
        told: CoordinatorConfig,
        loop: asyncio.AbstractEventLoop,
        clients: Clients,
        *,
        deaths: ExitEvents,
        on_ready: Callable[[Assembly], None],
        on_failure: Callable[[str, bool], None],
        tell: Callable[[object], None],
    ) -> None:
        """In the loop are called `on_ready(assembly)` once the engine is built, `on_failure(text, usage)` if
        it cannot be, or cannot go on, and `tell(message)` with what the supervisor is to know."""
        self._told = told
        self._loop = loop
        self._clients = clients
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._deaths, self._tell = deaths, tell
        self._assembly: Assembly | None = None
        self._calls: EngineInbox[Assembly] = EngineInbox()
        self.calibrations = Calibrations(self.send, self._attend)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(
        self, client: bytes, function: Callable[[Assembly], None], *, size: int = 0, always: bool = False
    ) -> bool:
        """Run a function with the assembly for a client, between two rounds; until then it holds `size`
        bytes. False where too many of this client's wait already, unless it is to be run `always`. From the
        event loop."""
        return self._calls.put(client, function, size=size, always=always)

    def stop(self) -> None:
        """End after the round that is running. From the event loop; `join` waits."""
        self._calls.stop()

    def join(self) -> None:
        """Wait for the end, not for a peer: a step that waits for one that does not answer is given up."""
        self._thread.join(JOIN_LIMIT)
        if self._thread.is_alive() and self._assembly is not None:
            self._assembly.give_up("the engine was stopped while a step waited")
            self._thread.join(GIVE_UP_LIMIT)

    def in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the event loop. From any thread."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def send(self, client: bytes, message: object) -> None:
        """Queue a message for a client. From any thread."""
        self.in_loop(self._clients.send, client, message)

    def _run(self) -> None:
        try:
            assembly = self._assembly = Assembly(
                self._told,
                self.send,
                self._clients.congested,
                self._deaths,
                tell=lambda message: self.in_loop(self._tell, message),
            )
            self.in_loop(self._on_ready, assembly)
            assembly.warm_up()
            self._serve(assembly)
        except (PipelineError, ShmError, CudaError) as e:
            usage = isinstance(e, (UsageError, NotEnoughMemory))
            self.in_loop(self._on_failure, str(e), usage)
        except Exception as e:
            log.exception("the engine failed")
            self.in_loop(self._on_failure, f"the engine failed: {type(e).__name__}: {e}", False)

    def _serve(self, assembly: Assembly) -> None:
        scheduler, pause = assembly.scheduler, IDLE_WAIT
        try:
            while not self._calls.stopped:
                self._take_calls(assembly, pause if scheduler.idle else 0.0)
                if scheduler.idle:
                    pause = MOVING_WAIT if assembly.rest() else IDLE_WAIT
                elif not scheduler.round():
                    self._take_calls(assembly, PAUSE)
        finally:
            if self._calls.stopped:  # whoever has asked for something is told its end
                self._take_calls(assembly, 0.0, LAST_CALLS_SECONDS)
                scheduler.cancel_all()
            # Otherwise the engine failed. Its successor goes on where a client asks it to, so nothing is
            # ended.
            assembly.close()

    def _attend(self, assembly: Assembly) -> bool:
        """What is done while a call takes long; False where the end was asked for."""
        self._take_calls(assembly, 0.0)
        return not self._calls.stopped

    def _take_calls(self, assembly: Assembly, wait: float, seconds: float = CALLS_SECONDS) -> None:
        """Run the calls that are there, for a little while, so that a flood of them does not keep rounds from
        running; wait for the first."""
        call = self._calls.get(wait)
        until = time.perf_counter() + seconds
        while call is not None:
            call(assembly)
            call = self._calls.get(0.0) if time.perf_counter() < until else None
