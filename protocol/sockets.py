"""ZeroMQ sockets as Tandem uses them, and where they live in the file system.

All sockets are ipc:// in a directory that only its user can enter. Whoever binds is a ROUTER, the others
are DEALERs. Works for zmq.Context and zmq.asyncio.Context alike. Knows no messages.

What libzmq does on Linux, found by trying: binding creates the socket file with the umask's permissions, so
it is narrowed right after, and the 0700 directory closes the moment between. Binding replaces a socket
file that is already there, even one that somebody listens on: two engines are kept apart by their
directories' locks, not by this. Closing leaves the file; the directory's owner removes it.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zmq

from protocol.checks import DEFAULT
from protocol.errors import MalformedMessage, ProtocolError

Socket = TypeVar("Socket", bound="zmq.Socket[Any]")

IPC_PATH_MAX = 107  # bytes: sockaddr_un.sun_path without its final NUL
HWM = 1000  # messages each way and peer
LINGER_MS = 500  # how long a closed socket still delivers its last messages, in the background
RECONNECT_MS, RECONNECT_MAX_MS = 10, 100
HANDSHAKE_MS = 5000  # a peer that connects and says nothing is dropped after this

_SCHEME = "ipc://"
_IDENTITY = re.compile(
    rb"((loader|coordinator|worker|prefetcher)-(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,17}))-([0-9a-f]{16})"
)


@dataclass(frozen=True)
class Identity:
    """Which incarnation of which child a ROUTER's identity frame names."""

    role: str  # loader | coordinator | worker | prefetcher
    index: int
    incarnation: int

    def prove(self, key: bytes) -> bytes:
        """The child's ROUTER identity, `<role>-<index>-<incarnation>-<proof>`: never used twice, because a
        ROUTER ignores a second peer of the same name for as long as it remembers the first. The proof is made
        from the engine's `key`, which its processes alone know: nobody else can speak for a child, or take its
        name before it does. Raises MalformedMessage for an identity that cannot be."""
        stated = f"{self.role}-{self.index}-{self.incarnation}".encode()
        name = stated + b"-" + _proof(stated, key)
        parse_identity(name, key)
        return name


def parse_identity(name: bytes, key: bytes) -> Identity:
    """The reverse of `Identity.prove`. Raises MalformedMessage for any other bytes."""
    parts = _IDENTITY.fullmatch(name)
    if parts is None:
        raise MalformedMessage(f"identity {name[:40]!r} is not <role>-<index>-<incarnation>-<proof>")
    if not hmac.compare_digest(parts[5], _proof(parts[1], key)):
        raise MalformedMessage(f"identity {parts[1].decode()} comes without its proof")
    return Identity(parts[2].decode(), int(parts[3]), int(parts[4]))


def _proof(stated: bytes, key: bytes) -> bytes:
    return hmac.digest(key, stated, "sha256").hex()[:16].encode()


def runtime_root() -> Path:
    """The directory of this user's runtime directories, made if it is missing: $XDG_RUNTIME_DIR/tandem, or
    /tmp/tandem-<uid> where the session has no such directory of its own (under su, say). Raises
    ProtocolError where it is not private to this user."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(session) and os.path.isdir(session) and os.stat(session).st_uid == os.getuid():
        return private_directory(Path(session) / "tandem")
    return private_directory(Path(f"/tmp/tandem-{os.getuid()}"))


def private_directory(path: Path) -> Path:
    """Make this directory with mode 0700, or check that the one there is this user's, and a real directory
    that nobody else can enter. Its parent must exist. Raises ProtocolError."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # something else of that name: said below
    except OSError as e:
        raise ProtocolError(f"cannot create {path}: {e.strerror}") from e
    _check_private(path)
    return path


def _check_private(path: Path) -> None:
    try:
        found = path.lstat()
    except OSError as e:
        raise ProtocolError(f"cannot use {path}: {e.strerror}") from e
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        raise ProtocolError(f"{path} is not a directory; remove it and start again")
    if found.st_uid != os.getuid():
        raise ProtocolError(f"{path} belongs to user {found.st_uid}, not to you; have it removed")
    if mode & 0o077:
        raise ProtocolError(f"{path} is open to other users (mode {mode:04o}); run: chmod 700 {path}")


def ipc_endpoint(runtime: Path, name: str) -> str:
    """The endpoint of a socket file in a runtime directory. Raises ProtocolError where the path is relative
    or longer than a socket address can be."""
    path = runtime / name
    length = len(os.fsencode(path))
    if not path.is_absolute():
        raise ProtocolError(f"the socket path {path} is not absolute")
    if length > IPC_PATH_MAX:
        raise ProtocolError(
            f"the socket path {path} has {length} bytes, the system's limit is {IPC_PATH_MAX}; "
            "use a shorter engine name or XDG_RUNTIME_DIR"
        )
    return _SCHEME + str(path)


def bind_router(context: zmq.Context[Socket], endpoint: str, *, send_hwm: int = HWM) -> Socket:
    """A ROUTER bound to an ipc endpoint in a private directory; its file has mode 0600.

    Sending to a peer that is not there raises zmq.ZMQError with EHOSTUNREACH. Send with zmq.NOBLOCK: where
    the peer's queue of `send_hwm` messages is full that raises zmq.Again, while a blocking send makes every
    other peer wait, and on an asyncio socket raises zmq.Again as soon as any *other* queue has room.
    Raises ProtocolError for an unusable endpoint or directory.
    """
    path = _socket_path(endpoint)
    _check_private(path.parent)
    socket = context.socket(zmq.ROUTER)
    try:
        _configure(socket, send_hwm, HWM)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(endpoint)
        path.chmod(0o600)
    except (zmq.ZMQError, OSError) as e:
        socket.close(linger=0)
        raise ProtocolError(f"cannot bind {endpoint}: {os.strerror(e.errno or 0)}") from e
    return socket


def connect_dealer(
    context: zmq.Context[Socket], endpoint: str, *, identity: bytes = b"", receive_hwm: int = HWM
) -> Socket:
    """A DEALER that connects to an ipc endpoint, at once or as soon as somebody binds it, and again after
    its peer was replaced. `receive_hwm` messages may wait to be read; then the peer has to.
    Raises ProtocolError for an unusable endpoint."""
    _socket_path(endpoint)
    socket = context.socket(zmq.DEALER)
    _configure(socket, HWM, receive_hwm)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(endpoint)
    return socket


def _configure(socket: zmq.Socket[Any], send_hwm: int, receive_hwm: int) -> None:
    socket.setsockopt(zmq.SNDHWM, send_hwm)
    socket.setsockopt(zmq.RCVHWM, receive_hwm)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max(DEFAULT.frame, DEFAULT.header))
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def _socket_path(endpoint: str) -> Path:
    path = Path(endpoint.removeprefix(_SCHEME))
    if not endpoint.startswith(_SCHEME) or not path.is_absolute():
        raise ProtocolError(f"endpoint {endpoint!r} is not ipc:// with an absolute path")
    ipc_endpoint(path.parent, path.name)  # for its check of the length
    return path
