"""The prefetcher as a thread of the coordinator: the same loop and messages, no process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict

from pipeline.coordinator_config import CoordinatorConfig
from pipeline.experts.peers import ChildServerSocket
from protocol.messages import Shutdown
from protocol.sockets import Identity
from shm.errors import ShmError
from shm.store import Store
from workers.child_endpoint import ChildEndpoint
from workers.copiers import Copier
from workers.cuda import CudaError
from workers.prefetcher import CopyLoop

JOIN_LIMIT = 5.0  # seconds for the thread to end


def start_copy_thread(
    told: CoordinatorConfig, store: Store, copier: Copier, socket: ChildServerSocket
) -> Callable[[], None]:
    """Start it; it announces itself to `socket`. Returns what ends it."""

    def _no_tick() -> None:
        """Nobody watches a thread: it cannot hang alone."""

    def copy() -> None:
        name = Identity("prefetcher", 0, told.incarnation)
        who = asdict(name) | {"identity": name.prove(told.key)}
        where = {"runtime": str(told.runtime), "fingerprint": told.fingerprint}
        peer = ChildEndpoint(who | where, "fetch.sock", supervised=False)
        loop = CopyLoop(peer, store, told.config.link_gbps, _no_tick)
        loop.attach(copier)
        peer.announce()
        try:
            loop.run()
        except (CudaError, ShmError) as e:
            socket.give_up(f"the prefetcher failed: {e}")
        finally:
            peer.close()

    def stop() -> None:
        socket.send(0, Shutdown())
        thread.join(JOIN_LIMIT)

    thread = threading.Thread(target=copy, name="prefetcher", daemon=True)
    thread.start()
    return stop
