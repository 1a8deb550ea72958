"""`launch.py keys`: makes the key files of an engine and of its clients over tcp, lists and revokes them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from launch.command_line.options import Options
from launch.errors import WrongUsage
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import show
from launch.terminal.tables import make_table, render
from protocol.errors import ProtocolError
from protocol.keys import (
    CLIENT_FILE,
    ENGINE_FILE,
    RIGHTS,
    EngineKeys,
    keys_folder,
    new_keys,
    read_engine_keys,
    replace_engine_keys,
    with_client,
    write_client_keys,
    write_engine_keys,
)
from protocol.private_files import private_directory
from protocol.program import COMMAND
from protocol.visible import visible

ADVICE = """\
{engine}
    stays here, with the engine: {command} serve --listen tcp://ADDRESS:PORT{here}
"""
CLIENT_ADVICE = """\
{client}
    is for the client: move it to that machine, as ~/.config/tandem/keys/{default} or a file for --key, mode
    0600, over a private connection (scp, say). There: {command} chat --connect tcp://HOST:PORT
Every program with a copy of {name} can {right}.
"""
MAY = {
    "use": "use the engine",
    "tune": "use the engine, and set its policy for everybody",
    "admin": "use the engine, set its policy, calibrate it, and read its paths and counters",
}


async def keys(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage where the files exist already, cannot be made, or have no such client."""
    written = options.written
    folder: Path = written.get("out", keys_folder())
    right: str = written.get("right", RIGHTS[0])
    try:
        if "list" in written:
            show(table(read_engine_keys(folder / ENGINE_FILE)), rendered=True)
        elif "remove" in written:
            removed = remove_client(folder, written["remove"])
            show(f"{removed} is revoked: an engine that runs with {folder / ENGINE_FILE} cuts it off now\n")
        elif "add" in written:
            show(_advice(add_client(folder, written["add"], right), right))
        else:
            engine, client = make_keys(folder, right)
            here = "" if folder == keys_folder() else f" --key {engine}"
            show(ADVICE.format(engine=engine, here=here, command=COMMAND) + _advice(client, right))
    except ProtocolError as e:
        raise WrongUsage(str(e)) from None
    return 0


def _advice(client: Path, right: str) -> str:
    words = {"name": client.name, "default": CLIENT_FILE, "right": MAY[right], "command": COMMAND}
    return CLIENT_ADVICE.format(client=client, **words)


def table(keys: EngineKeys) -> str:
    """The clients that an engine admits."""
    shown = make_table("client", "right", "public key")
    for client in keys.admitted:
        shown.add_row(client.name or "-", client.right, client.key.decode())
    return render(shown)


def add_client(folder: Path, name: str, right: str) -> Path:
    """Write a key file for a further client into the folder of the engine's, and admit it there. Raises
    ProtocolError where the name is taken."""
    engine_path, client_path = folder / ENGINE_FILE, folder / f"{name}.key"
    keys = read_engine_keys(engine_path)
    if name in (client.name for client in keys.admitted):
        raise ProtocolError(f"{engine_path} has a client {name} already; give another name")
    engine, client = with_client(keys, right, name)
    write_client_keys(client_path, client)
    try:
        replace_engine_keys(engine_path, engine)
    except ProtocolError:
        client_path.unlink()
        raise
    return client_path


def remove_client(folder: Path, which: str) -> str:
    """Revoke a client, by its name or public key. Returns how it is called. Raises ProtocolError."""
    path = folder / ENGINE_FILE
    keys = read_engine_keys(path)
    removed = [client for client in keys.admitted if which and which in (client.name, client.key.decode())]
    kept = tuple(client for client in keys.admitted if client not in removed)
    if not removed:
        raise ProtocolError(f"{path} has no client {visible(which)!r}; see {COMMAND} keys --list")
    if not kept:
        raise ProtocolError(f"{which} is the only client of {path}; first --add the one that replaces it")
    replace_engine_keys(path, replace(keys, admitted=kept))
    return removed[0].name or removed[0].key.decode()


def make_keys(folder: Path, right: str) -> tuple[Path, Path]:
    """Write both key files or none, into a private folder, made if missing. Raises ProtocolError."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        made = private_directory(missing)
        made.chmod(0o700)  # a umask may have taken more away
    try:
        private_directory(folder)
    except ProtocolError:
        raise ProtocolError(
            f"{folder} is not a folder that you alone can enter (mode 0700); name another, or a new one"
        ) from None
    engine_path, client_path = folder / ENGINE_FILE, folder / CLIENT_FILE
    for path in (engine_path, client_path):
        if os.path.lexists(path):
            raise ProtocolError(f"{path} exists and is not overwritten; name another folder with --out")
    engine, client = new_keys(right, Path(CLIENT_FILE).stem)
    write_engine_keys(engine_path, engine)
    try:
        write_client_keys(client_path, client)
    except ProtocolError:
        engine_path.unlink()
        raise
    return engine_path, client_path
