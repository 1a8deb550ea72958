"""Attention of decode steps by the CUDA kernels, emulated on the host, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulated_cuda import EmulatedLauncher, library
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gpu.registers import NoCompiler, usages
from workers.kernels.cuda.attention import THREADS, DecodeAttention, Rows, program

POISON = float("nan")
SCALE = 0.5


class Sequences:
    """Streams at any addresses, and the table by which the kernels find them."""

    def __init__(
        self, lengths: list[int], shapes: list[tuple[int, int]], dtype: torch.dtype, seed: int
    ) -> None:
        """`lengths`: with the new token; 0: a row without a sequence. `shapes`: their heads and width."""
        torch.manual_seed(seed)
        self.lengths = lengths
        spare = np.random.default_rng(seed).integers(0, 40, len(lengths)).tolist()
        self.capacities = [length + more for length, more in zip(lengths, spare, strict=True)]
        self.streams = []
        for heads, width in shapes:
            each = []
            for length, capacity in zip(lengths, self.capacities, strict=True):
                stream = torch.full((heads, capacity, width), POISON, dtype=dtype)
                stream[:, : max(0, length - 1)] = torch.randn(heads, max(0, length - 1), width).to(dtype)
                each.append(stream)
            self.streams.append(each)
        self.table = torch.tensor(
            [
                [length - 1 for length in lengths],
                self.capacities,
                *[[stream.data_ptr() for stream in each] for each in self.streams],
            ]
        )
        positions, capacities, *streams = (row.data_ptr() for row in self.table)
        self.rows = Rows(len(lengths), positions, capacities, tuple(streams))


def exact(q: Tensor, keys: Tensor, values: Tensor, window: int | None, sinks: Tensor | None = None) -> Tensor:
    """q [heads, width], keys and values [kv_heads, N, width], sinks [heads]: float64 [heads, value width]."""
    group = len(q) // len(keys)
    keys, values = (x.double().repeat_interleave(group, 0)[:, -(window or 1 << 30) :] for x in (keys, values))
    scores = keys @ (SCALE * q.double())[:, :, None]
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1)), 1)
    weights = scores.softmax(1)[:, : keys.shape[1]]
    return (values * weights).sum(1)


def attention(dtype: torch.dtype, context: int = 1000) -> DecodeAttention:
    return DecodeAttention(EmulatedLauncher(library(program(dtype))), context)


def test_it_compiles_for_gpus_and_hardly_spills() -> None:
    try:
        found = usages(program(torch.bfloat16), (90,))
    except NoCompiler as e:
        pytest.skip(str(e))
    assert {one.kernel.partition("_")[0] for one in found} == set(THREADS)
    assert max(one.spilled for one in found) <= 64
    assert max(one.registers for one in found) <= 128


CASES = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.sampled_from([0, 1, 2, 5, 127, 128, 129, 260]), min_size=1, max_size=3),
        "kv_heads": st.sampled_from([1, 2]),
        "group": st.sampled_from([1, 2, 3, 8, 9]),
        "width": st.sampled_from([7, 8, 20, 64]),
        "window": st.sampled_from([None, 1, 3, 130]),
        "sink": st.sampled_from([None, 0.0, -40.0, 30.0]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    }
)


@settings(max_examples=15, deadline=None)
@given(CASES, st.integers(0, 99))
def test_rows_attend_to_their_own_sequences(case, seed) -> None:
    """New tokens are written where they belong, and nothing beyond a sequence's end is read."""
    kv_heads, group, width, dtype = case["kv_heads"], case["group"], case["width"], case["dtype"]
    made = Sequences(case["lengths"], [(kv_heads, width)] * 2, dtype, seed)
    number = len(made.lengths)
    qkv = torch.randn(number, (group + 2) * kv_heads, width).to(dtype)
    q, k, v = torch.split(qkv, [group * kv_heads, kv_heads, kv_heads], dim=1)
    sinks = None if case["sink"] is None else case["sink"] + torch.randn(group * kv_heads)
    kernels = attention(dtype)
    kernels.append(made.rows, k, v)
    found = kernels.attend(made.rows, q, kv_heads, width, case["window"], SCALE, sinks)
    found = found.view(number, -1, width)
    for row, length in enumerate(made.lengths):
        if not length:
            assert (found[row] == 0).all()
            continue
        keys, values = (each[row][:, :length] for each in made.streams)
        assert torch.equal(keys[:, -1], k[row])
        assert torch.equal(values[:, -1], v[row])
        assert all(each[row][:, length:].isnan().all() for each in made.streams)
        expected = exact(q[row], keys, values, case["window"], sinks)
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_keys_and_values_of_one_stream(dtype) -> None:
    rank, rope, heads = 32, 8, 10
    made = Sequences([150, 3], [(1, rank + rope)], dtype, 1)
    new, q = torch.randn(2, 1, rank + rope).to(dtype), torch.randn(2, heads, rank + rope).to(dtype)
    kernels = attention(dtype)
    kernels.append(made.rows, new)
    found = kernels.attend(made.rows, q, 1, rank, None, SCALE).view(2, heads, rank)
    for row, length in enumerate(made.lengths):
        keys = made.streams[0][row][:, :length]
        expected = exact(q[row], keys, keys[..., :rank], None)
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_rows_bits_do_not_depend_on_its_batch_or_place() -> None:
    made = Sequences([300, 0, 7, 200], [(2, 16)] * 2, torch.bfloat16, 3)
    q, k, v = (torch.randn(4, heads, 16).bfloat16() for heads in (6, 2, 2))
    kernels = attention(torch.bfloat16)
    kernels.append(made.rows, k, v)
    together = kernels.attend(made.rows, q, 2, 16, None, SCALE)
    for row in range(4):
        positions, capacities, *streams = (line[row:].data_ptr() for line in made.table)
        alone = kernels.attend(
            Rows(1, positions, capacities, tuple(streams)), q[row : row + 1], 2, 16, None, SCALE
        )
        assert torch.equal(alone[0], together[row])
