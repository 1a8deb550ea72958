"""Process entry: an expert host, `python -P -m pipeline.cluster.host` with a HostConfig as JSON on standard
input. It loads its machine's part of the experts into shared memory and answers LaneWorks at a tcp endpoint.

It is nobody's child, holds its place's lock (`place.py`), and ends when its coordinator was silent for as
long as its lease, or by SIGTERM. After any other death its store is still in shared memory, and the next one
of the same name attaches it. It imports no torch.

With `disk_memory` it is a stand-in for a lost machine, whose part no memory has room for: it keeps some
experts in memory and reads the others from the file of the disk cache, as an engine with --host-memory does.

Its main thread does all: it takes messages, and while its workers compute, it takes them at every slice of
its wait. Only the part is loaded by a thread of its own, so that a coordinator is told how far that is."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from msgspec import json
from zmq.auth.thread import ThreadAuthenticator

from pipeline.arrays import FloatArray, IntArray
from pipeline.cluster import place
from pipeline.cluster.keeper import HostConfig, new_keys, same_bits
from pipeline.cluster.lanes import HeldLanes
from pipeline.cluster.rows import RowCoder, WireX
from pipeline.cluster.workers import READER, ROLE, HostWorkers
from pipeline.config import WorkerCores
from pipeline.errors import PipelineError
from pipeline.experts.carriers import ArenaCarrier
from pipeline.experts.disk_tier import DiskTier
from pipeline.experts.division import Divider, largest
from pipeline.experts.peers import COPY_BELOW, ChildServerSocket, ExitEvents
from pipeline.experts.pool import HostPool, computing
from pipeline.fairness import SparseLog
from pipeline.loader import Loading
from pipeline.memory.needs import LAYERS_IN_MEMORY
from pipeline.models.facts import facts_of
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage, ProtocolError
from protocol.files import private_directory
from protocol.machines import (
    DOMAIN,
    LOADING,
    READY,
    REFUSED,
    HostHello,
    HostWelcome,
    LaneAbandon,
    LaneFailed,
    LaneSums,
    LaneWork,
    Ping,
    Pong,
    host_router,
)
from protocol.program import LineFormatter
from protocol.sockets import runtime_root
from shm.control import ControlSegment
from shm.descriptor import HEADER, ITEMS, LAYER, Descriptor, head_of, numbers
from shm.errors import ShmError
from shm.lane import LaneShape, library
from shm.layout import ExpertShape
from shm.locks import StoreLease
from shm.segment import engine_prefix
from shm.store import Store
from workers.kernels.native import VERSION as KERNELS
from workers.kernels.native import best, store_kernel

NARROW_ROWS = 32  # of the slots of a lane of which there are several
FEW_ROWS = 4  # of a Work of which this process computes a share itself: it is deaf meanwhile
LOOK_MS = 100  # of a wait for messages, between two looks at the workers
TURN_SECONDS = 1.0  # that a turn counts as silence at most: one that was stopped has not listened
CHECK_SECONDS = 0.01  # between two looks at least: a system call for each worker
WORKER_LIMIT = 60.0  # seconds for the workers to announce themselves

log = logging.getLogger(__name__)


class ExpertHost:
    """One host. Used by the main thread."""

    def __init__(self, config: HostConfig, path: Path, closing: ExitStack) -> None:
        """Raises ProtocolError where it cannot listen."""
        self._config, self._path, self._closing = config, path, closing
        self.incarnation = secrets.token_hex(8)
        self._public, secret = new_keys()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        closing.callback(context.term)
        guard = ThreadAuthenticator(context, log=logging.getLogger("zmq.auth"))
        guard.start()
        closing.callback(guard.stop)
        guard.configure_curve_callback(DOMAIN.decode(), _Only(config.coordinator_key))
        self._socket = host_router(context, config.address, config.ports, self._public, secret)
        closing.callback(self._socket.close)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._works: dict[tuple[bytes, int], LaneWork] = {}  # without an answer, by sender and seq
        self._loading = _LoadingThread(config, path)
        self._store: Store | None = None
        self._lanes: HeldLanes | None = None  # once it is ready
        self._coder: RowCoder | None = None
        self._workers: HostWorkers | None = None
        self._tier: DiskTier | None = None
        self._error = ""  # why it cannot compute
        self._silence = 0.0  # seconds since the coordinator's last message in which this host has listened
        self._turned_at = time.monotonic()
        self._check_at = 0.0
        self.stopped = False
        self._log = SparseLog(log)

    def run(self) -> None:
        """Serve until SIGTERM, or the end of the lease."""
        self._publish(LOADING)
        self._loading.start()
        while not self._ended():
            if self._loading.is_alive() or self._lanes is not None:
                self._turn()
            elif self._loading.failure:
                self._publish("failed", self._loading.failure)
                raise SystemExit(1)
            else:
                self._open()
                self._publish(READY)

    def _ended(self) -> bool:
        before, self._turned_at = self._turned_at, time.monotonic()
        self._silence += min(TURN_SECONDS, self._turned_at - before)
        if self._loading.is_alive():  # perhaps for longer than a coordinator takes to start
            self._silence = 0.0
        if not self.stopped and self._silence > self._config.lease:
            log.warning(f"the coordinator was silent for {self._config.lease:g} s: this host ends")
            self.stopped = True
        return self.stopped

    def _turn(self) -> None:
        """Answer the next Work, or wait for messages."""
        if self._works and self._lanes is not None:
            (sender, _), work = next(iter(self._works.items()))
            self._answer(sender, work)
        else:
            self._look(LOOK_MS)
            if self._tier is not None:
                self._tier.update(0)

    def _publish(self, state: str, error: str = "") -> None:
        config = self._config
        of_host = config.name, os.getpid(), config.setting, state, self._endpoint, self._public
        lanes, path = config.lanes.held, str(place.log_of(self._path))
        place.publish(self._path, place.HostPlace(*of_host, lanes, path, error))

    # --- computing ---------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Attach the store and start the workers."""
        config, loading = self._config, self._loading.loading
        assert loading is not None
        assert self._loading.lease is not None
        self._closing.callback(self._loading.lease.release, keep=False)
        on_disk = config.disk_memory is not None
        self._store = store = Store.attach(loading.name, loading.fingerprint, writable=on_disk)
        self._closing.callback(store.close)
        runtime, prefix = self._path, engine_prefix(self._path)
        control = ControlSegment.create(f"{prefix}control-0", len(config.cores))
        self._closing.callback(control.close)
        exits, key = ExitEvents(), secrets.token_bytes(32)
        told = {
            "runtime": str(runtime),
            "log_level": config.log_level,
            "fingerprint": loading.fingerprint,
            "store": loading.name,
            "control": control.segment.name,
            "host_slowdown": config.host_slowdown,
            "supervised": False,
        }
        workers = HostWorkers(config.cores, told, key, control, exits, place.log_of(runtime), on_disk)

        def bind(file: str, role: str, largest: int = 0) -> ChildServerSocket:
            identity = runtime, file, role, loading.fingerprint, key, exits, workers.on_message
            socket = ChildServerSocket(*identity, largest=largest, tick=lambda: self._look(0))
            self._closing.callback(socket.close)
            return socket

        socket = bind("work.sock", ROLE, 4 * config.lanes.rows * store.layout.shape.hidden)
        reading = bind("read.sock", READER) if on_disk else None
        self._closing.callback(workers.stop)
        workers.check()
        self._workers = workers
        cores, shape = WorkerCores(tuple(max(1, len(one)) for one in config.cores)), store.layout.shape
        lanes = LaneShape(shape.hidden, *(self._slot(rows) for rows in (NARROW_ROWS, config.lanes.rows)))
        carrier = ArenaCarrier(socket, library(), prefix, lanes)
        self._closing.callback(carrier.close)
        divider = Divider(cores, shape.experts, shape.tiles)
        compute = None
        if config.host_slowdown == 1:
            compute = computing(store_kernel(store, guarded=True))
        pool = HostPool(divider, cores, compute, socket, carrier, control)
        pool.wait_ready(WORKER_LIMIT)
        if reading is not None:
            reading.wait_ready(1, WORKER_LIMIT)
            top_k = facts_of(loading.source.config).top_k
            self._tier = pool.tier = DiskTier(store, top_k, shape.layers, reading, control.line(READER, 0))
        self._coder = RowCoder(store.layout)
        self._lanes = HeldLanes(pool, config.lanes.part)

    def _slot(self, rows: int) -> tuple[int, int]:
        """Returns rows of x, and the numbers of the largest descriptor for them."""
        assert self._store is not None
        shape = self._store.layout.shape
        return rows, largest(WorkerCores.equal(1), shape.experts, shape.tiles, rows, shape.experts)

    def _answer(self, sender: bytes, work: LaneWork) -> None:
        assert self._lanes is not None
        started = time.perf_counter()
        if few := len(work.x) <= FEW_ROWS:
            self._lanes.pool.announce()  # workers wake while x is made
        try:
            x = self._x_of(work)
            ends = list(accumulate(work.lengths, initial=0))
            pieces = [work.descriptors[begin:end] for begin, end in pairwise(ends)]
            if self._tier is not None and pieces:
                assert self._store is not None
                self._tier.need(*_needed(pieces, self._store.layout.shape))
            ticket = self._lanes.begin({lane: pieces for lane in work.lanes}, x, few)
            if self._tier is not None:
                self._tier.predict(None)
            sums = ticket.sums()
        except (PipelineError, ValueError, IndexError) as e:
            self._works.pop((sender, work.seq), None)
            self._send(sender, LaneFailed(work.seq, str(e)))
            return
        parts = [sums[lane] for lane in work.lanes]
        y = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._works.pop((sender, work.seq), None)
        self._send(sender, LaneSums(work.seq, work.lanes, time.perf_counter() - started, y))

    def _x_of(self, work: LaneWork) -> FloatArray:
        """Raises ValueError where a Work's arrays do not fit this host or each other."""
        assert self._coder is not None
        if not set(work.lanes) <= set(self._config.lanes.held) or len(set(work.lanes)) != len(work.lanes):
            raise ValueError(f"lanes {work.lanes} of a host that holds {self._config.lanes.held}")
        if sum(work.lengths) != len(work.descriptors) or min(work.lengths, default=99) < numbers(0, 0):
            raise ValueError("descriptors of other lengths than said")
        if len(work.x) > self._config.lanes.rows:
            raise ValueError(f"x of {len(work.x)} rows instead of {self._config.lanes.rows} at most")
        return self._coder.decode(WireX(work.compact, work.x))

    # --- messages ----------------------------------------------------------------------------------------

    def _look(self, wait_ms: int) -> None:
        """Take the messages that have arrived, after waiting for one; look after the workers."""
        if self._workers is not None and (now := time.monotonic()) >= self._check_at:
            self._workers.check()
            self._check_at = now + CHECK_SECONDS
        if not self._poller.poll(wait_ms):
            return
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                message = decode(frames)
            except MalformedMessage as e:
                self._log.warning(f"dropped a malformed message of the coordinator: {e}")
                continue
            self._silence = 0.0
            self._on_message(sender, message)

    def _on_message(self, sender: bytes, message: object) -> None:
        match message:
            case HostHello():
                self._send(sender, self._welcome(message))
            case Ping(number=number):
                works = tuple(seq for other, seq in self._works if other == sender)
                self._send(sender, Pong(number, self.incarnation, works))
            case LaneWork():
                self._works.setdefault((sender, message.seq), message)
            case LaneAbandon(seqs=seqs):
                for seq in seqs:
                    self._works.pop((sender, seq), None)
            case _:
                self._log.warning(f"an unexpected {type(message).__name__} of the coordinator")

    def _welcome(self, hello: HostHello) -> HostWelcome:
        config, loading = self._config, self._loading
        lanes, progress = config.lanes.held, (loading.done, loading.total)
        if loading.loading is None or self._lanes is None:
            return HostWelcome(self.incarnation, LOADING, lanes, "", *progress)
        if error := self._mismatch(hello, loading.loading.whole):
            self._log.warning(f"refused the coordinator: {error}")
            return HostWelcome(self.incarnation, REFUSED, lanes, error)
        return HostWelcome(self.incarnation, READY, lanes, from_disk=config.disk_memory is not None)

    def _mismatch(self, hello: HostHello, fingerprint: str) -> str:
        """Returns why this host cannot compute in the coordinator's place; "" where it can."""
        config, variant = self._config, best().variant
        if hello.kernels != KERNELS:
            return f"its kernels have version {KERNELS}, the coordinator's {hello.kernels}: install the same"
        if hello.format != config.format:
            return f"its experts are in {config.format}, the coordinator's in {hello.format}"
        if hello.fingerprint != fingerprint:
            return f"its copy of the model in {config.model} differs from the coordinator's"
        plan = config.lanes.bounds, config.lanes.pieces
        if (hello.bounds, hello.pieces) != plan:
            return "it divides experts into other lanes"
        if not same_bits({variant, hello.variant}, hello.format):
            return (
                f"its kernels are for {variant}, the coordinator's for {hello.variant}: in {hello.format}"
                " their sums may differ in the last bits"
            )
        return ""

    def _send(self, sender: bytes, message: object) -> None:
        frames = encode(message)
        small = sum(map(len, frames)) < COPY_BELOW
        try:
            self._socket.send_multipart([sender, *frames], zmq.NOBLOCK, copy=small)
        except zmq.ZMQError as e:  # the coordinator asks again for what it needs
            self._log.warning(f"an answer did not reach the coordinator: {e}")


