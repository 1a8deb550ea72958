"""`launch.py keys`: makes the key files that clients over tcp, and the engine that takes them, need."""

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
from protocol.sockets import private_directory

ADVICE = """\
{engine}
    stays here, with the engine: python launch.py serve --listen tcp://ADDRESS:PORT{here}
{client}
    is for the client: move it to that machine, as ~/.config/tandem/keys/{name} or wherever --key says, mode
    0600, by a way that nobody else can read (scp, say). There: python launch.py chat --connect tcp://HOST:PORT
Whoever has a copy of {name} may use the engine.
"""


async def keys(options: Options, interrupts: Interrupts) -> int:
    """Raises WrongUsage where there are such files already, or none can be made."""
    folder: Path = options.written.get("out", keys_folder())
    try:
        engine, client = make_keys(folder)
    except ProtocolError as e:
        raise WrongUsage(str(e)) from None
    here = "" if folder == keys_folder() else f" --key {engine}"
    show(ADVICE.format(engine=engine, client=client, name=CLIENT_FILE, here=here))
    return 0


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Write an engine's and a client's new key file into a folder that is this user's alone, and is made if
    it is missing. Both or none. Raises ProtocolError, also where one of them is there already."""
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
            raise ProtocolError(f"{path} is there already and stays as it is; name another folder with --out")
    engine, client = new_keys()
    write_engine_keys(engine_path, engine)
    try:
        write_client_keys(client_path, client)
    except ProtocolError:
        engine_path.unlink()
        raise
    return engine_path, client_path
