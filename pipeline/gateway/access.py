"""The gateway's address, and who may send requests: API keys from a file, and which hosts and pages a
browser may name. Pages of other sites are answered as the standard of browsers wants it (CORS)."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Collection, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.gateway.errors import ApiError
from protocol.errors import NotPrivate, ProtocolError
from protocol.files import check_private, read_small

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]  # of ASGI
Headers = tuple[tuple[bytes, bytes], ...]

LEAST_KEY, MOST_KEY = 16, 256  # characters
LARGEST = 1 << 20  # bytes of the file
OTHERS = 0o077
FIELDS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1000}")  # names of a request's headers
ASKED_SECONDS = 600  # that a browser remembers what a page may send
LINE = re.compile(r"([A-Za-z0-9._-]{1,64})[ \t]+([\x21-\x7e]+)")


def header_of(scope: Scope, name: bytes) -> str:
    """Returns the first header of this name, in small letters; "" without one."""
    return next((str(value.decode("latin-1")) for key, value in scope["headers"] if key == name), "")


def read_api_keys(path: Path) -> dict[bytes, str]:
    """Returns the names of clients by the SHA-256 of their keys. A line of the file is a name and a key;
    empty lines and those that begin with # are left out. Raises ProtocolError, one line, which holds no
    key."""
    try:
        check = partial(check_private, forbidden=OTHERS, remedies={"mode": f"; run: chmod 600 {path}"})
        text = read_small(path, LARGEST, check=check).decode("ascii")
    except NotPrivate as e:
        raise ProtocolError(f"{path} {e}") from None
    except UnicodeDecodeError:
        raise ProtocolError(f"{path}: keys are of ASCII characters") from None
    except OSError as e:
        raise ProtocolError(f"the file of API keys {path} cannot be read: {e.strerror}") from None
    keys: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None or not LEAST_KEY <= len(match[2]) <= MOST_KEY:
            form = f"a name (letters, digits, . _ -) and a key of {LEAST_KEY} to {MOST_KEY} characters"
            raise ProtocolError(f"{path}, line {number}: write {form}, with a space between them")
        if _digest(match[2]) in keys or match[1] in keys.values():
            raise ProtocolError(f"{path}, line {number}: its name or key is in the file twice")
        keys[_digest(match[2])] = match[1]
    if not keys:
        raise ProtocolError(f"{path} has no keys; write one a line: a name and a key")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


class Access:
    """`path`: of the API keys; without it, whoever reaches the address may send requests."""

    def __init__(self, path: Path | None, host: str, origins: Collection[str] = ()) -> None:
        """`host`: the address that the gateway listens at; `origins`: of pages of other sites that may send
        requests, "*" for any. Raises ProtocolError."""
        self._path = path
        self._origins = frozenset(origins)
        self._keys = {} if path is None else read_api_keys(path)
        self._stamp = None if path is None else _stamp(path)
        self._local = is_loopback(host)

    def check_page(self, scope: Scope) -> Headers:
        """Refuse what a page of another site has a browser send, unless its origin is allowed. Such pages
        reach a loopback address, also under a name of their own (DNS rebinding). Returns the headers by which
        the browser lets an allowed page read the answer. Raises ApiError."""
        host = header_of(scope, b"host")
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            raise ApiError(400, "the request has two Host fields")  # a proxy may have read the other one
        name = _host_name(host)
        if self._local and self._path is None and not is_loopback(name):
            raise ApiError(403, f"the Host {host[:80]!r} is not this machine")
        origin = header_of(scope, b"origin")
        if not origin or origin.partition("://")[2] == host:
            return ()
        if not self._origins & {origin.lower(), "*"}:
            raise ApiError(403, f"pages of {origin[:80]!r} may not send requests here; see --allowed-origins")
        return (
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"retry-after, www-authenticate"),
            (b"vary", b"origin"),
        )

    def check_site(self, scope: Scope, *, public: bool) -> None:
        """Refuse what a page of another site loads without saying its origin, as browsers do for pictures,
        scripts and frames. `public`: what is asked for may be opened by a link there. Raises ApiError."""
        site = header_of(scope, b"sec-fetch-site")  # browsers alone send it; "none": the user has opened it
        opened = header_of(scope, b"sec-fetch-dest") == "document"
        if site in ("", "same-origin", "none") or (public and opened):
            return
        if not header_of(scope, b"origin") and "*" not in self._origins:
            raise ApiError(403, "pages of other sites may not load this; see --allowed-origins")

    def account(self, scope: Scope) -> str:
        """Returns the name of the client whose key the request has, "" where it has none that is known."""
        try:
            return self.client(scope)
        except ApiError:
            return ""

    def client(self, scope: Scope) -> str:
        """Returns the name of the client whose key the request has, "" where none is needed. Raises
        ApiError."""
        if self._path is None:
            return ""
        self._read_again(self._path)
        scheme, _, key = header_of(scope, b"authorization").partition(" ")
        if scheme.lower() != "bearer":
            key = header_of(scope, b"x-api-key")
        given, name = _digest(key.strip()), ""
        for digest, client in self._keys.items():  # all of them, so that no time depends on the key
            if hmac.compare_digest(digest, given):
                name = client
        if not name:
            text = "this API key is not known" if key else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, text, code="invalid_api_key")
        return name

    def _read_again(self, path: Path) -> None:
        """Read the file where it has changed. Where it cannot be read, the keys stay as they were."""
        if (stamp := _stamp(path)) != self._stamp:
            self._stamp = stamp
            try:
                self._keys = read_api_keys(path)
            except ProtocolError as e:
                log.warning("%s; the keys that were known before still are", e)


def permission(scope: Scope, method: str) -> Headers:
    """Returns what a browser is told that asks, before an allowed page's request, whether it may be sent.
    `method`: that which the path serves. Keys travel in headers, so there are no cookies to allow."""
    asked = header_of(scope, b"access-control-request-headers")
    fields = asked if FIELDS.fullmatch(asked) else "authorization, content-type"
    return (
        (b"access-control-allow-methods", method.encode()),
        (b"access-control-allow-headers", fields.encode()),
        (b"access-control-max-age", str(ASKED_SECONDS).encode()),
    )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """Returns a host without the port and an IPv6 address's brackets."""
    match = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::\d+)?|([^:\[\]]+)(?::\d+)?", host)
    return "" if match is None else (match[1] or match[2]).lower()


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of HOST:PORT, with [HOST] for IPv6."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
