"""Embeddings: the same rows before they are in memory, while they move there, and after."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.backbone import embedding as module
from pipeline.backbone.embedding import Table
from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.reader import TensorReader
from pipeline.errors import ModelError

ROWS, WIDTH = 300, 24
LIMIT = 20.0
TOKENS = torch.tensor([0, 299, 7, 7, 128])


def checkpoint(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """A file with one tensor in the middle; returns that."""
    whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    save_file({"a": torch.ones(5), "it": whole, "z": torch.ones(5)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    return whole


def table_of(folder: Path, dtype: torch.dtype) -> Table:
    return Table(TensorReader(CheckpointIndex.open(folder)), "it", (ROWS, WIDTH), dtype)


def open_files(folder: Path) -> int:
    """How many descriptors of this process lead into a folder."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(link).startswith(str(folder))
        except FileNotFoundError:
            continue
    return count


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("written", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_the_same_from_the_file_and_from_memory(
    tmp_path: Path, written: torch.dtype, kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_NUMBERS", 7 * WIDTH)  # many parts, and a rest
    whole = checkpoint(tmp_path, written)
    table = table_of(tmp_path, kept)
    assert table.bytes == ROWS * WIDTH * kept.itemsize
    wanted = whole.to(kept)
    for _ in range(2):
        found = table[TOKENS]
        assert found.dtype == kept
        assert torch.equal(found, wanted[TOKENS])
        table.move(lambda: True)
    (tmp_path / "model.safetensors").unlink()  # nothing is read any more
    assert torch.equal(table[torch.arange(ROWS)], wanted)
    assert open_files(tmp_path) == 0


def test_a_move_that_is_ended_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_NUMBERS", 10 * WIDTH)
    whole = checkpoint(tmp_path, torch.bfloat16)
    table = table_of(tmp_path, torch.bfloat16)
    left = iter([True, True, False])
    table.move(lambda: next(left))
    assert torch.equal(table[TOKENS], whole[TOKENS])
    assert open_files(tmp_path) == 1
    del table
    gc.collect()
    assert open_files(tmp_path) == 0


def test_rows_are_right_while_the_table_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_NUMBERS", WIDTH)
    whole = checkpoint(tmp_path, torch.bfloat16)
    for _ in range(5):
        table = table_of(tmp_path, torch.bfloat16)
        mover = threading.Thread(target=table.move, args=(lambda: True,))
        mover.start()
        until, after = time.monotonic() + LIMIT, 0
        while after < 10:
            assert torch.equal(table[TOKENS], whole[TOKENS])
            assert time.monotonic() < until
            after += not mover.is_alive()
        mover.join(LIMIT)
        assert open_files(tmp_path) == 0


@pytest.mark.parametrize("use", [lambda table: table[TOKENS], lambda table: table.move(lambda: True)])
def test_a_file_that_was_cut_is_an_error(tmp_path: Path, use: Callable[[Table], object]) -> None:
    checkpoint(tmp_path, torch.bfloat16)
    table = table_of(tmp_path, torch.bfloat16)
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(ModelError, match=r"model\.safetensors became shorter while it was read"):
        use(table)


def test_a_file_that_was_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, torch.bfloat16)
    table = table_of(tmp_path, torch.bfloat16)
    (tmp_path / "new").write_bytes(bytes((tmp_path / "model.safetensors").stat().st_size))
    (tmp_path / "new").replace(tmp_path / "model.safetensors")
    for _ in range(2):
        assert torch.equal(table[TOKENS], whole[TOKENS])
        table.move(lambda: True)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, torch.bfloat16)
    with pytest.raises(ModelError, match=r"it has the shape \[300, 24\]; config.json says \[24, 300\]"):
        Table(TensorReader(CheckpointIndex.open(tmp_path)), "it", (WIDTH, ROWS), torch.bfloat16)
