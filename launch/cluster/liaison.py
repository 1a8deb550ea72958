"""Process entry: the liaison, the one process of an engine or a command that knows Ray. It is a child of the
one that asks (`launch/cluster/cluster.py`), writes one JSON value a line, and ends with it. By `what` in its
configuration:

nodes    the machines of the cluster: one line, a list. Needs no Ray on this machine.
look     what each machine has (`machine.look`), and the way to it: one line, a map by name
place    places expert hosts and tells, at each change, what they say about themselves; ends them when asked
by a line
         on standard input. A machine that Ray calls dead stays as it was last said to be: whether its host
         still answers is not Ray's to know.

A failure is one line {"failure": why}. Only public keys and endpoints pass through Ray."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

import ray
from ray.exceptions import ActorDiedError, AuthenticationError, GetTimeoutError, RayError

from launch.cluster.machine import Echo, HostActor, call_echo, look
from launch.cluster.node import LABEL, RESOURCE, VERSIONS
from launch.cluster.plan import StandIns

NODES_LIMIT = 5.0  # seconds
LOOK_LIMIT = 60.0  # seconds for all machines; Ray starts a Python on each
STOP_LIMIT = 20.0  # seconds for hosts to end
REACH_LIMIT = 2.0  # seconds for a host to take a connection
WATCH_LIMIT = 20.0  # seconds for an actor's answer, which takes 5 where nothing changes
ADOPT_SECONDS = 30.0  # that a machine is lost before a spare one loads its part
LOST_SECONDS = 60.0  # without one, though its machine is there
PAUSE_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between looks at who is alive
SHARE = 0.001  # of a machine's resource: it says who takes part, and limits nothing


class Answers:
    """Standard output, on which Ray would print what it notices; from any thread."""

    def __init__(self, quiet: bool) -> None:
        """`quiet`: nobody reads standard error either."""
        self._file, self._lock = os.fdopen(os.dup(1), "w"), threading.Lock()
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(2, 1)

    def write(self, value: Any) -> None:
        """Write a line."""
        with self._lock:
            print(json.dumps(value), file=self._file, flush=True)


def main(config: dict[str, Any]) -> None:
    """Do what `what` names, for the cluster at `address`. `own`: this machine's address; "" where Ray finds
    it."""
    answers = Answers(quiet=config["what"] == "place")
    try:
        if config["what"] == "nodes":
            answers.write(nodes_of(config["address"]))
            return
        own = {"_node_ip_address": config["own"]} if config["own"] else {}
        quiet = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
        ray.init(config["address"], namespace="tandem", **quiet, **own)
        if config["what"] == "look":
            answers.write(_look(config))
        else:
            Placing(config, answers).run()
    except AuthenticationError:
        answers.write({"failure": "wrong token"})
    except (RayError, ConnectionError, RuntimeError, ValueError) as e:
        answers.write({"failure": _reason(e)})
    os._exit(0)  # Ray's own end takes seconds


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    known = [line for line in lines if "Error" in line or "ersion" in line]
    return (known or lines or [type(error).__name__])[-1][:300]


def nodes_of(address: str) -> list[dict[str, Any]]:
    """Returns the cluster's machines, also those that are dead. Raises AuthenticationError."""
    client = import_module("ray._raylet").GcsClient(address=address)
    found = []
    for node in client.get_all_node_info(timeout=NODES_LIMIT).values():
        found.append(
            {
                "id": node.node_id.hex(),
                "name": dict(node.labels).get(LABEL, ""),
                "versions": dict(node.labels).get(VERSIONS, ""),
                "address": node.node_manager_address,
                "alive": node.state == 0,
                "part": dict(node.resources_total).get(RESOURCE, 0) > 0,
            }
        )
    return found


def _machines() -> dict[str, dict[str, Any]]:
    """Returns Ray's machines that take part and are alive, by name."""
    found = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get(RESOURCE):
            labels = node.get("Labels", {})
            name = labels.get(LABEL) or node["NodeManagerAddress"]
            key = LABEL if LABEL in labels else "ray.io/node-id"
            found[name] = {
                "address": node["NodeManagerAddress"],
                "here": node["NodeID"] == ray.get_runtime_context().get_node_id(),
                "on": {key: labels[key]},
            }
    return found


def _options(machine: dict[str, Any]) -> dict[str, Any]:
    return {"num_cpus": 0, "resources": {RESOURCE: SHARE}, "label_selector": machine["on"]}


