"""ZeroMQ sockets with Tandem's options, and their paths in the file system.

Sockets are ipc:// in a directory that only its user can enter: a ROUTER binds, DEALERs connect. Works for
zmq.Context and zmq.asyncio.Context alike. Knows no messages.

Behaviour of libzmq on Linux, found by experiment: binding creates the socket file with the umask's
permissions, so `bind_router` narrows them right after, and the 0700 directory protects it in between. Binding
replaces an existing socket file, even of a listening process: the locks of runtime directories keep two
engines apart, not the sockets. Closing leaves the file; the directory's owner removes it.

A limit that libzmq lacks: a receive HWM counts whole messages and MAXMSGSIZE single frames, so a peer that
speaks ZMTP itself and never ends its message fills memory, frame by frame, until it disconnects. Such a peer
is a process of the same user.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zmq

from protocol.errors import MalformedMessage, NotPrivate, ProtocolError
from protocol.files import (
    OTHERS_READ_OR_WRITE,
    check_private_directory,
    private_directory,
)
from protocol.messages import ARRAY_LIMIT, HEADER_LIMIT

Socket = TypeVar("Socket", bound="zmq.Socket[Any]")

IPC_PATH_MAX = 107  # bytes: sockaddr_un.sun_path without its final NUL
HWM = 1000  # messages, each way and for each peer
CHILD_HWM = 64  # messages of one child that may wait to be read; also of a peer that is not a child
LINGER_MS = 500  # how long a closed socket still delivers its last messages, in the background
RECONNECT_MS, RECONNECT_MAX_MS = 10, 100
NEVER_MS = 24 * 3600 * 1000
HANDSHAKE_MS = 5000  # after which a peer that connects and sends nothing is dropped

LARGEST = max(ARRAY_LIMIT, HEADER_LIMIT)  # bytes of a frame

_IPC = "ipc://"
CLIENT_IDENTITY = 16  # bytes of a client's identity
_IDENTITY = re.compile(
    rb"((loader|coordinator|worker|prefetcher|reader|text|gateway)-(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,17}))"
    rb"-([0-9a-f]{16})"
)


@dataclass(frozen=True)
class Identity:
    """A child process of the engine, as a ROUTER's identity frame names it."""

    role: str  # loader | coordinator | worker | prefetcher | reader | text | gateway
    index: int
    generation: int

    def prove(self, key: bytes) -> bytes:
        """The child's ROUTER identity, `<role>-<index>-<generation>-<proof>`: never used twice, because a
        ROUTER ignores a second peer of the same name as long as it remembers the first. The proof is a MAC
        with the engine's `key`, which only its processes know: no other process can act as a child or take
        its name first. Raises MalformedMessage for an invalid identity."""
        stated = f"{self.role}-{self.index}-{self.generation}".encode()
        name = stated + b"-" + _proof(stated, key)
        parse_identity(name, key)
        return name


def parse_identity(name: bytes, key: bytes) -> Identity:
    """The reverse of `Identity.prove`. Raises MalformedMessage for any other bytes."""
    parts = _IDENTITY.fullmatch(name)
    if parts is None:
        raise MalformedMessage(f"identity {name[:40]!r} is not <role>-<index>-<generation>-<proof>")
    if not hmac.compare_digest(parts[5], _proof(parts[1], key)):
        raise MalformedMessage(f"identity {parts[1].decode()} has no valid proof")
    return Identity(parts[2].decode(), int(parts[3]), int(parts[4]))


def _proof(stated: bytes, key: bytes) -> bytes:
    return hmac.digest(key, stated, "sha256").hex()[:16].encode()


def random_identity() -> bytes:
    """A client's: a ROUTER sends its answers to whichever peer states it, so it must not be guessed. ZeroMQ
    reserves a first byte of zero for the identities that a ROUTER makes."""
    return (os.urandom(1)[0] % 255 + 1).to_bytes() + os.urandom(CLIENT_IDENTITY - 1)


def is_client_identity(name: bytes) -> bool:
    """Returns whether a peer has set this identity, and it is long enough to be a secret."""
    return len(name) >= CLIENT_IDENTITY and name[0] != 0


