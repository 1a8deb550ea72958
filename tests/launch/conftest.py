"""A Hub on this machine, for the tests of `--model org/name`, and the errors of a command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hub_home import Home, repository_files
from hub_server import HubServer

from launch.cli import main
from launch.doctor import model_plan
from launch.forecast import Speeds


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


@pytest.fixture
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor takes these speeds for measured: measuring takes ten seconds."""

    async def measured(source: object, config: object, names: Sequence[str], *_: object) -> Speeds:
        return Speeds(25e9, dict.fromkeys(names, 20e9), 20e9, 1e-3, 0.0, 2)

    monkeypatch.setattr(model_plan, "measure_speeds", measured)


@pytest.fixture
def complaint(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line that a wrong command line gets."""

    def complaint(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("launch.py: ")
        assert err.count("\n") == 1, err
        return err.removeprefix("launch.py: ").rstrip("\n")

    return complaint
