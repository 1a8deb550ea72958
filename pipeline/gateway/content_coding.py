"""Bodies that a client has compressed. What comes out of one is bounded, whatever it claims."""

from __future__ import annotations

import zlib
from importlib.util import find_spec

from pipeline.gateway.errors import ApiError

CODINGS = ("gzip", "deflate", "zstd")
ALIASES = {"x-gzip": "gzip"}  # RFC 9110
EITHER = 32 + zlib.MAX_WBITS  # gzip's head or zlib's
MOST_MEMBERS = 64  # of a gzip body, each with a head of its own
MOST_WINDOW = 8 << 20  # bytes that a zstd frame may look back on, as RFC 9659 has it


def inflated(raw: bytes, coding: str, most: int) -> bytes:
    """Returns the plain bytes of a body. Raises ApiError for another coding (415), a damaged body (400) and
    one of more than `most` bytes (413), of which no more are decoded."""
    coding = ALIASES.get(coding, coding)
    if coding not in CODINGS:
        raise ApiError(
            415, f"the body's coding {coding[:40]!r} is not read; send {', '.join(CODINGS)} or plain"
        )
    if coding == "zstd" and find_spec("zstandard") is None:
        raise ApiError(415, "bodies in zstd need the Python package zstandard: pip install '.[serve]'")
    try:
        plain = _zstd(raw, most + 1) if coding == "zstd" else _zlib(raw, most + 1)
    except (ValueError, zlib.error) as e:
        raise ApiError(400, f"the body is no valid {coding}: {str(e)[:200]}") from None
    if len(plain) > most:
        raise ApiError(413, f"the body has more than {most >> 20} MB when it is decoded")
    return plain


def _zlib(raw: bytes, most: int) -> bytes:
    plain = b""
    for _ in range(MOST_MEMBERS):
        reader = zlib.decompressobj(EITHER)
        plain += reader.decompress(raw, most - len(plain))
        if len(plain) == most or (reader.eof and not reader.unused_data):
            return plain
        if not reader.eof:
            raise ValueError("it does not end where the body ends")
        raw = reader.unused_data
    raise ValueError(f"it has more than {MOST_MEMBERS} members")


def _zstd(raw: bytes, most: int) -> bytes:
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    try:
        plain: bytes = reader.stream_reader(raw, read_across_frames=True).read(most)
    except zstandard.ZstdError as e:
        raise ValueError(str(e)) from None
    return plain
