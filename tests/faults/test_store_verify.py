"""`--verify`: a damaged store is built again, unless another engine uses it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import ForkedPython
from marked_engine import ROOT, Engine, Place

from shm.segment import unlink
from shm.store import store_name

LIMIT = 100.0
OPTIONS = ("--workers", "1", "--chunk", "32", "--keep-store")


@pytest.fixture
def place(place: Place) -> Iterator[Place]:
    yield place
    unlink(store_name(place.key))


def generate(place: Place, *words: str) -> tuple[int, list[str]]:
    """Exit code and lines of stderr."""
    command = "generate --prompt-tokens 5 --max-tokens 1 --device cpu".split()
    command = [str(ROOT / "launch.py"), *command, *OPTIONS, "--model", str(place.model), *words]
    with ForkedPython(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, err = process.communicate(timeout=LIMIT)
    return process.returncode, err.splitlines()


def damage(place: Place) -> None:
    """Change a bit of the last layer."""
    with (Path("/dev/shm") / store_name(place.key)[1:]).open("r+b") as file:
        file.seek(-9000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-9000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def test_damaged_store_is_built_again_unless_an_engine_uses_it(place: Place) -> None:
    with Engine(place, f"verify-{os.getpid()}") as engine:
        engine.wait_ready()
        damage(place)
        code, lines = generate(place, "--verify")
        assert code == 1
        assert lines[-1].startswith("launch.py: the store ")
        assert "is damaged in layer 1, and another engine uses it: end that engine" in lines[-1]
        assert sum("damaged" in line for line in lines) == 1
        assert "coordinator" in engine.doing()
        engine.ask(2)
        engine.process.terminate()
        assert engine.process.wait(LIMIT) == 0
    code, lines = generate(place, "--verify", "--log-level", "info")  # the damaged store was kept
    assert code == 0
    assert sum("is damaged in layer 1; it is removed and made again" in line for line in lines) == 1
    assert any("source cache" in line for line in lines)
