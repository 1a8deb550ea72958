"""`benchmarks/llama_cpp.py`: which build of llama.cpp it measures, and with which settings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.llama_engines import Task
from benchmarks.llama_environment import NATIVE, WITHOUT_AMX, Build
from benchmarks.llama_process import Crashed, Llama, Settings, llama

DECODE, PREFILL = Task("decode", 4, 32, 64), Task("prefill", 1, 512, 0)
# Stands for the environment's interpreter: called with -P, the driver and its options.
DRIVER = f"""#!{sys.executable} -SE
import json, os, resource, signal, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
loaded = json.loads(sys.argv[3])["settings"]
"""
READY = """
print(json.dumps({"version": "1"}), flush=True)
for line in sys.stdin:
    settings = json.loads(line)["settings"]
"""
ANSWER = """
    assert settings["repack"] == loaded["repack"]
    seconds = 8 if settings["repack"] else 4 if settings["flash"] else 2
    print(json.dumps({"decode_s": seconds, "prefill_s": abs(settings["micro_batch"] - 100)}), flush=True)
"""

Starts = Callable[[Build], Llama]


@pytest.fixture
def start(tmp_path: Path) -> Callable[[dict[Build, str]], tuple[Starts, list[Build]]]:
    """How a build starts whose driver has this code, and the builds that were started."""

    def make(code: dict[Build, str]) -> tuple[Starts, list[Build]]:
        started: list[Build] = []

        def start(build: Build) -> Llama:
            started.append(build)
            python = tmp_path / f"python{build.suffix}"
            python.write_text(DRIVER + code[build])
            python.chmod(0o700)
            return Llama(python, tmp_path / "model.gguf", 1000, 2)

        return start, started

    return make


Make = Callable[[dict[Build, str]], tuple[Starts, list[Build]]]


async def setup(engine: Llama) -> None:
    await engine.choose([DECODE, PREFILL], 2, lambda _: None)
    await engine.load()


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGILL", "SIGBUS"])
@pytest.mark.parametrize("before", ["", READY], ids=["loading", "computing"])
async def test_a_build_that_crashes_is_replaced_by_the_next(start: Make, signal: str, before: str) -> None:
    crash = before + f"{'    ' if before else ''}os.kill(os.getpid(), signal.{signal})\n"
    starts, started = start({NATIVE: crash, WITHOUT_AMX: READY + ANSWER})
    said: list[str] = []
    async with llama([NATIVE, WITHOUT_AMX], starts, setup, said.append) as engine:
        assert engine.facts["build"] == WITHOUT_AMX.name
        assert signal in engine.facts["fallback"]
        assert [line for line in said if signal in line]
        assert engine.pids
    assert started == [NATIVE, WITHOUT_AMX]
    assert not engine.pids


async def test_a_crash_of_the_last_build_ends_the_benchmark_with_its_signal(start: Make) -> None:
    starts, started = start({NATIVE: "os.kill(os.getpid(), signal.SIGSEGV)"})
    with pytest.raises(Crashed, match="SIGSEGV"):
        async with llama([NATIVE], starts, setup, lambda _: None):
            raise AssertionError
    assert started == [NATIVE]


async def test_another_failure_is_no_reason_for_another_build(start: Make) -> None:
    starts, started = start({NATIVE: "sys.exit(1)", WITHOUT_AMX: READY + ANSWER})
    with pytest.raises(SystemExit, match="see its output"):
        async with llama([NATIVE, WITHOUT_AMX], starts, setup, lambda _: None):
            raise AssertionError
    assert started == [NATIVE]


async def test_each_task_has_the_fastest_settings_and_unused_models_are_unloaded(start: Make) -> None:
    starts, _ = start({NATIVE: READY + ANSWER})
    async with llama([NATIVE], starts, setup, lambda _: None) as engine:
        assert engine.facts["build"] == NATIVE.name
        assert engine.facts["fallback"] == ""
        assert engine.settings == {
            str(DECODE): Settings(2, repack=False, flash=False),
            str(PREFILL): Settings(2, micro_batch=128),
        }
        assert len(engine.pids) == 2
        engine.settings[str(PREFILL)] = engine.settings[str(DECODE)]
        await engine.load()
        assert len(engine.pids) == 1
