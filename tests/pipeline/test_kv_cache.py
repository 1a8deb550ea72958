"""The KV cache: a budget of tokens, and sequences whose rows stay where they were written."""

from __future__ import annotations

import pytest
import torch
from test_models import GOOD

from pipeline.errors import RequestError
from pipeline.kv_cache import KVCache
from pipeline.models.registry import model_spec


@pytest.fixture
def cache() -> KVCache:
    return KVCache(model_spec(GOOD), torch.float32, torch.device("cpu"), budget=100)


def test_the_budget_is_kept(cache) -> None:
    first, second = cache.allocate(60), cache.allocate(40)
    assert (first.capacity, second.capacity, cache.used) == (60, 40, 100)
    assert not cache.fits(1)
    with pytest.raises(RequestError, match="1 tokens do not fit the KV cache, 0 are free"):
        cache.allocate(1)
    cache.release(first)
    assert cache.fits(60)
    assert not cache.fits(61)
    cache.release(second)
    assert cache.used == 0


def test_writes_append_and_count_only_once_all_layers_have_them(cache) -> None:
    spec = model_spec(GOOD)
    sequence = cache.allocate(5)
    random = torch.Generator().manual_seed(0)
    shapes = [(2, spec.layers, spec.kv_heads, count, spec.head_dim) for count in (3, 1, 1)]
    steps = [torch.randn(shape, generator=random) for shape in shapes]
    for step, (keys, values) in enumerate(steps):
        so_far = torch.cat(steps[: step + 1], dim=3)
        for layer in range(spec.layers):
            before = sequence.length
            k, v = sequence.write(layer, keys[layer], values[layer])
            assert torch.equal(k, so_far[0, layer])
            assert torch.equal(v, so_far[1, layer])
            assert sequence.length == before
        sequence.advance(keys.shape[2])
    assert sequence.length == sequence.capacity


def test_sequences_do_not_share_room(cache) -> None:
    a, b = cache.allocate(4), cache.allocate(4)
    ones = torch.ones(2, 4, 16)
    a.write(0, ones, ones)
    b.write(0, 2 * ones, 2 * ones)
    assert (a.keys[0] == 1).all()
    assert (b.values[0] == 2).all()
