"""A prefetcher that may die at any moment, in a thread: over a tile, which is then half written, or between
two. Its news comes as the supervisor's would, and a successor when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moving_parts import LIMIT, Parts, control_segment, peer_of, peer_socket

from pipeline.device import open_device
from pipeline.experts.fetch_link import FetchLink
from pipeline.experts.peers import ChildServerSocket, ExitEvents
from protocol.messages import CancelFetch, Shutdown, WorkerDied
from shm.layout import Bytes
from shm.store import Store
from workers.copiers import Copier
from workers.prefetcher import CopyLoop

NEVER = 1 << 30  # tiles


class _Death(BaseException):
    """Ends a life; nothing of the prefetcher's own may stop it."""


class Life:
    """One life: how many more tiles it has, and whether somebody takes its place at once."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.tiles = NEVER
        self.heir = False
        self.thread: threading.Thread
        self._killed = threading.Event()

    def kill(self) -> None:
        """It dies when it looks next whether there is something to do."""
        self._killed.set()

    def tick(self) -> None:
        if self._killed.is_set():
            raise _Death

    def copying(self) -> bool:
        """Whether it lives to copy one more tile."""
        self.tiles -= 1
        return self.tiles >= 0


class _MortalCopier:
    """Another copier as long as its life lasts; its last tile is half written."""

    def __init__(self, inner: Copier, life: Life) -> None:
        self.depth, self.notes = inner.depth, inner.notes
        self._inner, self._life = inner, life

    def start(self, tile: Bytes, slot: int) -> None:
        if self._life.copying():
            self._inner.start(tile, slot)
            return
        half = tile.copy()
        half[len(tile) // 2 :] ^= 0xFF
        self._inner.start(half, slot)
        raise _Death

    def finish(self) -> None:
        self._inner.finish()

    def close(self) -> None:
        self._inner.close()


class _MortalLoop(CopyLoop):
    """Its copiers are mortal."""

    life: Life

    def attach(self, copier: Copier) -> None:
        super().attach(_MortalCopier(copier, self.life))


class Lives:
    """One life after the other, and none at first."""

    def __init__(self, runtime: Path, store: Store, peers: ChildServerSocket, deaths: ExitEvents) -> None:
        self._runtime, self._store, self._peers, self._deaths = runtime, store, peers, deaths
        self._lock = threading.Lock()
        self._next = 0
        self._dead = 0
        self.life: Life | None = None

    def begin(self) -> None:
        """A new life, where there is none; the present one has an heir."""
        with self._lock:
            if self.life is None:
                self._begin()
            else:
                self.life.heir = True

    def doom(self, tiles: int, heir: bool) -> None:
        """The present life, if there is one, ends over the tile after so many more."""
        with self._lock:
            if self.life is not None:
                self.life.tiles, self.life.heir = tiles, heir

    def kill(self) -> None:
        """The present life ends now, without an heir."""
        with self._lock:
            life = self.life
            if life is None:
                return
            life.heir = False
            life.kill()
        self._peers.send(0, CancelFetch(NEVER))  # so that it looks
        life.thread.join(LIMIT)
        assert not life.thread.is_alive()

    def end(self) -> None:
        """In order."""
        self.begin()
        with self._lock:
            assert self.life is not None
            life = self.life
            life.tiles, life.heir = NEVER, False
        while life.incarnation not in [p["incarnation"] for p in self._peers.stats()]:
            self._peers.receive(50)
        self._peers.send(0, Shutdown())
        life.thread.join(LIMIT)
        assert not life.thread.is_alive()

    def _begin(self) -> None:
        life = self.life = Life(self._next)
        self._next += 1
        life.thread = threading.Thread(target=self._run, args=(life,), name="prefetcher", daemon=True)
        life.thread.start()

    def _run(self, life: Life) -> None:
        peer = peer_of(
            self._runtime, "prefetcher", "fetch.sock", self._store.fingerprint, 0, life.incarnation
        )
        loop = _MortalLoop(peer, self._store, None, life.tick)
        loop.life = life
        try:
            peer.announce()
            loop.run()
        except _Death:
            with self._lock:
                self.life = None
                self._deaths.put(WorkerDied("prefetcher", 0, life.incarnation, False, -1))
                if life.heir:
                    self._begin()
        finally:
            peer.close()


@contextmanager
def mortal_parts(runtime: Path, store: Store, slots: int) -> Iterator[tuple[Parts, Lives]]:
    """A slab of `slots` slots beside a store, and a prefetcher's lives."""
    runtime.chmod(0o700)
    deaths = ExitEvents()
    with ExitStack() as stack:
        device = open_device("cpu")
        control = stack.enter_context(control_segment(1))
        slab = device.open_slab(f"{control.segment.name}-slab", slots, store.layout.tile_bytes)
        stack.callback(slab.close)
        peers = stack.enter_context(
            peer_socket(runtime, "fetch.sock", "prefetcher", store.fingerprint, deaths)
        )
        link = FetchLink(peers, slab.address(), control.line("prefetcher", 0))
        lives = Lives(runtime, store, peers, deaths)
        lives.begin()
        assert link.wait_up(LIMIT)
        stack.callback(lives.end)
        yield Parts(store, slab, device, link), lives
