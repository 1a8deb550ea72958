"""`launch.py keys`: makes the key files of an engine and of its clients over tcp."""

from __future__ import annotations

import os
from pathlib import Path

from launch.command_line.options import Options
from launch.errors import WrongUsage
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import show
from protocol.errors import ProtocolError
from protocol.keys import (
    CLIENT_FILE,
    ENGINE_FILE,
    keys_folder,
    new_keys,
    write_client_keys,
    write_engine_keys,
)
from protocol.private_files import private_directory

ADVICE = """\
{engine}
    stays here, with the engine: python launch.py serve --listen tcp://ADDRESS:PORT{here}
{client}
    is for the client: move it to that machine, as ~/.config/tandem/keys/{name} or a file for --key, mode
    0600, over a private connection (scp, say). There: python launch.py chat --connect tcp://HOST:PORT
Every program with a copy of {name} can use the engine.
"""


async def keys(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage where the files exist already, or cannot be made."""
    folder: Path = options.written.get("out", keys_folder())
    try:
        engine, client = make_keys(folder)
    except ProtocolError as e:
        raise WrongUsage(str(e)) from None
    here = "" if folder == keys_folder() else f" --key {engine}"
    show(ADVICE.format(engine=engine, client=client, name=CLIENT_FILE, here=here))
    return 0


def make_keys(folder: Path) -> tuple[Path, Path]:
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
    engine, client = new_keys()
    write_engine_keys(engine_path, engine)
    try:
        write_client_keys(client_path, client)
    except ProtocolError:
        engine_path.unlink()
        raise
    return engine_path, client_path
