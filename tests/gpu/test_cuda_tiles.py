"""The CUDA kernels on a GPU: bits of the host's kernels, and numbers near those of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import brute_force
import numpy as np
import pytest
import torch
from device_layers import host, made, on_device, on_host, same
from kernel_runs import any_matrix, plain_expert
from quantized_cases import BLOCKS, QUANTIZED

from pipeline.device.cuda import CudaDevice
from shm.blocks import BlockFormat
from shm.floe import FloeFormat
from shm.layout import ExpertShape, StoreLayout, format_named
from workers.kernels.channels import ChannelKernel
from workers.kernels.cuda.experts import CudaExperts
from workers.kernels.cuda.matrix import CudaChannels
from workers.kernels.matrix import HostMatrix
from workers.kernels.tile_sums import TorchKernel

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LARGE = (4096, 7)  # hidden, records of a tile's channels
SHAPES = [(2048, 3), (300, 2), (1, 1)]


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


@pytest.mark.parametrize(
    ("hidden", "groups", "format"),
    [
        *((*LARGE, format) for format in QUANTIZED),
        *((*shape, format) for shape in SHAPES for format in BLOCKS),
    ],
)
def test_layers_have_the_bits_of_the_host(device: CudaDevice, hidden: int, groups: int, format: str) -> None:
    for number in (1, 2, 3, 4, 5, 8, 9, 31, 33, 64, 200):
        layer = made(format, hidden, groups, 3, number, 5, "random", "normal", "normal", seed=number)
        kernel = device.expert_kernel(layer.layout)
        assert isinstance(kernel, CudaExperts)
        random = np.random.default_rng(number)
        resident = [int(random.integers(0, cut + 1)) for _, cut in layer.items]
        found = on_device(kernel, device.torch_device, layer, resident, number, device.sums)
        same(found, on_host(host("fused"), layer))


def test_tiles_in_the_hosts_memory_have_the_same_bits(device: CudaDevice) -> None:
    """Page-locked, they are read over the link."""
    layer = made("int4", 512, 2, 2, 3, 2, "random", "normal", "normal", seed=3)
    layer = replace(
        layer,
        items=((0, 2), (1, 2)),
        rows=(np.arange(3, dtype=np.int32),) * 2,
        weights=(np.ones(3, np.float32),) * 2,
    )
    locked = torch.from_numpy(layer.data.copy()).pin_memory()
    size, offsets = layer.layout.tile_bytes, np.array([0, 3, 6], np.int32)
    rows, weights = np.concatenate(layer.rows), np.concatenate(layer.weights)
    x = torch.from_numpy(layer.x).to(device.torch_device)
    share = device.expert_kernel(layer.layout).begin(x, np.array([2, 2], np.int32), offsets, rows, weights)
    places = [(item, tile) for item in range(2) for tile in range(2)]
    share.add([(item, tile, locked[item, tile * size :][:size]) for item, tile in places])
    same(device.total([share.result()], (), x.shape).cpu().numpy(), on_host(host("fused"), layer))


@pytest.mark.parametrize(("hidden", "tile"), [(4096, 448), (320, 100), (64, 7)])
def test_plain_tiles_are_near_the_exact_numbers(device: CudaDevice, hidden: int, tile: int) -> None:
    """By our kernels for few rows, and by torch for more."""
    random = np.random.default_rng(1)
    layout, (gate, up, down), data = plain_expert(random, hidden, tile, 2)
    kernel, size = device.expert_kernel(layout), layout.tile_bytes
    assert isinstance(kernel, CudaExperts)
    tiles = [(0, i, torch.from_numpy(data[i * size :][:size]).to(device.torch_device)) for i in range(2)]
    found = {}
    for number in (1, 3, 8, 9, 64):
        x = np.random.default_rng(2).standard_normal((64, hidden)).astype(np.float32)
        every, weights = np.arange(number, dtype=np.int32), np.ones(number, np.float32)
        offsets, cuts = np.array([0, number], np.int32), np.array([2], np.int32)
        share = kernel.begin(torch.from_numpy(x).to(device.torch_device), cuts, offsets, every, weights)
        share.add(tiles)
        found[number] = device.total([share.result()], (), x.shape).cpu().numpy()[:number]
        assert brute_force.expert(gate, up, down, x[:number], "bf16").agrees(found[number])
    np.testing.assert_array_equal(found[1], found[8][:1])
    np.testing.assert_array_equal(found[3], found[8][:3])


@pytest.mark.parametrize("kind", ["zero", "huge", "tiny", "denormal", "spikes"])
def test_extreme_numbers_have_the_bits_of_the_host(device: CudaDevice, kind: str) -> None:
    for format in BLOCKS:
        layer = made(format, 200, 2, 2, 20, 3, "either", "mixed", kind, seed=1)
        every = [cut for _, cut in layer.items]
        kernel = device.expert_kernel(layer.layout)
        found = on_device(kernel, device.torch_device, layer, every, 1)
        same(found, on_host(host("fused"), layer))


@pytest.mark.parametrize("format", BLOCKS)
def test_torch_computes_nearly_the_same(device: CudaDevice, format: str) -> None:
    layer = made(format, 512, 2, 2, 12, 4, "random", "normal", "normal", seed=2)
    every = [cut for _, cut in layer.items]
    found, expected = (
        on_device(kernel, device.torch_device, layer, every, 2)
        for kernel in (device.expert_kernel(layer.layout), TorchKernel(layer.layout, device.from_host))
    )
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["floe-int4", "floe-u4", "floe-u8"])
def test_up_matrices_have_the_bits_of_the_host(device: CudaDevice, name: str) -> None:
    random, form = np.random.default_rng(4), format_named(name)
    assert isinstance(form, FloeFormat)
    layout = StoreLayout(ExpertShape(1, 1, 2048, 768, 768), form)
    heads, body = np.empty(layout.head_bytes, np.uint8), np.empty(layout.tile_bytes, np.uint8)
    form.fill_random(random, 2048, 768, 0.02, body, heads)
    x = random.standard_normal((40, 2048)).astype(np.float32)
    kernel, cpu = device.channel_kernel(layout), ChannelKernel(host("fused"), form, 2048, None)
    assert isinstance(kernel, CudaChannels)
    there, inputs = torch.from_numpy(heads).to(device.torch_device), cpu.activations(x)
    on_device = kernel.activations(torch.from_numpy(x).to(device.torch_device))
    for rows in ([7], [0, 3], list(range(40))):
        chosen, ends = torch.tensor(rows, device=device.torch_device), np.array([0, len(rows)], np.int32)
        u = kernel.ups(there[None], [0], on_device, chosen, ends, [768])
        same(u.cpu().numpy(), cpu.up(heads, inputs, np.array(rows, np.int32)))


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("shape", [(5120, 4096), (151, 70), (1, 1)])
def test_matrices_have_the_bits_of_the_host(device: CudaDevice, format: str, shape: tuple[int, int]) -> None:
    form, random = format_named(format), np.random.default_rng(3)
    assert isinstance(form, BlockFormat)
    data = any_matrix(random, form, *shape, "random", "normal")
    matrix = device.quantized_matrix(form, data, shape)
    on_host = HostMatrix(host("fused"), None, form, shape, data)
    for rows in (1, 2, 5, 33, 100):
        x = random.standard_normal((rows, shape[1])).astype(np.float32)
        found = matrix.product(torch.from_numpy(x).to(device.torch_device)).cpu().numpy()
        same(found, on_host.product(x))
