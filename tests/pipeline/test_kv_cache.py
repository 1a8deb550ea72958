"""The KV cache: its budget of tokens, and sequences that keep their rows when they are resized."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_models import GOOD

from pipeline.backbone.kv_cache import KVCache, SequenceKV, capacity_for
from pipeline.config import KV_BLOCK, SNAPSHOTS
from pipeline.errors import RequestError
from pipeline.models.facts import facts_of
from pipeline.models.registry import model_spec
from pipeline.models.spec import GatedDelta


@pytest.fixture
def cache() -> KVCache:
    return KVCache(model_spec(GOOD), torch.float32, torch.device("cpu"), budget=100)


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
    first, second = cache.allocate(60), cache.allocate(30)
    assert (first.capacity, second.capacity, cache.used, cache.free) == (60, 30, 90, 10)
    with pytest.raises(RequestError, match="11 tokens do not fit the KV cache, 10 are free"):
        cache.allocate(11)
    with pytest.raises(RequestError, match="11 tokens do not fit"):
        cache.resize(first, 71)
    cache.resize(first, 70)
    assert (first.capacity, cache.free) == (70, 0)
    cache.resize(first, 20)
    assert (first.capacity, cache.free) == (20, 50)
    cache.resize(first, 70)
    cache.release(first)
    assert cache.free == 70
    cache.release(second)
    assert cache.used == 0


def test_writes_append_and_count_after_advance(cache) -> None:
    spec = model_spec(GOOD)
    sequence = cache.allocate(5)
    steps = random_rows((3, 1, 1))
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


def test_resized_and_truncated_sequence_keeps_its_rows(cache) -> None:
    first, second, third = random_rows((4, 3, 2))
    sequence = cache.allocate(4)
    append(sequence, first)
    cache.resize(sequence, 8)
    append(sequence, second)
    sequence.truncate(5)
    sequence.truncate(7)  # dropped tokens stay dropped
    assert sequence.length == 5
    cache.resize(sequence, 7)
    wanted = torch.cat((first, second[:, :, :, :1], third), dim=3)
    for layer in range(wanted.shape[1]):
        keys, values = sequence.write(layer, third[0, layer], third[1, layer])
        assert torch.equal(keys, wanted[0, layer])
        assert torch.equal(values, wanted[1, layer])


def test_sequences_do_not_share_memory(cache) -> None:
    a, b = cache.allocate(4), cache.allocate(4)
    ones = torch.ones(2, 4, 16)
    a.write(0, ones, ones)
    b.write(0, 2 * ones, 2 * ones)
    assert (a.layers[0][0] == 1).all()
    assert (b.layers[0][1] == 2).all()


def test_capacity_is_whole_blocks_up_to_the_limit() -> None:
    assert capacity_for(1, 1000) == KV_BLOCK
    assert capacity_for(KV_BLOCK, 1000) == KV_BLOCK
    assert capacity_for(KV_BLOCK + 1, 1000) == 2 * KV_BLOCK
    assert capacity_for(KV_BLOCK + 1, KV_BLOCK + 5) == KV_BLOCK + 5


LATENT = {
    "model_type": "deepseek_v2",
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}


def test_latent_attention_caches_one_stream() -> None:
    spec = model_spec(GOOD | LATENT)
    sequence = KVCache(spec, torch.float32, torch.device("cpu"), budget=10).allocate(7)
    assert [[stream.shape for stream in streams] for streams in sequence.layers] == [[(1, 7, 28)]] * 2
    assert facts_of(GOOD | LATENT).kv_numbers_per_token == 2 * 28


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
    assert (sequence.long, sequence.length) == (True, 0)


def test_without_a_rope_switch_nothing_is_dropped(cache) -> None:
    sequence = cache.allocate(9)
    sequence.advance(9)
    assert sequence.select_rope(1000)
    assert (sequence.long, sequence.length) == (False, 9)


RECURRENT = GatedDelta(key_heads=1, value_heads=2, key_dim=3, value_dim=5, taps=4)


@pytest.fixture
def recurrent() -> KVCache:
    """Of a model whose first layer is recurrent, for two sequences."""
    spec = replace(model_spec(GOOD), recurrent=RECURRENT, recurrent_layers=(0,))
    return KVCache(spec, torch.float32, torch.device("cpu"), budget=100, sequences=2)


def step(sequence: SequenceKV, tokens: int) -> None:
    """A step whose states count the tokens."""
    for now, then in zip(sequence.states[0], sequence.pending[0], strict=True):
        then.copy_(now + tokens)
    sequence.advance(tokens)


def states_are(sequence: SequenceKV, number: int) -> bool:
    return all(bool((state == number).all()) for state in sequence.states[0])


def test_recurrent_layers_keep_states_instead_of_streams(recurrent) -> None:
    sequence = recurrent.allocate(7)
    assert [len(streams) for streams in sequence.layers] == [0, 2]
    assert [[s.shape for s in layer] for layer in sequence.states] == [[(3, 16), (2, 3, 5)], []]
    assert sequence.capacity == 7
    assert states_are(sequence, 0)
    table = torch.tensor(sequence.stream_addresses)
    assert table[1].tolist() == [stream.data_ptr() for stream in sequence.layers[1]]
    recurrent.resize(sequence, 9)
    assert (sequence.capacity, recurrent.used) == (9, 9)


def test_a_step_reads_states_and_writes_pending_ones(recurrent) -> None:
    sequence = recurrent.allocate(7)
    step(sequence, 2)
    now, then = sequence.states[0], sequence.pending[0]
    for state in then:
        state.fill_(torch.nan)  # of a step that fails
    assert states_are(sequence, 2)
    step(sequence, 1)
    assert states_are(sequence, 3)
    assert sequence.states[0] is then
    assert sequence.pending[0] is now


def test_states_are_cut_back_only_to_a_snapshot_the_present_length_and_zero(recurrent) -> None:
    sequence = recurrent.allocate(60)
    for _ in range(SNAPSHOTS + 2):
        step(sequence, 10)
        sequence.snapshot()
    step(sequence, 1)
    ends = tuple(range(30, 10 * SNAPSHOTS + 21, 10))
    assert sequence.snapshots == ends  # the shortest ones were dropped
    assert not sequence.truncate(29)
    assert [sequence.reachable(n) for n in (29, 30, 39, sequence.length, 1000)] == [0, 30, 30, 41, 41]
    assert states_are(sequence, 41)
    assert sequence.truncate(1000)
    for _ in range(2):  # a snapshot serves more than once
        assert sequence.truncate(30)
        assert (sequence.length, sequence.snapshots) == (30, (30,))
        assert states_are(sequence, 30)
        step(sequence, 7)
    assert sequence.truncate(0)
    assert states_are(sequence, 0)
    assert sequence.snapshots == ()


def test_recurrent_sequences_are_as_many_as_there_are_places(recurrent, cache) -> None:
    first = recurrent.allocate(1)
    recurrent.allocate(1)
    with pytest.raises(RequestError, match="no room for the states of another sequence"):
        recurrent.allocate(1)
    recurrent.release(first)
    recurrent.allocate(1)
    assert (recurrent.places, cache.places) == (0, None)
