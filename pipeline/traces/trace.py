"""A trace: a header with the model, its experts and its router, and steps; to bytes and back.

docs/traces.md specifies the bytes. A reader checks every length against the file before it takes the bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pipeline.arrays import PHASES, Phase
from pipeline.errors import TraceError
from pipeline.models.routing import Scored, Softmax, SparseMixer
from pipeline.policies.view import ModelShape, Router, Routing
from protocol.files import open_regular

MAGIC = b"TANDEMTR"
VERSION = 3
PREFIX = struct.Struct("<8sII")  # magic, version, bytes of the JSON object that follows
MAX_JSON = 1 << 16
MAX_ARRAY = 1 << 26  # bytes
Described = Softmax | SparseMixer | Scored
ROUTERS: dict[str, type[Described]] = {"softmax": Softmax, "sparse-mixer": SparseMixer, "scored": Scored}
ARRAYS = ("bias", "expert_scale")  # of a Scored, float32 [L, E]

Fingerprint = Annotated[str, Meta(pattern=r"\A[0-9a-f]{8,128}\Z")]  # it names files
Bytes = Annotated[int, Meta(ge=0, le=1 << 40)]


class PlainHeader(msgspec.Struct, omit_defaults=True):
    """A header as its JSON object, with the least and most of its numbers."""

    model: str
    fingerprint: Fingerprint
    store: Fingerprint
    layers: Annotated[int, Meta(ge=1, le=1 << 12)]
    experts: Annotated[int, Meta(ge=1, le=1 << 16)]
    tiles: Annotated[int, Meta(ge=1, le=1 << 20)]
    top_k: Annotated[int, Meta(ge=1, le=1 << 12)]
    tile_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    depth: Annotated[int, Meta(ge=0, le=16)]
    router: dict[str, Any]
    up: str = ""
    up_bytes: Bytes = 0


@dataclass(frozen=True)
class Header:
    """The traced model, and the settings of the trace."""

    model: str  # its path or name, for a person
    fingerprint: str  # of the model: the name of the folder of its calibration
    store: str  # fingerprint of its experts in their format and tile: the key of measured costs
    shape: ModelShape
    tile_bytes: int
    router: Router
    depth: int  # the routers of this many later layers were applied to each layer's x
    up: str = ""  # the format of the up matrices, where the experts' format keeps them apart
    up_bytes: int = 0  # of them for a tile, beside its `tile_bytes`

    def predictions(self, layer: int) -> int:
        """The later layers with recorded router logits on this layer's x."""
        return min(self.depth, self.shape.layers - 1 - layer)

    def encode(self) -> bytes:
        """The file's first bytes. Raises TraceError for a router that the format cannot describe."""
        kinds = [kind for kind, router in ROUTERS.items() if type(self.router) is router]
        if not kinds:
            raise TraceError(f"a trace cannot describe the router {type(self.router).__name__}")
        router = {"kind": kinds[0]} | vars(self.router)
        arrays = {name: router.pop(name) for name in ARRAYS if name in router}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        if arrays:
            router["arrays"] = list(arrays)
        fields = vars(self) | asdict(self.shape) | {"router": router}
        del fields["shape"]
        text = json.dumps(msgspec.to_builtins(PlainHeader(**fields))).encode()
        numbers = [array.astype("<f4").tobytes() for array in arrays.values()]
        return b"".join((PREFIX.pack(MAGIC, VERSION, len(text)), text, *numbers))

    @classmethod
    def decode(cls, text: bytes, file: BinaryIO) -> Header:
        """The JSON object, and the arrays that follow it in the file. Raises TraceError."""
        try:
            fields = msgspec.structs.asdict(msgspec.json.decode(text, type=PlainHeader))
            shape = ModelShape(**{name: fields.pop(name) for name in ModelShape.__dataclass_fields__})
            router = _router(fields.pop("router"), shape, file)
        except (ValueError, RecursionError) as e:
            raise TraceError(f"its header is damaged: {e}") from None
        # the model's name is shown in a terminal
        model = "".join(c if c.isprintable() else "?" for c in fields.pop("model"))
        return cls(model=model, shape=shape, router=router, **fields)


