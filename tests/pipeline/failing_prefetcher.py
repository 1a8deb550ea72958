"""A prefetcher in a thread that a test can make exit: during a tile, which is then half written, or between
two tiles. The test reports the exit, as the supervisor would, and restarts the prefetcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from child_messages import LIMIT, child_endpoint
from shm.landing_flags import NONE

from pipeline.experts.peers import ChildServerSocket, ExitEvents
from protocol.messages import CancelFetch, I32Vector, Shutdown, WorkerDied
from shm.layout import Bytes
from shm.store import Store
from workers.copiers import Copier, paced
from workers.prefetcher import CopyLoop

NEVER = 1 << 30  # tiles


class _Exit(BaseException):
    """Ends an incarnation; no handler of the prefetcher may stop it."""


class Incarnation:
    """One incarnation: the number of tiles that it still copies, and whether it is restarted at once."""

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
    """A copier that exits with its incarnation; the last tile is half written."""

    def __init__(self, inner: Copier, incarnation: Incarnation) -> None:
        self.gather_depth, self.flags = inner.gather_depth, inner.flags
        self._inner, self._incarnation = inner, incarnation
        self._kept: list[Bytes] = []  # copies may read them after `start`

    @property
    def depth(self) -> int:
        return self._inner.depth

    @property
    def notes(self) -> tuple[str, ...]:
        return self._inner.notes

    @property
    def locked(self) -> tuple[int, int]:
        return self._inner.locked

    def start(self, tile: Bytes, slot: int, number: int = NONE) -> None:
        if self._incarnation.may_copy():
            self._inner.start(tile, slot, number)
            return
        half = tile.copy()
        half[len(tile) // 2 :] ^= 0xFF
        self._kept.append(half)
        self._inner.start(half, slot)
        raise _Exit

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        if not self._incarnation.may_copy():
            self._inner.gather(records ^ 0xFF, chosen[: len(chosen) // 2], slot, place)
            raise _Exit
        self._inner.gather(records, chosen, slot, place)

    def finish(self) -> int:
        return self._inner.finish()

    def close(self) -> None:
        self._inner.close()


class _FailingLoop(CopyLoop):
    """The prefetcher's loop with failing copiers."""

    incarnation: Incarnation

    def attach(self, copier: Copier) -> None:
        super().attach(_FailingCopier(copier, self.incarnation))


class FailingPrefetcher:
    """Incarnations of the prefetcher, one after the other; none runs at first."""

    def __init__(
        self,
        runtime: Path,
        store: Store,
        socket: ChildServerSocket,
        exits: ExitEvents,
        link_gbps: float | None,
        copier: Callable[[], Copier] | None = None,
    ) -> None:
        """`copier`: opens that of each incarnation; None: it attaches the slab that the coordinator names."""
        self._copier = copier
        self._runtime, self._store, self._socket, self._exits = runtime, store, socket, exits
        self._link_gbps = link_gbps
        self._lock = threading.Lock()
        self._next = 0
        self.present: Incarnation | None = None

    def start(self) -> None:
        """Start one where none runs; the present one is restarted when it exits."""
        with self._lock:
            if self.present is None:
                self._start()
            else:
                self.present.restarted = True

    def exit_after(self, tiles: int, restarted: bool) -> None:
        """Make the present incarnation, if one runs, exit during the tile after `tiles` more."""
        with self._lock:
            if self.present is not None:
                self.present.tiles, self.present.restarted = tiles, restarted

    def kill(self) -> None:
        """The present incarnation exits now and is not restarted."""
        with self._lock:
            present = self.present
            if present is None:
                return
            present.restarted = False
            present.kill()
        self._socket.send(0, CancelFetch(NEVER))  # so that its loop wakes up
        present.thread.join(LIMIT)
        assert not present.thread.is_alive()

    def shut_down(self) -> None:
        """End the prefetcher in order."""
        self.start()
        with self._lock:
            assert self.present is not None
            present = self.present
            present.tiles, present.restarted = NEVER, False
        while present.number not in [p["incarnation"] for p in self._socket.stats()]:
            self._socket.receive(50)
        self._socket.send(0, Shutdown())
        present.thread.join(LIMIT)
        assert not present.thread.is_alive()

    def _start(self) -> None:
        present = self.present = Incarnation(self._next)
        self._next += 1
        present.thread = threading.Thread(target=self._run, args=(present,), name="prefetcher", daemon=True)
        present.thread.start()

    def _run(self, incarnation: Incarnation) -> None:
        number, print_ = incarnation.number, self._store.fingerprint
        endpoint = child_endpoint(self._runtime, "prefetcher", "fetch.sock", print_, 0, number)
        loop = _FailingLoop(endpoint, self._store, self._link_gbps, incarnation.tick)
        loop.incarnation = incarnation
        copier = None if self._copier is None else paced(self._copier(), self._link_gbps, incarnation.tick)
        try:
            if copier is not None:
                loop.attach(copier)
            endpoint.announce()
            loop.serve()
        except _Exit:
            if copier is not None:
                copier.close()  # an exited process's copies have stopped
            with self._lock:
                self.present = None
                self._exits.put(WorkerDied("prefetcher", 0, number, False, -1))
                if incarnation.restarted:
                    self._start()
        finally:
            endpoint.close()
