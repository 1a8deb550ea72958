"""A cluster as its engines and commands see it: who is in it, what each machine has, and the expert hosts of
an engine, placed by the liaison, a child process that is started again when it ends. Imports no ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.cluster.machine import versions
from launch.cluster.node import NodePlace, check_ray, check_token, local_nodes, ray_environment, token_path
from launch.command_line.options import Options
from launch.errors import LaunchError, WrongUsage
from launch.processes.trials import Trial, TrialFailed, trial
from protocol.program import COMMAND

LIAISON = "launch.cluster.liaison"
REACH_LIMIT = 3.0  # seconds for a tcp connection
NODES_LIMIT, LOOK_LIMIT = 60.0, 120.0  # seconds for the liaison, which has limits of its own


@dataclass(frozen=True)
class Cluster:
    """A cluster that answers. `node`: this machine in it; None where `cluster join` has not been run here."""

    address: str  # of its head: ADDRESS:PORT
    token: Path
    node: NodePlace | None

    @classmethod
    def of(cls, options: Options, address: str) -> Cluster:
        """Returns the cluster at this address. Raises WrongUsage where its packages or its token are
        missing."""
        check_ray()
        token = options.written.get("token") or token_path()
        check_token(token)
        nodes = local_nodes(address)
        return cls(address, token, nodes[0] if nodes else None)

    async def nodes(self) -> list[dict[str, Any]]:
        """Returns its machines, also dead ones, as `liaison.nodes_of`. Raises LaunchError: nobody answers
        there, or not to this token."""
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(REACH_LIMIT):
                _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
        except (OSError, TimeoutError):
            raise LaunchError(
                f"nothing answers at {self.address}: no head runs there (`{COMMAND} cluster start`),"
                " or a firewall is in between"
            ) from None
        return list(await self._ask("nodes", NODES_LIMIT))

    async def look(
        self, model: Path | None, again: bool, ports: tuple[int, int] = (0, 0)
    ) -> dict[str, dict[str, Any]]:
        """Returns what its machines have, by name, as `liaison`'s look; `again`: with the way to each, at one
        of these ports (0: any), all of it measured again. Raises LaunchError, WrongUsage."""
        await self.nodes()
        if self.node is None:
            raise WrongUsage(f"this machine is not in the cluster: run {COMMAND} cluster join {self.address}")
        told = {"model": None if model is None else str(model), "again": again, "ports": ports}
        return dict(await self._ask("look", LOOK_LIMIT, **told))

    @asynccontextmanager
    async def liaison(self, what: str, **config: Any) -> AsyncIterator[Trial]:
        """The liaison, during the block. Raises TrialFailed."""
        told = {"what": what, "address": self.address, "own": self.node.config.address if self.node else ""}
        async with trial(LIAISON, told | config, env=ray_environment(str(self.token))) as process:
            yield process

    async def _ask(self, what: str, limit: float, **config: Any) -> Any:
        try:
            async with self.liaison(what, **config) as process:
                answer = await process.result(limit)
        except TrialFailed as e:
            raise LaunchError(f"the cluster at {self.address} does not answer: {e}") from None
        if isinstance(answer, dict) and isinstance(answer.get("failure"), str):
            raise LaunchError(self._failure(answer["failure"]))
        return answer

    def _failure(self, why: str) -> str:
        if why == "wrong token":
            return f"the head at {self.address} does not take the token in {self.token}: copy its file there"
        return f"the cluster at {self.address} does not answer: {why}"


def differing(machines: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns why machines cannot take part, by name: they do not answer, or run another version."""
    found = {}
    for name, machine in machines.items():
        if failure := machine.get("failure"):
            found[name] = f"machine {name} does not answer as it should: {failure}"
        elif words := unlike(machine["versions"]):
            found[name] = f"machine {name} runs another version ({words}): install the same there"
        elif machine.get("variant") == "portable":
            found[name] = f"machine {name} has only the portable kernels, whose sums have other bits"
    return found


def unlike(theirs: dict[str, str]) -> str:
    """Returns which of a machine's versions differ from those here; "" of equal ones."""
    ours = versions()
    other = [key for key in ours if theirs.get(key) != ours[key]]
    return ", ".join(f"{key} {theirs.get(key)} instead of {ours[key]}" for key in other)
