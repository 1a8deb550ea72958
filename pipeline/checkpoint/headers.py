"""The headers of safetensors files, checked before anything is allocated for their claims.

A safetensors file begins with the header's length (8 bytes, little endian) and the header, a JSON object that
gives each tensor a dtype, a shape and `data_offsets` [begin, end) relative to the byte after the header. The
tensors cover the rest of the file exactly. The safetensors library is not used: its numpy interface has no
bfloat16, its errors name no remedy, and it maps files, so that a file that shrinks meanwhile ends the
process.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from pipeline.errors import ModelError
from protocol.files import open_regular

MAX_HEADER = 100_000_000  # bytes; the format's own limit
LFS_POINTER = b"version "  # the first bytes of the text file that git-lfs puts in place of a large one
MAX_TENSORS = 1 << 18  # of a model; the largest known one has half
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file, for its fingerprint: times differ from machine to machine
COLONS = 5  # of each tensor in a header, and one more
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}

Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct):
    """A tensor in a header."""

    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=32)]
    data_offsets: tuple[Size, Size]


@dataclass(frozen=True)
class TensorEntry:
    """The location of a tensor: `nbytes` bytes from byte `offset` of `file`, row-major, little endian."""

    file: Path
    dtype: str  # safetensors' name: BF16, F16, F32, ...
    shape: tuple[int, ...]
    offset: int  # from the file's first byte
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file."""

    path: Path
    size: int
    header_digest: bytes
    sample_digest: bytes
    tensors: dict[str, TensorEntry]


def read_shard(path: Path) -> Shard:
    """Returns a file's header. Raises ModelError, one line, where it is missing, cut short or damaged."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            begin = file.read(8)
            if begin == LFS_POINTER:
                raise ModelError(f"{path} is a git-lfs pointer and not the weights: run `git lfs pull` there")
            length = int.from_bytes(begin, "little")
            if status.st_size < 8 or length > status.st_size - 8:
                raise ModelError(f"{path} is cut short within its header: download it again")
            if length > MAX_HEADER:
                raise ModelError(f"{path} is not a safetensors file: its header would have {length} bytes")
            header = file.read(length)
            sample_digest = samples(file.fileno(), status.st_size)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: the download is incomplete") from None
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror}") from None
    if len(header) != length:
        raise ModelError(f"{path} changed while it was read")
    # Before objects are made of them: of tensors, or of anything else that has a name.
    if header.count(b'"data_offsets"') > MAX_TENSORS or header.count(b":") > COLONS * MAX_TENSORS:
        raise ModelError(f"{path} has more than {MAX_TENSORS} tensors, which makes no sense")
    try:
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise ModelError(f"{path} is damaged: its header is not a JSON object") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is damaged: its header is not valid JSON") from None
    fields.pop("__metadata__", None)
    tensors = {name: _located(path, name, field, 8 + length) for name, field in fields.items()}
    _check_cover(path, tensors, 8 + length, status.st_size)
    digest = hashlib.blake2b(header, digest_size=32).digest()
    return Shard(path, status.st_size, digest, sample_digest, tensors)


def samples(descriptor: int, size: int) -> bytes:
    """Returns a digest of a few bytes from all of a file, its last ones included: other weights in a file of
    the same header and size, as training writes them again and again, change it. Raises OSError."""
    digest = hashlib.blake2b(digest_size=32)
    last = max(0, size - SAMPLE_BYTES)
    for number in range(SAMPLES):
        digest.update(os.pread(descriptor, SAMPLE_BYTES, last * number // (SAMPLES - 1)))
    return digest.digest()


def _located(path: Path, name: str, field: msgspec.Raw, start: int) -> TensorEntry:
    damaged = f"{path} is damaged: the header's entry {name[:80]!r}"
    try:
        entry = msgspec.json.decode(field, type=_Entry)
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise ModelError(f"{damaged}: {str(e)[:120]}") from None
    if entry.dtype not in DTYPE_BYTES:
        raise ModelError(f"{damaged} has the unknown dtype {entry.dtype[:40]!r}")
    begin, end = entry.data_offsets
    if end - begin != math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]:
        raise ModelError(f"{damaged} claims {end - begin} bytes, which is not its shape's and dtype's size")
    return TensorEntry(path, entry.dtype, entry.shape, start + begin, end - begin)


def _check_cover(path: Path, tensors: dict[str, TensorEntry], start: int, size: int) -> None:
    """Raises ModelError unless the tensors, in order, cover the file from byte `start` to its end."""
    position = start
    cut = None  # the first tensor that is not wholly in the file
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != position:
            what = "overlap" if entry.offset < position else "leave a hole"
            raise ModelError(f"{path} is damaged: its tensors {what} before {name[:80]!r}")
        position += entry.nbytes
        if position > size and cut is None:
            cut = name
    if cut is not None:
        raise ModelError(
            f"{path} has {size} of {position} bytes, it ends before the end of {cut[:80]!r}: "
            "the download is incomplete"
        )
    if position < size:
        raise ModelError(f"{path} is damaged: {size - position} bytes follow its last tensor")
