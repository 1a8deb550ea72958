"""Families with embedding tables beside that of the input: these stay in the checkpoint's files. A row that
cannot be read ends the request that needs it, in one line, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from comparison import exactly, scored
from exact_presets import costs
from oracle import EXACT, Oracle
from tiny_families import described, tiny_model

from pipeline.backbone.linear import Precision
from pipeline.checkpoint.decoder import decoder_of
from pipeline.checkpoint.open import open_model
from pipeline.checkpoint.tables import Parameters
from pipeline.config import EngineConfig
from pipeline.device.cpu import CpuDevice
from pipeline.errors import ModelError
from pipeline.generic.backbone import GenericBackbone
from pipeline.memory.needs import needs
from pipeline.models import facts
from pipeline.models.facts import facts_of
from protocol.errors import RequestFailed

# By family, the numbers of its tables: those of layers' inputs, and those of n-grams, which are in parts.
TABLES = {"gemma4": 128 * 6 * 16, "qwen4_exp": (2176 + 2304) * 8}
CHOSEN = {"gemma4": {}, "qwen4_exp": {"indexer_budget": 64}}  # more tokens than there are
TEXTS = [tuple((i * factor + 2) % 120 + 3 for i in range(30)) for factor in (5, 7, 11)]
CONFIG = EngineConfig(format="f32", backbone_dtype="f32", tile=16, chunk=12, workers=0)


@pytest.fixture(autouse=True)
def _described_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_ask", described)


@contextmanager
def shortened(path: Path) -> Iterator[None]:
    """A file has only its header during the block."""
    content = path.read_bytes()
    os.truncate(path, 8 + int.from_bytes(content[:8], "little"))
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.write(content)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", TABLES)
async def test_rows_are_read_from_the_checkpoint(family: str, start_engine, tmp_path: Path) -> None:
    tiny_model(family, **CHOSEN[family]).save_pretrained(tmp_path, save_original_format=True)
    source, config = open_model(tmp_path), replace(CONFIG, model=tmp_path, costs=costs(tmp_path))
    with source.tensors() as weights:
        assert isinstance(weights, Parameters)
        device = CpuDevice()
        precision = Precision("f32", device)
        backbone = GenericBackbone(facts_of(source.config), *decoder_of(source.config), weights, precision)
        device.close()
        with pytest.raises(ModelError, match="cannot be read by rows"):
            weights.table(f"{backbone.facts.tables[0].name}.weight", (1, 1))
        name, shape = backbone.facts.tables[0]
        for place in (-1, shape[0]):  # the row of a token that a table does not have
            with pytest.raises(ModelError, match=f"row {place} is wanted of {shape[0]}"):
                weights.table(f"{name}.weight", shape).rows(np.array([0, place]))
    assert backbone.facts.table_numbers == TABLES[family]
    planned = needs(source, config, "f32").backbone
    assert abs(backbone.bytes - planned) < 1024  # neither has a table; the input's is the head as well

    expected = Oracle(tmp_path, torch.float32).batch(TEXTS)
    async with start_engine(config) as (_, client):
        assert not exactly(expected[:2], EXACT)([await scored(client, t, True) for t in TEXTS[:2]])
        with shortened(tmp_path / "model.safetensors"):
            with pytest.raises(RequestFailed, match=r"model\.safetensors became shorter") as failed:
                await scored(client, TEXTS[2], True)
            assert "\n" not in str(failed.value)
        assert not exactly(expected, EXACT)([await scored(client, t, True) for t in TEXTS])
