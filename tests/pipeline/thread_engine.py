"""An engine on the tiny model with its worker and prefetcher as threads of this process."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from child_messages import LIMIT, child_endpoint, child_socket, control_segment
from failing_prefetcher import FailingPrefetcher
from mover_parts import MoverParts, mover_parts, random_store

from pipeline.arrays import IntArray
from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.linear import Precision
from pipeline.backbone.protocol import AnyBackbone
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_model
from pipeline.config import WorkerCores
from pipeline.device import Device
from pipeline.engine.engine import Engine
from pipeline.experts.carriers import ArenaCarrier, SocketCarrier
from pipeline.experts.channel_share import ChannelMemory
from pipeline.experts.device_share import DeviceMemory, Slab
from pipeline.experts.division import Divider, largest
from pipeline.experts.peers import ExitEvents
from pipeline.experts.pool import HostPool
from pipeline.models.facts import expert_shape, facts_of, is_own
from pipeline.models.registry import model_spec
from pipeline.policies.presets import make_policy
from pipeline.policies.view import ModelShape, Plan, Policy, PolicyRequest, Routing, View
from protocol.messages import Shutdown, WorkerDied
from shm.lane import LaneShape, library
from shm.layout import format_named
from shm.store import Store
from workers.copiers import TileCopy
from workers.expert_worker import serve
from workers.kernels.native import WorkKernel, store_kernel

CONTEXT = 256
PROMPT = [5, 6, 7, 8, 9]
TOKEN = 11
_NUMBERS = itertools.count()


class Exited(BaseException):
    """A worker ends here, as by a kill."""


class Mortal:
    """A worker's kernel; the worker exits before or after a Work where `dies` says so."""

    def __init__(self, kernel: WorkKernel, dies: Callable[[], bool]) -> None:
        self.hidden = kernel.hidden
        self._kernel, self._dies = kernel, dies

    def compute(self, *arguments: Any) -> Any:
        if self._dies():
            raise Exited
        tally = self._kernel.compute(*arguments)
        if self._dies():
            raise Exited
        return tally


@contextmanager
def pool_in_threads(
    folder: Path,
    store: Store,
    workers: int,
    exchange: str,
    top_k: int = 2,
    device: Device | None = None,
    dies: Callable[[], bool] = lambda: False,
) -> Iterator[HostPool]:
    """Yields a pool whose workers are threads of this process. `exchange`: zmq or shm; `device` reads answers
    in shared memory, if it can. `dies`: asked before and after each Work; the worker that exits is followed
    by another."""
    torch_threads = torch.get_num_threads()  # which the workers, being threads, set for all of us
    cores, shape, exits = WorkerCores.equal(workers), store.layout.shape, ExitEvents()
    with ExitStack() as stack:
        socket = stack.enter_context(child_socket(folder, "work.sock", "worker", store.fingerprint, exits))
        control = stack.enter_context(control_segment(workers))

        def work(index: int) -> None:
            line = control.line("worker", index)
            for generation in itertools.count(index + 5):
                peer = child_endpoint(folder, "worker", "work.sock", store.fingerprint, index, generation)
                peer.announce()
                kernel: Any = Mortal(store_kernel(store, None, line, generation=generation), dies)
                try:
                    serve(peer, line, kernel, slowdown=1.0)
                except Exited:
                    exits.put(WorkerDied("worker", index, generation, False, -1))
                else:
                    return
                finally:
                    peer.close()

        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(workers)]
        for thread in threads:
            thread.start()
        carrier: ArenaCarrier | SocketCarrier = SocketCarrier(socket, shape.hidden)
        if exchange == "shm":
            most = largest(cores, shape.experts, shape.tiles, CONTEXT, top_k)
            lanes = LaneShape(shape.hidden, (4, most), (CONTEXT, most))
            prefix = f"/tandem-tests{os.getpid()}-threads-{next(_NUMBERS)}-"
            carrier = ArenaCarrier(socket, library(), prefix, lanes, device)
            stack.callback(carrier.close)
        division = Divider(cores, shape.experts, shape.tiles)
        pool = HostPool(division, cores, None, socket, carrier, control)
        pool.wait_ready(LIMIT)
        try:
            yield pool
        finally:
            for index, thread in enumerate(threads):
                socket.send(index, Shutdown())
                thread.join(LIMIT)
                assert not thread.is_alive()
            torch.set_num_threads(torch_threads)


