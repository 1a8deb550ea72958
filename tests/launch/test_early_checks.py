"""Errors in a model's settings are reported before anything is loaded."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from launch.command_line.checks import check_engine, check_extra
from launch.errors import WrongUsage
from pipeline.config import EngineConfig
from pipeline.errors import ModelError
from pipeline.text.tokenizer import Tokenizer
from workers.interpreter import ROOT


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


def test_missing_package_is_named_with_the_command_that_installs_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extra = project["optional-dependencies"]["serve"]
    check_extra("--http", "serve", "json")
    with pytest.raises(
        WrongUsage, match=r"^--http needs the Python package no_such_package: run "
    ) as refused:
        check_extra("--http", "serve", "json", "no_such_package")
    command = str(refused.value).partition(": run ")[2]
    assert shlex.split(command) == [sys.executable, "-m", "pip", "install", *extra]