def _router(plain: dict[str, Any], shape: ModelShape, file: BinaryIO) -> Router:
    """Raises ValueError where these are not the numbers of a router that fits the shape."""
    kind, arrays = plain.get("kind"), plain.pop("arrays", [])
    if not isinstance(kind, str) or kind not in ROUTERS:
        raise ValueError("unknown router")
    named = arrays == [name for name in ARRAYS if name in arrays] if isinstance(arrays, list) else False
    if not named or not plain.keys().isdisjoint(ARRAYS):
        raise ValueError("unknown arrays of its router")
    router: Described = msgspec.convert(plain, ROUTERS[kind])
    if isinstance(router, SparseMixer):
        fits = shape.top_k == 2 and 0 <= router.jitter < math.inf
    else:
        fits = router.k == shape.top_k <= shape.experts and 0 < router.scale < math.inf
        fits = fits and 1 <= router.best_groups <= router.groups and shape.experts % router.groups == 0
    if isinstance(router, Scored):
        of_group = shape.experts // router.groups
        fits = fits and router.best_groups * of_group >= router.k
        fits = fits and (router.groups == 1 or router.group_score == "max" or of_group > 1)
        fits = fits and 4 * shape.layers * shape.experts <= MAX_ARRAY
    else:
        fits = fits and not arrays
    if not fits:
        raise ValueError("its router does not fit its shape")
    read = {name: _array(shape, file) for name in arrays}
    if not isinstance(router, Scored):
        return router
    return replace(router, bias=read.get("bias"), expert_scale=read.get("expert_scale"))


def _array(shape: ModelShape, file: BinaryIO) -> NDArray[np.float32]:
    """The next numbers by layer, float32 [L, E]. Raises ValueError."""
    size = 4 * shape.layers * shape.experts
    if len(data := file.read(size)) < size:
        raise ValueError("an array of its router is incomplete")
    array = np.frombuffer(data, "<f4").reshape(shape.layers, shape.experts)
    if not np.isfinite(array).all():
        raise ValueError("an array of its router has numbers that are not finite")
    return array


# --- steps --------------------------------------------------------------------------------------------------

Halves = NDArray[np.float16]

FRAME = struct.Struct("<II")  # bytes of the body, their CRC-32
HEAD = struct.Struct("<QIB3s")  # number, rows, phase, `rest` in microseconds
MOST_REST = 0xFFFFFF  # microseconds
LOGITS, FIRST = 1, 2  # flags of a layer
MAX_BODY = 1 << 30
LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class LayerTrace:
    """One layer of a step of R rows."""

    router_routing: Routing  # of the router, or of the prediction in its place
    logits: Halves | None  # [R, E] of the layer's own router, where it was run
    predictions: tuple[Halves, ...]  # of the next layers' routers on this layer's x, each [R, E]
    first: Halves | None  # at the last layer, if recorded: of the gate for the next token's first layer


@dataclass(frozen=True)
class TracedStep:
    """One step of the engine."""

    number: int  # 0 for the first that was recorded
    phase: Phase
    sequences: tuple[int, ...]  # [R]
    layers: tuple[LayerTrace, ...]
    rest: float = 0.0  # seconds that a replay does not simulate, as in docs/traces.md; 0: not measured


def halves(values: NDArray[np.float32]) -> Halves:
    """Convert to float16, clipped to its range."""
    return np.clip(values, -LARGEST_HALF, LARGEST_HALF).astype("<f2")


def encode_step(step: TracedStep) -> bytes:
    """The step's frame and body."""
    rest = min(round(1e6 * step.rest), MOST_REST).to_bytes(3, "little")
    parts = [
        HEAD.pack(step.number, len(step.sequences), PHASES.index(step.phase), rest),
        (np.array(step.sequences, np.int64) & 0xFFFFFFFF).astype("<u4").tobytes(),
    ]
    for layer in step.layers:
        routing = layer.router_routing
        parts.append(bytes([LOGITS * (layer.logits is not None) | FIRST * (layer.first is not None)]))
        parts += [routing.experts.astype("<u2").tobytes(), routing.weights.astype("<f4").tobytes()]
        optional = (layer.logits, *layer.predictions, layer.first)
        parts += [numbers.tobytes() for numbers in optional if numbers is not None]
    body = b"".join(parts)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


def decode_step(header: Header, body: bytes, expected: int) -> TracedStep:
    """The step with this number. Its arrays are views of the body, except the experts. Raises TraceError."""
    shape = header.shape
    if len(body) < HEAD.size:
        raise TraceError("its fixed fields are incomplete")
    number, rows, phase, rest = HEAD.unpack_from(body)
    if number != expected:
        raise TraceError(f"it has the number {number}")
    if phase >= len(PHASES):
        raise TraceError(f"it has the unknown phase {phase}")
    least = HEAD.size + 4 * rows + shape.layers * (1 + 6 * rows * shape.top_k)
    if rows == 0 or len(body) < least:
        raise TraceError(f"it is too short for {rows} rows")
    reader = _BodyReader(header, body, rows)
    sequences = tuple(reader.take("<u4", rows).tolist())
    layers = tuple([reader.layer(layer) for layer in range(shape.layers)])
    reader.check_routings()
    if reader.at != len(body):
        raise TraceError("it is longer than its layers")
    return TracedStep(number, PHASES[phase], sequences, layers, int.from_bytes(rest, "little") / 1e6)


