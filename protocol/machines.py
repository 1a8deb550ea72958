"""The messages between a coordinator and the expert hosts on other machines, and their sockets.

A host has a ROUTER at a tcp endpoint, its coordinator a DEALER for each host; both with CURVE keys: a host
answers only the coordinator whose public key it was started with, and a coordinator only a host with the key
that it was told. The bytes of messages are those of `codec.py`.

A conversation
--------------
1. The coordinator sends HostHello until a HostWelcome says that the host is ready, or why it never will be.
2. LaneWork -> LaneSums, or LaneFailed. A Work may be sent again, to this host or to another that holds the
   lane, at any time: a host keeps nothing of it, and whoever computes it, the sums have the same bits.
3. Ping -> Pong, also while the host computes. A host lives on the coordinator's messages: it ends when there
   was none for as long as its lease. A Pong names the Works that the host has; what it does not name and has
   not answered, of those sent before its Ping, is lost, with a connection or a process, and is sent again.
4. A Pong of another `incarnation` comes from another process: the coordinator begins again with 1.

x travels as the int8 codes that kernels of the integer formats make of it anyway, a quarter of its bytes,
with each group's largest magnitude (`pipeline/cluster/rows.c`). The receiver's kernels make the same codes
again, so that the result has the bits of x itself."""

from __future__ import annotations

from typing import Any

import zmq

from protocol.errors import ProtocolError
from protocol.messages import ARRAY_LIMIT, F32Matrix, Float, I8Matrix, I32Vector, Int, Ints, Record, message
from protocol.sockets import HANDSHAKE_MS, LINGER_MS, Socket, random_identity

LOADING, READY, REFUSED = "loading", "ready", "refused"  # states of a host
QUEUED = 1000  # messages, each way
BEAT_MS, SILENT_MS = (
    500,
    2000,
)  # of the transport's own heartbeats: a dead connection is given up, and made again
DOMAIN = b"tandem"  # in which keys are checked


@message(80)
class HostHello(Record, frozen=True):
    """What a host must have in common with its coordinator, in whose place it computes."""

    kernels: Int  # version of the kernels' functions
    variant: str  # of the coordinator's kernels
    fingerprint: str  # of the whole model's store
    format: str  # of the experts
    bounds: Ints  # of lanes
    pieces: Int  # of a lane


@message(81)
class HostWelcome(Record, frozen=True):
    """A host's answer to HostHello. `error`: why it is refused, for a person. A host that is loading says how
    far it is, in bytes."""

    incarnation: str  # another one for each process
    state: str  # loading | ready | refused
    lanes: Ints  # that it holds
    error: str = ""
    done: Int = 0
    total: Int = 0
    from_disk: bool = False  # it reads most experts from disk: others are asked first


@message(82)
class LaneWork(Record, frozen=True, eq=False):
    """Compute these lanes, which have equally many tiles, for the rows of x. `descriptors`: those of a lane's
    pieces, with tiles counted from the lane's first, one after the other, of `lengths` numbers each."""

    seq: Int
    lanes: Ints
    lengths: Ints
    descriptors: I32Vector
    compact: bool
    x: I8Matrix  # [R, bytes of a row]: compact, or as float32


@message(83)
class LaneSums(Record, frozen=True, eq=False):
    """The answer to a LaneWork: of each of its lanes the sum for each row, one lane after the other."""

    seq: Int
    lanes: Ints
    busy: Float  # seconds that the host computed
    y: F32Matrix  # [lanes * R, hidden]


@message(84)
class LaneFailed(Record, frozen=True):
    """A host cannot compute this LaneWork; nor could another."""

    seq: Int
    text: str


@message(85)
class Ping(Record, frozen=True):
    """The coordinator lives; answered by Pong."""

    number: Int


@message(86)
class Pong(Record, frozen=True):
    """The host lives. `works`: the seqs of the LaneWorks that it has and has not answered."""

    number: Int
    incarnation: str
    works: Ints


@message(87)
class LaneAbandon(Record, frozen=True):
    """These LaneWorks are no longer needed, and are skipped if they have not been begun."""

    seqs: Ints


def host_router(
    context: zmq.Context[Socket], address: str, ports: tuple[int, int], public: str, secret: str
) -> Socket:
    """Returns a host's ROUTER, bound to this address and the first port that is free, of these from the first
    to the last; 0: of all. Raises ProtocolError."""
    socket = context.socket(zmq.ROUTER)
    try:
        _configure(socket, public, secret)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a coordinator that has connected again is the same peer
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        _bind(socket, address, *ports)
    except zmq.ZMQError as e:
        socket.close(linger=0)
        which = "any port" if ports == (0, 0) else f"any of the ports {ports[0]} to {ports[1]} (--host-ports)"
        why = zmq.strerror(e.errno or 0)
        raise ProtocolError(f"an expert host cannot listen at {address}, {which}: {why}") from e
    return socket


def _bind(socket: Socket, address: str, first: int, last: int) -> None:
    """Raises ZMQError where no port is free."""
    for port in range(first, last + 1):
        try:
            socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as e:
            if e.errno != zmq.EADDRINUSE or port == last:
                raise
        else:
            return


def host_dealer(context: zmq.Context[Socket], endpoint: str, key: str, public: str, secret: str) -> Socket:
    """Returns a coordinator's DEALER for the host at this endpoint, which has this public key. Nothing is
    queued while there is no connection: sending raises zmq.Again. Raises ProtocolError."""
    socket = context.socket(zmq.DEALER)
    try:
        _configure(socket, public, secret)
        socket.setsockopt(zmq.IDENTITY, random_identity())
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
        socket.connect(endpoint)
    except (zmq.ZMQError, UnicodeEncodeError) as e:
        socket.close(linger=0)
        raise ProtocolError(f"{endpoint} with the key {key!r} is no expert host: {e}") from e
    return socket


def _configure(socket: zmq.Socket[Any], public: str, secret: str) -> None:
    for option, value in (
        (zmq.SNDHWM, QUEUED),
        (zmq.RCVHWM, QUEUED),
        (zmq.LINGER, LINGER_MS),
        (zmq.MAXMSGSIZE, ARRAY_LIMIT),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.HEARTBEAT_IVL, BEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, SILENT_MS),
        (zmq.CONNECT_TIMEOUT, SILENT_MS),
        (zmq.TCP_MAXRT, SILENT_MS),
        (zmq.RECONNECT_IVL, 50),
        (zmq.RECONNECT_IVL_MAX, 500),
        (zmq.CURVE_PUBLICKEY, public.encode()),
        (zmq.CURVE_SECRETKEY, secret.encode()),
    ):
        socket.setsockopt(option, value)
