"""The head of a store: its header page and its manifest. The same bytes begin the segment and the cache file.

    byte  bytes  field            all integers unsigned, little endian
       0      8  magic            "TANDEMST"
       8      4  version          2
      12      4  state            0 building, 1 ready
      16      8  manifest length  M
      24      8  data offset      D: the first multiple of 4096 that is not below 4096 + M
      32      4  manifest crc32
      36   4060  zero
    4096      M  manifest         a msgpack map, see StoreManifest
       D         the experts, as StoreLayout places them, up to the end of the segment

**When the head is valid.** A store is built under its build lock. The builder writes length and offset first
and everything else before `state`, which is one aligned 32-bit store and comes last; nothing is ever changed
after it. A reader learns the segment's name from a message that was sent after that store, or holds the build
lock, which the builder released after it. Both paths go through system calls on both sides, so a reader that
sees `state` ready also sees all that was written before, on any processor. A segment in state building was
left by a killed builder if no process holds the build lock or a lock on the segment itself.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import msgspec
import numpy as np

from shm.errors import StoreInvalid, UnknownFormat
from shm.layout import PAGE, Bytes, ExpertShape, Part, StoreLayout, format_named, part_of, shape_of

MAGIC = b"TANDEMST"
VERSION = 2
BUILDING, READY = 0, 1
STATE_OFFSET = 12
MAX_MANIFEST = 1 << 20

_HEADER = struct.Struct("<8sIIQQI")
_CHECKSUM = np.dtype("<u4")


@dataclass(frozen=True)
class StoreManifest:
    """The content of a store. In msgpack: `fingerprint`, `format`, `source` as text; `shape` as the map that
    `ExpertShape.plain` gives; `checksums` as binary, 4 bytes for each layer: the crc32 of its bytes in a
    file; in memory 0; of a part of a model `part`, as the map that `Part.plain` gives; and of a store of
    which only some experts are in memory `file` (shm/store.py)."""

    fingerprint: str
    shape: ExpertShape
    format: str
    source: str  # the model directory it came from, for a person
    checksums: tuple[int, ...] = ()  # one for each layer; () as for zeros
    part: Part | None = None  # None: the whole experts
    file: str = ""  # that has every expert, where the segment has only some; "": it has all

    @property
    def layout(self) -> StoreLayout:
        """Returns where the store's tiles lie. Raises UnknownFormat."""
        return StoreLayout(self.shape, format_named(self.format))

    def pack(self) -> bytes:
        """The msgpack map. Its length does not depend on the checksums' values."""
        checksums = self.checksums or (0,) * self.shape.layers
        return msgspec.msgpack.encode(
            {
                "fingerprint": self.fingerprint,
                "format": self.format,
                "source": self.source,
                "shape": self.shape.plain(),
                "checksums": np.array(checksums, dtype=_CHECKSUM).tobytes(),
            }
            | ({} if self.part is None else {"part": self.part.plain()})
            | ({"file": self.file} if self.file else {})
        )


def data_offset(manifest_length: int) -> int:
    """Returns the byte at which the experts begin."""
    return -(-(PAGE + manifest_length) // PAGE) * PAGE


def store_bytes(manifest: StoreManifest) -> int:
    """Bytes of the whole store: head and experts."""
    return data_offset(len(manifest.pack())) + manifest.layout.total_bytes


def pack_head(manifest: StoreManifest, state: int) -> bytes:
    """Header page and manifest, as they begin a store."""
    packed = manifest.pack()
    header = _HEADER.pack(MAGIC, VERSION, state, len(packed), data_offset(len(packed)), zlib.crc32(packed))
    return header.ljust(PAGE, b"\0") + packed


def read_head(head: Bytes, size: int) -> tuple[StoreManifest, int]:
    """The manifest and the data offset of a store of `size` bytes that begins with `head` (at least its
    header page and manifest). Raises StoreInvalid unless it is a ready store of this version and size."""
    if len(head) < PAGE:
        raise StoreInvalid("it is shorter than a store's header")
    magic, version, state, length, offset, crc = _HEADER.unpack(head[: _HEADER.size].tobytes())
    if magic != MAGIC:
        raise StoreInvalid("it is not a store")
    if version != VERSION:
        raise StoreInvalid(f"it has version {version} of the store's layout, and this program {VERSION}")
    if state != READY:
        raise StoreInvalid("it is unfinished")
    if length > MAX_MANIFEST or offset != data_offset(length) or offset > size or PAGE + length > len(head):
        raise StoreInvalid("its manifest does not fit")
    packed = head[PAGE : PAGE + length].tobytes()
    if zlib.crc32(packed) != crc:
        raise StoreInvalid("its manifest is damaged")
    manifest = _unpack(packed)
    try:
        expected = offset + manifest.layout.total_bytes
    except (UnknownFormat, ValueError) as e:  # ValueError: a tile that is no whole groups of the format
        raise StoreInvalid(str(e)) from None
    if size != expected:
        raise StoreInvalid(f"it has {size} bytes instead of {expected}")
    return manifest, offset


def _unpack(packed: bytes) -> StoreManifest:
    try:
        fields = msgspec.msgpack.decode(packed)
        checksums = np.frombuffer(fields["checksums"], dtype=_CHECKSUM)
        shape = shape_of(fields["shape"])
        text = {key: str(fields[key]) for key in ("fingerprint", "format", "source")}
        part, file = part_of(fields.get("part")), str(fields.get("file", ""))
    except (msgspec.DecodeError, RecursionError, ValueError, KeyError, TypeError, AttributeError):
        raise StoreInvalid("its manifest cannot be read") from None
    if len(checksums) != shape.layers:
        raise StoreInvalid("its manifest lacks checksums")
    checks = tuple(int(c) for c in checksums)
    return StoreManifest(shape=shape, checksums=checks, part=part, file=file, **text)
