"""Attention of prefill on a GPU, by what torch would launch there (fake tensors, no GPU), and the same
numbers where rows are taken a few at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.backbone import attention
from pipeline.backbone.attention import attend_span
from pipeline.backbone.batch import Batch


class Launched(TorchDispatchMode):
    """Records operations and the bytes of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function.name(), kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        return result


def causal_mask(new: int, total: int, window: int | None) -> torch.Tensor:
    places = torch.arange(total)
    distance = places[total - new :, None] - places
    return (distance >= 0) & (distance < (window or total))


def batch_of(new: int, total: int, window: int | None, device: str, *, flash: bool) -> Batch:
    on_cpu = device == "cpu"
    mask = causal_mask(new, total, window) if on_cpu else torch.empty(new, total, dtype=bool, device=device)
    masks = {} if flash else {window: [mask]}
    return cast(Batch, SimpleNamespace(flash=flash, stored=True, masks=masks))


@pytest.mark.parametrize("window", [None, 512, 8192])
def test_prefill_on_a_gpu_is_one_flash_launch_without_scores_in_memory(window) -> None:
    """1024 tokens of 8192, 32 query heads in groups of 4: their scores would be a gigabyte."""
    new, total, width = 1024, 8192, 128
    with FakeTensorMode(), torch.inference_mode():
        q = torch.empty(32, new, width, device="cuda", dtype=torch.bfloat16)
        keys, values = (torch.empty(8, total, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        with Launched() as launched:
            out = attend_span(q, keys, values, batch_of(new, total, window, "cuda", flash=True), 0, window)
    assert out.shape == (new, 32, width)
    (options,) = [kwargs for name, kwargs in launched.calls if "flash_attention" in name]
    left = 511 if window == 512 else None  # the token itself and 511 before it
    assert options.get("window_size_left") == left
    assert options.get("window_size_right") == (None if left is None else 0)
    assert launched.largest <= keys.numel() * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_flash_scores_in_memory_are_bounded(dtype, monkeypatch) -> None:
    new, total, width, limit = 256, 4096, 64, 1 << 22
    monkeypatch.setattr(attention, "SCORE_BYTES", limit)
    with FakeTensorMode(), torch.inference_mode():
        q = torch.empty(8, new, width, device="cuda", dtype=dtype)
        keys, values = (torch.empty(2, total, width, device="cuda", dtype=dtype) for _ in range(2))
        batch = batch_of(new, total, None, "cuda", flash=False)
        with Launched() as launched:
            attend_span(q, keys, values, batch, 0, None)
    repeated = 8 * total * width * 4  # keys of all query heads, float32
    assert launched.largest <= max(limit, repeated) < 8 * new * total * 4


def drawn(new: int, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of 4 heads, keys and values of 2."""
    torch.manual_seed(0)
    return torch.randn(4, new, 16), torch.randn(2, total, 16), torch.randn(2, total, 16)


def by_definition(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, heads, width], and the logarithm of the sum of exponentials without sinks [heads, T]."""
    keys, values = (x.repeat_interleave(2, 0) for x in (keys, values))
    scores = (q @ keys.transpose(1, 2)) * 16**-0.5
    scores = scores.masked_fill(~causal_mask(q.shape[1], keys.shape[1], window), -torch.inf)
    columns = scores
    if sinks is not None:
        columns = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, q.shape[1], 1)), -1)
    weights = torch.softmax(columns, -1)[..., : keys.shape[1]]
    return (weights @ values).transpose(0, 1), scores.logsumexp(-1)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-9.0, 0.5, 2.0, 40.0])])
def test_rows_taken_a_few_at_a_time_give_the_same(window, rows, sinks, monkeypatch) -> None:
    new, total = 30, 50
    q, keys, values = drawn(new, total)
    monkeypatch.setattr(attention, "SCORE_BYTES", rows * 4 * 4 * total)
    monkeypatch.setattr(attention, "on_cpu", lambda q: False)
    batch = batch_of(new, total, window, "cpu", flash=False)
    found = attend_span(q, keys, values, batch, 0, window, sinks=sinks)
    torch.testing.assert_close(found, by_definition(q, keys, values, window, sinks)[0])


def test_sinks_beside_flash_attention(monkeypatch) -> None:
    """What the launch gives has no sinks: they follow from its sums."""
    q, keys, values = drawn(30, 50)

    def launched(q, keys, values, *rest, **options):
        q, keys, values = (x.squeeze(0).transpose(0, 1).float() for x in (q, keys, values))
        out, logsumexp = by_definition(q, keys, values, None, None)
        return out.unsqueeze(0), logsumexp.unsqueeze(0)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", launched)
    narrow, sinks = [x.bfloat16() for x in (q, keys, values)], torch.tensor([-9.0, 0.5, 2.0, 40.0])
    found = attend_span(*narrow, batch_of(30, 50, None, "cpu", flash=True), 0, None, sinks=sinks)
    wide = [x.float() for x in narrow]
    torch.testing.assert_close(found, by_definition(*wide, None, sinks)[0])
