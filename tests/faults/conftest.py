"""Runtime and cache folders for engines that tests start by `launch.py` and kill."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_engines import sweep_all
from marked_engine import Place


@pytest.fixture
def place(request, tiny_model: Path, monkeypatch) -> Iterator[Place]:
    """Folders of the test's own. OPTIONS of its module are those of its engines."""
    with tempfile.TemporaryDirectory(prefix="tk-", dir="/tmp") as folder:  # short: socket paths are
        place = Place(Path(folder), tiny_model, request.module.OPTIONS)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.runtime))  # for the sweeps
        monkeypatch.setenv("XDG_CACHE_HOME", str(place.cache))
        yield place
        sweep_all(place)
