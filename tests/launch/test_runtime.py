"""Runtime directories: the owner of a name, the list of running engines, the files of killed ones."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from launch.cluster.node import names
from launch.errors import WrongUsage
from launch.runtime import EngineInfo, RuntimeDir, find_engine, running_engines, segments, sweep
from protocol.messages import VERSION
from protocol.sockets import runtime_root
from shm.segment import engine_prefix

ROOT = Path(__file__).parents[2]


@pytest.fixture
def claimed() -> Iterator[RuntimeDir]:
    runtime = RuntimeDir.claim("rt-test")
    yield runtime
    runtime.remove()


def publish(runtime: RuntimeDir) -> EngineInfo:
    endpoint = runtime.endpoint("client.sock")
    info = EngineInfo(runtime.name, os.getpid(), "/m", endpoint, VERSION)
    runtime.publish(info)
    return info


def test_only_an_exited_coordinator_s_slab_is_removed_before_its_restart(claimed: RuntimeDir) -> None:
    prefix = "/dev/shm" + engine_prefix(claimed.path)
    slab, control = Path(f"{prefix}slab-0"), Path(f"{prefix}control-0")
    for segment in (slab, control):
        segment.touch()
    claimed.remove_of_coordinator()
    claimed.remove_of_coordinator()
    assert (slab.exists(), control.exists()) == (False, True)
    claimed.remove()
    assert not control.exists()


def test_an_engines_segments_are_removed_where_its_directory_was_replaced(
    claimed: RuntimeDir, tmp_path
) -> None:
    segment = Path(f"/dev/shm{engine_prefix(claimed.path)}control-0")
    segment.touch(mode=0o600)
    (tmp_path / "lock").touch()
    shutil.rmtree(claimed.path)
    claimed.path.symlink_to(tmp_path)  # as another user can, after a program that cleans /tmp
    try:
        claimed.remove()
        assert (tmp_path / "lock").exists()
        assert not segment.exists()
    finally:
        claimed.path.unlink()
        segment.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".locks", "x" * 33, "store", "a b"])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(WrongUsage, match="--name"):
        RuntimeDir.claim(name)


def test_an_engine_is_found_once_it_is_ready(claimed: RuntimeDir) -> None:
    assert running_engines() == []
    with pytest.raises(WrongUsage, match="no engine is running"):
        find_engine(None)
    info = publish(claimed)
    assert running_engines() == [info]
    assert find_engine(None) == info
    assert find_engine("rt-test") == info
    with pytest.raises(WrongUsage, match=r"other.*running: rt-test"):
        find_engine("other")


def test_engine_of_another_version_is_listed_and_refused(claimed: RuntimeDir) -> None:
    """Whatever else its engine.json holds; it still counts as one of two running engines."""
    publish(claimed)
    second = RuntimeDir.claim("rt-future")
    try:
        info = publish(second)
        for nonsense in ("[]", "null", "5", "{", "{}"):
            (second.path / "engine.json").write_text(nonsense)
            assert len(running_engines()) == 1
        content = asdict(info) | {"version": 99, "news": [1]}
        (second.path / "engine.json").write_text(json.dumps(content))
        with pytest.raises(WrongUsage, match="2 engines are running"):
            find_engine(None)
        with pytest.raises(WrongUsage, match="rt-future speaks protocol version 99, this program version"):
            find_engine("rt-future")
    finally:
        second.remove()


def test_sweep_removes_killed_engines_and_not_running_ones(claimed: RuntimeDir) -> None:
    script = (
        "import os, signal; from launch.runtime import RuntimeDir\n"
        "RuntimeDir.claim('rt-dead'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=30)
    segment = segment_of(runtime_root() / "rt-dead")
    segment.write_bytes(b"x")
    assert (runtime_root() / "rt-dead").is_dir()
    assert sweep() == ["rt-dead"]
    assert not (runtime_root() / "rt-dead").exists()
    assert not segment.exists()
    assert claimed.path.is_dir()


def test_sweep_leaves_the_place_of_a_machine_whose_ray_may_go_on() -> None:
    place = runtime_root() / "machine-rt-killed"
    place.mkdir(mode=0o700)
    try:
        for name in ("lock", "machine.json"):
            (place / name).touch()
        assert sweep() == []
        assert names() == ["rt-killed"], "cluster stop finds it"
    finally:
        shutil.rmtree(place)


def test_sweep_removes_segments_without_a_directory(claimed: RuntimeDir) -> None:
    """$XDG_RUNTIME_DIR is removed at a logout; without the sweep an engine of that name could never start
    again."""
    gone, living = segment_of(runtime_root() / "rt-gone"), segment_of(claimed.path)
    elsewhere = segment_of(Path("/run/elsewhere/rt-gone"))
    try:
        for segment in (gone, living, elsewhere):
            segment.write_bytes(b"x")
        assert sweep() == ["rt-gone"]
        assert (gone.exists(), living.exists(), elsewhere.exists()) == (False, True, True)
        gone.write_bytes(b"x")
        runtime = RuntimeDir.claim("rt-gone")
        assert not gone.exists()
        runtime.remove()
        assert sweep() == []
    finally:
        for segment in (gone, living, elsewhere):
            segment.unlink(missing_ok=True)


def test_sweep_removes_everything_in_a_killed_engines_directory(claimed: RuntimeDir) -> None:
    """A supervisor may be killed between making the directory and its lock, and its children dump cores."""
    for name in ("rt-half", "rt-full", "rt-foreign"):
        (runtime_root() / name).mkdir(mode=0o700)
    (runtime_root() / "rt-full" / "lock").touch()
    (runtime_root() / "rt-full" / "folder" / "inner").mkdir(parents=True)
    (runtime_root() / "rt-full" / "link").symlink_to(claimed.path)
    (runtime_root() / "rt-foreign" / "file").touch()  # without a lock: of unknown origin
    try:
        assert sweep() == ["rt-full"]
        left = sorted(p.name for p in runtime_root().iterdir() if p.name.startswith("rt-"))
        assert left == ["rt-foreign", "rt-test"]
        assert (claimed.path / "lock").exists()
    finally:
        (runtime_root() / "rt-foreign" / "file").unlink()
        (runtime_root() / "rt-foreign").rmdir()


def test_name_can_be_claimed_while_its_previous_owner_removes_it() -> None:
    def claim_repeatedly() -> int:
        count = 0
        for _ in range(50):
            try:
                runtime = RuntimeDir.claim("rt-again")
            except WrongUsage:  # the other thread has it
                continue
            publish(runtime)
            assert (runtime.path / "engine.json").exists()
            runtime.remove()
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        claims = [pool.submit(claim_repeatedly) for _ in range(2)]
        assert all(claim.result() > 0 for claim in claims)
    assert not (runtime_root() / "rt-again").exists()


def segment_of(runtime: Path) -> Path:
    return Path("/dev/shm" + engine_prefix(runtime) + "slab-0")


@pytest.mark.parametrize("other", ["/run/one/rt-a-b", "/run/two/rt-a"], ids=["longer name", "another place"])
def test_segments_of_engines_with_similar_names_are_kept_apart(other: str) -> None:
    mine = Path("/run/one/rt-a")
    paths = [segment_of(mine), segment_of(Path(other))]
    try:
        for path in paths:
            path.write_bytes(b"x")
        assert segments(mine) == paths[:1]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_directory_of_another_engine_with_the_same_name_is_left_alone() -> None:
    first = RuntimeDir.claim("rt-removed")
    shutil.rmtree(first.path)
    assert not first.intact
    second = RuntimeDir.claim("rt-removed")
    segment = Path("/dev/shm" + engine_prefix(second.path) + "control-0")
    segment.touch()
    first.remove()
    assert second.intact
    assert segment.exists()
    second.remove()
    assert not segment.exists()


def test_directory_is_locked_against_systemd_tmpfiles() -> None:
    """It skips a directory on which it gets no exclusive lock."""
    claimed = RuntimeDir.claim("rt-locked")
    folder = os.open(claimed.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    claimed.remove()
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
