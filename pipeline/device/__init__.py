"""Devices: they compute the backbone and hold the slab. Code outside a device class is device-agnostic."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.config import EngineConfig
from pipeline.device.base import Device, Fence, SlabMemory
from pipeline.errors import UsageError

__all__ = ["Device", "Fence", "SlabMemory", "open_device", "open_devices"]


def open_devices(config: EngineConfig, cache: Path | None = None) -> list[Device]:
    """Returns the devices that divide the layers, in their order; emulated ones are the host. Arguments and
    errors as of `open_device`."""
    if config.kind != "cuda":
        return [open_device(config.kind, cache)] * max(1, len(config.cards))
    numbers: list[int | None] = [card.number for card in config.cards] or [None]
    return [open_device("cuda", cache, number) for number in numbers]


def open_device(name: str, cache: Path | None = None, number: int | None = None) -> Device:
    """Returns the device `cpu`, or `cuda`, which keeps compiled kernels in the `cache` folder; `auto`: cuda
    where torch sees such a device. `number`: of a GPU; None: the present one. Raises UsageError for a cuda
    that torch does not see, or for which no kernels can be compiled."""
    # Before CUDA starts: streams that share a hardware queue wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")
        from pipeline.device.cuda import CudaDevice

        if number is not None and number >= torch.cuda.device_count():
            raise UsageError(
                f"--device cuda:{number}: torch sees {torch.cuda.device_count()} CUDA devices here"
            )
        device = CudaDevice(cache, number)
        device.use()  # kernels are loaded into the present device
        device.check_kernels()
        return device
    from pipeline.device.cpu import CpuDevice

    return CpuDevice()
