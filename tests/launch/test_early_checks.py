"""Errors in a model's settings are reported before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launch.command_line.checks import check_engine
from pipeline.config import EngineConfig
from pipeline.errors import ModelError
from pipeline.text.tokenizer import Tokenizer


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change(file: Path, **entries: object) -> None:
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | entries))


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        ("generation_config.json", {"do_sample": True, "temperature": "hot"}, "temperature is 'hot'"),
        ("generation_config.json", {"eos_token_id": ["x"]}, "eos_token_id"),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id"),
        ("config.json", {"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "short_factor"),
    ],
)
def test_impossible_settings_are_refused_before_loading(folder: Path, file, entries, message) -> None:
    check_engine(EngineConfig(model=folder))
    change(folder / file, **entries)
    with pytest.raises(ModelError, match=message) as failure:
        check_engine(EngineConfig(model=folder))
    assert "\n" not in str(failure.value)


def test_settings_of_a_tokenizer_alone_are_no_tokenizer(folder: Path) -> None:
    assert Tokenizer.load(folder) is not None
    (folder / "tokenizer.json").unlink()
    assert (folder / "tokenizer_config.json").exists()
    assert Tokenizer.load(folder) is None
