"""Attention of decode steps by the CUDA kernels, emulated on the host, against float64."""

from __future__ import annotations

import pytest
import torch
from emulated_cuda import EmulatedLauncher, library
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.backbone.kv_blocks import Slab, blocks_for, quantized, widened
from pipeline.config import KV_BLOCK
from workers.kernels.cuda.attention import DecodeAttention, Rows, program

POISON = float("nan")
SCALE = 0.5


class Sequences:
    """Streams in blocks in any order, and the table by which the kernels find them."""

    def __init__(
        self, lengths: list[int], shapes: list[tuple[int, int]], dtype: torch.dtype, seed: int
    ) -> None:
        """`lengths`: with the new token; 0: a row without a sequence. `shapes`: their heads and width."""
        torch.manual_seed(seed)
        self.lengths = lengths
        counts = [blocks_for(length) for length in lengths]
        self.slabs = [Slab(sum(counts) + 2, *shape, dtype, torch.device("cpu")) for shape in shapes]
        self._dtype = query_dtype(dtype)
        self._blocks = torch.split(torch.randperm(sum(counts) + 2)[: sum(counts)], counts)
        for slab in self.slabs:
            (slab.numbers if slab.scales is None else slab.scales).fill_(POISON)
            for blocks, length in zip(self._blocks, lengths, strict=True):
                heads, width = slab.numbers.shape[1], slab.numbers.shape[3]
                if length > 1:
                    slab.store(blocks.tolist(), 0, torch.randn(heads, length - 1, width).to(self._dtype))
        self.table = torch.full((2 + max(counts), len(lengths)), 1 << 40)
        self.table[0] = torch.tensor(lengths) - 1
        for row, blocks in enumerate(self._blocks):
            self.table[1 : 1 + len(blocks), row] = blocks
        self.rows = self.from_row(0)

    def from_row(self, first: int, number: int | None = None) -> Rows:
        """The rows from this one on."""
        positions, blocks = (line[first:].data_ptr() for line in self.table[:2])
        streams = tuple(slab.numbers.data_ptr() for slab in self.slabs)
        scales = tuple(0 if slab.scales is None else slab.scales.data_ptr() for slab in self.slabs)
        return Rows(number or len(self.lengths), positions, blocks, len(self.lengths), streams, scales)

    def of(self, row: int) -> list[Tensor]:
        """A row's streams [heads, length, width]."""
        blocks, length = self._blocks[row].tolist(), self.lengths[row]
        return [slab.read(blocks, 0, length, torch.float32) for slab in self.slabs]

    def unused(self, row: int) -> bool:
        """Whether what is behind a row's tokens in its last block was left alone."""
        last, used = self._blocks[row][-1], self.lengths[row] % KV_BLOCK or KV_BLOCK
        return all(bool(slab.tensors[-1][last, :, used:].isnan().all()) for slab in self.slabs)


def query_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.int8 else dtype


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


CASES = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.sampled_from([0, 1, 2, 5, 127, 128, 129, 260]), min_size=1, max_size=3),
        "kv_heads": st.sampled_from([1, 2]),
        "group": st.sampled_from([1, 2, 3, 8, 9]),
        "width": st.sampled_from([16, 64, 80, 160]),
        "window": st.sampled_from([None, 1, 3, 130]),
        "sink": st.sampled_from([None, 0.0, -40.0, 30.0]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    }
)


@settings(max_examples=15)
@given(CASES, st.integers(0, 99))
def test_rows_attend_to_their_own_sequences(case, seed) -> None:
    """New tokens are written where they belong, and nothing beyond a sequence's end is read."""
    kv_heads, group, width, dtype = case["kv_heads"], case["group"], case["width"], case["dtype"]
    made = Sequences(case["lengths"], [(kv_heads, width)] * 2, dtype, seed)
    number = len(made.lengths)
    qkv = torch.randn(number, (group + 2) * kv_heads, width).to(query_dtype(dtype))
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
        keys, values = made.of(row)
        for stream, new in ((keys, k[row]), (values, v[row])):
            assert torch.equal(
                stream[:, -1], widened(*quantized(new)) if dtype == torch.int8 else new.float()
            )
        assert made.unused(row)
        expected = exact(q[row], keys, values, case["window"], sinks)
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_latents_are_keys_and_values_of_one_stream(dtype) -> None:
    rank, rope, heads = 128, 16, 10
    made = Sequences([150, 3], [(1, rank + rope)], dtype, 1)
    new, q = (torch.randn(2, n, rank + rope).to(query_dtype(dtype)) for n in (1, heads))
    kernels = attention(dtype)
    kernels.append(made.rows, new)
    found = kernels.attend(made.rows, q, 1, rank, None, SCALE).view(2, heads, rank)
    for row in range(2):
        (keys,) = made.of(row)
        expected = exact(q[row], keys, keys[..., :rank], None)
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_rows_bits_do_not_depend_on_its_batch_or_place() -> None:
    made = Sequences([300, 0, 7, 200], [(2, 16)] * 2, torch.bfloat16, 3)
    q, k, v = (torch.randn(4, heads, 16).bfloat16() for heads in (6, 2, 2))
    kernels = attention(torch.bfloat16)
    kernels.append(made.rows, k, v)
    together = kernels.attend(made.rows, q, 2, 16, None, SCALE)
    for row in range(4):
        alone = kernels.attend(made.from_row(row, 1), q[row : row + 1], 2, 16, None, SCALE)
        assert torch.equal(alone[0], together[row])
