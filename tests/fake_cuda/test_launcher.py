"""The launcher of compiled kernels, on the stand-in for a GPU's driver."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_gpu import fake_device
from fake_runtime import Status

from shm.layout import format_named
from workers.kernels.cuda import attention, launcher
from workers.kernels.cuda.products import LIMITS, PLAIN_LIMITS
from workers.kernels.cuda.sources import Program

BLOCKS, PLAIN = (Program.of_format(format_named(name), fused=True) for name in ("int4", "bf16"))


@pytest.mark.parametrize(
    ("program", "others"),
    [
        (BLOCKS, ["quantize", "combine", *(f"{of}_{n}" for of in ("gate_up", "down") for n in LIMITS)]),
        (PLAIN, ["quantize", "combine", *(f"{of}_{n}" for of in ("gate_up", "down") for n in PLAIN_LIMITS)]),
        (Program.of_sums(), ["add_parts"]),
        (attention.program(torch.bfloat16), list(attention.THREADS)),
    ],
)
def test_kernels_are_loaded_before_the_first_launch(program, others, monkeypatch) -> None:
    """Loading a kernel may wait for the device, and a step must not."""
    loaded, launched = [], []
    with fake_device() as (device, runtime):

        def load(module: int, name: bytes) -> tuple[Status, str]:
            loaded.append(name.decode())
            return Status(0), name.decode()

        def launch(function: str, *arguments: object) -> tuple[Status]:
            launched.append(function)
            return (Status(0),)

        monkeypatch.setattr(runtime, "cuModuleLoadData", lambda image: (Status(0), 1), raising=False)
        monkeypatch.setattr(runtime, "cuModuleGetFunction", load, raising=False)
        monkeypatch.setattr(runtime, "cuLaunchKernel", launch, raising=False)
        monkeypatch.setattr(launcher, "compiled", lambda *_: b"cubin")
        made = launcher.CudaLauncher(program, torch.device("cuda", 0), Path("/"), device.from_host)
        before = sorted(loaded)
        for name in before:
            made.launch(name, 1, 32, int(np.int64(7)))
        assert sorted(launched) == before == sorted(loaded)
        for name in others:
            assert any(one == name or one.rpartition("_")[0] == name for one in before), name
