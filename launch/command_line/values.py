"""Parsers of single values on the command line. Each raises ArgumentTypeError, which names the error."""

from __future__ import annotations

import argparse
import ipaddress
import math
import re
import socket
from collections.abc import Callable
from pathlib import Path

from pipeline.config import SpeculateName
from pipeline.models.shapes import is_shape, with_whole_path
from shm.control import MOST_DEVICES

ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # which browsers leave out
MOST_NAMES, MAX_NAME = 8, 96
SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def at_least(low: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `low` to what fits 64 bits."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value < 1 << 63:
            raise argparse.ArgumentTypeError(f"must be at least {low}, not {value}")
        return value

    return whole


def guesses(text: str) -> SpeculateName | int:
    """Reads on, off, or the number of next tokens to guess."""
    if text in ("on", "off"):
        return "on" if text == "on" else "off"
    return at_least(1)(text)


def between(low: float, high: float) -> Callable[[str], float]:
    """Returns a parser of finite numbers from `low` to `high`."""
    bound = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
    return _number(lambda value: low <= value <= high, bound)


def above(low: float, high: float = math.inf) -> Callable[[str], float]:
    """Returns a parser of finite numbers greater than `low`, up to `high`."""
    bound = f"above {low:g}" + (f" and at most {high:g}" if math.isfinite(high) else "")
    return _number(lambda value: low < value <= high, bound)


def _number(allowed: Callable[[float], bool], bound: str) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (allowed(value) and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"must be {bound}, not {text}")
        return value

    return number


def http_address(text: str) -> str:
    """Reads HOST:PORT or PORT, with an IP address or localhost; the port 0 is any free one."""
    host, _, port = text.rpartition(":")
    host = {"": "127.0.0.1", "localhost": "127.0.0.1", "*": "0.0.0.0"}.get(host.strip("[]"), host.strip("[]"))
    try:
        ip = ipaddress.ip_address(host)
        host = str(getattr(ip, "ipv4_mapped", None) or ip)
    except ValueError:
        host = ""
    if not host or not port.isdecimal() or not port.isascii() or int(port) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write it as HOST:PORT, with an IP address of this machine"
        )
    return f"[{host}]:{int(port)}" if ":" in host else f"{host}:{int(port)}"


def head_address(text: str) -> str:
    """Reads HOST:PORT of a cluster's head, by its IP address or name; without a port, the default one."""
    host, colon, number = text.rpartition(":")
    host, number = (host, number) if colon else (text, "6379")
    try:
        return f"{socket.gethostbyname(host)}:{port(number)}"
    except (OSError, UnicodeError):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: no machine has that name or address") from None


def port(text: str) -> int:
    """Reads a port that other machines connect to."""
    number = at_least(1024)(text)
    if number > 65000:
        raise argparse.ArgumentTypeError(f"must be at most 65000, not {number}")
    return number


def port_range(text: str) -> tuple[int, int]:
    """Reads the ports of expert hosts: the first and the last."""
    first, dash, last = text.partition("-")
    found = port(first), port(last if dash else first)
    if found[1] < found[0]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first port first, such as 7300-7310")
    return found


def ip_address(text: str) -> str:
    """Reads an address at which other machines can reach this one."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not an IPv4 address") from None
    if address.is_unspecified or text == "127.0.0.1":
        raise argparse.ArgumentTypeError(f"other machines do not reach this one at {text}")
    return text


def machine_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,24}", text):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r}: a machine's name has 1 to 24 letters, digits, _ or -"
        )
    return text


def origins(text: str) -> tuple[str, ...]:
    """Reads origins of pages, with commas between them, as browsers write them; `*` is any."""
    found = []
    for part in text.split(","):
        match = ORIGIN.fullmatch(part.strip().lower())
        if match is None and part.strip() != "*":
            raise argparse.ArgumentTypeError(
                f"{part.strip()[:80]!r}: write it as http://HOST:PORT, without a path; or * for any"
            )
        scheme, host, port = ("", "*", "") if match is None else match.groups(default="")
        port = "" if port == DEFAULT_PORTS.get(scheme) else port
        found.append(f"{scheme}://{host}{port}" if scheme else host)
    return tuple(found)


def size(text: str) -> int:
    """Reads bytes, with or without a unit: 500MB, 1.5GB, 0."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kMGT]?)B?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500MB or 1.5GB")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def devices(text: str) -> str:
    """Reads auto, cpu, cuda, or devices that divide the layers: GPUs by number, or emulated ones by size,
    which becomes bytes."""
    words = [word.strip() for word in text.split(",")]
    if words[0] in ("auto", "cpu", "cuda") and len(words) == 1:
        return text
    kinds, values = zip(*(word.partition(":")[::2] for word in words), strict=True)
    if not all(values) or set(kinds) not in ({"cpu"}, {"cuda"}):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r}: give auto, cpu or cuda; or several, as cuda:0,cuda:1 or, emulated,"
            " cpu:24GB,cpu:12GB"
        )
    if len(words) > MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"{len(words)} devices are more than {MOST_DEVICES}")
    numbers = [size(value) if kinds[0] == "cpu" else at_least(0)(value) for value in values]
    if kinds[0] == "cuda" and len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} names a device twice")
    return ",".join(f"{kinds[0]}:{number}" for number in numbers)


def rates(text: str) -> float | tuple[float, ...]:
    """Reads a rate, or one for each device with commas between them."""
    found = tuple(above(0.0)(word) for word in text.split(","))
    return found if len(found) > 1 else found[0]


def model_path(text: str) -> Path:
    """Returns a checkpoint's folder or file, or a shape as it is written; ./NAME is always a path."""
    path = Path(text)
    if is_shape(text):
        return Path(with_whole_path(text))
    return path.absolute() if is_shape(path) else path


def absolute(text: str) -> Path:
    """Returns a path that means the same in every process."""
    return Path(not_empty(text)).absolute()


def not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def names(text: str) -> tuple[str, ...]:
    """Reads up to eight names of a model, with commas between them."""
    found = tuple(name.strip() for name in text.split(","))
    if len(found) > MOST_NAMES or not all(name.isprintable() and 0 < len(name) <= MAX_NAME for name in found):
        raise argparse.ArgumentTypeError(
            f"write up to {MOST_NAMES} names of at most {MAX_NAME} characters, with commas between them"
        )
    return found


def token_ids(text: str) -> tuple[int, ...]:
    try:
        ids = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids like 1,2,3") from None
    if min(ids) < 0:
        raise argparse.ArgumentTypeError(f"token ids are not negative: {min(ids)}")
    return ids
