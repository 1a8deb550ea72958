"""A Hub on this machine, for the tests of `--model org/name`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_home import Home, repository_files
from hub_server import HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, hub: HubServer) -> Home:
    return Home(tmp_path, hub.endpoint)


@pytest.fixture
def files(tiny_model: Path) -> dict[str, bytes]:
    """The tiny model as a repository has it."""
    return repository_files(tiny_model)
