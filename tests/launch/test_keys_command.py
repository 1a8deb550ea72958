"""`launch.py keys`, and engines that are reached over tcp."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import Launched, run
from free_port import free_port

from launch.cli import main
from protocol.keys import new_keys, read_client_keys, read_engine_keys, write_client_keys, write_engine_keys

Complaint = Callable[..., str]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate configuration folder: the default place of this test's keys."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "tandem" / "keys"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_keys_are_made_and_explained(keys: Path, capfd: pytest.CaptureFixture[str], mask: int) -> None:
    before = os.umask(mask)
    try:
        assert main(["keys"]) == 0
    finally:
        os.umask(before)
    engine, client = read_engine_keys(keys / "engine.key"), read_client_keys(keys / "client.key")
    assert engine.clients == {client.public}
    assert client.engine == engine.public
    assert mode(keys) == mode(keys.parent) == mode(keys.parent.parent) == 0o700
    assert mode(keys / "engine.key") == mode(keys / "client.key") == 0o600
    out, err = capfd.readouterr()
    assert err == ""
    for word in (
        f"{keys}/engine.key",
        f"{keys}/client.key",
        "serve --listen tcp://",
        "chat --connect tcp://",
    ):
        assert word in out
    assert "--key" not in out.split("client.key")[0]
    for secret in (engine.secret, client.secret):
        assert secret.decode() not in out


def test_keys_are_written_to_the_folder_of_out(keys: Path, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "--out", "a/b"]) == 0
    assert "serve --listen tcp://ADDRESS:PORT --key a/b/engine.key" in capfd.readouterr().out
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["client.key", "engine.key"]
    assert not keys.exists()


def test_keys_are_never_overwritten(keys: Path, complaint: Complaint) -> None:
    keys.mkdir(parents=True)
    keys.chmod(0o700)
    for name in ("client.key", "engine.key"):  # whichever is there, neither is made
        (keys / name).touch()
        assert complaint("keys").startswith(f"{keys / name} exists and is not overwritten")
        assert [(p.name, p.stat().st_size) for p in keys.iterdir()] == [(name, 0)]
        (keys / name).unlink()


def test_clients_are_added_listed_and_revoked(keys: Path, complaint: Complaint, capfd) -> None:
    assert main(["keys", "--right", "tune"]) == 0
    assert main(["keys", "--add", "anna", "--right", "admin"]) == 0
    assert main(["keys", "--add", "b.2"]) == 0
    anna = read_client_keys(keys / "anna.key").public.decode()
    assert f"{keys}/b.2.key" in capfd.readouterr().out
    assert main(["keys", "--list"]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[1:]] == [["client", "tune"], ["anna", "admin"], ["b.2", "use"]]
    assert rows[2][2] == anna
    assert f"{keys}/engine.key has a client anna already" in complaint("keys", "--add", "anna")
    assert "has no client 'dora'" in complaint("keys", "--remove", "dora")
    assert main(["keys", "--remove=" + anna]) == 0
    assert main(["keys", "--remove", "client"]) == 0
    assert [client.name for client in read_engine_keys(keys / "engine.key").admitted] == ["b.2"]
    capfd.readouterr()
    assert "is the only client" in complaint("keys", "--remove", "b.2")
    assert mode(keys / "engine.key") == mode(keys / "b.2.key") == 0o600
    assert sorted(p.name for p in keys.iterdir()) == ["anna.key", "b.2.key", "client.key", "engine.key"]


def test_keys_are_not_written_to_a_folder_that_is_not_private(tmp_path: Path, complaint: Complaint) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "file").touch()
    for name in ("open", "file"):
        line = complaint("keys", "--out", str(tmp_path / name))
        assert line.startswith(f"{tmp_path / name} is not a folder that you alone can enter")
    assert list((tmp_path / "open").iterdir()) == []
    assert "cannot create" in complaint("keys", "--out", str(tmp_path / "file" / "below"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("serve --listen 127.0.0.1:5000", "write it as tcp://ADDRESS:PORT"),
        ("serve --listen ipc:///tmp/a", "write it as tcp://ADDRESS:PORT"),
        ("serve --listen tcp://127.0.0.1", "write it as tcp://ADDRESS:PORT"),
        ("serve --listen tcp://localhost:5000", "an IP address of this machine"),
        ("serve --listen tcp://127.0.0.1:0", "1 to 65535"),
        ("serve --listen tcp://127.0.0.1:65536", "write it as tcp://ADDRESS:PORT"),
        ("serve --key a", "--key belongs to --listen"),
        ("generate --prompt a --key a", "--key is for tcp"),
        ("chat --connect name --key a", "--key is for tcp"),
        ("generate --prompt a --connect --key a", "--key is for tcp"),
        ("generate --prompt a --listen tcp://127.0.0.1:5000", "--listen does not belong to generate"),
        ("generate --prompt a --connect tcp://host", "or tcp://HOST:PORT"),
        ("generate --prompt a --connect tcp://host:0", "or tcp://HOST:PORT"),
        ("generate --prompt a --connect ipc:///tmp/a", "or tcp://HOST:PORT"),
        ("generate --prompt a --connect tcp://host:5000 --policy fiddler", "--policy does not change"),
        ("--model a keys", "--model does not belong to keys"),
        ("--key a keys", "--key does not belong to keys"),
        ("keys --json", "--json does not belong to keys"),
        ("keys --add ../a", "'../a' is not a name"),
        ("keys --add engine", "'engine' is not a name"),
        ("keys --add a --list", "give one"),
        ("keys --list --right use", "--right is of a new client"),
        ("keys --right root", "unknown value 'root'"),
        ("keys --add a", "the key file"),
        ("generate --prompt a --right use", "--right does not belong to generate"),
    ],
)
def test_wrong_usage_is_one_line(arguments: str, words: str, keys: Path, complaint: Complaint) -> None:
    assert words in complaint(*arguments.split())
    assert not keys.exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("serve --listen tcp://127.0.0.1:{port}", "engine.key"),
        ("generate --prompt a --connect tcp://127.0.0.1:{port}", "client.key"),
    ],
)
def test_tcp_requires_keys(command, name, keys, port, complaint, tmp_path) -> None:
    arguments = command.format(port=port).split()
    assert f"the key file {keys / name} does not exist; make keys with: python launch.py keys" in complaint(
        *arguments
    )
    arguments += ["--key", str(tmp_path / "key")]
    assert f"the key file {tmp_path / 'key'} does not exist" in complaint(*arguments)
    engine, client = new_keys()
    write_client_keys(tmp_path / "client.key", client)
    write_engine_keys(tmp_path / "engine.key", engine)
    (tmp_path / "key").symlink_to(tmp_path / {"engine.key": "client.key"}.get(name, "engine.key"))
    line = complaint(*arguments)
    assert "; use a" in line
    assert f"({name})" in line
    (tmp_path / "client.key").chmod(0o640)
    (tmp_path / "engine.key").chmod(0o604)
    assert "is open to other users (mode 06" in complaint(*arguments)


def test_address_that_cannot_be_bound_is_refused(keys: Path, taken: int, complaint: Complaint, capfd) -> None:
    assert main(["keys"]) == 0
    capfd.readouterr()
    for address, reason in (
        (f"127.0.0.1:{taken}", "Address already in use"),
        ("192.0.2.1:5000", "Cannot assign requested address"),
    ):
        line = complaint("serve", "--listen", f"tcp://{address}")
        assert line == f"--listen tcp://{address}: cannot be bound: {reason}"


def test_an_engine_is_used_from_another_machine(keys: Path, tiny_model: Path, port: int, tmp_path) -> None:
    """Simulated on one machine: over tcp, with keys from another folder."""
    assert main(["keys"]) == 0
    elsewhere = tmp_path / "elsewhere.key"
    (keys / "client.key").rename(elsewhere)
    where = f"tcp://127.0.0.1:{port}"
    given = ("--connect", where, "--key", str(elsewhere))
    prompt = ("generate", "--prompt-tokens", "1,2,3", "--max-tokens", "4", "--ignore-eos", "--json")
    with Launched("serve", "--model", str(tiny_model), "--listen", where, "--workers", "1") as engine:
        name = engine.line().split()[0]
        assert f"clients with a key are taken at {where}" in engine.stderr
        unknown = tmp_path / "unknown.key"
        write_client_keys(unknown, new_keys()[1])
        # Not answered, which takes seconds: beside the commands that are.
        with Launched(*prompt, "--connect", where, "--key", str(unknown)) as refused:
            answers = []
            for to in (given, ("--connect", name)):
                code, out, err = run(*prompt, *to)
                assert (code, err) == (0, "")
                answers.append(json.loads(out)["token_ids"])
            assert answers[0] == answers[1]
            assert len(answers[0]) == 4
            text = tmp_path / "ids.json"
            text.write_text("[1, 2, 3, 4]")
            assert run("score", "--tokens", str(text), "--json", *given)[0] == 0
            code, out, err = refused.end()
        assert (code, out) == (1, "")
        assert where in err
        assert err.count("\n") == 1
        engine.send(signal.SIGTERM)
        assert engine.end()[0] == 0
