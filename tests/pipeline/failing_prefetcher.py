"""A prefetcher in a thread that a test can make exit: during a tile, which is then half written, or between
two tiles. The test reports the exit, as the supervisor would, and restarts the prefetcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from child_messages import LIMIT, child_endpoint

from pipeline.device import SlabMemory
from pipeline.experts.peers import ChildServerSocket, ExitEvents
from protocol.messages import AttachSlab, CancelFetch, Shutdown, SlabAttached, WorkerDied
from shm.control import ControlLine
from shm.store import Store
from workers.copiers import Copier, EmulatedLink, TileCopy
from workers.cuda_copier import CudaCopier, open_copier
from workers.prefetcher import CopyLoop

NEVER = 1 << 30  # tiles


class _Exit(BaseException):
    """Ends a generation; no handler of the prefetcher may stop it."""


class Generation:
    """One generation: the number of tiles that it still copies, and whether it is restarted at once."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tiles = NEVER
        self.restarted = False
        self.thread: threading.Thread
        self._killed = threading.Event()

    def kill(self) -> None:
        """Exit at the next tick."""
        self._killed.set()

    def tick(self) -> None:
        if self._killed.is_set():
            raise _Exit

    def may_copy(self) -> bool:
        """Whether one more tile is copied as a whole."""
        self.tiles -= 1
        return self.tiles >= 0


class _FailingCopier:
    """A copier that exits with its generation; the last tile is half written."""

    def __init__(self, inner: Copier, generation: Generation, slab: SlabMemory) -> None:
        self.ahead = inner.ahead
        self._inner, self._generation, self._slab = inner, generation, slab
        self._begun: list[Any] = []  # and not ready

    @property
    def copied(self) -> tuple[int, float]:
        return self._inner.copied

    def begin(self, copies: Sequence[TileCopy]) -> Any:
        self._begun.append(self._inner.begin(copies))
        return copies, self._begun[-1]

    def ready(self, begun: Any) -> None:
        copies, inner = begun
        self._inner.ready(inner)
        self._begun = [other for other in self._begun if other is not inner]
        if not self._generation.may_copy():
            for copy in copies:
                slot = self._slab.slot(copy.slot).numpy()
                slot[: len(slot) // 2] ^= 0xFF
            raise _Exit

    def close(self) -> None:
        """Of a GPU's copies the driver takes back what they hold, as a process ends."""
        if isinstance(self._inner, CudaCopier):
            for begun in self._begun:
                self._inner.ready(begun)
        self._inner.close()


class _FailingLine:
    """A line of the control segment; its process exits at a tick."""

    def __init__(self, line: ControlLine, generation: Generation) -> None:
        self._line, self._generation = line, generation
        self.begin, self.end = line.begin, line.end

    @property
    def seq(self) -> int:
        return self._line.seq

    def tick(self) -> None:
        self._line.tick()
        self._generation.tick()


class _FailingLoop(CopyLoop):
    """The prefetcher's loop with failing copiers. It has the slab of a GPU already."""

    generation: Generation
    slab: SlabMemory | None

    def _accept(self, message: object) -> None:
        if isinstance(message, AttachSlab) and self.slab is not None:
            order, address = message, getattr(self.slab, "_address", 0)
            if order.kind == "cuda":
                self._copier = CudaCopier(self._store, 0, address, order.slot_bytes, link=self._link)
            else:
                self._copier = open_copier(order, self._store, self._link)
            self._copier = _FailingCopier(self._copier, self.generation, self.slab)
            self._peer.send(SlabAttached(self._peer.generation))
        else:
            super()._accept(message)

    def close(self) -> None:
        """An exited process's copies have stopped."""
        if self._copier is not None:
            self._copier.close()


class FailingPrefetcher:
    """Generations of the prefetcher, one after the other; none runs at first."""

    def __init__(
        self,
        runtime: Path,
        store: Store,
        socket: ChildServerSocket,
        exits: ExitEvents,
        line: ControlLine,
        link: EmulatedLink | None = None,
        slab: SlabMemory | None = None,
        index: int = 0,
    ) -> None:
        """Without `slab`, the prefetcher maps the slab that the coordinator names, and never exits early.
        `index`: of its device."""
        self._line, self._link, self._slab, self._index = line, link, slab, index
        self._runtime, self._store, self._socket, self._exits = runtime, store, socket, exits
        self._lock = threading.Lock()
        self._next = 0
        self.present: Generation | None = None

    def start(self) -> None:
        """Start one where none runs; the present one is restarted when it exits."""
        with self._lock:
            if self.present is None:
                self._start()
            else:
                self.present.restarted = True

    def exit_after(self, tiles: int, restarted: bool) -> None:
        """Make the present generation, if one runs, exit during the tile after `tiles` more."""
        with self._lock:
            if self.present is not None:
                self.present.tiles, self.present.restarted = tiles, restarted

    def kill(self) -> None:
        """The present generation exits now and is not restarted."""
        with self._lock:
            present = self.present
            if present is None:
                return
            present.restarted = False
            present.kill()
        self._socket.send(self._index, CancelFetch(NEVER))  # so that its loop wakes up
        present.thread.join(LIMIT)
        assert not present.thread.is_alive()

    def shut_down(self) -> None:
        """End the prefetcher in order."""
        self.start()
        with self._lock:
            assert self.present is not None
            present = self.present
            present.tiles, present.restarted = NEVER, False
        there = self._index, present.number
        while there not in [(p["index"], p["generation"]) for p in self._socket.stats()]:
            self._socket.receive(50)
        self._socket.send(self._index, Shutdown())
        present.thread.join(LIMIT)
        assert not present.thread.is_alive()

    def _start(self) -> None:
        present = self.present = Generation(self._next)
        self._next += 1
        present.thread = threading.Thread(target=self._run, args=(present,), name="prefetcher", daemon=True)
        present.thread.start()

    def _run(self, generation: Generation) -> None:
        number, print_ = generation.number, self._store.fingerprint
        endpoint = child_endpoint(self._runtime, "prefetcher", "fetch.sock", print_, self._index, number)
        line: Any = _FailingLine(self._line, generation)
        line.end()
        loop = _FailingLoop(endpoint, self._store, line, self._link)
        loop.generation, loop.slab = generation, self._slab
        try:
            endpoint.announce()
            loop.serve()
        except _Exit:
            loop.close()
            with self._lock:
                self.present = None
                self._exits.put(WorkerDied("prefetcher", self._index, number, False, -1))
                if generation.restarted:
                    self._start()
        finally:
            endpoint.close()


def start_prefetcher(
    runtime: Path,
    store: Store,
    socket: ChildServerSocket,
    line: ControlLine,
    link: EmulatedLink | None = None,
    index: int = 0,
) -> Callable[[], None]:
    """Start one that does not fail, in a thread. Returns the function that stops it."""
    prefetcher = FailingPrefetcher(runtime, store, socket, ExitEvents(), line, link, index=index)
    prefetcher.start()
    return prefetcher.shut_down
