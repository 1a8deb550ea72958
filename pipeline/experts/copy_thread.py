"""The prefetcher as a thread of the coordinator: the same loop and messages as the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict

from pipeline.coordinator_config import CoordinatorConfig
from pipeline.experts.peers import ChildServerSocket, ExitEvents
from pipeline.experts.progress import CopyProgress
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
    config: CoordinatorConfig,
    store: Store,
    copier: Copier,
    socket: ChildServerSocket,
    exits: ExitEvents,
    progress: CopyProgress,
    index: int = 0,
) -> Callable[[], None]:
    """Start the thread, which announces itself to `socket` as the prefetcher of this index, and counts its
    progress. Returns the function that stops it."""

    def copy() -> None:
        try:
            with closing(connected()) as endpoint:
                loop = CopyLoop(endpoint, store, config.options.link_gbps, progress.tick)
                loop.attach(copier)
                endpoint.announce()
                loop.serve()
        except (CudaError, ShmError) as e:
            exits.give_up(f"the prefetcher failed: {e}")
        except Exception as e:  # nobody restarts a thread, and the engine must not wait for it
            exits.give_up(f"the prefetcher failed: {type(e).__name__}: {e}")

    def connected() -> ChildEndpoint:
        identity = Identity("prefetcher", index, config.incarnation)
        of_child = {
            **asdict(identity),
            "identity": identity.prove(config.key),
            "runtime": str(config.runtime),
            "fingerprint": config.fingerprint,
        }
        return ChildEndpoint(of_child, "fetch.sock", supervised=False)

    def stop() -> None:
        socket.send(index, Shutdown())
        thread.join(JOIN_LIMIT)

    thread = threading.Thread(target=copy, name="prefetcher", daemon=True)
    thread.start()
    return stop
