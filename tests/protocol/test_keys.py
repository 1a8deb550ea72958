"""Key files on the real file system: their modes, and the error for each invalid file."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import zmq

from protocol.errors import ProtocolError
from protocol.keys import (
    Admitted,
    binary_key,
    keys_folder,
    new_keys,
    read_client_keys,
    read_engine_keys,
    replace_engine_keys,
    with_client,
    write_client_keys,
    write_engine_keys,
)

ENGINE, CLIENT = new_keys()


@pytest.fixture
def engine_file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.key"
    write_engine_keys(path, ENGINE)
    return path


@pytest.fixture
def client_file(tmp_path: Path) -> Path:
    path = tmp_path / "client.key"
    write_client_keys(path, CLIENT)
    return path


def changed(path: Path, **fields: object) -> Path:
    """The same file with other contents."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


def complaint(path: Path) -> str:
    """What both readers say, one line and no secret."""
    texts = set()
    for read in (read_engine_keys, read_client_keys):
        with pytest.raises(ProtocolError) as caught:
            read(path)
        texts.add(str(caught.value))
    (text,) = texts
    assert "\n" not in text
    return text


def test_keys_survive_the_round_trip_through_files(engine_file: Path, client_file: Path) -> None:
    assert read_engine_keys(engine_file) == ENGINE
    assert read_client_keys(client_file) == CLIENT
    assert ENGINE.clients == {CLIENT.public}
    assert CLIENT.engine == ENGINE.public
    assert ENGINE.secret != CLIENT.secret
    assert new_keys() != (ENGINE, CLIENT)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_a_key_file_is_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_engine_keys(tmp_path / "engine.key", ENGINE)
        write_client_keys(tmp_path / "client.key", CLIENT)
    finally:
        os.umask(before)
    for name in ("engine.key", "client.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_key_file_is_never_overwritten(engine_file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (engine_file, tmp_path / "link"):
        with pytest.raises(ProtocolError, match=r"exists and is not overwritten; remove it first$"):
            write_engine_keys(path, new_keys()[0])
    assert read_engine_keys(engine_file) == ENGINE
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(ProtocolError, match=r"^cannot write /.*: No such file or directory$"):
        write_client_keys(tmp_path / "missing" / "client.key", CLIENT)


def test_no_half_of_a_key_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("protocol.keys.os.fchmod", full)
    with pytest.raises(ProtocolError, match=rf"^cannot write {tmp_path}/key: No space left on device$"):
        write_client_keys(tmp_path / "key", CLIENT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o666])
def test_a_key_that_others_could_read_is_refused(engine_file: Path, mode: int) -> None:
    engine_file.chmod(mode)
    text = complaint(engine_file)
    assert f"open to other users (mode {mode:04o})" in text
    assert text.endswith(f"run: chmod 600 {engine_file}")
    engine_file.chmod(0o400)
    assert read_engine_keys(engine_file) == ENGINE


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_another_owner_s_key_is_refused(engine_file: Path) -> None:
    os.chown(engine_file, 12345, -1)
    assert "belongs to user 12345, not to you" in complaint(engine_file)


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    assert "make keys with: python launch.py keys" in complaint(tmp_path / "missing")
    assert complaint(tmp_path / "pipe").endswith("pipe is not a file")
    assert "folder" in complaint(tmp_path / "folder")
    assert "null" in complaint(tmp_path / "a\0b")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"{", b"[]", b"3", b"{}", b'{"kind": "other"}', b'{"kind": []}', b"[" * 100000],
    ids=range(9),
)
def test_files_that_are_no_key_files_are_refused(engine_file: Path, content: bytes) -> None:
    engine_file.write_bytes(content)
    assert complaint(engine_file) == f"{engine_file} is not a key file; make keys with: python launch.py keys"


def test_wrong_kind_of_key_is_refused(engine_file: Path, client_file: Path) -> None:
    with pytest.raises(ProtocolError, match=r"is a client's \(client.key\); .* an engine's \(engine.key\)$"):
        read_engine_keys(client_file)
    with pytest.raises(ProtocolError, match=r"is an engine's \(engine.key\); .* a client's \(client.key\)$"):
        read_client_keys(engine_file)


