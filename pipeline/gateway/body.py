"""The body of a request: read within limits, parsed, and its fields taken one by one with their checks."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection
from typing import Any, NoReturn

from pipeline.gateway.errors import ApiError, bad
from pipeline.gateway.types import Receive, Scope, header_of

MOST_BYTES = 8 << 20  # a message to the engine has half of that
BODY_SECONDS = 60.0  # for the whole body; a slow network sends 8 MB in less
MOST_NESTING = 200  # values in each other; schemas need some dozens
HALF = "is no valid Unicode: it has half of a surrogate pair"
_MISSING: Any = object()


async def read_json(scope: Scope, receive: Receive) -> dict[str, Any]:
    """The JSON object of a request. Raises ApiError, and ConnectionError where the client has gone."""
    kind = header_of(scope, b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page of another site can send any other type without asking (CORS).
        raise ApiError(415, f"the body must be application/json, not {kind[:80] or 'without a Content-Type'}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await _read(scope, receive)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
    try:
        text = raw.decode()
    except UnicodeDecodeError as e:
        raise ApiError(400, f"the body is no valid JSON: it is not in UTF-8 at byte {e.start}") from None
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {kind_of(value)}")
    return value


async def _read(scope: Scope, receive: Receive) -> bytearray:
    if header_of(scope, b"content-length").isdecimal():
        _check_size(int(header_of(scope, b"content-length")[:20]))
    raw = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        raw += message.get("body", b"")
        _check_size(len(raw))
        more = message.get("more_body", False)
    return raw


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise ApiError(413, f"the body has more than {MOST_BYTES >> 20} MB")


def parse_json(text: str, name: str = "") -> Any:
    """The value of a JSON text: a body, or a field of this name. Raises ApiError, also for what cannot be
    sent on to the engine: half characters, and values nested more deeply than the libraries write."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)[:200]
        error = f"is no valid JSON: {reason}"
        raise bad(name, error) if name else ApiError(400, f"the body {error}") from None
    if "\\ud" in text or "\\uD" in text or text.count("[") + text.count("{") > MOST_NESTING:
        try:
            _check(value, 0)
        except _Unfit as e:
            place = "".join(f"[{p}]" if isinstance(p, int) else f".{p[:40]}" for p in reversed(e.path))
            raise bad((name + ascii(place)[1:-1])[:200].lstrip("."), e.text) from None
    return value


class _Unfit(Exception):
    """`path`: keys and places of the value, the innermost first."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path: list[str | int] = []


def _check(value: Any, depth: int) -> None:
    """Raises _Unfit."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _Unfit(HALF) from None
        return
    if depth >= MOST_NESTING:
        raise _Unfit(f"is nested too deeply: {MOST_NESTING} values in each other are the most")
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        try:
            if isinstance(key, str):
                _check(key, depth)
            if isinstance(inner, (str, list, dict)):
                _check(inner, depth + 1)
        except _Unfit as e:
            e.path.append(key)
            raise


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def kind_of(value: Any) -> str:
    """How JSON calls a value."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else names.get(type(value), "an object")


class Fields:
    """The fields of a JSON object. Each method takes one: null counts as not given; for a value of another
    type or outside the limits it raises an ApiError that names the field."""

    def __init__(self, given: dict[str, Any], where: str = "") -> None:
        """`where`: of the object in the body, as a prefix of its fields' names."""
        self._given = given
        self._where = where
        self._taken: set[str] = set()

    def name(self, field: str) -> str:
        return f"{self._where}.{field}" if self._where else field

    @property
    def unknown(self) -> list[str]:
        """Fields that are not null and were not taken."""
        return [name for name, value in self._given.items() if name not in self._taken and value is not None]

    def refuse(self, field: str, text: str) -> NoReturn:
        raise bad(self.name(field), text)

    def any(self, field: str) -> Any:
        """The value as it is; None where it is absent."""
        self._taken.add(field)
        return self._given.get(field)

    def _checked(self, field: str, kinds: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self.any(field)
        if value is None:
            if default is _MISSING:
                self.refuse(field, f"is required: {what}")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            self.refuse(field, f"must be {what}, not {kind_of(value)}")
        return value

    def text(self, field: str, default: Any = _MISSING) -> Any:
        value = self._checked(field, str, "a string", default)
        return value if value is None else valid_text(value, self.name(field))

    def flag(self, field: str, default: bool = False) -> bool:
        return bool(self._checked(field, bool, "a boolean", default))

    def integer(self, field: str, low: int, high: int, default: Any = _MISSING) -> Any:
        value = self._checked(field, (int, float), "a whole number", default)
        if value is None or value is default:
            return value
        if value != int(value) if isinstance(value, float) and math.isfinite(value) else False:
            self.refuse(field, f"must be a whole number, not {value}")
        if not low <= value <= high:
            self.refuse(field, f"must be from {low} to {high}, not {str(value)[:40]}")
        return int(value)

    def number(self, field: str, low: float, high: float, default: Any = _MISSING) -> Any:
        value = self._checked(field, (int, float), "a number", default)
        if value is None or value is default:
            return value
        if not low <= value <= high:
            self.refuse(field, f"must be from {low:g} to {high:g}, not {str(value)[:40]}")
        return float(value)

    def choice(self, field: str, known: Collection[str], default: Any = _MISSING) -> Any:
        value = self._checked(field, str, "a string", default)
        if value is not None and value is not default and value not in known:
            self.refuse(field, f"must be one of {', '.join(known)}, not {value[:40]!r}")
        return value

    def array(self, field: str, default: Any = _MISSING) -> Any:
        return self._checked(field, list, "an array", default)

    def object(self, field: str, default: Any = _MISSING) -> Any:
        return self._checked(field, dict, "an object", default)

    def within(self, field: str) -> Fields | None:
        """The fields of an object in this one; None where it is absent."""
        value = self.object(field, None)
        return None if value is None else Fields(value, self.name(field))

    def strings(self, field: str) -> tuple[str, ...]:
        """A string, or an array of strings; empty where it is absent."""
        value = self.any(field)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            self.refuse(field, "must be a string or an array of strings")
        return tuple(valid_text(text, self.name(field)) for text in values)


def valid_text(text: str, name: str) -> str:
    """Raises ApiError for half a character, which JSON can write and no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad(name, HALF) from None
    return text
