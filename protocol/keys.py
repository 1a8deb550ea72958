"""CURVE keys: which clients an engine admits over tcp, and which engine a client trusts.

A key file is a JSON object with `kind`, `public` and `secret`, the last two 40 characters of Z85 each; an
engine's also has `clients`, the public keys that it admits, and a client's has `engine`, the engine's public
key. It must be private (mode 0600): a file that other users can read is refused.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from protocol.errors import NotPrivate, ProtocolError
from protocol.private_files import OTHERS_READ_OR_WRITE, check_private, sync_folder
from protocol.small_files import read_small
from protocol.user_folders import user_folder

ENGINE_FILE, CLIENT_FILE = "engine.key", "client.key"
_KINDS = {
    "tandem engine key": f"an engine's ({ENGINE_FILE})",
    "tandem client key": f"a client's ({CLIENT_FILE})",
}
_ENGINE, _CLIENT = _KINDS
_LARGEST = 1 << 20  # bytes of a key file
_BINARY = 32  # bytes of a key


@dataclass(frozen=True)
class ClientKeys:
    """A client's own key pair and the public key of its engine, each 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    engine: bytes


@dataclass(frozen=True)
class EngineKeys:
    """An engine's key pair and the public keys of the clients that it admits, each 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]


@dataclass(frozen=True)
class Address:
    """An endpoint of an engine for clients. `keys` None: a local one, ipc://."""

    endpoint: str
    keys: ClientKeys | None = None


def keys_folder() -> Path:
    """The default folder of key files."""
    return user_folder("CONFIG") / "keys"


def new_keys() -> tuple[EngineKeys, ClientKeys]:
    """New keys of an engine and of one client that it admits."""
    engine_public, engine_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    engine = EngineKeys(engine_public, engine_secret, frozenset({client_public}))
    return engine, ClientKeys(client_public, client_secret, engine_public)


def write_engine_keys(path: Path, keys: EngineKeys) -> None:
    """Create the file, mode 0600. Raises ProtocolError if it exists or cannot be created."""
    clients = sorted(key.decode() for key in keys.clients)
    _write(path, {"kind": _ENGINE} | _pair(keys) | {"clients": clients})


def write_client_keys(path: Path, keys: ClientKeys) -> None:
    """Create the file, mode 0600. Raises ProtocolError if it exists or cannot be created."""
    _write(path, {"kind": _CLIENT} | _pair(keys) | {"engine": keys.engine.decode()})


def read_engine_keys(path: Path) -> EngineKeys:
    """Raises ProtocolError with the remedy for a file that is missing, not private, damaged or a client's."""
    found = _read(path, _ENGINE)
    public, secret = _checked_pair(path, found)
    clients = found.get("clients")
    if type(clients) is not list or not clients:
        raise ProtocolError(f'{path}: "clients" must be a list of the public keys to admit')
    return EngineKeys(public, secret, frozenset(_key(path, "clients", key) for key in clients))


def read_client_keys(path: Path) -> ClientKeys:
    """Raises ProtocolError like `read_engine_keys`, here also for an engine's file."""
    found = _read(path, _CLIENT)
    return ClientKeys(*_checked_pair(path, found), _key(path, "engine", found.get("engine")))


def _pair(keys: EngineKeys | ClientKeys) -> dict[str, Any]:
    return {"public": keys.public.decode(), "secret": keys.secret.decode()}


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ProtocolError(f"{path} exists and is not overwritten; remove it first") from None
    except OSError as e:
        raise ProtocolError(f"cannot write {path}: {e.strerror}") from e
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            os.fchmod(fd, 0o600)  # whatever the umask
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(fd)
    except OSError as e:
        path.unlink()
        raise ProtocolError(f"cannot write {path}: {e.strerror}") from e
    sync_folder(path.parent)


def _read(path: Path, kind: str) -> dict[str, Any]:
    remedies = {
        "owner": "; use a key file of your own",
        "mode": f"; make new keys, or if no other user has read it run: chmod 600 {path}",
    }
    try:
        check = partial(check_private, forbidden=OTHERS_READ_OR_WRITE, remedies=remedies)
        content = read_small(path, _LARGEST, check=check)
    except NotPrivate as e:
        raise ProtocolError(f"{path} {e}") from None
    except FileNotFoundError:
        missing = f"the key file {path} does not exist; make keys with: python launch.py keys"
        raise ProtocolError(missing) from None
    except OSError as e:
        raise ProtocolError(f"cannot read {path}: {e.strerror}") from None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if type(found) is not dict or str(found.get("kind")) not in _KINDS:
        raise ProtocolError(f"{path} is not a key file; make keys with: python launch.py keys")
    if found["kind"] != kind:
        raise ProtocolError(f"{path} is {_KINDS[found['kind']]}; use {_KINDS[kind]}")
    return found


def _checked_pair(path: Path, found: dict[str, Any]) -> tuple[bytes, bytes]:
    public, secret = (_key(path, name, found.get(name)) for name in ("public", "secret"))
    if zmq.curve_public(secret) != public:
        raise ProtocolError(f'{path}: "public" and "secret" are not a pair; the file is damaged')
    return public, secret


def _key(path: Path, name: str, value: Any) -> bytes:
    """The value never appears in an error: it may be a secret."""
    try:
        key = value.encode("ascii")
        if len(key) == 40 and len(binary_key(key)) == _BINARY:
            return bytes(key)
    except (AttributeError, ValueError):
        pass  # not text or not ASCII: the same error as for every other value below
    raise ProtocolError(f'{path}: "{name}" holds something that is no key of 40 characters')


def binary_key(key: bytes) -> bytes:
    """The 32 bytes of a key of 40 Z85 characters. Raises ValueError."""
    try:
        binary: bytes = z85.decode(key)
    except (KeyError, struct.error, ValueError) as e:  # a wrong character, value, length
        raise ValueError("not Z85") from e
    return binary
