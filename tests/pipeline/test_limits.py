"""Memory for the slab and the KV cache is checked before it is allocated, and an error is one line."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from pipeline.config import DEFAULT_CONTEXT, KV_CONTEXTS
from pipeline.device import open_device
from pipeline.errors import UsageError
from pipeline.memory.needs import cache_tiles, choose_context, full_memory_in_one_line, kv_budget

TERABYTE = 10**12


def test_slab_or_kv_cache_beyond_the_free_memory_is_refused_with_numbers() -> None:
    device = open_device("cpu")
    device.check_memory(1000, 1000, 1000)
    with pytest.raises(UsageError, match=r"slab needs 500000\.00 GB.* free: .*--expert-cache"):
        device.check_memory(500_000 * TERABYTE // 1000, 0, 0)
    with pytest.raises(UsageError, match=r"KV cache 500000\.00 GB.* free: .*--context"):
        device.check_memory(1000, 500_000 * TERABYTE // 1000, 0)
    with pytest.raises(UsageError, match=r"rest 500000\.50 GB.* free: "):
        device.check_memory(1000, 1000, 500_000 * TERABYTE // 1000)


def test_full_device_memory_is_one_line_for_the_user() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB.\nAnd more."
    with pytest.raises(UsageError) as caught, full_memory_in_one_line():
        raise torch.OutOfMemoryError(text)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 2.00 GiB: use a smaller --expert-cache, --context or --chunk"
    )


def test_share_of_the_tiles_loses_none_by_rounding() -> None:
    assert [cache_tiles(n / 100, 100) for n in range(101)] == list(range(101))
    assert cache_tiles(0.5, 3) == 1
    for tiles in (7, 1000, 28_672):  # a planned share is in thousandths, and never exceeds the plan
        assert all(0 <= n * tiles / 1000 - cache_tiles(n / 1000, tiles) < 1 for n in range(1001))


def test_context_and_kv_cache_have_limits() -> None:
    short, long = SimpleNamespace(max_positions=4096), SimpleNamespace(max_positions=32768)
    assert [choose_context(None, spec) for spec in (short, long)] == [4096, DEFAULT_CONTEXT]
    assert [choose_context(n, short) for n in (1, 4096)] == [1, 4096]
    with pytest.raises(UsageError, match="--context 4097 is more than the model's 4096 positions"):
        choose_context(4097, short)
    assert [kv_budget(requested, 100) for requested in (None, 100, 101)] == [KV_CONTEXTS * 100, 100, 101]
    with pytest.raises(UsageError, match="--kv-tokens 99 is less than one context of 100"):
        kv_budget(99, 100)


def test_memory_plan_imports_no_torch() -> None:
    script = "import sys, pipeline.memory.needs, pipeline.memory.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
