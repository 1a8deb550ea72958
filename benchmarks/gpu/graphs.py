"""Decode steps on this GPU with CUDA graphs and without: their time, whether their numbers are the same, and
what runs in one.

    python -m benchmarks.gpu.graphs [--model shape:mixtral-8x7b/4] [--rows 1 --rows 4] [--out FILE.json]

A step is that of an engine whose experts are all resident: embeddings, layers up to their experts and their
copies to the host, a layer's active experts by the kernels in int4, the head with the greedy choice. Weights
are random. Times are of the host's clock around a step, medians. Beside the figures goes a trace of steps
without and with graphs (`FILE.trace.json`, for chrome://tracing or ui.perfetto.dev); its kernels with the
most time are shown last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.kernels import SHAPES, Layers
from pipeline.arrays import FloatArray
from pipeline.backbone.backbone import Backbone, EagerLayers
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_blocks import blocks_for
from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.backbone.linear import Precision
from pipeline.backbone.step import StepLayers
from pipeline.checkpoint.open import open_model
from pipeline.config import KV_BLOCK
from pipeline.device import Device, open_device
from pipeline.engine.graphs import CAPTURES, WARM, StepGraphs
from pipeline.engine.observer import Probing
from pipeline.errors import UsageError
from pipeline.models.registry import model_spec

MODELS = ("shape:mixtral-8x7b/4", "shape:qwen3-30b-a3b/6")
ROWS = (1, 3, 8)
CONTEXT, LENGTH = 4096, 1000  # tokens; those of a sequence that are there already
STEPS = 30
TRACED = 3  # steps of each kind in the trace
SHOWN = 15  # kernels

Experts = Callable[[Tensor], Tensor]  # float32 [R, H] each


@dataclass(frozen=True)
class Row:
    model: str
    rows: int
    eager_us: float  # a layer, of a step
    graph_us: float
    equal: str  # "bits", or the largest difference
    status: str  # of the graphs


def step(layers: StepLayers, number: int, inputs: Sequence[StepInput], experts: Experts) -> list[FloatArray]:
    """One step; all that is read back."""
    h, found = layers.embed(), list[FloatArray]()
    for layer in range(number):
        attended = layers.attend(layer, h, True, ())
        h = attended.h
        found += layers.read()
        if (y := attended.shared()) is not None:
            h.add_(y)
        h.add_(experts(attended.x))
    return found + layers.answers(h, inputs)


class Steps:
    """Decode steps of some sequences, again and again at the same position."""

    def __init__(self, backbone: Backbone, device: Device, rows: int, length: int, experts: Experts) -> None:
        self.backbone, self._device, self._experts = backbone, device, experts
        self.layers = len(backbone.spec.moe_layers)
        self._probing = Probing(backbone, device.torch_device, None)
        tokens = rows * KV_BLOCK * blocks_for(length + 1)
        kv = KVCache(backbone.spec, backbone.dtype, device.torch_device, tokens)
        for slab in itertools.chain(*kv.slabs):
            slab.numbers.normal_()
        spans = [TokenSpan(filled(kv.allocate(length + 1), length), [5 + row]) for row in range(rows)]
        self._inputs = [StepInput(span, "greedy") for span in spans]
        self.graphs = StepGraphs(backbone, device, "auto")

    def eager(self) -> list[FloatArray]:
        spans = [item.span for item in self._inputs]
        layers = EagerLayers(self.backbone, spans, self._probing.logits)
        return step(layers, self.layers, self._inputs, self._experts)

    def by_graphs(self) -> list[FloatArray]:
        """Computes a step, without graphs where they are off."""
        layers = self.graphs.layers([item.span for item in self._inputs], self._probing)
        return self.eager() if layers is None else step(layers, self.layers, self._inputs, self._experts)

    def warm(self) -> None:
        """Computes steps until all graphs are captured."""
        for _ in range(WARM + 2 + (2 * self.layers + 2) // CAPTURES):
            self.by_graphs()


def filled(sequence: SequenceKV, length: int) -> SequenceKV:
    """Returns the sequence with so many tokens."""
    sequence.advance(length)
    return sequence


def seconds(once: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        once()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def difference(found: Sequence[FloatArray], expected: Sequence[FloatArray]) -> str:
    """ "bits", or the largest of all numbers but those of choices, which hold tokens."""
    pairs = list(zip(found, expected, strict=True))
    if all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in pairs):
        return "bits"
    return f"{max(float(np.abs(a - b).max()) for a, b in pairs if a.shape[1] != 4):.2g}"


def measure(
    name: str,
    backbone: Backbone,
    device: Device,
    rows: Sequence[int],
    experts: Experts,
    length: int = LENGTH,
    repeats: int = STEPS,
) -> tuple[list[Row], list[Steps]]:
    """A row for each number of sequences."""
    table, every = [], []
    for number in rows:
        steps = Steps(backbone, device, number, length, experts)
        expected = steps.eager()
        steps.warm()
        equal = difference(steps.by_graphs(), expected)
        eager, graph = (1e6 * seconds(one, repeats) / steps.layers for one in (steps.eager, steps.by_graphs))
        table.append(Row(name, number, eager, graph, equal, steps.graphs.status))
        every.append(steps)
    return table, every


def trace(steps: Steps, file: Path | None) -> list[str]:
    """Record steps of both kinds; lines of the kernels with the most time."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        for kind, one in (("without graphs", steps.eager), ("with graphs", steps.by_graphs)):
            for _ in range(TRACED):
                with torch.profiler.record_function(kind):
                    one()
    if file is not None:
        recorded.export_chrome_trace(str(file))
    averages: list[Any] = list(recorded.key_averages())
    on_gpu = any(one.self_device_time_total for one in averages)
    spent = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    averages.sort(key=lambda one: -getattr(one, spent))
    where = "GPU" if on_gpu else "CPU"
    return [
        f"{getattr(one, spent) / TRACED:9.1f} us a step on the {where}, {one.count:5} calls: {one.key[:60]}"
        for one in averages[:SHOWN]
    ]


