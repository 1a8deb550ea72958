"""Embeddings have the same rows in the file, while they are copied into memory, and after."""

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
from pipeline.backbone.embedding import Embedding
from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.reader import TensorReader
from pipeline.errors import ModelError

ROWS, WIDTH = 300, 24
LIMIT = 20.0
TOKENS = torch.tensor([0, 299, 7, 7, 128])


def checkpoint(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Write a file with the tensor `it` in the middle; returns that tensor."""
    whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    save_file({"a": torch.ones(5), "it": whole, "z": torch.ones(5)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    return whole


def embedding_of(folder: Path, dtype: torch.dtype) -> Embedding:
    return Embedding(TensorReader(CheckpointIndex.open(folder)), "it", (ROWS, WIDTH), dtype)


def open_files(folder: Path) -> int:
    """The number of this process's descriptors of files in a folder."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(link).startswith(str(folder))
        except FileNotFoundError:
            continue
    return count


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("written", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_equal_from_file_and_memory(tmp_path, written, kept, monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 7 * WIDTH)  # many chunks, the last one smaller
    whole = checkpoint(tmp_path, written)
    embedding = embedding_of(tmp_path, kept)
    assert embedding.bytes == ROWS * WIDTH * kept.itemsize
    wanted = whole.to(kept)
    for _ in range(2):
        found = embedding[TOKENS]
        assert found.dtype == kept
        assert torch.equal(found, wanted[TOKENS])
        embedding.materialize(lambda: True)
    (tmp_path / "model.safetensors").unlink()  # no later read
    assert torch.equal(embedding[torch.arange(ROWS)], wanted)
    assert open_files(tmp_path) == 0


def test_stopped_materialize_leaves_the_file_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 10 * WIDTH)
    whole = checkpoint(tmp_path, torch.bfloat16)
    embedding = embedding_of(tmp_path, torch.bfloat16)
    polls = iter([True, True, False])
    embedding.materialize(lambda: next(polls))
    assert torch.equal(embedding[TOKENS], whole[TOKENS])
    assert open_files(tmp_path) == 1
    del embedding
    gc.collect()
    assert open_files(tmp_path) == 0


def test_rows_are_right_while_another_thread_materializes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK_NUMBERS", WIDTH)
    whole = checkpoint(tmp_path, torch.bfloat16)
    for _ in range(5):
        embedding = embedding_of(tmp_path, torch.bfloat16)
        thread = threading.Thread(target=embedding.materialize, args=(lambda: True,))
        thread.start()
        until, after = time.monotonic() + LIMIT, 0
        while after < 10:
            assert torch.equal(embedding[TOKENS], whole[TOKENS])
            assert time.monotonic() < until
            after += not thread.is_alive()
        thread.join(LIMIT)
        assert open_files(tmp_path) == 0


@pytest.mark.parametrize(
    "use", [lambda embedding: embedding[TOKENS], lambda embedding: embedding.materialize(lambda: True)]
)
def test_truncated_file_raises_model_error(tmp_path: Path, use: Callable[[Embedding], object]) -> None:
    checkpoint(tmp_path, torch.bfloat16)
    embedding = embedding_of(tmp_path, torch.bfloat16)
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(ModelError, match=r"model\.safetensors became shorter while it was read"):
        use(embedding)


def test_replaced_file_does_not_change_rows(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, torch.bfloat16)
    embedding = embedding_of(tmp_path, torch.bfloat16)
    (tmp_path / "new").write_bytes(bytes((tmp_path / "model.safetensors").stat().st_size))
    (tmp_path / "new").replace(tmp_path / "model.safetensors")
    for _ in range(3):  # a second copy would read the new file
        assert torch.equal(embedding[TOKENS], whole[TOKENS])
        embedding.materialize(lambda: True)


def test_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, torch.bfloat16)
    with pytest.raises(ModelError, match=r"it has the shape \[300, 24\]; config.json gives \[24, 300\]"):
        Embedding(TensorReader(CheckpointIndex.open(tmp_path)), "it", (WIDTH, ROWS), torch.bfloat16)
