"""CURVE keys: who may talk to an engine over tcp, and to which engine a client talks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClientKeys:
    """A client's own key pair and the public key of its engine, each 40 characters of Z85."""

    public: bytes
    secret: bytes
    engine: bytes


@dataclass(frozen=True)
class Address:
    """Where an engine takes clients. `keys` None: a local one, ipc://."""

    endpoint: str
    keys: ClientKeys | None = None
