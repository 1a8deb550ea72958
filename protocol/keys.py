"""CURVE keys: which clients an engine admits over tcp, and which engine a client trusts.

A key file is a JSON object with `kind`, `public` and `secret`, the last two 40 characters of Z85 each; an
engine's also has `clients`, those that it admits, and a client's has `engine`, the engine's public key. An
admitted client is an object with its public `key`, its `right` and its `name`; just a public key has the
right "use". It must be private (mode 0600): a file that other users can read is refused.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from protocol.errors import NotPrivate, ProtocolError
from protocol.private_files import OTHERS_READ_OR_WRITE, check_private, sync_folder
from protocol.program import COMMAND
from protocol.small_files import read_small
from protocol.user_folders import user_folder

ENGINE_FILE, CLIENT_FILE = "engine.key", "client.key"
_KINDS = {
    "tandem engine key": f"an engine's ({ENGINE_FILE})",
    "tandem client key": f"a client's ({CLIENT_FILE})",
}
_ENGINE, _CLIENT = _KINDS
RIGHTS = ("use", "tune", "admin")  # each includes those before it
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,39}")
_LARGEST = 1 << 20  # bytes of a key file
_BINARY = 32  # bytes of a key


@dataclass(frozen=True)
class ClientKeys:
    """A client's own key pair and the public key of its engine, each 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    engine: bytes


@dataclass(frozen=True)
class Admitted:
    """A client that an engine admits, by its public key. `right`: "use" is for requests, "tune" also for the
    policy, "admin" for everything that a local client may do."""

    key: bytes  # 40 characters of Z85
    right: str = RIGHTS[0]
    name: str = ""  # of a client that was added by its key alone


@dataclass(frozen=True)
class EngineKeys:
    """An engine's key pair, each 40 characters of Z85, and the clients that it admits."""

    public: bytes
    secret: bytes = field(repr=False)
    admitted: tuple[Admitted, ...]

    @property
    def clients(self) -> frozenset[bytes]:
        """The public keys of the clients."""
        return frozenset(client.key for client in self.admitted)


@dataclass(frozen=True)
class Address:
    """An endpoint of an engine for clients. `keys` None: a local one, ipc://."""

    endpoint: str
    keys: ClientKeys | None = None


def keys_folder() -> Path:
    """The default folder of key files."""
    return user_folder("CONFIG") / "keys"


def new_keys(right: str = RIGHTS[0], name: str = "") -> tuple[EngineKeys, ClientKeys]:
    """New keys of an engine and of one client that it admits."""
    return with_client(EngineKeys(*zmq.curve_keypair(), ()), right, name)


def with_client(keys: EngineKeys, right: str, name: str) -> tuple[EngineKeys, ClientKeys]:
    """The engine's keys with a further client, and that one's new keys."""
    public, secret = zmq.curve_keypair()
    admitted = (*keys.admitted, Admitted(public, right, name))
    return replace(keys, admitted=admitted), ClientKeys(public, secret, keys.public)


def is_client_name(name: str) -> bool:
    """Whether a client can have this name, which is also that of its file."""
    return _NAME.fullmatch(name) is not None and f"{name}.key" != ENGINE_FILE


def write_engine_keys(path: Path, keys: EngineKeys) -> None:
    """Create the file, mode 0600. Raises ProtocolError if it exists or cannot be created."""
    _write(path, {"kind": _ENGINE} | _pair(keys) | {"clients": [_entry(client) for client in keys.admitted]})


def replace_engine_keys(path: Path, keys: EngineKeys) -> None:
    """Replace the file as a whole. Raises ProtocolError where it cannot be replaced, and then it is
    unchanged."""
    path = path.resolve()  # what a link names
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_engine_keys(new, keys)
    try:
        new.replace(path)
    except OSError as e:
        new.unlink()
        raise ProtocolError(f"cannot write {path}: {e.strerror}") from e
    sync_folder(path.parent)


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
    admitted = tuple(_admitted(path, entry) for entry in clients)
    if len({client.key for client in admitted}) < len(admitted):
        raise ProtocolError(f'{path}: a key is in "clients" twice')
    return EngineKeys(public, secret, admitted)


def read_client_keys(path: Path) -> ClientKeys:
    """Raises ProtocolError like `read_engine_keys`, here also for an engine's file."""
    found = _read(path, _CLIENT)
    return ClientKeys(*_checked_pair(path, found), _key(path, "engine", found.get("engine")))


def _entry(client: Admitted) -> str | dict[str, str]:
    key = client.key.decode()
    if client == Admitted(client.key):
        return key
    return {"key": key, "right": client.right} | ({"name": client.name} if client.name else {})


def _admitted(path: Path, entry: Any) -> Admitted:
    if type(entry) is not dict:
        return Admitted(_key(path, "clients", entry))
    unknown = entry.keys() - {"key", "right", "name"}
    right, name = entry.get("right", RIGHTS[0]), entry.get("name", "")
    if unknown or right not in RIGHTS or not (name == "" or (type(name) is str and is_client_name(name))):
        form = f'"key", "right" ({", ".join(RIGHTS)}) and "name" (letters, digits, . _ -)'
        raise ProtocolError(f'{path}: "clients" holds something other than keys, and objects of {form}')
    return Admitted(_key(path, "clients", entry.get("key")), right, name)


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
        missing = f"the key file {path} does not exist; make keys with: {COMMAND} keys"
        raise ProtocolError(missing) from None
    except OSError as e:
        raise ProtocolError(f"cannot read {path}: {e.strerror}") from None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if type(found) is not dict or str(found.get("kind")) not in _KINDS:
        raise ProtocolError(f"{path} is not a key file; make keys with: {COMMAND} keys")
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
