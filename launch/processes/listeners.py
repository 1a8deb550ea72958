"""The sockets at which an engine is served over HTTP. The supervisor holds them as long as the engine runs,
and hands them to each gateway: while one is restarted connections wait, and no other program can take the
port, where it would receive prompts and API keys."""

from __future__ import annotations

import errno
import socket

from launch.errors import WrongUsage
from pipeline.gateway.access import split_address

BACKLOG = 512  # connections that wait to be accepted
PORT_TRIES = 20  # with port 0: the system chooses one, which must be free at both addresses
ABSENT = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # this machine has no such address
# Clients of "localhost" try both loopback addresses: who listens at one of them, or at all of IPv4, holds the
# other too.
COMPANIONS = {"127.0.0.1": "::1", "::1": "127.0.0.1", "0.0.0.0": "::1"}


def listen(address: str) -> tuple[socket.socket, ...]:
    """Returns sockets that listen at HOST:PORT, with [HOST] for IPv6; port 0 is any free one. The first is
    the asked one; [::] is all addresses, of IPv4 too. Raises WrongUsage."""
    host, port = split_address(address)
    for tries_left in range(PORT_TRIES if port == 0 else 1, 0, -1):
        try:
            asked = _listen_at(host, port)
        except OSError as e:
            raise WrongUsage(f"--http {address}: cannot be bound: {e.strerror}") from None
        if host not in COMPANIONS:
            return (asked,)
        companion, given = COMPANIONS[host], asked.getsockname()[1]
        try:
            return asked, _listen_at(companion, given)
        except OSError as e:
            if e.errno in ABSENT:
                return (asked,)
            asked.close()
            if tries_left == 1:
                other = _written(companion, given)
                raise WrongUsage(
                    f"--http {address}: {other}, which clients of localhost may reach, cannot be bound:"
                    f" {e.strerror}; choose another port"
                ) from None
    raise AssertionError("unreachable")


def address_of(listener: socket.socket) -> str:
    """Returns HOST:PORT, with [HOST] for IPv6."""
    return _written(*listener.getsockname()[:2])


def _written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_at(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever this machine's default is
        # Only against the remains of connections: two sockets cannot listen at one port because of it.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound
