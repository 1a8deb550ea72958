"""Decode steps by CUDA graphs: what is the same in each step is captured once and then enqueued with one call
a layer, where torch takes one for each of its operations.

Graphs are of fixed shapes, so steps are padded to a bucket of rows. A bucket's graphs read and write tensors
that stay: the table of its rows (`pipeline/backbone/batch.py`), the residual stream, the input of the
experts, the routers' logits. A row without a sequence attends to nothing, and its numbers are read by no
other row. Routed experts are computed between the graphs: the one before rounds their input for the device's
kernel and leaves it where the workers read it, and the next one begins with the sum of what device and
workers give, as a table tells it.

Captured is what has run: from a bucket's third step on, a few graphs a step, so that no step takes much
longer. Each first replay is compared with the same work done without a graph. Where it differs, or the work
cannot be captured, the engine goes on without graphs, and a line says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import FloatArray, IntArray
from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.decoder_layer import DecoderLayer
from pipeline.backbone.kv_blocks import BlockPool, blocks_for
from pipeline.backbone.kv_cache import BLOCKS
from pipeline.backbone.step import Attended, StepLayers, greedy, split_rows
from pipeline.config import GRAPH_BYTES, GraphsName
from pipeline.device.base import Added, Device
from pipeline.device.cuda import CudaGraphs
from pipeline.engine.observer import Probing
from pipeline.experts.device_share import DeviceMemory
from pipeline.text.logprobs import WIDTH
from shm.segment import byte_size
from workers.cuda import CudaError
from workers.kernels.cuda.sums import HEADER_BYTES, MOST_PARTS, OutputSums, sums_table, table_room

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # rows
WARM = 2  # steps of a bucket before its graphs are captured
CAPTURES = 8  # graphs that a step captures at most
CLOSE = 1e-4  # of the largest number: by so much a replay may differ where its bits do

log = logging.getLogger(__name__)


class StepGraphs:
    """Makes one engine's decode steps by graphs. `status`: one line for a person."""

    def __init__(self, backbone: Backbone | None, device: Device, mode: GraphsName) -> None:
        """`backbone`: one of ours; without, there are none."""
        self._backbone, self._device = backbone, device
        self._buckets: dict[int, Bucket] = {}
        self._pool: BlockPool | None = None  # of the sequences in all steps by graphs: its slabs' addresses
        self._gpu: CudaGraphs | None = None
        self.sums: OutputSums
        self.taken = 0  # bytes of the device's memory
        self.captured = 0  # graphs
        self._off = ""  # why there are none
        if mode == "off":
            self._off = "--graphs off"
        elif (gpu := device.graphs()) is None:
            self._off = f"the device {device.name} has none"
        elif backbone is None:
            self._off = "the model runs on modules of transformers"
        elif backbone.kernels is None:
            self._off = "our kernels of attention do not take the model's heads"
        elif backbone.spec.recurrent_layers:
            self._off = "the model has recurrent states, which change places at each step"
        else:
            self._gpu, self.sums = gpu, gpu.device.sums

    @property
    def planned_bytes(self) -> int:
        """Return the device's memory that is still to be taken."""
        return 0 if self._off else max(0, GRAPH_BYTES - self.taken)

    @property
    def status(self) -> str:
        """Return one line for a person. Any thread may read it."""
        if self._off:
            return f"off: {self._off}"
        return f"on: {self.captured} captured, {byte_size(self.taken)}"

    def layers(
        self, spans: Sequence[TokenSpan], probing: Probing, memory: DeviceMemory | None = None
    ) -> StepLayers | None:
        """Return a decode step by graphs, or None where it has to be done without. `memory`: of the experts
        on the device."""
        if self._off or self._gpu is None or self._backbone is None:
            return None
        if not all(span.decodes for span in spans):
            return None
        needed = sum(len(span.tokens) for span in spans)
        rows = next((rows for rows in BUCKETS if needed <= rows), None)
        if rows is None:
            return None
        pool = self._pool = self._pool or spans[0].kv.pool
        if any(span.kv.pool is not pool for span in spans):
            return None
        if rows not in self._buckets:
            self._buckets[rows] = Bucket(self, self._backbone, self._device, self._gpu, rows, pool)
        bucket = self._buckets[rows]
        bucket.begin(spans, probing, memory)
        return bucket

    def stop(self, reason: str) -> None:
        """Go on without graphs."""
        self._off = reason
        log.warning(f"CUDA graphs are off: {reason}")
        for bucket in self._buckets.values():
            bucket.forget()

    def capture(self, work: Callable[[], None], h: Tensor, outputs: Sequence[Tensor]) -> Callable[[], None]:
        """Do the work, which reads h and changes `outputs`, perhaps h among them. Returns a function that
        repeats it. Raises _Failed: h is then as before, and the work is still to be done."""
        assert self._gpu is not None
        free, before = self._gpu.free_bytes(), h.clone()
        try:
            replay = self._gpu.capture(work)
            expected = [output.clone() for output in outputs]
            h.copy_(before)
            for output in outputs:
                if output is not h:
                    output.fill_(torch.nan)
            replay()
            differs = not all(map(_agrees, outputs, expected))
        except (RuntimeError, CudaError) as e:
            h.copy_(before)
            raise _Failed(f"a step could not be captured: {str(e).splitlines()[0]}") from e
        if differs:
            h.copy_(before)
            raise _Failed("a captured step gave other numbers than the same step without a graph")
        self.captured += 1
        self.taken += max(0, free - self._gpu.free_bytes())
        if self.taken > GRAPH_BYTES:
            log.warning(f"CUDA graphs take {byte_size(self.taken)}: no more are captured")
        return replay


