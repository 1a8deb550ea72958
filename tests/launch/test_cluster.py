"""The commands of several machines, without Ray: what goes wrong is one line, and nothing stays behind."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import Any, cast

import pytest
from engines import ROOT, launch

from launch.cluster import command, node
from launch.cluster.cluster import Cluster, differing
from launch.cluster.machine import Echo, call_echo, known_rate, look, versions
from launch.cluster.node import NodeConfig, NodePlace
from launch.errors import LaunchError, WrongUsage


def test_token_is_readable_by_its_user_alone(tmp_path: Path) -> None:
    token = tmp_path / "new" / "token"
    assert node.make_token(token)
    assert not node.make_token(token), "the cluster keeps its token"
    assert token.stat().st_mode & 0o777 == 0o600
    node.check_token(token)
    token.chmod(0o644)
    with pytest.raises(WrongUsage, match="chmod 600"):
        node.check_token(token)
    with pytest.raises(WrongUsage, match="copy the head's file"):
        node.check_token(tmp_path / "missing")


def test_other_or_missing_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f'"ray>={node.RAY},<' in (ROOT / "pyproject.toml").read_text()
    for found in ("(not installed)", "1.2.3"):
        monkeypatch.setattr(node, "installed", lambda package, found=found: found)
        with pytest.raises(WrongUsage, match=rf"need Ray {node.RAY} \(here: .* pip install 'ray=="):
            node.check_ray()


def test_port_that_is_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WrongUsage, match=f"port {port} is in use.*--port"):
            node.check_ports(NodeConfig("m", "127.0.0.2", port, "token"))


@pytest.mark.parametrize("reached", [True, False])
async def test_machine_whose_ray_starts_again_while_it_joins_has_joined(
    monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    config = NodeConfig("m", "127.0.0.2", 1, "token")
    states = chain(["up", "again", "again"], repeat("up"))
    stopped = list[str]()

    class Head:
        """Is started again itself meanwhile."""

        answers = chain([LaunchError("nothing answers")], repeat([{"name": "m", "alive": reached}]))

        async def nodes(self) -> Any:
            answer = next(self.answers)
            if isinstance(answer, LaunchError):
                raise answer
            return answer

    monkeypatch.setattr(command, "GIVEN_UP_SECONDS", 0.0)
    monkeypatch.setattr(command, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(command, "REACHED_LIMIT", 3600.0 if reached else 0.1)
    monkeypatch.setattr(node, "read_place", lambda name: NodePlace(config, 1, next(states)))
    monkeypatch.setattr(node, "stop", stopped.append)
    with nullcontext() if reached else pytest.raises(LaunchError, match="open them in the firewall"):
        await command._check_reached(cast(Cluster, Head()), config)
    assert stopped == ([] if reached else ["m"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("cluster", "start, join HEAD:PORT, status or stop"),
        ("cluster begin", "'begin' is none of them"),
        ("cluster join", "cluster join HEAD:PORT"),
        ("cluster stop", "this machine is in no cluster"),
        ("cluster start --address 127.0.0.1", "other machines do not reach this one"),
        ("serve --replicas 1", "--replicas belongs to --cluster"),
        ("serve --cluster 127.0.0.1:6379 --host-ports 7310-7300", "the first port first"),
    ],
)
def test_wrong_usage_is_one_line(arguments: str, words: str) -> None:
    ended = launch(*arguments.split())
    assert ended.returncode == 2
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_machine_says_what_it_has_and_measures_its_memory_once() -> None:
    seen = look(None, again=False)
    assert seen["versions"] == versions()
    assert seen["model"]
    assert not look("/nowhere/model", again=False)["model"]
    assert seen["rate"] == known_rate(seen["cpu"], seen["cores"], again=False)
    assert known_rate(seen["cpu"], seen["cores"], again=True) >= seen["rate"]


def test_machines_of_another_version_are_told_apart() -> None:
    ours = {"versions": versions()}
    other = {"versions": versions() | {"kernels": -1}}
    wrong = differing({"a": ours, "b": other, "c": {"failure": "no answer"}})
    assert list(wrong) == ["b", "c"]
    assert "kernels -1" in wrong["b"]


def test_way_to_a_machine_is_measured() -> None:
    trip, rate = call_echo("127.0.0.1", Echo("127.0.0.1").port())
    assert trip > 0
    assert rate > 0


def test_way_is_measured_at_a_port_that_a_host_may_take() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        assert first < Echo("127.0.0.1", (first, first + 20)).port() <= first + 20
        with pytest.raises(OSError, match="in use"):
            Echo("127.0.0.1", (first, first))
