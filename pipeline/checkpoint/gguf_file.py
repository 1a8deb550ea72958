"""The header of a GGUF file, checked before anything is allocated for its claims. Every unusable file raises
a ModelError that names the file and the remedy.

A GGUF file has, little endian: the magic GGUF and a version (4 bytes each), the numbers of tensors and of
settings (8 bytes each); the settings, each a key, a type, and a value; for each tensor its name, sizes (the
row's first), type, and place; zeros up to a multiple of the alignment; and the tensors, from there on. A
string is its length (8 bytes) and UTF-8; an array the type and number (8 bytes) of its values.

The gguf package gives types and their sizes, and its GGUFReader is not used: it maps the file, so that one
that shrinks meanwhile ends the process, makes several arrays of each string and number of a list (for a
vocabulary seconds, and hundreds of megabytes), and loops for ever over a list that claims 2^60 values.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from pipeline.checkpoint.headers import MAX_TENSORS, Shard, TensorEntry
from pipeline.checkpoint.quantized import MAX_NAME
from pipeline.errors import ModelError
from pipeline.models.shapes import OTHER_GGUF
from protocol.files import open_regular

SUFFIX = ".gguf"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, where the file does not say
MAX_ALIGNMENT = 1 << 20
MAX_HEADER = 1 << 28  # bytes; the largest known one has a tenth
MAX_SETTINGS = 1 << 16  # the most known are a hundred
MAX_VALUES = 1 << 22  # of all lists; those of the largest known vocabularies have a third
MAX_DIMENSIONS = 4
LONG = 256  # values of a list
FIRST_READ = 1 << 16  # bytes; doubled until they hold the header
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
NUMBERS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
DOWNLOAD = "download it again"


@dataclass(frozen=True)
class GgufFile:
    """One file: its settings, and its tensors, whose dtypes are the names of GGML's types and whose shapes
    have the row's size last."""

    settings: dict[str, Any]
    shard: Shard


def read_metadata(path: Path, long_arrays: bool = True) -> dict[str, Any]:
    """The settings of a file by key: strings, numbers, truth values, and lists of these. Bytes that are no
    UTF-8 become U+FFFD, and a float32 the shortest decimal number that it stands for. Without `long_arrays`
    lists of more than LONG values are left out. Raises ModelError."""
    return read_gguf(path, long_arrays).settings


def gguf_in(folder: Path) -> Path | None:
    """The first file of the one GGUF model in this folder, None where it has none or safetensors. Raises
    ModelError where it has several, or lacks the first file of one."""
    if any(folder.glob("*.safetensors*")):
        return None
    firsts = gguf_models_in(folder)
    if len(firsts) > 1:
        shown = ", ".join(name[:MAX_NAME] for name in firsts[:4])
        raise ModelError(f"{folder} has {len(firsts)} GGUF models: name the file of one ({shown})")
    if firsts:
        return folder / firsts[0]
    later = next((PART.fullmatch(name) for name in _gguf_files(folder) if part_of(name)[0] > 1), None)
    if later is not None:
        raise ModelError(
            f"{folder} has {later[0][:MAX_NAME]} and lacks {_first_of(later)}, the first file: download it"
        )
    return None


def gguf_models_in(folder: Path) -> list[str]:
    """The first file of each GGUF model in this folder, in order."""
    return [name for name in _gguf_files(folder) if part_of(name)[0] == 1]


