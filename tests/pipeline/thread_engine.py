"""An engine on the tiny model with its worker and prefetcher as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from mover_parts import (
    LIMIT,
    MoverParts,
    child_endpoint,
    child_socket,
    control_segment,
    mover_parts,
    random_store,
)

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.open import open_model
from pipeline.coordinator_config import WorkerCores
from pipeline.engine.engine import Engine
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.worker_pool import WorkerPool
from pipeline.models.registry import expert_shape, model_spec
from protocol.messages import Shutdown
from shm.layout import format_named
from shm.store import Store
from workers.expert_worker import serve

CONTEXT = 256


def unlimited(folder: Path, store: Store, slots: int) -> AbstractContextManager[MoverParts]:
    """A link at full speed."""
    return mover_parts(folder, store, slots, None)


@contextmanager
def engine_in_threads(
    model: Path,
    folder: Path,
    make_parts: Callable[[Path, Store, int], AbstractContextManager[MoverParts]] = unlimited,
    capacity: int = 6,
) -> Iterator[tuple[Engine, DeviceMemory]]:
    """With random experts and a cache of `capacity` of their 24 tiles; `make_parts` makes the tile mover's
    parts."""
    torch_threads = torch.get_num_threads()  # which the worker, being a thread, sets for all of us
    source = open_model(model)
    with ExitStack() as stack:
        shape = expert_shape(source.config, 32, format_named("bf16"))
        store = stack.enter_context(random_store(shape, "thread_engine"))
        parts = stack.enter_context(make_parts(folder, store, capacity + 4))
        socket = stack.enter_context(child_socket(folder, "work.sock", "worker", store.fingerprint))

        control = stack.enter_context(control_segment(1))

        def work() -> None:
            peer = child_endpoint(folder, "worker", "work.sock", store.fingerprint)
            peer.announce()
            serve(peer, store, control.line("worker", 0), team=None, slowdown=1.0)
            peer.close()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        pool = WorkerPool(socket, control, WorkerCores.equal(1), store.layout.shape.hidden)
        pool.wait_ready(LIMIT)
        memory = DeviceMemory(parts.mover(capacity=capacity, staging=4), parts.slab)
        spec = model_spec(source.config)
        backbone = Backbone(source, spec, Precision("f32", parts.device), CONTEXT)
        try:
            engine = Engine(backbone, store.layout, parts.device, pool)
            engine.memory = memory
            yield engine, memory
        finally:
            socket.send(0, Shutdown())
            thread.join(LIMIT)
            assert not thread.is_alive()
            torch.set_num_threads(torch_threads)
