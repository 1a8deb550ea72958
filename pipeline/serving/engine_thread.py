"""The thread in which the engine is built and served. The event loop starts and stops it; the two exchange
messages through `inbox` (to the engine) and `post` (to the event loop)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

from pipeline.coordinator_config import CoordinatorConfig
from pipeline.errors import PipelineError, UsageError
from pipeline.experts.peers import ExitEvents
from pipeline.serving.child_sockets import ChildSockets
from pipeline.serving.engine_builder import build_engine
from pipeline.serving.engine_events import EngineFailed, EngineReady, Post, ToSupervisor
from pipeline.serving.engine_inbox import EngineInbox
from pipeline.serving.engine_service import EngineService
from shm.errors import NotEnoughMemory, ShmError
from workers.cuda import CudaError

log = logging.getLogger(__name__)

JOIN_LIMIT = 2.0  # seconds for the thread to end its step
GIVE_UP_LIMIT = 1.0  # seconds for it to end once its waits for children were given up


class EngineThread:
    """Started by `start`, ended by `stop` and `join`, all called by the event loop's thread."""

    def __init__(
        self,
        config: CoordinatorConfig,
        post: Post,
        *,
        exit_events: ExitEvents,
        congested: Callable[[bytes], bool],
    ) -> None:
        """`post` and `congested` are called in the engine's thread."""
        self.inbox = EngineInbox()
        self._config = config
        self._post = post
        self._exit_events = exit_events
        self._congested = congested
        self._sockets: ChildSockets | None = None  # once the engine is built
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the round that is running; `join` waits for it."""
        self.inbox.stop()

    def join(self) -> None:
        """Wait for the thread's end. A step that waits for a child that does not answer is given up."""
        self._thread.join(JOIN_LIMIT)
        if self._thread.is_alive() and self._sockets is not None:
            self._sockets.give_up("the engine was stopped while a step waited")
            self._thread.join(GIVE_UP_LIMIT)

    def _run(self) -> None:
        """In the engine's thread."""
        try:
            with ExitStack() as closing:
                self._serve(closing)
        except (PipelineError, ShmError, CudaError) as e:
            self._post(EngineFailed(str(e), isinstance(e, UsageError | NotEnoughMemory)))
        except Exception as e:
            log.exception("the engine failed")
            self._post(EngineFailed(f"the engine failed: {type(e).__name__}: {e}", False))

    def _serve(self, closing: ExitStack) -> None:
        parts = build_engine(
            self._config, self._exit_events, lambda message: self._post(ToSupervisor(message)), closing
        )
        service = EngineService(parts, self.inbox, self._post, self._congested)
        self._sockets = parts.sockets
        self._post(EngineReady(service.status, tuple(parts.notes)))
        service.warm_up()
        service.serve()
