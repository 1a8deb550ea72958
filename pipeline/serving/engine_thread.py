"""The engine's thread from its start to its end: builds the engine and serves, or posts why it cannot."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

from pipeline.coordinator_config import CoordinatorConfig
from pipeline.errors import PipelineError, UsageError
from pipeline.experts.peers import ExitEvents
from pipeline.serving.engine_events import EngineFailed, EngineReady, Post, ToSupervisor
from pipeline.serving.engine_inbox import EngineInbox
from pipeline.serving.engine_parts import EngineParts
from pipeline.serving.engine_service import EngineService
from pipeline.serving.text_messages import TextMessages
from shm.errors import NotEnoughMemory, ShmError
from workers.cuda import CudaError

log = logging.getLogger(__name__)


def run_engine(
    config: CoordinatorConfig,
    inbox: EngineInbox,
    post: Post,
    exits: ExitEvents,
    congested: Callable[[bytes], bool],
    text_up: threading.Event,
) -> None:
    """Build an engine and serve until `inbox` is stopped: the whole life of the engine's thread. `text_up`:
    set once the text process is ready."""

    def to_supervisor(message: object) -> None:
        post(ToSupervisor(message))

    try:
        with ExitStack() as closing:
            parts = EngineParts(config, exits, to_supervisor, closing, text_up)
            service = EngineService(parts, inbox, post, congested)
            texts = TextMessages(parts.detokenizer, parts.context)
            post(EngineReady(service.status, texts, tuple(parts.notes)))
            service.warm_up()
            service.serve()
    except (PipelineError, ShmError, CudaError) as e:
        post(EngineFailed(str(e), isinstance(e, UsageError | NotEnoughMemory)))
    except Exception as e:
        log.exception("the engine failed")
        post(EngineFailed(f"the engine failed: {type(e).__name__}: {e}", False))
