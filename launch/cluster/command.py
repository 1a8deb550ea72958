"""`launch.py cluster`: this machine's part in a cluster. `start` makes it the head, `join` one of the others,
`status` shows the machines, `stop` ends its part. All of it can be done again: a machine that has stopped
joins again."""

from __future__ import annotations

import asyncio
import re
import socket
from argparse import ArgumentTypeError
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.cluster import node
from launch.cluster.cluster import Cluster, differing, unlike
from launch.cluster.machine import versions
from launch.cluster.node import NodeConfig
from launch.command_line.options import Options
from launch.command_line.table import DEFAULT_PORT, PORTS
from launch.command_line.values import head_address
from launch.errors import LaunchError, WrongUsage
from launch.terminal.format import rate
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from launch.terminal.output import announce, print_json
from launch.terminal.tables import Column, Table, print_parts
from protocol.program import COMMAND
from shm.segment import byte_size

ANYWHERE = "192.0.2.1"  # an address of documentation, on the way to which the default route leads
LOOK_SECONDS = 1.0
GIVEN_UP_SECONDS = 7.0  # after which the head has given up a machine that it does not reach (`node.TUNED`)
REACHED_LIMIT = 60.0  # seconds to stay up for so long: on a busy machine, Ray or the head may start again
POLL_SECONDS = 0.2

Row = tuple[str, dict[str, Any]]


async def cluster(options: Options, interrupts: Interrupts) -> int:
    """Do what the words say. Raises WrongUsage, LaunchError."""
    actions: dict[str, Callable[[Options, Interrupts], Awaitable[int]]] = {
        "start": _start,
        "join": _join,
        "status": _status,
        "stop": _stop,
    }
    words = options.words
    if not words or words[0] not in actions:
        what = f"{words[0]!r} is none of them" if words else "say what to do"
        raise WrongUsage(f"cluster: {what}: start, join HEAD:PORT, status or stop")
    most = 2 if words[0] in ("join", "status") else 1
    if len(words) > most or (words[0] == "join" and len(words) < 2):
        raise WrongUsage(f"write it as cluster {words[0]}{' HEAD:PORT' if words[0] == 'join' else ''}")
    return await actions[words[0]](options, interrupts)


async def _start(options: Options, interrupts: Interrupts) -> int:
    node.check_ray()
    token = (options.written.get("token") or node.token_path()).absolute()
    made = await asyncio.to_thread(node.make_token, token)
    address = options.written.get("address") or node.own_address(ANYWHERE)
    config = _config(options, address, token)
    await _run(config)
    notice(f"machine {config.name} is the head of a cluster at {config.cluster}")
    notice(
        f"its token is {'new, in' if made else 'in'} {token}: whoever has it runs programs on every machine"
    )
    announce(f"{COMMAND} cluster join {config.cluster}")
    notice("run the line above on each other machine, with a copy of the token's file in the same place")
    return await _stay(options, interrupts, config)


async def _join(options: Options, interrupts: Interrupts) -> int:
    head = _head(options.words[1])
    there = Cluster.of(options, head)
    nodes = await there.nodes()
    address = options.written.get("address") or node.own_address(head.rpartition(":")[0])
    config = _config(options, address, there.token.absolute(), head)
    if any(each["alive"] and each["name"] == config.name for each in nodes):
        raise WrongUsage(
            f"a machine named {config.name} is in the cluster already: give another --name, or stop it there"
        )
    for each in [each for each in nodes if each["alive"] and each["versions"]]:
        if words := unlike(dict(zip(versions(), each["versions"].split("_"), strict=False))):
            raise WrongUsage(
                f"another version than on machine {each['name']} ({words}): install the same here"
            )
    await _run(config)
    await _check_reached(there, config)
    notice(f"machine {config.name} has joined the cluster at {head} as {config.address}")
    return await _stay(options, interrupts, config)


