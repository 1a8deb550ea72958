"""The KV cache: its blocks, who holds them, and sequences that keep their rows in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_models import GOOD

from pipeline.backbone.kv_blocks import quantized, widened
from pipeline.backbone.kv_cache import KVCache, SequenceKV
from pipeline.config import KV_BLOCK
from pipeline.errors import RequestError
from pipeline.models.registry import model_spec
from pipeline.models.spec import GatedDelta
from workers.kernels import layer as layer_kernels


@pytest.fixture
def cache() -> KVCache:
    return KVCache(model_spec(GOOD), torch.float32, torch.device("cpu"), budget=4 * KV_BLOCK)


def test_kernels_have_the_same_blocks() -> None:
    assert KV_BLOCK == layer_kernels.KV_BLOCK


def random_rows(counts: tuple[int, ...]) -> list[torch.Tensor]:
    """Keys and values [2, layers, kv_heads, count, head_dim] for each count."""
    spec, random = model_spec(GOOD), torch.Generator().manual_seed(0)
    heads, width = spec.attention.kv_streams[0]
    shapes = [(2, spec.layers, heads, count, width) for count in counts]
    return [torch.randn(shape, generator=random) for shape in shapes]


def append(sequence, rows: torch.Tensor) -> None:
    for layer in range(rows.shape[1]):
        sequence.write(layer, rows[0, layer], rows[1, layer])
    sequence.advance(rows.shape[3])


def test_budget_bounds_allocation_and_growth(cache) -> None:
    first, second = cache.allocate(KV_BLOCK + 1), cache.allocate(1)
    assert (first.capacity, second.capacity) == (2 * KV_BLOCK, KV_BLOCK)
    assert (cache.used, cache.free) == (3 * KV_BLOCK, 1)
    with pytest.raises(RequestError, match="128 tokens do not fit the KV cache, 64 are free"):
        cache.allocate(KV_BLOCK + 1)
    with pytest.raises(RequestError, match="128 tokens do not fit"):
        first.grow(3 * KV_BLOCK + 1)
    assert cache.free == 1
    assert [first.missing(n) for n in (1, 128, 129, 193)] == [0, 0, 1, 2]
    first.grow(2 * KV_BLOCK + 1)
    assert (first.capacity, cache.free) == (3 * KV_BLOCK, 0)
    assert sorted([*first.blocks, *second.blocks]) == [0, 1, 2, 3]
    first.truncate(0)
    assert (first.capacity, cache.free) == (0, 3)
    cache.release(first)
    cache.release(second)
    assert (cache.used, cache.free) == (0, 4)


def test_a_block_is_free_when_its_last_holder_drops_it(cache) -> None:
    blocks = cache.take(3)
    cache.hold(blocks[:2])
    cache.drop(blocks)
    assert (cache.references[blocks].tolist(), cache.free) == ([1, 1, 0], 2)
    cache.drop(blocks[:2])
    assert cache.free == 4
    with pytest.raises(RequestError, match="320 tokens do not fit"):
        cache.take(5)


def test_a_shared_block_is_copied_before_it_is_written(cache) -> None:
    """A sequence goes on behind 70 tokens of another one, in a copy of the block that has the last six."""
    (rows, ours, theirs) = random_rows((70, 5, 5))
    first, second = cache.allocate(75), cache.allocate(0)
    append(first, rows)
    cache.hold(first.blocks)
    second.append(first.blocks)
    second.advance(70)
    assert [second.missing(n) for n in (70, 71, 128, 129)] == [0, 1, 1, 2]
    second.grow(75)
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    assert (cache.free, first.missing(75)) == (1, 0)
    append(first, ours)
    append(second, theirs)
    for sequence, last in ((first, ours), (second, theirs)):
        for stream in (0, 1):
            found = sequence.read(1, stream, 60, 75, torch.float32)
            assert torch.equal(found, torch.cat((rows, last), 3)[stream, 1, :, 60:])
    first.truncate(64)
    assert cache.free == 2
    for sequence in (first, second):
        cache.release(sequence)
    assert cache.free == 4


def test_without_a_free_block_a_shared_one_stays(cache) -> None:
    first, second = cache.allocate(10), cache.allocate(0)
    first.advance(10)
    cache.hold(first.blocks)
    second.append(first.blocks)
    second.advance(10)
    cache.allocate(3 * KV_BLOCK)
    with pytest.raises(RequestError, match="do not fit"):
        second.grow(11)
    assert second.blocks == first.blocks


def test_writes_append_and_count_after_advance(cache) -> None:
    spec = model_spec(GOOD)
    sequence = cache.allocate(200)
    steps = random_rows((60, 1, 1, 1, 1, 1, 127))
    for step, (keys, values) in enumerate(steps):
        so_far = torch.cat(steps[: step + 1], dim=3)
        for layer in range(spec.layers):
            before = sequence.length
            k, v = sequence.write(layer, keys[layer], values[layer])
            assert torch.equal(k, so_far[0, layer])
            assert torch.equal(v, so_far[1, layer])
            assert sequence.length == before
        sequence.advance(keys.shape[2])
    assert sequence.length == 192


def test_truncated_sequence_keeps_its_rows_and_grows_again(cache) -> None:
    first, second, third = random_rows((64, 63, 2))
    sequence = cache.allocate(64)
    append(sequence, first)
    sequence.grow(127)
    append(sequence, second)
    sequence.truncate(65)
    sequence.truncate(67)  # dropped tokens stay dropped
    assert (sequence.length, sequence.capacity) == (65, 128)
    wanted = torch.cat((first, second[:, :, :, :1], third), dim=3)
    for layer in range(wanted.shape[1]):
        keys, values = sequence.write(layer, third[0, layer], third[1, layer])
        assert torch.equal(keys, wanted[0, layer])
        assert torch.equal(values, wanted[1, layer])


@pytest.mark.parametrize("width", [16, 128, 200, 576])
def test_int8_is_within_half_a_step_of_each_run(width: int) -> None:
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(1)) * 10
    x[1, 2] = 0
    numbers, scales = quantized(x)
    assert (numbers.dtype, numbers.shape, scales.shape) == (torch.int8, x.shape, (3, 5, -(-width // 128)))
    for first in range(0, width, 128):
        run = slice(first, first + 128)
        step = x[..., run].abs().amax(-1, keepdim=True) / 127
        error = (widened(numbers, scales)[..., run] - x[..., run]).abs()
        assert (error <= step * 0.5001).all()


def test_int8_of_denormal_numbers_keeps_their_signs() -> None:
    x = torch.linspace(-1, 1, 64) * 2.5e-43  # 127 is 1.4 steps of the smallest number
    numbers, _ = quantized(x)
    assert torch.equal(numbers.sign().float(), x.sign())
    assert numbers.abs().max() == 127


def test_int8_is_read_as_it_is_written() -> None:
    cache = KVCache(model_spec(GOOD), torch.int8, torch.device("cpu"), budget=200)
    (rows,) = random_rows((70,))
    sequence = cache.allocate(70)
    for layer in range(rows.shape[1]):
        for found, wanted in zip(sequence.write(layer, *rows[:, layer]), rows[:, layer], strict=True):
            assert torch.equal(found, widened(*quantized(wanted)))


def test_crossing_the_rope_switch_drops_the_filled_tokens() -> None:
    factors = [1.0] * 8
    longrope = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    scaling = longrope | {"original_max_position_embeddings": 6}
    spec = model_spec(GOOD | {"rope_scaling": scaling})
    sequence = KVCache(spec, torch.float32, torch.device("cpu"), budget=10).allocate(10)
    assert sequence.select_rope(7)  # no token was filled
    assert sequence.long
    assert sequence.select_rope(6)
    sequence.advance(6)
    assert sequence.select_rope(6)
    assert (sequence.long, sequence.length) == (False, 6)
    assert not sequence.select_rope(7)
    assert (sequence.long, sequence.length, sequence.capacity) == (True, 0, 0)


RECURRENT = GatedDelta(key_heads=1, value_heads=2, key_dim=3, value_dim=5, taps=4)


@pytest.fixture
def recurrent() -> KVCache:
    """Of a model whose first layer is recurrent, for two sequences."""
    spec = replace(model_spec(GOOD), recurrent=RECURRENT, recurrent_layers=(0,))
    return KVCache(spec, torch.float32, torch.device("cpu"), budget=4 * KV_BLOCK, sequences=2)


def step(sequence: SequenceKV, tokens: int) -> None:
    """A step whose states count the tokens."""
    for now, then in zip(sequence.states[0], sequence.pending[0], strict=True):
        then.copy_(now + tokens)
    sequence.advance(tokens)


def states_are(sequence: SequenceKV, number: int) -> bool:
    return all(bool((state == number).all()) for state in sequence.states[0])


def test_states_are_cut_back_to_copied_ones_the_present_length_and_zero(recurrent) -> None:
    sequence = recurrent.allocate(60)
    step(sequence, 30)
    copied = sequence.copied_states()
    step(sequence, 11)
    with pytest.raises(ValueError, match="at 30 of 41 tokens"):
        sequence.truncate(30)
    sequence.truncate(1000)
    assert (sequence.length, states_are(sequence, 41)) == (41, True)
    for _ in range(2):  # a copy serves more than once
        sequence.truncate(30, copied)
        assert (sequence.length, states_are(sequence, 30)) == (30, True)
        step(sequence, 7)
    sequence.truncate(0)
    assert (sequence.length, states_are(sequence, 0)) == (0, True)


def test_recurrent_sequences_are_as_many_as_there_are_places(recurrent, cache) -> None:
    first = recurrent.allocate(1)
    recurrent.allocate(1)
    with pytest.raises(RequestError, match="no room for the states of another sequence"):
        recurrent.allocate(1)
    recurrent.release(first)
    recurrent.allocate(1)
    assert (recurrent.places, cache.places) == (0, None)
