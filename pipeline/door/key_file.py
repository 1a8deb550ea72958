"""The engine's key file, read again whenever it has changed."""

from __future__ import annotations

import logging
from pathlib import Path

from protocol.errors import ProtocolError
from protocol.keys import Admitted, EngineKeys, binary_key, read_engine_keys

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int] | None


class KeyFile:
    """`keys`: as they were last read without an error."""

    def __init__(self, path: Path) -> None:
        """Raises ProtocolError where the keys cannot be read."""
        self._path = path
        self._stamp = _stamp(path)
        self._set(read_engine_keys(path))

    def admitted(self, key: bytes) -> Admitted | None:
        """The client with this key of 32 bytes."""
        return self._clients.get(key)

    def changed(self) -> bool:
        """Read the file again where it was written since. Where it cannot be read, as while an editor writes
        it, the keys stay as they were, and a line says so."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            keys = read_engine_keys(self._path)
        except ProtocolError as e:
            log.warning("%s; the clients that were admitted before still are", e)
            return False
        if keys == self.keys:
            return False
        self._set(keys)
        return True

    def _set(self, keys: EngineKeys) -> None:
        self.keys = keys
        self._clients = {binary_key(client.key): client for client in keys.admitted}


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
