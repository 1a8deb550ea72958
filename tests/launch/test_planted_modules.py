"""A model's folder may hold files named like Python modules, and users start engines from there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from engines import launch

from launch import planning
from launch.processes.trials import TrialFailed, trial

MODULES = ("msgpack", "numpy", "posix_ipc", "regex", "tokenizers", "torch", "transformers", "uvloop", "zmq")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that every planted module of the working directory creates when it is imported."""
    marker = tmp_path / "ran"
    for name in (*MODULES, "launch", "pipeline", "protocol", "shm", "workers"):
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r} + ' ')\n")
    monkeypatch.chdir(tmp_path)
    # An empty part means the working directory; it is common: PYTHONPATH=/a:$PYTHONPATH.
    monkeypatch.setenv("PYTHONPATH", f"{os.sep}none{os.pathsep}")
    return marker


def test_engine_imports_nothing_from_the_working_directory(tiny_model: Path, ran: Path) -> None:
    words = ("--model", str(tiny_model), "--workers", "1", "--chunk", "64", "--max-tokens", "2")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = launch("generate", "a", *words, executed=True, env=environment)
    assert not ran.exists(), ran.read_text()
    assert done.returncode == 0, done.stderr


async def failing_trial() -> None:
    async with trial("launch.doctor.child", {"what": "rates"}) as child:
        await child.result(60)


def test_trials_and_probes_import_nothing_from_the_working_directory(
    ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrialFailed):
        asyncio.run(failing_trial())
    monkeypatch.setattr(planning, "DRIVER_NODES", (ran.parent,))
    planning.usable_device("auto")
    assert not ran.exists(), ran.read_text()
