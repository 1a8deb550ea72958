"""How much the door takes from clients over tcp and from strangers."""

from __future__ import annotations

from dataclasses import dataclass, replace

RESERVED = 96  # descriptors for everything but connections
PER_CLIENT = 6  # tcp, both ends of its ipc, the connection to the coordinator, and one for each ZeroMQ socket
PER_STRANGER = 5  # before a key is known: the same without the coordinator's, and a moment's listening one
CLOSING = 32  # connections that are being closed, beside the strangers and the clients


@dataclass(frozen=True)
class DoorLimits:
    """Seconds, connections and bytes."""

    hello: float = 5.0  # seconds from a connection's begin to the client's Hello
    silence: float = 10.0  # seconds without a byte of a client, or in which it takes none
    clients: int = 384  # connections with an admitted key
    clients_of_key: int = 64
    strangers: int = 128  # connections without one so far; the oldest is closed for a new one
    strangers_of_machine: int = 64  # by IPv4 address, or by the first 64 bits of an IPv6 address
    unread: int = 16 << 20  # bytes of a client that are no whole message yet, or were not forwarded
    unread_in_all: int = 256 << 20

    def within(self, descriptors: int) -> DoorLimits:
        """As many connections as leave the process RESERVED descriptors."""
        free = descriptors - RESERVED - CLOSING * PER_CLIENT
        share = min(1.0, free / (self.clients * PER_CLIENT + self.strangers * PER_STRANGER))
        return replace(
            self,
            clients=max(1, int(self.clients * share)),
            strangers=max(1, int(self.strangers * share)),
        )
