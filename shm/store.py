"""The store: every expert of a model in one shared-memory segment.

Below are the header page and the manifest, and when a reader may rely on them;
`shm/layout.py` specifies the bytes after them. One loader builds a store, under the store's build lock
(`shm/locks.py`); any number of processes then attach it, which takes the same time whatever its size.

A store may be **partial**: only some of its experts are in memory, and a file of the disk cache has all. Its
memory is a number of *frames* that hold an expert each, laid out as the experts of a store of one layer, and
read from the file again and again: pages that were made anew for each would cost ten times the processor's
time. One coordinator decides which expert lies in which frame (`pipeline/experts/disk_tier.py`), and names
frames in place of experts to all others, as experts of layer 0: who computes or copies one knows nothing of
the file. So a partial store is its engine's alone, and has a fingerprint of its own, and with it a name and
locks. While its file is made, the store is a whole one without pages, of which each layer has some for the
time in which it is filled.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from shm.errors import SegmentEmpty, ShmError, StoreInvalid, UnknownFormat
from shm.huge import give_back
from shm.layout import PAGE, Bytes, ExpertShape, Float32, Part, StoreLayout, format_named, part_of, shape_of
from shm.numa import interleave
from shm.segment import Segment, is_segment, segment_path, shm_names, unlink

# ----------------------------------------------------------------------------------------------------------
# The head of a store: its header page and its manifest. The same bytes begin the segment and the cache file.
#
#     byte  bytes  field            all integers unsigned, little endian
#        0      8  magic            "TANDEMST"
#        8      4  version          2
#       12      4  state            0 building, 1 ready
#       16      8  manifest length  M
#       24      8  data offset      D: the first multiple of 4096 that is not below 4096 + M
#       32      4  manifest crc32
#       36   4060  zero
#     4096      M  manifest         a msgpack map, see StoreManifest
#        D         the experts, as StoreLayout places them, up to the end of the segment
#
# **When the head is valid.** A store is built under its build lock. The builder writes length and offset
# first and everything else before `state`, which is one aligned 32-bit store and comes last; nothing is
# ever changed after it. A reader learns the segment's name from a message that was sent after that store,
# or holds the build lock, which the builder released after it. Both paths go through system calls on both
# sides, so a reader that sees `state` ready also sees all that was written before, on any processor. A
# segment in state building was left by a killed builder if no process holds the build lock or a lock on the
# segment itself.


MAGIC = b"TANDEMST"
VERSION = 2
BUILDING, READY = 0, 1
STATE_OFFSET = 12
MAX_MANIFEST = 1 << 20

_HEADER = struct.Struct("<8sIIQQI")
_CHECKSUM = np.dtype("<u4")

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class StoreManifest:
    """The content of a store. In msgpack: `fingerprint`, `format`, `source` as text; `shape` as the map that
    `ExpertShape.plain` gives; `checksums` as binary, 4 bytes for each layer: the crc32 of its bytes in a
    file; in memory 0; of a part of a model `part`, as the map that `Part.plain` gives; and of a store of
    which only some experts are in memory `file` and `frames` (shm/store.py)."""

    fingerprint: str
    shape: ExpertShape
    format: str
    source: str  # the model directory it came from, for a person
    checksums: tuple[int, ...] = ()  # one for each layer; () as for zeros
    part: Part | None = None  # None: the whole experts
    file: str = ""  # that has every expert, where the segment has only some; "": it has all
    frames: int = 0  # of the segment, where it has any

    @property
    def layout(self) -> StoreLayout:
        """Returns where the tiles of all experts lie, in a file too. Raises UnknownFormat."""
        return StoreLayout(self.shape, format_named(self.format))

    @property
    def held(self) -> StoreLayout:
        """Returns where tiles lie in memory: of a store with frames as of one layer. Raises UnknownFormat."""
        if not self.frames:
            return self.layout
        return StoreLayout(replace(self.shape, layers=1, experts=self.frames), format_named(self.format))

    @property
    def experts(self) -> str:
        """The fingerprint of the experts, which that of an engine's own store is not."""
        return Path(self.file).parent.name if self.file else self.fingerprint

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
            | ({"file": self.file, "frames": self.frames} if self.file else {})
        )


