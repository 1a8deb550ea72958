"""Decode steps of changing sequences, by CUDA graphs and without, for a GPU or the stand-in for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch

from pipeline.backbone.backbone import Backbone, EagerLayers
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.backbone.step import StepLayers
from pipeline.config import KV_BLOCK
from pipeline.device import Device
from pipeline.engine import graphs
from pipeline.engine.graphs import StepGraphs
from pipeline.engine.observer import Probing


def through(
    layers: StepLayers, backbone: Backbone, inputs: list[StepInput], probes: bool
) -> list[np.ndarray]:
    """All that a step reads back: x and logits of each layer, and the answers. Shared experts and a number
    for the routed ones are added, as in the engine."""
    h, found = layers.embed(), []
    number = len(backbone.spec.moe_layers)
    for layer in range(number):
        others = [layer + 1] if probes and layer + 1 < number else []
        if others:
            h, before = layers.before(layer, h, others)
            found += [one.copy() for one in before]
        attended = layers.attend(layer, h, layer != 1, others)
        h = attended.h
        found += [one.copy() for one in layers.read()]
        shared = attended.shared()
        y = layers.add([] if shared is None else [shared], [np.full(h.shape, 0.25, np.float32)])
        if y is not None:
            h.add_(y)
    return found + layers.answers(h, inputs)


def poison(sequences: list[SequenceKV]) -> None:
    """Where a step writes."""
    for written in places(sequences):
        written.fill_(torch.nan)


def stored(sequences: list[SequenceKV]) -> list[torch.Tensor]:
    return [written.clone() for written in places(sequences)]


def places(sequences: list[SequenceKV]) -> Iterator[torch.Tensor]:
    """The next token's place in each stream, [heads, width]."""
    for kv in sequences:
        block, at = kv.blocks[kv.length // KV_BLOCK], kv.length % KV_BLOCK
        yield from (slab.numbers[block, :, at] for layer in kv.pool.slabs for slab in layer)


def compare(
    backbone: Backbone, device: Device, seed: int, *, steps: int = 16, exact: bool = True
) -> StepGraphs:
    """Steps of sequences that come, grow, move and end, each also without graphs; in some, a token is
    guessed. In full buckets the bits are the same if `exact`. Returns the graphs."""
    there = device.torch_device
    made, probing = StepGraphs(backbone, device, "auto"), Probing(backbone, there, None)
    kv = KVCache(backbone.spec, backbone.dtype, there, 2000)
    near = {"rtol": 1e-4, "atol": 1e-4} if backbone.dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    random = np.random.default_rng(seed)
    running: list[SequenceKV] = []
    for step in range(steps):
        wanted = int(random.choice([1, 2, 3, 4, 4]))
        while len(running) > wanted:
            kv.release(running.pop(int(random.integers(len(running)))))
        while len(running) < wanted:
            sequence = kv.allocate(int(random.integers(30, 50)))
            tokens = random.integers(0, 60, int(random.integers(2, 6))).tolist()
            prompt = [StepInput(TokenSpan(sequence, tokens), "none")]
            through(EagerLayers(backbone, [prompt[0].span], probing.logits), backbone, prompt, False)
            sequence.advance(len(tokens))
            running.append(sequence)
        if step % 5 == 4:
            running[0].grow(running[0].capacity + 3)
        spans = [TokenSpan(sequence, [int(random.integers(60))]) for sequence in running]
        if step % 4 == 3:
            spans[0] = TokenSpan(running[0], [*spans[0].tokens, int(random.integers(60))], drafted=1)
        kind = ["greedy", "last", "mixed"][step % 3]
        kinds = ["greedy", *["last"] * (wanted - 1)] if kind == "mixed" else [kind] * wanted
        inputs = [StepInput(span, cast(Any, one)) for span, one in zip(spans, kinds, strict=True)]
        poison(running)
        expected = through(EagerLayers(backbone, spans, probing.logits), backbone, inputs, step % 2 == 0)
        written = stored(running)
        poison(running)
        layers = made.layers(spans, probing)
        assert layers is not None, made.status
        found = through(layers, backbone, inputs, step % 2 == 0)
        for ours, theirs in zip(found, expected, strict=True):
            if exact and wanted + spans[0].drafted in graphs.BUCKETS:
                np.testing.assert_array_equal(ours.view(np.int32), theirs.view(np.int32))
            elif ours.shape[1] != 4:  # of choices one number is a token
                np.testing.assert_allclose(ours, theirs, **near)
        for ours, theirs in zip(stored(running), written, strict=True):
            torch.testing.assert_close(ours, theirs, **near)
        for sequence in running:
            sequence.advance(1)
    return made