class _BodyReader:
    """A read position in a body, behind its fixed fields at first."""

    def __init__(self, header: Header, body: bytes, rows: int) -> None:
        self._header, self._body, self._rows = header, body, rows
        self._routings: list[tuple[int, Routing]] = []  # with their layers
        self.at = HEAD.size

    def take(self, dtype: str, *shape: int) -> NDArray[Any]:
        """The next numbers, a view of this shape."""
        kind, count = np.dtype(dtype), math.prod(shape)
        end = self.at + kind.itemsize * count
        if end > len(self._body):
            raise TraceError("it ends within a layer")
        array = np.ndarray(shape, kind, self._body, self.at)
        self.at = end
        return array

    def layer(self, layer: int) -> LayerTrace:
        shape, rows = self._header.shape, self._rows
        if self.at == len(self._body):
            raise TraceError("it ends within a layer")
        flags = self._body[self.at]
        self.at += 1
        if flags >= 2 * FIRST or (flags & FIRST and layer != shape.layers - 1):
            raise TraceError(f"layer {layer} has unknown flags")
        routing = self._routing(layer)
        own = self.take("<f2", rows, shape.experts) if flags & LOGITS else None
        predictions = tuple(self.take("<f2", self._header.predictions(layer), rows, shape.experts))
        first = self.take("<f2", rows, shape.experts) if flags & FIRST else None
        return LayerTrace(routing, own, predictions, first)

    def _routing(self, layer: int) -> Routing:
        size = self._rows, self._header.shape.top_k
        experts = self.take("<u2", *size).astype(np.int32)
        weights = self.take("<f4", *size)
        self._routings.append((layer, routing := Routing(experts, weights)))
        return routing

    def check_routings(self) -> None:
        """Check what was read all at once, as a check of each takes longer than reading it."""
        experts = np.concatenate([routing.experts for _, routing in self._routings])
        weights = np.concatenate([routing.weights for _, routing in self._routings])
        wrong = (experts >= self._header.shape.experts).any(axis=1) | ~np.isfinite(weights).all(axis=1)
        if wrong.any():
            layer = self._routings[int(wrong.argmax()) // self._rows][0]
            raise TraceError(f"layer {layer} has experts that do not exist, or weights that are not finite")


# --- files --------------------------------------------------------------------------------------------------


class Trace:
    """A file of `--record`. After a kill of its writer, the steps end with the last complete one."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises TraceError, one line with the path, like every method of this class."""
        self.path = path
        self.end = 0  # the offset behind the last complete step; known once the steps have been read
        self.cut_short = False  # whether the file goes on there
        with self._open() as file:
            self.header, self._start = _read_header(file, path)

    def steps(self) -> Iterator[TracedStep]:
        """All complete steps, in order."""
        with self._open() as file:
            size = os.fstat(file.fileno()).st_size
            self.end = file.seek(self._start)
            for number in itertools.count():
                try:
                    body = _next_body(file, size)
                    step = None if body is None else decode_step(self.header, body, number)
                except TraceError as e:
                    raise TraceError(f"{self.path}: step {number} is damaged: {e}") from None
                if step is None:
                    break
                self.end = file.tell()
                yield step
            self.cut_short = self.end != size

    def _open(self) -> BinaryIO:
        try:
            return os.fdopen(open_regular(self.path), "rb")
        except OSError as e:
            raise TraceError(f"cannot read the trace {self.path}: {e.strerror}") from None


def _read_header(file: BinaryIO, path: Path) -> tuple[Header, int]:
    prefix = file.read(PREFIX.size)
    if len(prefix) < PREFIX.size or not prefix.startswith(MAGIC):
        raise TraceError(f"{path} is not a trace; --record makes one")
    _, version, length = PREFIX.unpack(prefix)
    if version != VERSION:
        raise TraceError(f"{path} is a trace of version {version}, this program reads version {VERSION}")
    if length > MAX_JSON or len(text := file.read(length)) < length:
        raise TraceError(f"{path}: its header is incomplete")
    try:
        return Header.decode(text, file), file.tell()
    except TraceError as e:
        raise TraceError(f"{path}: {e}") from None


def _next_body(file: BinaryIO, size: int) -> bytes | None:
    """The body of the next step; None where the rest of the file's `size` bytes has no complete one."""
    if file.tell() + FRAME.size > size:
        return None
    length, checksum = FRAME.unpack(file.read(FRAME.size))
    if length > MAX_BODY:
        raise TraceError(f"it would have {length} bytes")
    if file.tell() + length > size:
        return None
    body = file.read(length)
    if zlib.crc32(body) != checksum:
        raise TraceError("its checksum is wrong")
    return body