def runtime_root() -> Path:
    """The directory of this user's runtime directories, created if missing: $XDG_RUNTIME_DIR/tandem, or
    /tmp/tandem-<uid> if the session has none of this user (under su, for example). Raises NotPrivate."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(session) and os.path.isdir(session) and os.stat(session).st_uid == os.getuid():
        return private_directory(Path(session) / "tandem")
    return private_directory(Path(f"/tmp/tandem-{os.getuid()}"))


def ipc_endpoint(runtime: Path, name: str) -> str:
    """The endpoint of a socket file. Raises ProtocolError if its path is relative or too long."""
    path = runtime / name
    length = len(os.fsencode(path))
    if not path.is_absolute():
        raise ProtocolError(f"the socket path {path} is not absolute")
    if length > IPC_PATH_MAX:
        raise ProtocolError(
            f"the socket path {path} has {length} bytes, the system's limit is {IPC_PATH_MAX}; "
            "use a shorter engine name or XDG_RUNTIME_DIR"
        )
    return _IPC + str(path)


def bind_router(
    context: zmq.Context[Socket],
    endpoint: str,
    *,
    send_hwm: int = HWM,
    receive_hwm: int = HWM,
    largest: int = LARGEST,
) -> Socket:
    """A ROUTER bound to an ipc endpoint in a private directory; its file has mode 0600. Frames of more than
    `largest` bytes end their sender's connection.

    Sending to an unknown peer raises zmq.ZMQError with EHOSTUNREACH. Send with zmq.NOBLOCK, which raises
    zmq.Again if the peer's queue of `send_hwm` messages is full; a blocking send makes every other peer wait,
    and on an asyncio socket raises zmq.Again as soon as any *other* queue can take a message.
    Raises ProtocolError for an unusable endpoint or directory.
    """
    path = _socket_path(endpoint)
    check_private_directory(path.parent)
    _seed_made_identities()
    socket = context.socket(zmq.ROUTER)
    try:
        _configure(socket, send_hwm, receive_hwm, largest)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer that connects again at once, as after a frame that was too large, would never be read while
        # its last connection has unread messages: not even its end would be seen.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.bind(endpoint)
        path.chmod(0o600)
    except (zmq.ZMQError, OSError) as e:
        socket.close(linger=0)
        raise ProtocolError(f"cannot bind {endpoint}: {os.strerror(e.errno or 0)}") from e
    return socket


def connect_dealer(
    context: zmq.Context[Socket],
    endpoint: str,
    *,
    identity: bytes = b"",
    send_hwm: int = HWM,
    receive_hwm: int = HWM,
) -> Socket:
    """A DEALER that connects to an ipc endpoint, at once or as soon as it is bound, and again after its peer
    is replaced. `identity`: by default a random one of its own. `receive_hwm` messages may wait to be read;
    then the peer waits. Raises ProtocolError for an unusable endpoint."""
    socket = _dealer(context, endpoint, identity, send_hwm, receive_hwm)
    socket.connect(endpoint)
    return socket


def client_dealer(context: zmq.Context[Socket], endpoint: str, receive_hwm: int = HWM) -> Socket:
    """A client's DEALER for an ipc endpoint, not connected yet. `connect_checked` connects it, again after
    each break: ZeroMQ itself would connect to any socket of that name. Raises ProtocolError for an unusable
    endpoint."""
    socket = _dealer(context, endpoint, b"", HWM, receive_hwm)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    return socket


def _dealer(
    context: zmq.Context[Socket], endpoint: str, identity: bytes, send_hwm: int, receive_hwm: int
) -> Socket:
    _socket_path(endpoint)
    socket = context.socket(zmq.DEALER)
    _configure(socket, send_hwm, receive_hwm, LARGEST)
    socket.setsockopt(zmq.IDENTITY, identity or random_identity())
    return socket


def connect_checked(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Connect a `client_dealer`, unless `check_engine` raises NotPrivate."""
    with suppress(zmq.ZMQError):  # it was not connected
        socket.disconnect(endpoint)
    check_engine(endpoint)
    socket.connect(endpoint)


def check_engine(endpoint: str) -> None:
    """Raises NotPrivate where another user has put a directory or a socket in the place of this ipc endpoint:
    after a program that cleans /tmp has removed an engine's directory, any user can. What is missing may be
    made by an engine that starts."""
    path = _socket_path(endpoint)
    for file, is_kind, kind in ((path.parent, stat.S_ISDIR, "directory"), (path, stat.S_ISSOCK, "socket")):
        with suppress(FileNotFoundError, PermissionError):  # of the folder above; then connecting fails, too
            status = file.lstat()
            if not is_kind(status.st_mode):
                raise NotPrivate(f"{file} is not a {kind}")
            if status.st_uid not in (os.geteuid(), 0):
                raise NotPrivate(f"{file} belongs to user {status.st_uid}, not to you")
            if stat.S_IMODE(status.st_mode) & OTHERS_READ_OR_WRITE and kind == "directory":
                raise NotPrivate(f"{file} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})")


def _seed_made_identities() -> None:
    """A ROUTER's identities for peers without one count up from C's rand(), which other libraries seed with
    the time: a peer that claims the next of them first would make libzmq abort."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4))))


def _configure(socket: zmq.Socket[Any], send_hwm: int, receive_hwm: int, largest: int) -> None:
    socket.setsockopt(zmq.SNDHWM, send_hwm)
    socket.setsockopt(zmq.RCVHWM, receive_hwm)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, largest)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def _socket_path(endpoint: str) -> Path:
    path = Path(endpoint.removeprefix(_IPC))
    if not endpoint.startswith(_IPC) or not path.is_absolute():
        raise ProtocolError(f"endpoint {endpoint!r} is not ipc:// with an absolute path")
    ipc_endpoint(path.parent, path.name)  # checks the length
    return path
