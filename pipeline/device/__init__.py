"""Devices: they compute the backbone and hold the slab. Code outside a device class is device-agnostic."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.device.base import Device, Fence, SlabMemory
from pipeline.errors import UsageError

__all__ = ["Device", "Fence", "SlabMemory", "open_device"]


def open_device(name: str, cache: Path | None = None) -> Device:
    """Returns the device `cpu`, or `cuda`, which keeps compiled kernels in the `cache` folder; `auto`: cuda
    where torch sees such a device. Raises UsageError for a cuda that torch does not see, or for which no
    kernels can be compiled."""
    # Before CUDA starts: streams that share a hardware queue wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")
        from pipeline.device.cuda import CudaDevice

        device = CudaDevice(cache)
        device.check_kernels()
        return device
    from pipeline.device.cpu import CpuDevice

    return CpuDevice()
