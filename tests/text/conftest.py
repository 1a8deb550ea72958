"""A tokenizer of each family, in a model directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_tokenizers import FAMILIES, loaded, write_family

from pipeline.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return loaded(model_dir)