def resident_experts(device: Device, model: str, layers: int) -> tuple[Experts, Layers]:
    """A layer's active experts, in int4, by the device's kernels."""
    name = model.removeprefix("shape:").partition("/")[0]
    if name not in SHAPES:
        raise UsageError(f"--model {model}: give shape:{' or shape:'.join(SHAPES)}, with a number of layers")
    hidden, intermediate, _, number = SHAPES[name]
    tiles = Layers(device, name, "int4", 2 * layers * number * hidden * intermediate)
    kernel = device.expert_kernel(tiles.layout)
    arguments = {rows: tiles.share(rows)[1] for rows in range(1, 65)}

    def experts(x: Tensor) -> Tensor:
        share = kernel.begin(x, *arguments[len(x)])
        share.add(tiles.next_tiles())
        return device.total([share.result()], (), x.shape)

    return experts, tiles


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--rows", action="append", type=int, choices=range(1, 65), metavar="1..64")
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    arguments = parser.parse_args()
    table: list[Row] = []
    lines: list[str] = []
    try:
        device = open_device("cuda")
        with torch.inference_mode():
            for model in arguments.model or MODELS:
                source = open_model(Path(model))
                spec = model_spec(source.config)
                backbone = Backbone(source, spec, Precision("bf16", device), CONTEXT)
                experts, tiles = resident_experts(device, model, spec.layers)
                rows, every = measure(model, backbone, device, arguments.rows or ROWS, experts)
                table += rows
                if not lines:
                    file = None if arguments.out is None else arguments.out.with_suffix(".trace.json")
                    lines = trace(every[0], file)
                tiles.slab.close()
                del every, backbone, experts, tiles
    except UsageError as e:
        print(e, file=sys.stderr)
        return 2
    for row in table:
        print(
            f"{row.model:24} {row.rows:3} rows: a layer {row.eager_us:7.1f} us without,"
            f" {row.graph_us:7.1f} with graphs; equal: {row.equal}; {row.status}"
        )
    print(*lines, sep="\n")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in table], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
