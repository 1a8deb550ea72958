"""Engines that start, share a store and are killed, many at once: a store in use is never
removed, and the next start removes what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import shm
from shm.locks import StoreLease, build_folder, sweep
from shm.segment import unlink
from shm.store import store_name

ROOT = Path(shm.__file__).parents[1]
USERS = 200


@pytest.fixture
def fingerprint() -> Iterator[str]:
    fingerprint = uuid.uuid4().hex * 2
    yield fingerprint
    unlink(store_name(fingerprint))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_store_in_use_survives_many_starts_and_kills(fingerprint: str, seed: int) -> None:
    script = [sys.executable, str(Path(__file__).with_name("store_users.py")), fingerprint]
    done = subprocess.run(
        [*script, str(USERS), str(seed)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert sum(ends.values()) >= USERS
    assert set(ends) == {"done", "killed"}, (ends, done.stderr)
    assert min(ends.values()) > USERS // 5

    # A kept store stays until an engine has used it without asking to keep it.
    sweep()
    segment = Path("/dev/shm") / store_name(fingerprint)[1:]
    if segment.exists():
        StoreLease.acquire(fingerprint).release(keep=False)
    assert not segment.exists()
    assert not list(build_folder().glob(f"{fingerprint[:16]}*"))