@contextmanager
def engine_in_threads(
    model: Path,
    folder: Path,
    capacity: int = 6,
    store: Store | None = None,
    staging: int = 4,
    device: Device | None = None,
    arena: bool = False,
    context: int = CONTEXT,
    dies: Callable[[], bool] = lambda: False,
    others: Store | None = None,
) -> Iterator[tuple[Engine, FailingPrefetcher]]:
    """With a DeviceMemory for `capacity` tiles, of a store's experts or of random ones, of 24 tiles in
    all. `arena`: Work goes through shared memory. `dies`: as of pool_in_threads; `others`: of mover_parts."""
    source = open_model(model)
    with ExitStack() as stack:
        if store is None:
            shape = expert_shape(source.config, 32, format_named("bf16"))
            store = stack.enter_context(random_store(shape, "thread_engine"))
        parts = stack.enter_context(
            mover_parts(folder, store, capacity + staging, device=device, others=others)
        )
        exchange = "shm" if arena else "zmq"
        pool = stack.enter_context(
            pool_in_threads(folder, store, 1, exchange, device=parts.device, dies=dies)
        )
        backbone = backbone_in(parts.device, source, stack, context)
        engine = Engine(backbone, store.layout, pool)
        engine.first.memory = device_memory(parts, engine.shape, capacity)
        yield engine, parts.prefetcher


def backbone_in(device: Device, source: ModelSource, stack: ExitStack, context: int = CONTEXT) -> AnyBackbone:
    """The model's backbone as an engine has it, in float32; its tables are open until the stack is closed."""
    precision = Precision("f32", device)
    if is_own(source.config):
        return Backbone(source, model_spec(source.config), precision, context)
    from pipeline.checkpoint.decoder import decoder_of
    from pipeline.checkpoint.tables import Parameters
    from pipeline.generic.backbone import GenericBackbone

    weights = stack.enter_context(source.tensors())
    assert isinstance(weights, Parameters)
    return GenericBackbone(facts_of(source.config), *decoder_of(source.config), weights, precision)


def device_memory(parts: MoverParts, shape: ModelShape, capacity: int) -> DeviceMemory:
    """Of the store's format."""
    layout, device = parts.store.layout, parts.device
    slab = Slab(parts.slab, capacity, parts.link, parts.copier)
    if not layout.head_bytes:
        return DeviceMemory(shape, device, slab, device.expert_kernel(layout))
    heads, kernel = device.load_heads(parts.store, range(shape.layers)), device.channel_kernel(layout)
    return ChannelMemory(shape, device, slab, kernel, heads, layout)


class Placed(Policy):
    """Places whole experts of layer 1, and has the host compute everything."""

    experts: tuple[int, ...] = ()

    def placement(self, view: View) -> IntArray:
        target = np.zeros((view.shape.layers, view.shape.experts), np.int32)
        target[1, list(self.experts)] = view.shape.tiles
        return target

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        return Plan(np.zeros(view.shape.experts, np.int32))


def prefilled(engine: Engine, kv: KVCache, capacity: int = 16) -> TokenSpan:
    """A sequence with TOKEN as its next token."""
    engine.set_policy(make_policy(PolicyRequest("all-host"), 0), None)
    sequence = kv.allocate(capacity)
    engine.step([StepInput(TokenSpan(sequence, PROMPT), "none")], "prefill")
    return TokenSpan(sequence, [TOKEN])


def decode(engine: Engine, after: TokenSpan, token: int = TOKEN) -> None:
    """One more token of a sequence."""
    engine.step([StepInput(TokenSpan(after.kv, [token]), "none")], "decode")


def recorded_orders(engine: Engine, patch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, int, int]]]:
    """The tiles that are moved from now on: (urgency, (layer, expert, tile)) of each; 0 for demanded ones."""
    moved: list[tuple[int, tuple[int, int, int]]] = []
    slab = engine.first.memory.slab
    order, begin = slab.link.order, slab.copier.begin

    def ordered(layer: int, expert: int, lo: int, slots: list[int], urgency: int, channels: object) -> object:
        moved.extend((urgency, (layer, expert, lo + index)) for index in range(len(slots)))
        return order(layer, expert, lo, slots, urgency, channels)

    def begun(copies: list[TileCopy]) -> object:
        moved.extend((0, (copy.layer, copy.expert, copy.tile)) for copy in copies)
        return begin(copies)

    patch.setattr(slab.link, "order", ordered)
    patch.setattr(slab.copier, "begin", begun)
    return moved