class _Failed(Exception):
    """No graph was made; the text says why."""


def _agrees(ours: Tensor, expected: Tensor) -> bool:
    """Compare all bits; else the difference is at most CLOSE of the largest number."""
    if torch.equal(ours.view(torch.int32), expected.view(torch.int32)):
        return True
    limit = CLOSE * float(expected.abs().max())
    return bool(((ours - expected).abs() <= limit).all())


@dataclass
class _Attended:
    """A layer up to its experts, in its bucket's tensors."""

    h: Tensor
    x: Tensor
    _layer: int
    _bucket: Bucket

    @property
    def inputs(self) -> Any:
        return self._bucket.inputs or self.x

    def shared(self) -> Tensor | None:
        return self._bucket.shared(self._layer)

    def expert_bias(self, experts: IntArray, weights: FloatArray) -> Added | None:
        return self._bucket.computed[self._layer].expert_bias(experts, weights)


class Bucket:
    """Decode steps of at most so many rows: StepLayers, one step after the other."""

    def __init__(
        self,
        graphs: StepGraphs,
        backbone: Backbone,
        device: Device,
        gpu: CudaGraphs,
        rows: int,
        pool: BlockPool,
    ) -> None:
        self._graphs, self._backbone, self._device, self._gpu = graphs, backbone, device, gpu
        spec, there, kernels = backbone.spec, device.torch_device, backbone.kernels
        assert kernels is not None
        self._bucket_rows = rows
        lines = BLOCKS + blocks_for(kernels.context)
        self._table = torch.zeros((lines, rows), dtype=torch.int64, device=there)
        self._batch = backbone.decode_batch(self._table, pool)
        self._h, self._x, self._shared = (
            torch.zeros((rows, spec.hidden), dtype=torch.float32, device=there) for _ in range(3)
        )
        landing = device.landing  # in the workers' memory
        if landing is None or rows > len(landing):
            landing = gpu.answers(rows, spec.hidden)
        self._x_host = landing[:rows]
        self._memory: DeviceMemory | None = None
        self.inputs: Any = None  # x as the kernel of the experts reads it, where it takes that
        # What the experts of a layer add, for the next graph: on the host and the device.
        room = table_room(rows, 2 * rows * backbone.facts.top_k, MOST_PARTS)
        self._told = gpu.answers(room // 4 + 1).view(np.uint8)
        self._told[:] = 0
        self._table_of_sums = torch.zeros(len(self._told), dtype=torch.uint8, device=there)
        self._added: Sequence[Added] = ()  # of which the table tells
        # On the device and the host: of so many routers their logits, and what the head gives.
        self._results: dict[int | str, tuple[Tensor, FloatArray]] = {}
        self.computed: dict[int, DecoderLayer] = {}
        self._replays: dict[Hashable, Callable[[], None]] = {}
        self._steps = 0
        # of the present step:
        self._rows = self._captures = 0
        self._number = 0  # of logits that the latest `attend` gives
        self._probing: Probing

    def begin(self, spans: Sequence[TokenSpan], probing: Probing, memory: DeviceMemory | None) -> None:
        """A step begins."""
        self._rows, self._probing = sum(len(span.tokens) for span in spans), probing
        self._told[:HEADER_BYTES] = 0  # where a step has failed
        if memory is not self._memory:
            self._memory, self.inputs = memory, None if memory is None else memory.inputs(self._bucket_rows)
        table = self._backbone.decode_table(spans, self._bucket_rows)
        self._gpu.device.upload_to(self._table[: len(table)], table)
        self._steps += 1
        self._captures = CAPTURES if self._steps > WARM else 0

    def forget(self) -> None:
        """Use no graph any more."""
        self._replays.clear()
        self._captures = 0

    def embed(self) -> Tensor:
        def work() -> None:
            self._rotate()
            self._h.copy_(self._backbone.embed(self._batch))

        self._run(("embed",), work, self._h, *self._batch.cos_sin)
        return self._h[: self._rows]

    def enter(self, h: Tensor) -> Tensor:
        self._run(("enter",), self._rotate, *self._batch.cos_sin)
        return self._h[: self._rows].copy_(h)

    def _rotate(self) -> None:
        """Write the rows' factors of positions, which the layers' graphs read."""
        for kept, new in zip(self._batch.cos_sin, self._batch.found_cos_sin(), strict=True):
            kept.copy_(new)

    def leave(self, h: Tensor) -> Tensor:
        def work() -> None:
            self._add_told()
            self._h.copy_(self._backbone.finish(self._h, self._batch))

        self._run(("leave",), work, self._h)
        return self._h[: self._rows]

    def before(self, layer: int, h: Tensor, probes: Sequence[int]) -> tuple[Tensor, Sequence[FloatArray]]:
        logits, logits_host = self._logits(len(probes))

        def work() -> None:
            self._add_told()
            torch.stack([self._backbone.router_before(target, self._h) for target in probes], out=logits)
            self._gpu.device.copy_back(logits, logits_host)

        self._run(("before", *probes), work, self._h, logits)
        self._gpu.wait()
        self._told[:HEADER_BYTES] = 0  # it is added
        return self._h[: self._rows], [one[: self._rows].copy() for one in logits_host]

    def _logits(self, number: int) -> tuple[Tensor, FloatArray]:
        """Room for so many routers' logits."""
        return self._room(number, number, self._bucket_rows, self._backbone.spec.experts)

    def _room(self, name: int | str, *shape: int) -> tuple[Tensor, FloatArray]:
        """Room for results of this name, on the device and the host."""
        if name not in self._results:
            made = torch.zeros(shape, dtype=torch.float32, device=self._device.torch_device)
            self._results[name] = made, self._gpu.answers(*shape)
        return self._results[name]

    def attend(self, layer: int, h: Tensor, own: bool, probes: Sequence[int]) -> Attended:
        probing, probes = self._probing, tuple(probes)
        self._number = number = own + len(probes)
        logits, logits_host = self._logits(number)
        routers = [*[layer][:own], *probes]
        looks = (
            self._memory.looks(layer, routers, self._gpu) if self.inputs is not None and self._memory else ()
        )

        def work() -> None:
            self._add_told()
            attended = self._backbone.attend(layer, self._h, self._batch, routed=own)
            self.computed[layer] = attended.layer
            routed = [attended.logits()] if own else []
            routed += [probing.logits(target, attended.x) for target in probes]
            if routed:
                torch.stack(routed, out=logits)
                self._gpu.device.copy_back(logits, logits_host)
            self._x.copy_(attended.x)
            self._gpu.device.copy_back(self._x, self._x_host)
            self._h.copy_(attended.h)
            if self.inputs is not None:
                self.inputs.round(self._x)
            for look in looks:
                look(dict(zip(routers, logits, strict=True)), self.inputs)

        # A trained gate belongs to its calibration, a router to the model.
        of = probing if any(p <= 0 for p in probes) else None
        key = "attend", layer, own, probes, of, self.inputs, looks
        self._run(key, work, self._h, self._x, logits, *(look.looked.u for look in looks))
        return _Attended(self._h[: self._rows], self._x[: self._rows], layer, self)

    def read(self) -> Sequence[FloatArray]:
        self._gpu.wait()
        self._told[:HEADER_BYTES] = 0  # it is added
        _, logits = self._logits(self._number)
        return [self._x_host[: self._rows], *(one[: self._rows].copy() for one in logits)]

    def add(self, added: Sequence[Added], parts: Sequence[FloatArray]) -> Tensor | None:
        device, shape = self._device, (self._rows, self._backbone.spec.hidden)
        told = sums_table(self._rows, added, self._gpu.device.places(parts, shape))
        if len(told) > len(self._told):
            return device.total(added, parts, shape)
        self._told[: len(told)], self._added = told, added
        return None

    def _add_told(self) -> None:
        """Add to h what the table tells, which may be nothing."""
        self._gpu.device.copy_here(self._table_of_sums, self._told)
        self._graphs.sums.add(self._table_of_sums.data_ptr(), self._h)

    def shared(self, layer: int) -> Tensor | None:
        computed = self.computed[layer]
        if not computed.shares:
            return None

        def work() -> None:
            y = computed.shared_experts(self._x)
            assert y is not None
            self._shared.copy_(y)

        self._run(("shared", layer), work, self._shared)
        return self._shared[: self._rows]

    def answers(self, h: Tensor, inputs: Sequence[StepInput]) -> list[FloatArray]:
        wanted = {item.logits for item in inputs}
        if wanted not in ({"greedy"}, {"last"}, {"all"}):
            self._add_told()
            h = self._backbone.finish(self._h, self._batch)[: self._rows]
            return self._backbone.answers(h, inputs)
        small = wanted == {"greedy"}
        name, width = ("greedy", WIDTH) if small else ("logits", self._backbone.spec.vocabulary)
        result, result_host = self._room(name, self._bucket_rows, width)

        def work() -> None:
            self._add_told()
            logits = self._backbone.head(self._backbone.finish(self._h, self._batch))
            result.copy_(greedy(logits) if small else logits)
            self._gpu.device.copy_back(result, result_host)

        self._run((name,), work, result)
        self._gpu.wait()
        return split_rows(result_host[: self._rows].copy(), [len(item.span.tokens) for item in inputs])

    def hidden(self) -> Tensor:
        return self._backbone.normed(self._h[: self._rows])  # no dense layer is behind the last with experts

    def _run(self, key: Hashable, work: Callable[[], None], *outputs: Tensor) -> None:
        """Do the work, by its graph where there is one."""
        replay = self._replays.get(key)
        if replay is not None:
            replay()
        elif self._captures and self._graphs.planned_bytes:
            self._captures -= 1
            try:
                self._replays[key] = self._graphs.capture(work, self._h, outputs)
            except _Failed as e:
                self._graphs.stop(str(e))
                work()
        else:
            work()
