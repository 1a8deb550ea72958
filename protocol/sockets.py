"""ZeroMQ sockets as Tandem uses them, and where they live in the file system.

Sockets are ipc:// in a directory that only its user can enter, or tcp:// with CURVE keys: encrypted, and
between peers that have proved who they are. Whoever binds is a ROUTER, the others are DEALERs. Works for
zmq.Context and zmq.asyncio.Context alike. Knows no messages.

What libzmq does on Linux, found by trying: binding creates the socket file with the umask's permissions, so
it is narrowed right after, and the 0700 directory closes the moment between. Binding replaces a socket
file that is already there, even one that somebody listens on: two engines are kept apart by their
directories' locks, not by this. Closing leaves the file; the directory's owner removes it.

What it does not do: a receive HWM counts whole messages and MAXMSGSIZE single frames, so a peer that speaks
ZMTP itself and never ends its message is held in memory, frame by frame, until it is disconnected. Over ipc
such a peer is the user's own process, over tcp somebody who was given a key.
"""

from __future__ import annotations

import hmac
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zmq

from protocol.checks import DEFAULT
from protocol.errors import MalformedMessage, ProtocolError
from protocol.keys import ClientKeys, EngineKeys
from protocol.private_files import check_private_directory, private_directory

Socket = TypeVar("Socket", bound="zmq.Socket[Any]")

IPC_PATH_MAX = 107  # bytes: sockaddr_un.sun_path without its final NUL
HWM = 1000  # messages, each way and for each peer
CHILD_HWM = 64  # messages of one child that may wait to be read; also of a peer that is not a child
LINGER_MS = 500  # how long a closed socket still delivers its last messages, in the background
RECONNECT_MS, RECONNECT_MAX_MS = 10, 100
HANDSHAKE_MS = 5000  # a peer that connects and says nothing is dropped after this

LARGEST = max(DEFAULT.frame, DEFAULT.header)  # bytes of a frame
TCP_PROBE_S, TCP_PROBES = 5, 3  # a tcp peer whose machine answers none of so many is disconnected

_IPC, _TCP = "ipc://", "tcp://"
_HOST_AND_PORT = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.%a-z]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_ZAP_DOMAIN = b"tandem"
_ENCRYPTION = 1024  # bytes that CURVE adds to a frame, and more
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
        ROUTER ignores a second peer of the same name as long as it remembers the first. The proof is made
        from the engine's `key`, which its processes alone know: nobody else can speak for a child, or take
        its name before it does. Raises MalformedMessage for an identity that cannot be."""
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
    return _IPC + str(path)


def check_tcp(endpoint: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT. Raises ProtocolError for anything else."""
    parts = _HOST_AND_PORT.fullmatch(endpoint)
    if parts is None or int(parts[2]) > 65535:
        raise ProtocolError(f"endpoint {endpoint[:100]!r} is not tcp://HOST:PORT")
    return parts[1].strip("[]"), int(parts[2])


def bind_router(
    context: zmq.Context[Socket],
    endpoint: str,
    *,
    send_hwm: int = HWM,
    receive_hwm: int = HWM,
    largest: int = LARGEST,
    keys: EngineKeys | None = None,
) -> Socket:
    """A ROUTER bound to an ipc endpoint in a private directory (its file has mode 0600), or with `keys` to
    tcp://ADDRESS:PORT. Frames of more than `largest` bytes end their sender's connection.

    On tcp nobody gets in without an answer of this context's ZAP handler (ZeroMQ's RFC 27, bound to
    inproc://zeromq.zap.01): the caller has one that admits `keys.clients` and nobody else.

    Sending to a peer that is not there raises zmq.ZMQError with EHOSTUNREACH. Send with zmq.NOBLOCK: where
    the peer's queue of `send_hwm` messages is full that raises zmq.Again, while a blocking send makes every
    other peer wait, and on an asyncio socket raises zmq.Again as soon as any *other* queue has room.
    Raises ProtocolError for an unusable endpoint or directory.
    """
    path = None if _is_tcp(endpoint, keys) else _socket_path(endpoint)
    if path is not None:
        check_private_directory(path.parent)
    socket = context.socket(zmq.ROUTER)
    try:
        _configure(socket, send_hwm, receive_hwm, largest + (_ENCRYPTION if keys else 0))
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            _probe_peers(socket)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no handler: nobody gets in, not everybody
            socket.setsockopt(zmq.IPV6, int("[" in endpoint or "*" in endpoint))
        socket.bind(endpoint)
        if path is not None:
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
    receive_hwm: int = HWM,
    keys: ClientKeys | None = None,
) -> Socket:
    """A DEALER that connects to an ipc endpoint, or with `keys` to tcp://HOST:PORT, at once or as soon as
    somebody binds it, and again after its peer was replaced. `receive_hwm` messages may wait to be read; then
    the peer has to. Raises ProtocolError for an unusable endpoint. A host that does not answer, or does not
    let these keys in, is silence."""
    if not _is_tcp(endpoint, keys):
        _socket_path(endpoint)
    socket = context.socket(zmq.DEALER)
    _configure(socket, HWM, receive_hwm, LARGEST + (_ENCRYPTION if keys else 0))
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    try:
        if keys is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.engine)
            socket.setsockopt(zmq.IPV6, 1)  # beside IPv4
        socket.connect(endpoint)
    except zmq.ZMQError as e:
        socket.close(linger=0)
        raise ProtocolError(f"cannot connect to {endpoint}: {os.strerror(e.errno or 0)}") from e
    return socket


def _is_tcp(endpoint: str, keys: object | None) -> bool:
    """Raises ProtocolError for tcp without keys or otherwise unusable, and for keys without tcp."""
    if not endpoint.startswith(_TCP):
        if keys is not None:
            raise ProtocolError(f"endpoint {endpoint[:100]!r} is not tcp://HOST:PORT, and keys are for that")
        return False
    if keys is None:
        raise ProtocolError(f"endpoint {endpoint[:100]!r} is tcp, which is served with keys only")
    check_tcp(endpoint)
    return True


def _probe_peers(socket: zmq.Socket[Any]) -> None:
    """Over ipc the end of a peer closes its connection; a machine that is switched off closes nothing."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, TCP_PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, TCP_PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, TCP_PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, TCP_PROBE_S * TCP_PROBES * 1000)  # the same for what is under way to it


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
    ipc_endpoint(path.parent, path.name)  # for its check of the length
    return path
