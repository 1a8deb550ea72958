"""Tests of the device `cuda`. They are skipped on a machine without it; the reason names the missing part."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


def missing() -> str:
    """The part that this machine lacks for these tests; "" where it has all."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch warns of a driver that is too old; the reason for the skip names it
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
    try:
        import cuda.bindings.runtime  # noqa: F401
    except ImportError:
        return "cuda-bindings is not installed (make -B TORCH=cuda .venv/.test-tools)"
    return ""


@pytest.fixture(scope="session", autouse=True)
def without_tf32() -> Iterator[None]:
    """Skip without a device; with one, compute float32 in float32, as the engine does."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
