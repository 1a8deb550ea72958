"""The device `cpu`: torch's threads, the slab in shared memory, the check of the free memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from pipeline.device import cpu, open_device
from pipeline.device.base import SPARE_BYTES
from pipeline.device.cpu import WORTH_SHARING, CpuDevice
from pipeline.errors import UsageError

THREADS = 3


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """Made while torch has THREADS threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    device = CpuDevice()
    try:
        yield device
    finally:
        device.close()
        torch.set_num_threads(before)


def test_small_products_are_computed_by_one_thread_and_large_ones_by_all(device: CpuDevice) -> None:
    assert device.describe() == f"cpu, {THREADS} threads of {os.cpu_count()} cores"
    for products, threads in (
        (WORTH_SHARING - 1, 1),
        (WORTH_SHARING, THREADS),  # again all that there were at the start
        (1, 1),
        (1 << 40, THREADS),
    ):
        device.prepare(products)
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("slab", "memory", "fits"),
    [
        (1000, 1000 + 200 + 30 + SPARE_BYTES, True),
        (1000, 1000 + 200 + 30 + SPARE_BYTES - 1, False),
        (1001, 1 << 40, False),  # more than /dev/shm has
    ],
    ids=["exactly", "too little memory", "too little shared memory"],
)
def test_slab_kv_cache_and_weights_must_fit_the_free_memory(
    device: CpuDevice, monkeypatch, slab: int, memory: int, fits: bool
) -> None:
    monkeypatch.setattr(cpu, "free_shm_bytes", lambda: 1000)
    monkeypatch.setattr(cpu, "available_memory", lambda: memory)
    if fits:
        device.check_memory(slab, 200, 30)
        return
    with pytest.raises(
        UsageError, match=r"^the slab needs 1\.0 kB .* KV cache 200 B .* rest 500\.0 MB, .* 1\.0 kB"
    ):
        device.check_memory(slab, 200, 30)


def test_named_device_is_opened(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cpu", "auto"):
        device = open_device(name)
        assert isinstance(device, CpuDevice)
        device.close()
    with pytest.raises(UsageError, match="--device cuda: torch sees no CUDA device here; use --device cpu"):
        open_device("cuda")
