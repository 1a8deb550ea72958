"""The coordinator's sockets to its workers and its prefetcher. Used by the engine's thread, but for `stats`
and `give_up`, which any thread may call."""

from __future__ import annotations

from typing import Any

from pipeline.coordinator_config import CoordinatorConfig
from pipeline.experts.peers import ChildServerSocket, ExitEvents, Tell

_FILES = {"worker": "work.sock", "prefetcher": "fetch.sock"}


class ChildSockets:
    """One socket for each role that the engine uses."""

    def __init__(self, config: CoordinatorConfig, exit_events: ExitEvents, to_supervisor: Tell) -> None:
        self._config = config
        self._exit_events = exit_events
        self._to_supervisor = to_supervisor
        self._by_role: dict[str, ChildServerSocket] = {}

    def __contains__(self, role: str) -> bool:
        return role in self._by_role

    def __getitem__(self, role: str) -> ChildServerSocket:
        return self._by_role[role]

    def bind(self, role: str, largest: int = 0) -> ChildServerSocket:
        """Open a role's socket. `largest`: bytes of the largest array that one of these children sends."""
        config = self._config
        socket = ChildServerSocket(
            config.runtime,
            _FILES[role],
            role,
            config.fingerprint,
            config.key,
            self._exit_events,
            self._to_supervisor,
            largest=largest,
        )
        self._by_role[role] = socket
        return socket

    @property
    def behind(self) -> bool:
        """Messages are waiting that the last look did not take."""
        return any(socket.behind for socket in self._by_role.values())

    def stats(self) -> dict[str, Any]:
        """Which children are connected, how the engine recovered from their exits, and how many of their
        messages were malformed."""
        sockets = dict(self._by_role)  # a copy: the engine's thread may be opening another
        return {
            "peers": [child for socket in sockets.values() for child in socket.stats()],
            "recovery": {role: socket.recovery.stats() for role, socket in sockets.items()},
            "malformed": {role: socket.malformed for role, socket in sockets.items()},
        }

    def give_up(self, reason: str) -> None:
        """End every wait for a worker or the prefetcher with PeerLost."""
        for socket in list(self._by_role.values()):
            socket.give_up(reason)

    def close(self) -> None:
        for socket in self._by_role.values():
            socket.close()