@pytest.mark.parametrize("value", [None, 5, "", "short", "ü" * 40, '"' * 40, "#" * 40, "0" * 39, ["0" * 40]])
@pytest.mark.parametrize("name", ["public", "secret", "engine", "clients"])
def test_damaged_key_is_refused(engine_file: Path, client_file: Path, name: str, value: object) -> None:
    path, read = (client_file, read_client_keys) if name == "engine" else (engine_file, read_engine_keys)
    changed(path, **{name: [value] if name == "clients" else value})
    with pytest.raises(ProtocolError) as caught:
        read(path)
    assert str(caught.value) == f'{path}: "{name}" holds something that is no key of 40 characters'


def test_keys_that_are_no_pair_are_refused(engine_file: Path) -> None:
    changed(engine_file, secret=CLIENT.secret.decode())
    with pytest.raises(ProtocolError, match="are not a pair") as caught:
        read_engine_keys(engine_file)
    assert CLIENT.secret.decode() not in str(caught.value)


def test_engine_keys_without_clients_are_refused(engine_file: Path) -> None:
    for clients in ([], None, "x", {}):
        with pytest.raises(ProtocolError, match='"clients" must be a list'):
            read_engine_keys(changed(engine_file, clients=clients))


def test_a_second_client_is_let_in_by_its_public_key(engine_file: Path) -> None:
    other = zmq.curve_keypair()[0]
    changed(engine_file, clients=[CLIENT.public.decode(), other.decode()])
    assert read_engine_keys(engine_file).clients == {CLIENT.public, other}


def test_rights_and_names_survive_the_file(engine_file: Path) -> None:
    assert read_engine_keys(engine_file).admitted == (Admitted(CLIENT.public, "use"),)
    keys, added = with_client(ENGINE, "admin", "anna")
    link = engine_file.with_name("link")
    link.symlink_to(engine_file)
    replace_engine_keys(link, keys)
    assert link.is_symlink()
    assert stat.S_IMODE(engine_file.stat().st_mode) == 0o600
    assert read_engine_keys(engine_file).admitted == (
        Admitted(CLIENT.public, "use"),
        Admitted(added.public, "admin", "anna"),
    )
    assert (added.engine, len({added.public, added.secret, CLIENT.public})) == (ENGINE.public, 3)
    assert sorted(path.name for path in engine_file.parent.iterdir()) == ["engine.key", "link"]


@pytest.mark.parametrize(
    "entry",
    [
        {"right": "root"},
        {"right": None},
        {"right": ["use"]},
        {"name": "a/b"},
        {"name": "engine"},
        {"name": "\x1b[2J"},
        {"name": 5},
        {"since": 5},
    ],
)
def test_a_client_with_an_unknown_right_or_name_is_refused(engine_file: Path, entry: dict) -> None:
    changed(engine_file, clients=[{"key": CLIENT.public.decode()} | entry])
    with pytest.raises(ProtocolError, match='"clients" holds something other than keys') as caught:
        read_engine_keys(engine_file)
    assert "\n" not in str(caught.value)


def test_a_key_without_characters_or_twice_is_refused(engine_file: Path) -> None:
    with pytest.raises(ProtocolError, match="no key of 40 characters"):
        read_engine_keys(changed(engine_file, clients=[{"right": "use"}]))
    key = CLIENT.public.decode()
    with pytest.raises(ProtocolError, match='a key is in "clients" twice'):
        read_engine_keys(changed(engine_file, clients=[key, {"key": key, "right": "admin"}]))


def test_a_secret_is_not_in_what_is_logged_of_keys() -> None:
    for keys in (ENGINE, CLIENT):
        assert keys.secret.decode() not in repr(keys)
        assert keys.public.decode() in repr(keys)


def test_keys_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert keys_folder() == tmp_path / "tandem" / "keys"
    for not_a_place in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", not_a_place)
        assert keys_folder() == Path.home() / ".config" / "tandem" / "keys"


def test_the_bytes_of_a_key() -> None:
    assert binary_key(b"0" * 40) == bytes(32)
    assert binary_key(b"%nSc0" * 8) == b"\xff" * 32  # 2**32 - 1, the largest of five digits
    for wrong in (b"#" * 40, b'"' * 40, b"0" * 39):
        with pytest.raises(ValueError, match=r"^not Z85$"):
            binary_key(wrong)