def data_offset(manifest_length: int) -> int:
    """Returns the byte at which the experts begin."""
    return -(-(PAGE + manifest_length) // PAGE) * PAGE


def store_bytes(manifest: StoreManifest) -> int:
    """Bytes of the whole store: head and experts."""
    return data_offset(len(manifest.pack())) + manifest.held.total_bytes


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
        expected = offset + manifest.held.total_bytes
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
        frames = int(fields.get("frames", 0))
    except (msgspec.DecodeError, RecursionError, ValueError, KeyError, TypeError, AttributeError):
        raise StoreInvalid("its manifest cannot be read") from None
    if len(checksums) != shape.layers:
        raise StoreInvalid("its manifest lacks checksums")
    checks = tuple(int(c) for c in checksums)
    return StoreManifest(shape=shape, checksums=checks, part=part, file=file, frames=frames, **text)


# --- stores -------------------------------------------------------------------------------------------------

STORE_PREFIX = "/tandem-store-"
STORE_SPACE = "TANDEM_STORE_SPACE"  # the environment variable

Keep = Callable[[int, Bytes], None]  # a layer, and its bytes


def store_space() -> str:
    """The name of a separate set of stores and of their locks, from the environment; empty in ordinary use.
    Each process of the tests has its own: engines of different spaces neither share nor sweep stores.
    Raises ShmError for a name with other characters than letters, digits and underscores."""
    space = os.environ.get(STORE_SPACE, "")
    if space and not re.fullmatch(r"[A-Za-z0-9_]{1,64}", space):
        raise ShmError(f"{STORE_SPACE} may hold letters, digits and underscores only, not {space!r}")
    return space


def store_prefix() -> str:
    """The beginning of the names of this space's stores."""
    space = store_space()
    return f"{STORE_PREFIX}{space}-" if space else STORE_PREFIX


def store_name(fingerprint: str) -> str:
    """The segment's name, the same for all engines of this user and model. The user is part of it: two
    people may run the same model from one directory, and neither may open the other's segment."""
    return f"{store_prefix()}{fingerprint[:16]}-{os.geteuid()}"


def own_fingerprint(fingerprint: str, runtime: Path) -> str:
    """The fingerprint of one engine's partial store: of the experts, and of the engine's directory."""
    return hashlib.sha256(f"{fingerprint} in part, for {os.path.realpath(runtime)}".encode()).hexdigest()


def store_key(segment: str) -> str:
    """The first 16 digits of the fingerprint in the name of a store of this user; empty for other names."""
    return found[1] if (found := _store_pattern().fullmatch(segment.removeprefix("/"))) else ""


def store_segments() -> list[str]:
    """The names of this user's stores in shared memory, without a slash."""
    return [name for name in shm_names(_store_pattern()) if is_segment(segment_path(name))]


def _store_pattern() -> re.Pattern[str]:
    return re.compile(rf"{store_prefix()[1:]}([0-9a-f]{{16}})-{os.geteuid()}")


class Store:
    """A finished store, attached. The views it gives are read-only."""

    def __init__(self, segment: Segment, manifest: StoreManifest, start: int) -> None:
        """View a segment with experts from byte `start` on. Use `attach`."""
        self.segment = segment
        self.manifest = manifest
        self.layout: StoreLayout = manifest.layout
        self.held = manifest.held
        self.frame_of: Int32 | None = None  # [L, E], -1 for none; None: experts are named by their frames
        data = segment.array[start:]
        data.flags.writeable = False
        self._data: Bytes | None = data
        self._start = start
        self._tile_bytes = self.layout.tile_bytes

    @classmethod
    def attach(cls, name: str, fingerprint: str | None = None, writable: bool = False) -> Store:
        """Map a store; its weights are not read. `writable` maps its pages read-write, which locking them
        for a device requires; the views stay read-only.

        Raises SegmentMissing where there is none, StoreInvalid unless it is ready, of this version and, if
        a fingerprint is given, of that model.
        """
        try:
            segment = Segment.attach(name, writable)
        except SegmentEmpty:
            raise StoreInvalid(f"the store {name} cannot be used: it is empty") from None
        try:
            head = segment.array[: PAGE + MAX_MANIFEST]
            manifest, start = read_head(head, segment.size)
            if fingerprint is not None and manifest.fingerprint != fingerprint:
                raise StoreInvalid(f"it belongs to another model ({manifest.source})")
            return cls(segment, manifest, start)
        except StoreInvalid as e:
            segment.close()
            raise StoreInvalid(f"the store {name} cannot be used: {e}") from None

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def partial(self) -> bool:
        """Returns whether only some experts are in memory."""
        return bool(self.manifest.file)

    def place(self, layer: int, expert: int) -> tuple[int, int]:
        """Returns an expert's name to others: its layer and number, or its frame."""
        return (layer, expert) if self.frame_of is None else (0, int(self.frame_of[layer, expert]))

    def frame(self, number: int) -> list[Bytes]:
        """The parts of a frame, as `StoreLayout.ranges` has those of an expert; writable where the store is
        attached so. Raises as `tiles`."""
        start, memory = self._start, self.segment.array
        return [memory[start + at : start + at + size] for at, size in self.held.ranges(0, number)]

    def tiles(self, layer: int, expert: int, lo: int, hi: int) -> Bytes:
        """Tiles [lo, hi) of an expert: uint8 [(hi-lo) * tile_bytes], read-only. Raises IndexError outside
        the shape and where the expert is not in memory, ValueError after `close`."""
        data = self.all_tiles()
        self._check_tiles(lo, hi)
        start = self.held.offset(*self.place(layer, expert), lo)
        return data[start : start + (hi - lo) * self._tile_bytes]

    def heads(self, layer: int, expert: int, lo: int, hi: int) -> Bytes:
        """The heads of tiles [lo, hi): uint8 [(hi-lo) * head_bytes], read-only; of no bytes for a format
        without heads. Raises as `tiles`."""
        data = self.all_tiles()
        self._check_tiles(lo, hi)
        start = self.held.head_offset(*self.place(layer, expert), lo)
        return data[start : start + (hi - lo) * self.layout.head_bytes]

    def up_biases(self, layer: int, expert: int) -> Float32:
        """Up's biases of an expert of a format with heads: float32 [padded], read-only; empty without any."""
        layout, data = self.layout, self.all_tiles()
        first = self.held.head_offset(*self.place(layer, expert))
        return data[first + layout.up_biases : first + layout.heads_bytes].view(np.float32)

    def all_tiles(self) -> Bytes:
        """All of `held`, heads and tiles: uint8 [total_bytes], read-only, the same array at every call.
        Raises ValueError after `close`."""
        if self._data is None:
            raise ValueError(f"the store {self.segment.name} is closed here")
        return self._data

    def _check_tiles(self, lo: int, hi: int) -> None:
        if not 0 <= lo <= hi <= self.layout.shape.tiles:
            raise IndexError(f"no tiles {lo} to {hi} in an expert of {self.layout.shape.tiles}")

    def close(self) -> None:
        """End this process's use (see Segment.close). May be called twice."""
        self._data = None
        self.segment.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StoreBuilder:
    """A store being filled, by the holder of its build lock: every byte of every expert is written once, then
    `finish` makes it a store. `discard` removes an unfinished one. Until one of them, or until this process
    exits, a shared lock on the segment marks it as being built.

    `keep`, if set, is called once for every layer, after the last write to it. What it raises ends the
    filling."""

    def __init__(
        self, segment: Segment, manifest: StoreManifest, lock: int, notes: tuple[str, ...] = ()
    ) -> None:
        """Fill a new segment. `lock`: its locked descriptor, which this object closes. `notes`: warnings for
        the user. Use `create`."""
        self.segment = segment
        self.notes = notes
        self._lock = lock
        self.manifest = manifest
        self.layout: StoreLayout = manifest.layout
        self._start = data_offset(len(manifest.pack()))
        self.keep: Keep | None = None

    @classmethod
    def create(
        cls,
        name: str,
        manifest: StoreManifest,
        progress: Callable[[int], None] | None = None,
        nodes: Sequence[int] = (),
        sparse: bool = False,
    ) -> StoreBuilder:
        """A new segment for a store, its tiles interleaved over these NUMA nodes; `progress` is called with
        the bytes allocated so far, of which there are none if it is `sparse`. Raises NotEnoughMemory, and
        ShmError if the name is taken."""
        if len(manifest.pack()) > MAX_MANIFEST:
            raise ShmError(f"a store of {manifest.shape.layers} layers needs too long a manifest")
        notes: list[str] = []

        def place(descriptor: int) -> None:
            note = interleave(descriptor, manifest.held, data_offset(len(manifest.pack())), nodes)
            notes.extend([note] if note else ())

        placed = place if len(nodes) > 1 else None
        segment = Segment.create(name, store_bytes(manifest), progress, placed, sparse)
        head = pack_head(manifest, BUILDING)
        segment.array[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        lock = os.open(segment_path(segment.name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ShmError(f"the store {name} is being removed by another program; start again") from None
        return cls(segment, manifest, lock, tuple(notes))

    def layer(self, layer: int) -> Bytes:
        """All experts of a layer, with their heads: uint8 [layer_stride], writable."""
        start = self._start + layer * self.layout.layer_stride
        return self.segment.array[start : start + self.layout.layer_stride]

    def expert(self, layer: int, expert: int) -> Bytes:
        """The tiles of one expert and the padding after them: uint8 [expert_stride], writable."""
        first = self._start + self.layout.offset(layer, expert)
        return self.segment.array[first : first + self.layout.expert_stride]

    def heads(self, layer: int, expert: int) -> Bytes:
        """The heads of one expert and the padding after them: uint8 [head_stride], writable."""
        first = self._start + self.layout.head_offset(layer, expert)
        return self.segment.array[first : first + self.layout.head_stride]

    def filled(self, layer: int) -> None:
        """Give a layer, of which no byte will change any more, to `keep`."""
        if self.keep is not None:
            self.keep(layer, self.layer(layer))

    def forget(self, layer: int) -> None:
        """Give the memory of a layer of a partial store back: its file has it."""
        give_back(self.layer(layer))

    def finish(self) -> None:
        """Make the store ready, and close the builder."""
        self.segment.array[STATE_OFFSET : STATE_OFFSET + 4].view("<u4")[0] = READY  # last: see above
        self._close()

    def discard(self) -> None:
        """Remove an unfinished store."""
        unlink(self.segment.name)
        self._close()

    def _close(self) -> None:
        self.segment.close()
        os.close(self._lock)
