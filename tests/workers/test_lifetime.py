"""The start and the exit of children, with real processes and no engine."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from child_harness import ROOT, wait_gone

from workers.lifetime import EXIT_PARENT_GONE, MAX_CONFIG, ToldOnce, pack_config, pin

LIMIT = 30.0
CHILD = """
import json, logging, time
def main(config):
    logging.getLogger("x").info("%s", "a line")
    print(json.dumps(config), flush=True)
    if config.get("code") is not None:
        return config["code"]
    time.sleep(600)
"""
SLOW = """
import time
print("importing", flush=True)
time.sleep(600)
"""
LINES = {"its_module": '{"role": "child"}\n', "slow_module": "importing\n"}  # what they print
# Starts a child with the given pipe, prints its process id, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "workers.child", *sys.argv[1:]], pass_fds=[int(sys.argv[-1])])
print(child.pid, flush=True)
time.sleep(600)
"""
ENTRY = ("-m", "workers.child")  # the process that is tested


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the children run, where `-m` finds it."""
    (tmp_path / "its_module.py").write_text(CHILD)
    (tmp_path / "slow_module.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))


def runs(module: str, lifeline: int) -> tuple[str, ...]:
    """Arguments of the entry."""
    return module, "--lifeline", str(lifeline)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], LIMIT)[0], "the process prints nothing"
    return process.stdout.readline()


def complaints(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.read()


@contextmanager
def started(entry: tuple[str, ...], lifeline: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *entry, *arguments],
        cwd=ROOT,
        pass_fds=(lifeline,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Read and write end of a lifeline; a test may close them."""
    ends = os.pipe()
    yield ends
    for end in ends:
        if os.path.exists(f"/proc/self/fd/{end}"):
            os.close(end)


def test_the_configuration_arrives_as_it_was_sent(pipe: tuple[int, int]) -> None:
    config = {
        "role": "child",
        "log_level": "INFO",
        "cores": [1, 2],
        "text": "é" * 3000,
        "none": None,
        "map": {"a": 0.25},
    }
    os.write(pipe[1], pack_config(config))
    with started(ENTRY, pipe[0], *runs("its_module", pipe[0])) as child:
        assert json.loads(line_of(child)) == config
        os.close(pipe[1])
        assert child.wait(LIMIT) == EXIT_PARENT_GONE
        assert complaints(child) == "[child] a line\n"


@pytest.mark.parametrize("module", ["its_module", "slow_module"])
def test_child_without_a_configuration_exits_with_its_lifeline(pipe: tuple[int, int], module: str) -> None:
    """While it imports, and while it waits after the import."""
    with started(ENTRY, pipe[0], *runs(module, pipe[0])) as child:
        time.sleep(0.5)
        os.close(pipe[1])
        assert child.wait(LIMIT) == EXIT_PARENT_GONE


def test_sigint_is_ignored(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], pack_config({"role": "child"}))
    with started(ENTRY, pipe[0], *runs("its_module", pipe[0])) as child:
        line_of(child)
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        child.terminate()  # but SIGTERM ends it
        assert child.wait(LIMIT) == -signal.SIGTERM


@pytest.mark.parametrize("held", [False, True], ids=["with its lifeline", "its lifeline held by another"])
@pytest.mark.parametrize("module", LINES)
def test_child_exits_with_its_killed_parent(pipe: tuple[int, int], held: bool, module: str) -> None:
    """In its work and while it imports. Where another process still holds the lifeline's other end, the
    kernel's signal alone does it."""
    os.write(pipe[1], pack_config({"role": "child"}))
    with started(("-c", PARENT), pipe[0], *runs(module, pipe[0])) as parent:
        pid = int(line_of(parent))
        assert line_of(parent) == LINES[module]  # the child has entered: it has its parent's stdout
        parent.send_signal(signal.SIGKILL)
        if not held:
            os.close(pipe[1])
        assert wait_gone(pid)


@pytest.mark.parametrize(
    "sent", [b"", b"\0\0", pack_config({"role": "child"})[:-1]], ids=["none", "length", "half"]
)
def test_child_exits_with_its_parent_in_the_middle_of_the_configuration(pipe, sent) -> None:
    os.write(pipe[1], sent)
    os.close(pipe[1])
    with started(ENTRY, pipe[0], *runs("its_module", pipe[0])) as child:
        assert child.wait(LIMIT) == EXIT_PARENT_GONE
        assert complaints(child) == ""


def test_a_configuration_over_the_limit_is_refused(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], (MAX_CONFIG + 1).to_bytes(4, "big"))
    with started(ENTRY, pipe[0], *runs("its_module", pipe[0])) as child:
        assert child.wait(LIMIT) == 1
        assert complaints(child) == "the lifeline holds no configuration\n"


def test_child_exits_if_its_parent_exited_before_its_start(pipe: tuple[int, int]) -> None:
    """The kernel sends no signal for the earlier exit; the configuration is complete all the same."""
    os.write(pipe[1], pack_config({"role": "child"}))
    os.close(pipe[1])
    with started(ENTRY, pipe[0], *runs("slow_module", pipe[0])) as child:
        assert child.wait(LIMIT) == EXIT_PARENT_GONE


def test_pin_binds_to_the_cores_or_returns_the_reason() -> None:
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    try:
        assert pin([]) == ""
        assert os.sched_getaffinity(0) == allowed
        assert pin([core]) == ""
        assert os.sched_getaffinity(0) == {core}
        note = pin([100_000])
        assert "100000" in note
        assert "\n" not in note
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_fact_is_told_by_one_process_of_an_engine(tmp_path: Path) -> None:
    loader, coordinator = ToldOnce(tmp_path), ToldOnce(tmp_path)
    full, other = logging.makeLogRecord({"fact": "full-disk"}), logging.makeLogRecord({})
    assert [of.filter(record) for of in (loader, coordinator) for record in (full, other)] == [1, 1, 0, 1]