def _gguf_files(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*") if path.suffix.lower() == SUFFIX)
    return [name for name in names if not name.lower().startswith(OTHER_GGUF)]


def _first_of(part: re.Match[str]) -> str:
    """The name of a model's first file, from a match of another one's with PART."""
    return f"{part[1][:MAX_NAME]}-00001-of-{part[3]}{SUFFIX}"


def part_of(name: str) -> tuple[int, int]:
    """The number of this file among those of a model, from 1 on, and how many they are, by its name."""
    match = PART.fullmatch(name)
    return (int(match[2]), int(match[3])) if match else (1, 1)


def read_model(path: Path) -> tuple[dict[str, Any], tuple[Shard, ...]]:
    """The settings of a model, without long lists, and its files, of which `path` is the first. Raises
    ModelError where one is missing or damaged."""
    number, count = part_of(path.name)
    base = PART.fullmatch(path.name)
    if number != 1 and base:
        raise ModelError(f"{path} is file {number} of {count} of a model: give the first, {_first_of(base)}")
    first = read_gguf(path, long_arrays=False)
    said = first.settings.get(SPLIT_COUNT, 1) or 1
    if said != count:
        raise ModelError(
            f"{path} is one of {said} files of a model, and its name says {count}: give it its old name"
        )
    paths = [
        path.with_name(f"{base[1]}-{n:05}-of-{count:05}{path.suffix}") for n in range(2, count + 1) if base
    ]
    missing = [one.name for one in paths if not os.path.exists(one)]
    if missing:
        raise ModelError(
            f"{path.parent} lacks {len(missing)} of {count} files of {path.name} (the first is "
            f"{missing[0]}): download them"
        )
    shards = [first.shard]
    for n, one in enumerate(paths, 1):
        other = read_gguf(one, long_arrays=False)
        if (other.settings.get(SPLIT_NUMBER), other.settings.get(SPLIT_COUNT)) != (n, count):
            raise ModelError(f"{one} is not file {n + 1} of {count} of {path.name}: {DOWNLOAD}")
        shards.append(other.shard)
    total, twice = sum(len(shard.tensors) for shard in shards), _twice(shards)
    if twice is not None:
        raise ModelError(f"{path} is damaged: two files have the tensor {twice[:MAX_NAME]!r}")
    if first.settings.get(SPLIT_TENSORS, total) != total:
        raise ModelError(
            f"{path}: its files have {total} tensors, and it says {first.settings[SPLIT_TENSORS]}: {DOWNLOAD}"
        )
    return first.settings, tuple(shards)


def _twice(shards: Iterable[Shard]) -> str | None:
    """A tensor that several files have."""
    seen: set[str] = set()
    for shard in shards:
        if both := seen & shard.tensors.keys():
            return min(both)
        seen |= shard.tensors.keys()
    return None


def read_gguf(path: Path, long_arrays: bool = True) -> GgufFile:
    """A file's header; `long_arrays` as of `read_metadata`. Raises ModelError, one line, where it is missing,
    cut short, damaged, or of another kind."""
    try:
        descriptor = open_regular(path)
        try:
            return _Header(path, descriptor).read(long_arrays)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror}") from None


