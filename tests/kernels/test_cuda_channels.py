"""Formats whose gate and down lie by channel, by the emulated CUDA kernels: up has the host's bits, and so
its masks; what one row keeps has them in int8 and int4, wherever it lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from device_layers import host, same
from emulated_cuda import EmulatedLauncher, library
from made_shares import share_of
from mover_parts import encoded_store, mover_parts
from quantized_cases import KINDS

from pipeline.counters import StepClock
from pipeline.experts.channel_share import ChannelMemory
from pipeline.experts.device_share import Slab
from pipeline.policies.view import ModelShape, Target
from shm.descriptor import describe
from shm.floe import FloeFormat
from shm.layout import ExpertShape, StoreLayout, format_named
from shm.mask import DENSE, Mask
from workers.kernels.channels import ChannelKernel
from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.matrix import CudaChannels
from workers.kernels.cuda.sums import SUMS, OutputSums
from workers.kernels.native import store_kernel
from workers.kernels.reference import ReferenceChannels


def channels_of(layout: StoreLayout) -> CudaChannels:
    form = layout.format
    assert isinstance(form, FloeFormat)
    programs = Program.of_blocks(form.up), Program.of_channels(form.rows.bits, layout.shape.math)
    return CudaChannels(*(EmulatedLauncher(library(one)) for one in programs), layout)


@pytest.mark.parametrize(
    ("name", "kind"), [("floe-int4", "swiglu"), ("floe-u4", "swiglu"), ("floe-u4", "clamped")]
)
def test_up_and_masks_are_those_of_the_host(name: str, kind: str) -> None:
    random, form = np.random.default_rng(1), format_named(name)
    assert isinstance(form, FloeFormat)
    layout = StoreLayout(ExpertShape(1, 1, 100, 96, 48, KINDS[kind]), form)
    heads = np.empty(2 * layout.head_bytes, np.uint8)
    records = np.zeros(2 * layout.tile_bytes, np.uint8)
    for tile in range(2):
        gate, up, down = (random.standard_normal((48, 100)).astype(np.float32) for _ in range(3))
        of_head, of_body = (part.reshape(2, -1)[tile] for part in (heads, records))
        form.encode(gate, up, down, of_body, of_head)
    x = random.standard_normal((12, 100)).astype(np.float32)
    gpu = channels_of(layout)
    reference, cpu = ReferenceChannels(layout), ChannelKernel(host("fused"), form, 100, None)
    on_gpu, in_torch, on_host = gpu.activations(torch.from_numpy(x)), torch.from_numpy(x), cpu.activations(x)
    for rows in ([3], [0, 1, 5], list(range(12))):
        chosen = torch.tensor(rows)
        there, ends = torch.from_numpy(heads)[None], np.array([0, len(rows)], np.int32)
        u = gpu.ups(there, [0], on_gpu, chosen, ends, [96])
        same(u.numpy(), cpu.up(heads, on_host, np.array(rows, np.int32)))
        for mask in (Mask(0.5, 1), Mask(0, 0.3)):
            assert torch.equal(gpu.keeps(u, mask), reference.keeps(u, mask))
        y = gpu.channels(torch.from_numpy(records), u, on_gpu, chosen)
        assert torch.equal(
            y, reference.channels(torch.from_numpy(records), u, reference.activations(in_torch), chosen)
        )


SHAPE = ExpertShape(layers=2, experts=3, hidden=70, intermediate=220, tile=48)  # the last tile is padded
MODEL = ModelShape(SHAPE.layers, SHAPE.experts, SHAPE.tiles, 2)


@pytest.mark.parametrize(
    "case", ["floe swiglu", "floe-int4 swiglu", "floe-u8-int8 swiglu", "floe-u4-int4 clamped"]
)
def test_what_one_row_keeps_is_what_a_worker_computes(case: str, tmp_path: Path) -> None:
    """In two launches for all tiles that are there, whatever is resident, comes whole, or as channels."""
    name, kind = case.split()
    with (
        encoded_store(replace(SHAPE, math=KINDS[kind]), "kept_channels", name) as store,
        mover_parts(tmp_path, store, 24) as parts,
    ):
        kernel, format = channels_of(store.layout), store.layout.format
        heads = parts.device.load_heads(store, range(SHAPE.layers))
        slab = Slab(parts.slab, 9, parts.link, parts.copier)
        memory = ChannelMemory(MODEL, parts.device, slab, kernel, heads, store.layout)
        sums = OutputSums(EmulatedLauncher(library(SUMS)))
        x = np.random.default_rng(2).standard_normal((1, SHAPE.hidden)).astype(np.float32)
        for mask in (Mask(threshold=0.8), Mask(share=0.25), Mask(threshold=1e9), DENSE):
            found = []
            for resident, target in (([0, 0, 0], [0, 0, 0]), ([5, 1, 2], [5, 1, 2]), ([1, 0, 2], [2, 1, 2])):
                memory.mover.retarget(Target(1, expert, 0) for expert in range(3))
                memory.mover.retarget(Target(1, expert, tiles) for expert, tiles in enumerate(resident))
                memory.mover.wait_idle()
                memory.mover.retarget(Target(1, expert, tiles) for expert, tiles in enumerate(target))
                items = [
                    (e, there, cut) for e, (there, cut) in enumerate(zip(resident, (5, 3, 4), strict=True))
                ]
                share = share_of(items, [[0]] * 3, [[0.5], [0.25], [-1.5]])
                clock, given = StepClock(memory.counters), torch.from_numpy(x)
                work = memory.begin(1, share, given, mask, clock)
                y = torch.full_like(given, torch.nan)
                sums.total(y, [memory.compute(work, given, clock)], [])
                memory.end_layer(())
                found.append(y.numpy())
            share.items[:, 1] = 0
            work = describe(1, share.items, share.offsets, share.rows, share.weights, 1, mask)
            wanted = np.empty_like(x)
            store_kernel(store).compute(work, x, wanted)
            for y in found:
                if format.rows.bits < 16 and host("fused").variant.startswith("avx512"):
                    same(y, wanted)
                np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
                np.testing.assert_array_equal(y, found[0])
