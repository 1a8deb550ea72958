"""The device `cuda` on the stand-in for a GPU: its own code, with torch on the CPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from emulated_cuda import library
from fake_graphs import RecordedLauncher, function, patch_graphs
from fake_runtime import FakeRuntime
from torch import Tensor

from pipeline.device import cuda
from pipeline.device.base import DeviceChannelKernel, DeviceKernel
from shm.layout import StoreLayout
from workers.kernels.cuda.attention import DecodeAttention
from workers.kernels.cuda.compiler import Program
from workers.kernels.reference import ReferenceChannels
from workers.kernels.tile_sums import TorchKernel


@contextmanager
def fake_runtime(seed: int = 0) -> Iterator[FakeRuntime]:
    """In place of cuda-bindings. At the end no stream is stuck and all memory of the device is back."""
    runtime = FakeRuntime(seed)
    module = cast(Any, ModuleType("cuda.bindings.runtime"))
    module.__getattr__ = lambda name: function(runtime, name)
    driver = cast(Any, ModuleType("cuda.bindings.driver"))
    driver.__getattr__ = lambda name: getattr(runtime, name)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cuda", "cuda.bindings"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, "cuda.bindings.runtime", module)
        patch.setitem(sys.modules, "cuda.bindings.driver", driver)
        yield runtime
        runtime.exit()
        assert runtime.cudaMemGetInfo() == (0, runtime.total, runtime.total)


class LateSum:
    """A LayerSum whose tiles are read some time after `add` has returned, as on a GPU."""

    def __init__(self, inner: Any, runtime: FakeRuntime) -> None:
        self._inner, self._runtime = inner, runtime

    def add(self, tiles: Sequence[tuple[int, int, Tensor]]) -> None:
        for _, _, data in tiles:
            assert self._runtime.kernels_read(data.data_ptr(), data.nbytes)
        self._runtime.calls["shares begun"] += 1
        self._runtime.launch(lambda: self._inner.add(tiles))

    def result(self) -> Tensor:
        self._runtime.torch_stream.drain()
        y: Tensor = self._inner.result()
        return y


class LateKernel:
    """A DeviceKernel on the stand-in's stream."""

    def __init__(self, inner: DeviceKernel, runtime: FakeRuntime) -> None:
        self._inner, self._runtime = inner, runtime

    def inputs(self, rows: int) -> Any:
        return self._inner.inputs(rows)

    def begin(self, *arguments: Any) -> LateSum:
        return LateSum(self._inner.begin(*arguments), self._runtime)


class FakeCudaDevice(cuda.CudaDevice):
    """With tensors on the CPU."""

    attention = experts = False  # by the emulated kernels; else by torch

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu", 0)
        self.runtime = runtime

    def launcher(self, program: Program) -> Any:
        """The kernels themselves, emulated."""
        return RecordedLauncher(library(program), self)

    def decode_attention(
        self, streams: Sequence[tuple[int, int]], dtype: torch.dtype, context: int
    ) -> DecodeAttention | None:
        """The kernels, where they are emulated."""
        return super().decode_attention(streams, dtype, context) if self.attention else None

    def expert_kernel(self, layout: StoreLayout) -> DeviceKernel:
        kernel = super().expert_kernel(layout) if self.experts else TorchKernel(layout, self.from_host)
        return LateKernel(kernel, self.runtime)

    def channel_kernel(self, layout: StoreLayout) -> DeviceChannelKernel:
        kernel: Any = super().channel_kernel(layout) if self.experts else ReferenceChannels(layout)
        for name in ("channels", "kept"):  # what reads slots is behind the copies for which its stream waits
            if (works := getattr(kernel, name)) is not None:
                setattr(kernel, name, partial(self._behind, works))
        made: DeviceChannelKernel = kernel
        return made

    def _behind(self, works: Callable[..., Any], *arguments: Any) -> Any:
        self.runtime.torch_stream.drain()
        return works(*arguments)

    def time_mark(self) -> float:
        return 0.0

    def seconds_between(self, earlier: Any, later: Any) -> float:
        return 0.0

    def describe(self) -> str:
        return "a stand-in"


def _allocated(address: int, size: int, device: int) -> Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))


@contextmanager
def fake_device(seed: int = 0) -> Iterator[tuple[FakeCudaDevice, FakeRuntime]]:
    """The device, and its runtime."""
    with fake_runtime(seed) as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_allocated", _allocated)
        with cuda_device(lambda: FakeCudaDevice(runtime), runtime) as device:
            yield device, runtime


Made = TypeVar("Made", bound=cuda.CudaDevice)


@contextmanager
def cuda_device(make: Callable[[], Made], runtime: FakeRuntime) -> Iterator[Made]:
    """A device `cuda` where torch has none. It gives back all that it took."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        patch_graphs(patch, runtime)
        flags = torch.backends.cuda
        before = flags.cudnn_sdp_enabled(), flags.matmul.allow_bf16_reduced_precision_reduction
        device = make()
        try:
            yield device
            device.close()
            left = {"registered"}  # the process's exit unlocks pages, and frees memory that others may map
            left |= {"device"} if runtime.calls["cudaIpcGetMemHandle"] else set()
            assert runtime.leftovers().keys() <= left, runtime.leftovers()
        finally:
            flags.enable_cudnn_sdp(before[0])
            flags.matmul.allow_bf16_reduced_precision_reduction = before[1]