class _Header:
    """Reads a header from its first byte to its last: no further than the file and MAX_HEADER."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._status = os.fstat(descriptor)
        self._bytes = bytearray()
        self._at = 0
        self._values = 0  # of lists

    def read(self, long_arrays: bool) -> GgufFile:
        self._check_kind()
        tensors, settings = self._number("Q"), self._number("Q")
        if tensors > MAX_TENSORS or settings > MAX_SETTINGS:
            self._damaged(f"it claims {tensors} tensors and {settings} settings")
        found: dict[str, Any] = {}
        seen: set[str] = set()
        for _ in range(settings):
            key = self._name("key")
            if key in seen:
                self._damaged(f"it has the key {key[:MAX_NAME]!r} twice")
            seen.add(key)
            value = self._value(key, self._kind(key), long_arrays)
            if value is not None:
                found[key] = value
        alignment = found.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self._damaged(f"general.alignment is {str(alignment)[:MAX_NAME]}, no power of two from 8 on")
        claims = [self._tensor() for _ in range(tensors)]
        digest = hashlib.blake2b(memoryview(self._bytes)[: self._at], digest_size=32).digest()
        entries = self._located(claims, alignment)
        shard = Shard(self._path, self._status.st_size, self._status.st_mtime_ns, digest, entries)
        return GgufFile(found, shard)

    def _check_kind(self) -> None:
        if self._status.st_size < 24:
            raise ModelError(f"{self._path} is cut short: {DOWNLOAD}")
        magic = self._take(4)
        if magic == b"vers":
            raise ModelError(
                f"{self._path} is a git-lfs pointer and not the weights: run `git lfs pull` there"
            )
        if magic != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file: give one, or a folder with safetensors")
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise ModelError(
                f"{self._path} is for big-endian machines: download the model's little-endian file"
            )
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            what = (
                "download a newer file of this model" if version < VERSIONS[0] else "install a newer Tandem"
            )
            raise ModelError(f"{self._path} has version {version} of GGUF, only {known} are read: {what}")

    # --- the parts of a header --------------------------------------------------------------------------

    def _value(self, key: str, kind: GGUFValueType, long_arrays: bool) -> Any:
        """The value that comes next; None for a long list that is not wanted."""
        if kind is GGUFValueType.STRING:
            return self._text()
        if kind is not GGUFValueType.ARRAY:
            return self._numbers(kind, 1)[0]
        inner, count = self._kind(key), self._number("Q")
        if inner is GGUFValueType.ARRAY:
            self._damaged(f"{key[:MAX_NAME]!r} is a list of lists")
        # What the values take at least is in the file before a list of them is made.
        self._values += count
        if self._values > MAX_VALUES or count > self._status.st_size - self._at:
            all_lists = f", and all lists would have {self._values}" if self._values > count else ""
            self._damaged(f"{key[:MAX_NAME]!r} would be a list of {count} values{all_lists}")
        wanted = long_arrays or count <= LONG
        if inner is GGUFValueType.STRING:
            texts = [self._bytes[a:b].decode(errors="replace") for a, b in self._texts(count) if wanted]
            return texts if wanted else None
        if wanted:
            return self._numbers(inner, count)
        self._take(count * NUMBERS[inner].itemsize)
        return None

    def _numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = NUMBERS[kind]
        found = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if kind is GGUFValueType.FLOAT32 and count <= LONG:
            return [float(str(number)) for number in found]
        numbers: list[Any] = found.tolist()
        return numbers

    def _texts(self, count: int) -> Iterator[tuple[int, int]]:
        """The places of so many strings in the bytes read: hundreds of thousands, so without calls."""
        content, length, at = self._bytes, struct.Struct("<Q").unpack_from, self._at
        for _ in range(count):
            if at + 8 > len(content):
                self._at = at
                self._need(8)
            begin = at + 8
            at = begin + length(content, at)[0]
            if at > len(content):
                self._at = at
                self._need(0)
            yield begin, at
        self._at = at

    def _text(self) -> str:
        return self._take(self._number("Q")).decode(errors="replace")

    def _name(self, what: str) -> str:
        """A name of a setting or tensor."""
        length = self._number("Q")
        if not 0 < length <= 0xFFFF:
            self._damaged(f"a {what} would have {length} characters")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            self._damaged(f"a {what} is not UTF-8")

    def _kind(self, key: str) -> GGUFValueType:
        number = self._number("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            self._damaged(f"{key[:MAX_NAME]!r} has the unknown type {number}")

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """Name, type, shape, bytes and place of the tensor that comes next."""
        name, dimensions = self._name("tensor"), self._number("I")
        shown = f"the tensor {name[:MAX_NAME]!r}"
        if not 0 < dimensions <= MAX_DIMENSIONS:
            self._damaged(f"{shown} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, place = self._number("I"), self._number("Q")
        try:
            kind = GGMLQuantizationType(number)
            block, nbytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelError(
                f"{self._path}: {shown} has type {number} of GGML, which is not known: it is of a newer or a "
                "private version; download the model in another type, like Q4_K_M or Q8_0"
            ) from None
        count = math.prod(shape)
        if count == 0 or shape[-1] % block:
            self._damaged(f"{shown} of type {kind.name} cannot have the shape {list(shape)}")
        return name, kind.name, shape, count // block * nbytes, place

    def _located(
        self, claims: list[tuple[str, str, tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, TensorEntry]:
        """Raises ModelError unless the tensors lie behind the header, within the file, each for itself."""
        size, begin = self._status.st_size, -(-self._at // alignment) * alignment
        entries: dict[str, TensorEntry] = {}
        end = cut = 0
        for name, dtype, shape, nbytes, place in sorted(claims, key=lambda claim: claim[-1]):
            shown = f"the tensor {name[:MAX_NAME]!r}"
            if name in entries:
                self._damaged(f"it has {shown} twice")
            if place % alignment:
                self._damaged(f"{shown} lies at byte {place}, no multiple of {alignment}")
            if place < end:
                self._damaged(f"{shown} overlaps another one")
            end = place + nbytes
            cut += begin + end > size
            entries[name] = TensorEntry(self._path, dtype, shape, begin + place, nbytes)
        if cut:
            raise ModelError(
                f"{self._path} has {size} of {begin + end} bytes, {cut} of {len(claims)} tensors are not "
                f"wholly in it: the download is incomplete, {DOWNLOAD}"
            )
        return {claim[0]: entries[claim[0]] for claim in claims}

    # --- bytes ------------------------------------------------------------------------------------------

    def _number(self, code: str) -> int:
        """An unsigned number of 4 (I) or 8 bytes (Q)."""
        size = 4 if code == "I" else 8
        if self._at + size > len(self._bytes):
            self._need(size)
        (value,) = struct.unpack_from(f"<{code}", self._bytes, self._at)
        self._at += size
        return int(value)

    def _take(self, count: int) -> bytearray:
        if self._at + count > len(self._bytes):
            self._need(count)
        taken = self._bytes[self._at : self._at + count]
        self._at += count
        return taken

    def _need(self, count: int) -> None:
        """Read so many bytes from the current place on."""
        end = self._at + count
        if end > self._status.st_size:
            raise ModelError(f"{self._path} is cut short or damaged within its header: {DOWNLOAD}")
        if end > MAX_HEADER:
            self._damaged(f"its header would have more than {MAX_HEADER} bytes")
        known = len(self._bytes)
        wanted = min(max(end, 2 * known, FIRST_READ), MAX_HEADER, self._status.st_size)
        self._bytes += os.pread(self._descriptor, wanted - known, known)
        if len(self._bytes) < end:
            raise ModelError(f"{self._path} changed while it was read")

    def _damaged(self, how: str) -> NoReturn:
        raise ModelError(f"{self._path} is damaged: {how}; {DOWNLOAD}")