def _needed(pieces: Sequence[Descriptor], shape: ExpertShape) -> tuple[int, IntArray]:
    """Returns the layer of pieces, and its experts, ascending. Raises ValueError for others than there are:
    workers, which check all numbers of a Work, get those of frames instead."""
    heads = [head_of(piece) for piece in pieces]
    experts = [
        piece[HEADER : HEADER + 3 * head[ITEMS] : 3] for piece, head in zip(pieces, heads, strict=True)
    ]
    layer, needed = heads[0][LAYER], np.unique(np.concatenate(experts))
    there = 0 <= layer < shape.layers and all(head[LAYER] == layer for head in heads)
    if not there or needed.min(initial=0) < 0 or needed.max(initial=0) >= shape.experts:
        raise ValueError("no such expert in the layer of a Work")
    return layer, needed


class _Only:
    """Admits one key."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class _LoadingThread(threading.Thread):
    """Loads the part. Ends with `loading`, or with `failure`."""

    def __init__(self, config: HostConfig, path: Path) -> None:
        super().__init__(name="loading", daemon=True)
        self._config, self._path = config, path
        self.loading: Loading | None = None
        self.lease: StoreLease | None = None  # of its store
        self.failure = ""
        self.done = self.total = 0

    def run(self) -> None:
        config = self._config
        told: dict[str, Any] = {
            "model": str(config.model),
            "tile": config.tile,
            "format": config.format,
            "part": config.lanes.part.plain(),
            "cache_dir": str(config.cache),
            "reserve_bytes": config.reserve_bytes,
            "nodes": [],
            "host_memory": config.disk_memory,
            "runtime": str(self._path),
        }
        try:
            loading = Loading(told, self)
            loading.least = LAYERS_IN_MEMORY * loading.manifest.layout.layer_stride
            if loading.manifest.layout.head_bytes:
                raise ValueError(f"experts in {config.format} are for one machine alone")
            self.lease = loading.load_leased()
            log.info(f"lanes {config.lanes.held}: {loading.origin}")
            self.loading = loading
        except Exception as e:  # it is told to whoever asks; this thread has no caller
            log.warning(f"loading failed: {e}")
            self.failure = str(e) or type(e).__name__

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        """As of the loader's control."""
        self.done, self.total = 0, total

        def report(done: int) -> None:
            self.done = done

        return report


def main(plain: dict[str, Any]) -> None:
    """Be an expert host until it ends."""
    config = HostConfig.from_map(plain)
    private_directory(runtime_root())
    claimed = place.claim(config.name)
    if claimed is None:
        return  # another one runs, which its keeper finds
    path, lock = claimed
    _open_log(place.log_of(path), config)
    with ExitStack() as closing:
        try:
            host = ExpertHost(config, path, closing)

            def stop(number: int, frame: object) -> None:
                host.stopped = True

            signal.signal(signal.SIGTERM, stop)
            host.run()
        except (PipelineError, ShmError, ProtocolError, OSError) as e:
            log.warning(f"this host ends: {e}")
            place.remove_segments(path)
            failed = place.HostPlace(
                config.name, os.getpid(), config.setting, "failed", "", "", (), "", str(e)
            )
            place.publish(path, failed)
            raise SystemExit(1) from None
    place.remove(path, lock)


def _open_log(path: Path, config: HostConfig) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"[{config.name}] %(message)s"))
    logging.basicConfig(level=config.log_level, handlers=[handler], force=True)


if __name__ == "__main__":
    given = sys.stdin.buffer.read()
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(json.decode(given))
    os._exit(0)
