"""Two machines as two nodes of Ray on this one: answers have one machine's tokens, also while processes of
Ray and the expert host are killed. Takes minutes on a busy machine, mostly in Ray's starts."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import until

from launch.cluster.command import PORTS
from launch.runtime import find_engine
from protocol.client import Client

pytest.importorskip("ray", reason="the extra `cluster` is not installed")
from engines import LIMIT, Launched, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
REQUEST = ("--prompt", "A list is", "--max-tokens", "24", "--ignore-eos", "--json")
# The names of the processes, as they are on command lines.
ACTOR, RAYLET, GCS = "ray::HostActor", "raylet/raylet", "gcs/gcs_server"
HOST, LIAISON = "pipeline.cluster.host", "launch.cluster.liaison"


def free_ports() -> int:
    """Returns the first of two machines' ports, one behind the other's."""
    for first in range(20_000, 60_000, 2 * PORTS):
        probes = [socket.socket() for _ in range(2 * PORTS)]
        try:
            for place, probe in enumerate(probes):
                probe.bind(("", first + place))
            return first
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no ports are free")


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """A cluster of two machines: its head's address."""
    port = free_ports()
    address = f"{HEAD}:{port}"
    try:
        made = launch("cluster", "start", "--address", HEAD, "--port", str(port), "--name", "a", limit=300)
        assert made.returncode == 0, made.stderr
        assert f"cluster join {address}" in made.stdout
        other = ("--address", OTHER, "--port", str(port + PORTS), "--name", "b")
        joined = launch("cluster", "join", address, *other, limit=300)
        assert joined.returncode == 0, joined.stderr
        yield address
    finally:
        ended = [launch("cluster", "stop", "--name", name) for name in "ba"]
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert not [process for process in psutil.process_iter() if is_ours(process, "ray")]


def is_ours(process: psutil.Process, word: str) -> bool:
    """Returns whether this is a process of this session with a word on its command line."""
    try:
        ours = process.environ().get("XDG_RUNTIME_DIR") == os.environ["XDG_RUNTIME_DIR"]
        return ours and word in " ".join(process.cmdline())
    except psutil.Error:
        return False


def only(word: str, other: bool = False) -> psutil.Process | None:
    """Returns the running process with this word; of two raylets with `other` the one that has joined."""
    found = [process for process in psutil.process_iter() if is_ours(process, word)]
    if word == RAYLET:
        found = [each for each in found if (f"--node_ip_address={OTHER}" in each.cmdline()) == other]
    return found[0] if found else None


def test_an_answer_of_two_machines_has_the_tokens_of_one(head: str, tiny_model: Path) -> None:
    options = ("--model", str(tiny_model), "--tile", "32", "--format", "bf16", "--chunk", "64", *REQUEST)
    alone = json.loads(launch("generate", *options).stdout)
    several = launch("generate", *options, "--cluster", head, limit=300)
    assert several.returncode == 0, several.stderr
    assert json.loads(several.stdout)["token_ids"] == alone["token_ids"]
    assert only(HOST) is None, "the hosts end with their engine"


def test_wrong_token_and_missing_head_are_one_line(head: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    refused = launch("cluster", "status", head, "--token", str(token))
    assert refused.returncode == 1
    assert "does not take the token" in refused.stderr
    missing = launch("cluster", "status", f"{HEAD}:1999")
    assert "nothing answers" in missing.stderr
    assert refused.stderr.count("\n") == missing.stderr.count("\n") == 1
    again = launch("cluster", "join", head, "--name", "a")
    assert "named a is in the cluster already" in again.stderr


def test_requests_go_on_while_processes_of_ray_are_killed(head: str, tiny_model: Path) -> None:
    options = ("--model", str(tiny_model), "--tile", "32", "--format", "bf16", "--chunk", "64")
    with Launched("serve", "--name", "several", *options, "--cluster", head) as engine:
        assert engine.line().startswith("several "), engine.stderr
        asyncio.run(_kill_all())
        engine.process.terminate()
        code, _, errors = engine.end(LIMIT)
        assert code == 0, errors


async def _kill_all() -> None:
    async with Client.connect(find_engine("several").endpoint, name="tests", retry=60) as client:

        async def tokens() -> list[int]:
            answer = client.generate(prompt="A list is", max_tokens=24, ignore_eos=True)
            return [token.token async for token in answer]

        first = await tokens()
        for word in (ACTOR, HOST, LIAISON, RAYLET, GCS):
            victim = only(word, other=True)
            assert victim is not None, word
            victim.kill()
            for _ in range(10):
                assert await tokens() == first, word
            # Whatever Ray restarts for that, the same host goes on, or its successor.
            await until(lambda: (actor := only(ACTOR)) is not None and actor.is_running(), LIMIT)
            assert await tokens() == first, word