async def _check_reached(there: Cluster, config: NodeConfig) -> None:
    """Raises LaunchError where the head gives this machine up again and again, which has reached the head
    itself."""
    loop = asyncio.get_running_loop()
    up_since = began = loop.time()
    while loop.time() - began < REACHED_LIMIT:
        await asyncio.sleep(POLL_SECONDS)
        place = node.read_place(config.name)
        if place is None or place.state != "up":
            up_since = loop.time()
        elif loop.time() - up_since > GIVEN_UP_SECONDS:
            with suppress(LaunchError):  # the head itself is started again
                if any(each["alive"] and each["name"] == config.name for each in await there.nodes()):
                    return
    await asyncio.to_thread(node.stop, config.name)
    raise LaunchError(
        f"the head does not reach this machine at {config.address}, ports {config.port} to"
        f" {config.port + PORTS - 1}: open them in the firewall, or give another --address"
    )


async def _stop(options: Options, interrupts: Interrupts) -> int:
    here = _named(options)
    for name in here:
        await asyncio.to_thread(node.stop, name)
        notice(f"machine {name} has left its cluster, and Ray has ended on it")
    return 0


async def _status(options: Options, interrupts: Interrupts) -> int:
    places = node.local_nodes()
    if len(options.words) < 2 and not places:
        raise WrongUsage(f"this machine is in no cluster: {COMMAND} cluster start, or cluster join HEAD:PORT")
    head = _head(options.words[1]) if len(options.words) > 1 else places[0].config.cluster
    there = Cluster.of(options, head)
    alive = {each["name"] or each["address"]: each for each in await there.nodes() if each["alive"]}
    looks = await there.look(None, again=False) if there.node else {}
    wrong = differing(looks)
    if "json" in options.written:
        print_json(
            {"head": head, "machines": {name: each | looks.get(name, {}) for name, each in alive.items()}}
        )
        return 1 if wrong else 0
    print_parts(_table([(name, each | looks.get(name, {})) for name, each in sorted(alive.items())]))
    for why in wrong.values():
        notice(why)
    return 1 if wrong else 0


def _table(rows: list[Row]) -> Table[Row]:
    return Table(
        [
            Column[Row]("machine", lambda row: row[0], text=True, style="bold"),
            Column("address", lambda row: row[1]["address"]),
            Column("cores", lambda row: row[1].get("cores", "-")),
            Column("memory\nfree", lambda row: _bytes(row[1].get("memory"))),
            Column("/dev/shm\nfree", lambda row: _bytes(row[1].get("shm"))),
            Column("reads", lambda row: rate(row[1]["rate"]) if row[1].get("rate") else "-"),
            Column("kernels", lambda row: row[1].get("variant", "-")),
            Column("takes\npart", lambda row: "yes" if row[1]["part"] else "no"),
        ],
        rows,
    )


def _bytes(size: int | None) -> str:
    return "-" if size is None else byte_size(size)


def _config(options: Options, address: str, token: Path, head: str = "") -> NodeConfig:
    name = (
        options.written.get("name") or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().split(".")[0])[:24]
    )
    port, same = options.written.get("port", DEFAULT_PORT), "_".join(versions().values())
    return NodeConfig(name or "machine", address, port, str(token), head, same)


def _head(text: str) -> str:
    try:
        return head_address(text)
    except ArgumentTypeError as e:
        raise WrongUsage(str(e)) from None


async def _run(config: NodeConfig) -> None:
    notice(f"starting Ray on {config.address}, ports {config.port} to {config.port + PORTS - 1}")
    await asyncio.to_thread(node.start, config)


async def _stay(options: Options, interrupts: Interrupts, config: NodeConfig) -> int:
    """With --foreground, returns after a signal. Raises LaunchError where Ray has ended for good."""
    if "foreground" not in options.written:
        return 0
    try:
        while node.runs(config.name):  # noqa: ASYNC110  # it is another process, which sets no Event
            await asyncio.sleep(LOOK_SECONDS)
        raise LaunchError(f"machine {config.name} has left its cluster")
    except asyncio.CancelledError:
        if not interrupts.received:
            raise
        await asyncio.to_thread(node.stop, config.name)
        notice(f"machine {config.name} has left its cluster: {interrupts.received}")
        return 0


def _named(options: Options) -> list[str]:
    """Returns the machine of --name, or the only one here. Raises WrongUsage."""
    found = node.names()
    if name := options.written.get("name"):
        return [name]
    if not found:
        raise WrongUsage("this machine is in no cluster")
    if len(found) > 1:
        raise WrongUsage(f"several machines run here: choose one with --name: {', '.join(found)}")
    return found