def _look(config: dict[str, Any]) -> dict[str, Any]:
    machines = _machines()
    task = ray.remote(max_retries=0)(look)
    asked = {
        n: task.options(**_options(m)).remote(config["model"], config["again"]) for n, m in machines.items()
    }
    until = time.monotonic() + LOOK_LIMIT
    for name, machine in machines.items():
        try:
            machine |= ray.get(asked[name], timeout=max(0.1, until - time.monotonic()))
            if config["again"] and not machine["here"]:
                machine |= _way(machine, config["ports"])
        except GetTimeoutError:
            machine["failure"] = f"no word for {LOOK_LIMIT:.0f} s, perhaps for a firewall in between"
        except RayError as e:
            machine["failure"] = _reason(e)
    return machines


def _way(machine: dict[str, Any], ports: list[int]) -> dict[str, Any]:
    echo = ray.remote(Echo).options(**_options(machine)).remote(machine["address"], ports)
    try:
        trip, rate = call_echo(machine["address"], ray.get(echo.port.remote(), timeout=LOOK_LIMIT))
        return {"trip": trip, "link": rate}
    except (RayError, OSError) as e:
        return {"way": f"no connection to {machine['address']}: {_reason(e)}"}
    finally:
        ray.kill(echo)


class Placing:
    """Places the hosts of a plan: of each machine its own, and of machines that stay lost those that spares
    adopt."""

    def __init__(self, config: dict[str, Any], answers: Answers) -> None:
        """`hosts`: HostActor's configurations by machine. `spares`: by machine those that would adopt what it
        alone holds, the best first, and the lanes that this is. `endpoints`: by machine where its hosts were
        said to listen before."""
        self._hosts: dict[str, list[dict[str, Any]]] = config["hosts"]
        self._spares: dict[str, dict[str, Any]] = config["spares"]
        self._endpoints: dict[str, list[str]] = config["endpoints"]
        self._answers = answers
        self._lock = threading.Lock()
        self._node = ray.get_runtime_context().get_node_id()
        self._actors: dict[str, Any] = {}
        self._said: dict[str, Any] = {}  # by machine, what each of its hosts says
        self._down: dict[str, str] = {}  # by machine, why Ray does not reach its actor
        self._there_at: dict[str, float] = {}  # monotonic seconds, by machine: Ray or its host last answered
        self._standing: set[str] = set()  # titles of hosts that stand in for a lost machine
        self._ended: set[str] = set()  # of those whose machine is back

    def run(self) -> None:
        """Serve until a line on standard input."""
        for name, configs in self._hosts.items():
            self._begin(name, name, configs)
        threading.Thread(target=self._adopt, daemon=True).start()
        sys.stdin.readline()
        actors = list(self._actors.items())
        stops = [actor.stop.remote() for title, actor in actors if title not in self._down]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=STOP_LIMIT)

    def _begin(self, title: str, name: str, configs: list[dict[str, Any]]) -> None:
        threading.Thread(target=self._follow, args=(title, name, configs), daemon=True).start()

    def _adopt(self) -> None:
        """Have a spare machine load what a lost one alone held, or serve it from disk, until that one is
        back."""
        before = {(name, spare) for spare, _, name in (title.partition(" for ") for title in self._endpoints)}
        stand_ins = StandIns({n: spare["machines"] for n, spare in self._spares.items()}, before)
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                there = _machines()
            except RayError:
                continue  # the head is not there, which loses nobody
            for name in [name for name in self._spares if name in self._hosts]:
                self._see_to(name, there, stand_ins)

    def _see_to(self, name: str, there: dict[str, dict[str, Any]], stand_ins: StandIns) -> None:
        """Begin or end what stands in for a machine."""
        lost = self._lost(name, name in there and not self._failed(name))
        present = stand_ins.now(name)
        if not lost and present is not None and self._serves(name):
            self._ended |= self._standing & {f"{spare} for {name}" for spare in stand_ins.end(name)}
        elif lost > ADOPT_SECONDS:
            title = f"{present} for {name}"
            failed = self._failed(title) or self._lost(title, present in there) > ADOPT_SECONDS
            stand_ins.begin(name, there, failed)
        for spare in stand_ins.begun[name]:
            if spare in there and (title := f"{spare} for {name}") not in self._standing:
                self._standing.add(title)
                self._begin(title, spare, self._adopted(name, spare, there[spare]["address"]))

    def _failed(self, title: str) -> bool:
        """Returns whether a machine's hosts cannot serve: its disk may be gone, or its model."""
        return any(host["state"] == "failed" for host in self._said.get(title, {}).values())

    def _lost(self, title: str, there: bool) -> float:
        """Returns the seconds for which neither Ray nor its hosts know a machine."""
        now = time.monotonic()
        if there or self._answers_at(title):
            self._there_at[title] = now
        return now - self._there_at.setdefault(title, now)

    def _serves(self, name: str) -> bool:
        """Returns whether a machine's own hosts are ready, as far as they can tell, and answer."""
        hosts = self._said.get(name, {}).values()
        ready = name not in self._down and all(host["state"] == "ready" for host in hosts)
        return bool(hosts) and ready and self._answers_at(name)

    def _answers_at(self, name: str) -> bool:
        """Returns whether something answers where a machine's hosts listen: Ray may be wrong about it."""
        said = [host.get("endpoint") for host in self._said.get(name, {}).values()]
        for endpoint in filter(None, said or self._endpoints.get(name, [])):
            address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            with suppress(OSError), socket.create_connection((address, int(port)), REACH_LIMIT):
                return True
        return False

    def _adopted(self, name: str, spare: str, address: str) -> list[dict[str, Any]]:
        """Returns the configuration of the host that another machine has for a lost one."""
        (config,) = self._hosts[name]
        lanes = config["lanes"] | {"held": self._spares[name]["lanes"]}
        own = {"address": address, "disk_memory": self._spares[name]["memory"].get(spare)}
        return [config | own | {"name": f"{config['name']}-spare", "lanes": lanes}]

    def _follow(self, title: str, name: str, configs: list[dict[str, Any]]) -> None:
        """Keep an actor with these hosts on a machine, until they are no longer needed. `title`: what is said
        of them."""
        keeps = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 4}
        while title not in self._ended:
            try:
                machine = _machines().get(name)
                if machine is not None:
                    actor = ray.remote(HostActor).options(**_options(machine), **keeps).remote(configs)
                    self._actors[title] = actor
                    self._listen(title, name, actor)
                else:
                    self._say(title, down="it has not joined")
            except RayError as e:
                self._say(title, down=type(e).__name__)
            time.sleep(LOOK_SECONDS)
        self._drop(title)

    def _drop(self, title: str) -> None:
        """End the hosts of an actor, and it."""
        if (actor := self._actors.pop(title, None)) is not None:
            with suppress(RayError):
                ray.get(actor.stop.remote(), timeout=STOP_LIMIT)
            with suppress(RayError):
                ray.kill(actor)
        self._say(title, {n: host | {"state": "ended"} for n, host in self._said.get(title, {}).items()})
        self._ended.discard(title)
        self._standing.discard(title)

    def _listen(self, title: str, name: str, actor: Any) -> None:
        """Pass on what an actor says, until it is no longer needed, or Ray gives it up: it does not restart
        one whose machine left in order."""
        known: dict[str, Any] = {}
        heard_at = time.monotonic()
        while title not in self._ended:
            try:
                said = ray.get(actor.watch.remote(known), timeout=WATCH_LIMIT)
                if said != known or title in self._down:
                    self._say(title, said)
                known, heard_at = said, time.monotonic()
            except RayError as e:
                self._say(title, down=type(e).__name__)
                known = {}
                time.sleep(PAUSE_SECONDS)
                self._check_head(name, time.monotonic() - heard_at)
                if isinstance(e, ActorDiedError):
                    return

    def _check_head(self, name: str, seconds: float) -> None:
        """End this process, for another to begin again, where it follows nothing any more: Ray's head has
        been started again and knows neither this machine's Ray nor its actors, or an actor is not restarted
        though its machine is there."""
        try:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            if self._node in alive and (seconds < LOST_SECONDS or name not in _machines()):
                return
        except RayError:
            return
        self._answers.write({"failure": "Ray's head was started again"})
        os._exit(0)

    def _say(self, name: str, said: dict[str, Any] | None = None, down: str = "") -> None:
        with self._lock:
            if said is not None:
                self._said[name] = said
            if self._down.get(name, "") == down and said is None:
                return
            self._down.pop(name, None)
            if down:
                self._down[name] = down
            self._answers.write({"hosts": self._said, "down": self._down})
