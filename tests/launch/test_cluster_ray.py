"""Two machines as two nodes of Ray on this one: answers have one machine's tokens, also while the expert host
and processes of Ray are killed. When both have left the cluster, no process of Ray is left."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import until, wait_until

from launch.cluster import node
from launch.command_line.table import PORTS
from launch.runtime import find_engine
from protocol.client import Client

pytest.importorskip("ray", reason="the extra `cluster` is not installed")
from engines import Launched, launch, start

pytestmark = pytest.mark.timeout(900)

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
LIMIT = 300.0  # seconds for a command, which starts Pythons one after the other
# A busy machine answers Ray's health checks late. A killed process is noticed as soon as without these.
PATIENT = {"RAY_health_check_timeout_ms": "20000", "RAY_gcs_rpc_server_reconnect_timeout_s": "120"}
# The names of the processes, as they are on command lines.
ACTOR, RAYLET, GCS = "ray::HostActor", "raylet/raylet", "gcs/gcs_server"
HOST, LIAISON = "pipeline.cluster.host", "launch.cluster.liaison"

Tokens = Callable[[], Awaitable[list[int]]]


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
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        try:
            yield from _two_machines(address, port)
        finally:
            ended = [launch("cluster", "stop", "--name", name, limit=LIMIT) for name in "ba"]
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert wait_until(lambda: not of_ray(), LIMIT), of_ray()
    assert not [name for name in "ab" if node.ray_folder(name).exists()]


def _two_machines(address: str, port: int) -> Iterator[str]:
    made = launch("cluster", "start", "--address", HEAD, "--port", str(port), "--name", "a", limit=LIMIT)
    assert made.returncode == 0, made.stderr
    assert f"cluster join {address}" in made.stdout
    pipe, words = subprocess.PIPE, ("--address", OTHER, "--port", str(port + PORTS), "--name", "b")
    with start("cluster", "join", address, *words, stdout=pipe, stderr=pipe) as joining:
        # It takes part as soon as its Ray runs; the command looks for some seconds whether it is reached.
        up = wait_until(lambda: joining.poll() is not None or _is_up("b"), LIMIT)
        if up and joining.poll() is None:
            yield address
        _, errors = joining.communicate(timeout=LIMIT)
        assert joining.returncode == 0, errors


def _is_up(name: str) -> bool:
    place = node.read_place(name)
    return place is not None and place.state == "up"


def of_ray() -> list[str]:
    """The processes of Ray that were started here, of whichever title."""
    folders = [str(node.ray_folder(name)) for name in "ab"]
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            if any(folder in words for folder in folders) or is_ours(process, "ray"):
                found.append(words)
        except psutil.Error:
            continue
    return found


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


def adjustment(pid: int) -> int:
    """Returns how much sooner than others the kernel ends a process when memory is short."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def several(head: str, model: Path, kill: Callable[[Tokens, list[int]], Awaitable[None]]) -> None:
    """Serve the model on both machines, compare with one, kill something, and end."""
    options = ("--model", str(model), "--tile", "32", "--format", "bf16", "--chunk", "64")
    request = ("--prompt", "A list is", "--max-tokens", "24", "--ignore-eos", "--json")
    alone = json.loads(launch("generate", *options, *request, limit=LIMIT).stdout)["token_ids"]

    async def ask() -> None:
        async with Client.connect(find_engine("several").endpoint, name="tests", retry=LIMIT) as client:

            async def tokens() -> list[int]:
                answer = client.generate(prompt="A list is", max_tokens=24, ignore_eos=True)
                return [token.token async for token in answer]

            assert await tokens() == alone
            host = only(HOST)
            assert host is not None
            assert host.nice() == psutil.Process().nice()
            assert adjustment(host.pid) <= adjustment(os.getpid())
            await kill(tokens, alone)

    with Launched("serve", "--name", "several", *options, "--cluster", head) as engine:
        assert engine.line().startswith("several "), engine.stderr
        asyncio.run(ask())
        engine.process.terminate()
        code, _, errors = engine.end(LIMIT)
        assert code == 0, errors
        assert "[b] lanes" in errors, "the other machine's log is here too"
    # At the latest after its lease, where nobody was left that could end it.
    assert wait_until(lambda: only(HOST) is None, LIMIT), "the hosts end with their engine"


def test_two_machines_have_the_tokens_of_one_also_when_a_host_is_killed(head: str, tiny_model: Path) -> None:
    async def kill(tokens: Tokens, alone: list[int]) -> None:
        victim = only(HOST)
        assert victim is not None
        victim.kill()
        assert await tokens() == alone, "another host has attached the part"
        successor = only(HOST)
        assert successor is not None
        assert successor != victim

    several(head, tiny_model, kill)


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


@pytest.mark.slow
def test_requests_go_on_while_processes_of_ray_are_killed(head: str, tiny_model: Path) -> None:
    async def kill(tokens: Tokens, alone: list[int]) -> None:
        for word in (ACTOR, HOST, LIAISON, RAYLET, GCS):
            victim = only(word, other=True)
            assert victim is not None, word
            victim.kill()
            for _ in range(10):
                assert await tokens() == alone, word
            # Whatever Ray restarts for that, the same host goes on, or its successor.
            await until(lambda: (actor := only(ACTOR)) is not None and actor.is_running(), LIMIT)
            assert await tokens() == alone, word

    several(head, tiny_model, kill)
