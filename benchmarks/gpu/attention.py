"""Attention on a GPU: each way that the backbone takes, its error against float64, its time and its memory.

    python -m benchmarks.gpu.attention [--out FILE.json]

Decode (one token) and prefill (512 tokens behind others) of 32 query heads in 4 and 8 groups, bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.attention import attend_span
from pipeline.backbone.batch import Batch
from pipeline.config import KV_BLOCK
from pipeline.device import Device, open_device
from pipeline.errors import UsageError
from workers.kernels.cuda.attention import Rows

HEADS, WIDTH = 32, 128
CASES = [(1, 1024), (1, 8192), (512, 1024), (512, 8192)]  # new tokens, all tokens
GROUPS = (4, 8)  # heads of keys and values
CALLS = 20


@dataclass(frozen=True)
class Row:
    tokens: int
    of: int
    kv_heads: int
    way: str
    error: float  # the largest, against float64
    microseconds: float
    megabytes: float  # of memory beside inputs and output


def exact(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[heads, T, width] in float64."""
    new, total = q.shape[1], keys.shape[1]
    group = len(q) // len(keys)
    keys, values = (x.double().repeat_interleave(group, 0) for x in (keys, values))
    scores = q.double() @ keys.transpose(1, 2) * WIDTH**-0.5
    places = torch.arange(total, device=q.device)
    scores.masked_fill_(places[total - new :, None] < places, -torch.inf)
    attended: Tensor = scores.softmax(2) @ values
    return attended


def ways(
    device: Device, q: Tensor, keys: Tensor, values: Tensor
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Returns, by name, functions that return [heads, T, width]."""
    new, total = q.shape[1], keys.shape[1]
    if new == 1:
        grouped = q.view(len(keys), -1, WIDTH)
        attend = functional.scaled_dot_product_attention
        yield "grouped rows", lambda: attend(grouped[None], keys[None], values[None]).view(HEADS, 1, WIDTH)
        streams = [(len(keys), WIDTH)] * 2
        if (kernels := device.decode_attention(streams, keys.dtype, total)) is not None:
            blocks = total // KV_BLOCK
            table = torch.tensor([total - 1, *range(blocks)], device=keys.device)
            slabs = [x.view(-1, blocks, KV_BLOCK, WIDTH).transpose(0, 1).contiguous() for x in (keys, values)]
            keeps = table, slabs, q.view(1, HEADS, WIDTH)
            addresses = slabs[0].data_ptr(), slabs[1].data_ptr()
            rows = Rows(1, table.data_ptr(), table[1:].data_ptr(), 1, addresses, (0, 0))

            def by_kernels(keeps: tuple[Tensor, list[Tensor], Tensor] = keeps) -> Tensor:
                row = keeps[2]
                return kernels.attend(rows, row, len(keys), WIDTH, None, WIDTH**-0.5).view(HEADS, 1, WIDTH)

            yield "our kernels", by_kernels
        return
    places = torch.arange(total, device=q.device)
    mask = places[total - new :, None] >= places
    for name, flash in (("flash", True), ("with a mask", False)):
        batch = cast(Batch, SimpleNamespace(flash=flash, stored=True, masks={None: [mask]}))

        def span(batch: Batch = batch) -> Tensor:
            return attend_span(q, keys, values, batch, 0, None).transpose(0, 1)

        yield name, span


def measure(device: Device) -> list[Row]:
    rows, there = [], device.torch_device
    for new, total in CASES:
        for kv_heads in GROUPS:
            q = torch.randn(HEADS, new, WIDTH, device=there, dtype=torch.bfloat16)
            keys, values = (
                torch.randn(kv_heads, total, WIDTH, device=there, dtype=torch.bfloat16) for _ in "kv"
            )
            expected = exact(q, keys, values)
            for name, way in ways(device, q, keys, values):
                error = float((way().double() - expected).abs().max())
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                began = device.time_mark()
                for _ in range(CALLS):
                    way()
                ended = device.time_mark()
                device.wait(device.fence())
                peak = (torch.cuda.max_memory_allocated() - before) / 1e6
                microseconds = device.seconds_between(began, ended) * 1e6 / CALLS
                rows.append(Row(new, total, kv_heads, name, error, microseconds, peak))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    arguments = parser.parse_args()
    try:
        device = open_device("cuda")  # which sets torch up as an engine does
    except UsageError as e:
        print(e, file=sys.stderr)
        return 2
    with torch.inference_mode():
        rows = measure(device)
    for row in rows:
        print(
            f"{row.tokens:5} of {row.of:5}, {row.kv_heads} kv heads, {row.way:13}: error {row.error:.4f},"
            f" {row.microseconds:8.1f} us, {row.megabytes:8.1f} MB"
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
