"""One step of a trace, to bytes and back. docs/traces.md specifies the bytes."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import PHASES, Phase
from pipeline.errors import TraceError
from pipeline.policies.view import Routing
from pipeline.traces.header import Header

Halves = NDArray[np.float16]
Cuts = NDArray[np.uint16]

FRAME = struct.Struct("<II")  # bytes of the body, their CRC-32
HEAD = struct.Struct("<QIB3s")  # number, rows, phase, `rest` in microseconds
MOST_REST = 0xFFFFFF  # microseconds
PREDICTED, STALE, CHANGED, LOGITS, FIRST = 1, 2, 4, 8, 16  # flags of a layer
MAX_BODY = 1 << 30
LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class LayerTrace:
    """One layer of a step of R rows."""

    router_routing: Routing  # of the router, or of the prediction in its place
    computed: Routing  # as computed; the same object where it was not changed
    predicted: bool  # `router_routing` is from the previous layer, as in Gated
    stale: Cuts | None  # [E], where the host's share (tiles from the cut on) used the previous layer's x
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
    """As float16, clipped to its range."""
    return np.clip(values, -LARGEST_HALF, LARGEST_HALF).astype("<f2")


def encode_step(step: TracedStep) -> bytes:
    """The step's frame and body."""
    rest = min(round(1e6 * step.rest), MOST_REST).to_bytes(3, "little")
    parts = [
        HEAD.pack(step.number, len(step.sequences), PHASES.index(step.phase), rest),
        (np.array(step.sequences, np.int64) & 0xFFFFFFFF).astype("<u4").tobytes(),
    ]
    for layer in step.layers:
        changed = layer.computed is not layer.router_routing
        flags = PREDICTED * layer.predicted | STALE * (layer.stale is not None) | CHANGED * changed
        flags |= LOGITS * (layer.logits is not None) | FIRST * (layer.first is not None)
        parts.append(bytes([flags]))
        for routing in (layer.router_routing, layer.computed) if changed else (layer.router_routing,):
            parts += [routing.experts.astype("<u2").tobytes(), routing.weights.astype("<f4").tobytes()]
        optional = (layer.stale, layer.logits, *layer.predictions, layer.first)
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
        router_routing = self._routing(layer)
        computed = self._routing(layer) if flags & CHANGED else router_routing
        stale = self.take("<u2", shape.experts) if flags & STALE else None
        if stale is not None and int(stale.max()) > shape.tiles:
            raise TraceError(f"layer {layer} has cuts beyond its {shape.tiles} tiles")
        own = self.take("<f2", rows, shape.experts) if flags & LOGITS else None
        predictions = tuple(self.take("<f2", self._header.predictions(layer), rows, shape.experts))
        first = self.take("<f2", rows, shape.experts) if flags & FIRST else None
        return LayerTrace(router_routing, computed, bool(flags & PREDICTED), stale, own, predictions, first)

    def _routing(self, layer: int) -> Routing:
        size = self._rows, self._header.shape.top_k
        experts = self.take("<u2", *size).astype(np.int32)
        weights = self.take("<f4", *size)
        self._routings.append((layer, found := Routing(experts, weights)))
        return found

    def check_routings(self) -> None:
        """Those that were read; all at once, as a check of each takes longer than reading it."""
        experts = np.concatenate([routing.experts for _, routing in self._routings])
        weights = np.concatenate([routing.weights for _, routing in self._routings])
        wrong = (experts >= self._header.shape.experts).any(axis=1) | ~np.isfinite(weights).all(axis=1)
        if wrong.any():
            layer = self._routings[int(wrong.argmax()) // self._rows][0]
            raise TraceError(f"layer {layer} has experts that do not exist, or weights that are not finite")
