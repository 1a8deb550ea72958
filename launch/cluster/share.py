"""A model's experts, divided among the machines of a cluster: in the most exact format that fits."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

from launch.cluster.cluster import Cluster, differing
from launch.cluster.plan import Division, Room, coarse, plan
from launch.command_line.options import Options
from launch.errors import LaunchError, WrongUsage
from launch.planning import formats, situation
from launch.processes.cores import Cores
from launch.terminal.format import count
from launch.terminal.log import notice
from pipeline.assets import model_dir
from pipeline.calibration.cost_cache import measured_here
from pipeline.checkpoint.open import open_model
from pipeline.cluster.keeper import new_keys, same_bits
from pipeline.config import EngineConfig, LanePlan, MachineList
from pipeline.errors import UsageError
from pipeline.memory.needs import LAYERS_IN_MEMORY, needs
from pipeline.memory.plan import FREE_BYTES, GOOD_CONTEXT, Machine, Plan, smallest
from pipeline.models.facts import expert_shape
from pipeline.policies.costs import Costs
from protocol.program import COMMAND, user_folder
from shm.layout import StoreLayout, format_named
from shm.segment import byte_size

log = logging.getLogger("tandem")


@dataclass(frozen=True)
class Share:
    """An engine's experts, divided among the machines of a cluster."""

    cluster: Cluster
    config: EngineConfig  # of the coordinator, with its lanes
    machines: MachineList  # without machines, which the liaison tells later
    names: tuple[str, ...]  # of the division's machines, the coordinator's first
    rooms: tuple[Room, ...]
    division: Division
    layers: int
    ports: tuple[int, int]  # the first and the last that hosts may take; 0: any
    looks: dict[str, dict[str, Any]]

    def hosts(self, engine: str) -> dict[str, list[dict[str, Any]]]:
        """Returns `HostActor`'s configurations of the other machines, by name. `engine`: its name."""
        lanes, config = self.config.lanes, self.config
        assert lanes is not None
        found = {}
        for name, part in zip(self.names[1:], self.division.parts[1:], strict=True):
            if part:
                digest = hashlib.blake2b(f"{engine} {name} {part}".encode(), digest_size=6).hexdigest()
                found[name] = [
                    {
                        "name": f"host-{digest}",
                        "model": None if config.model is None else str(config.model),
                        "format": config.format,
                        "tile": config.tile,
                        "lanes": asdict(replace(lanes, held=tuple(sorted(part)))),
                        "address": self.looks[name]["address"],
                        "ports": self.ports,
                        "coordinator_key": self.machines.public_key,
                        "workers": None,
                        "cache": None,
                        "reserve_bytes": FREE_BYTES,
                    }
                ]
        return found

    def spares(self) -> dict[str, dict[str, Any]]:
        """Returns by name, of machines whose loss would leave lanes without a holder, those lanes and the
        names of the machines with room for them; where there are none, of those with room for some layers of
        them, and by name the `memory` that they have for it: the rest they would read from disk."""
        division, rooms, found = self.division, self.rooms, {}
        for machine, name in enumerate(self.names):
            lanes = division.alone(machine)
            able, memory = division.spares(machine, rooms), dict[str, int]()
            if not able:
                least = LAYERS_IN_MEMORY * -(-division.bytes_of(lanes) // self.layers)
                memory = {self.names[m]: left for m, left in division.free(machine, rooms, least).items()}
            names = list(memory) or [self.names[each] for each in able]
            if machine and lanes and names:
                found[name] = {"lanes": lanes, "machines": names, "memory": memory}
        return found

    def lines(self) -> list[str]:
        """Returns lines about who holds what, and about lanes without the replicas that were asked for."""
        division, lines = self.division, []
        total = division.bounds[-1]
        for machine, (name, part) in enumerate(zip(self.names, division.parts, strict=True)):
            own = sum(division.bounds[lane + 1] - division.bounds[lane] for lane in part)
            here = " (this one)" if machine == 0 else ""
            what = (
                f"{own / total:.0%} of each expert, {byte_size(division.bytes_of(part))}"
                if part
                else "nothing"
            )
            lines.append(f"machine {name}{here} holds {what} of {byte_size(self.rooms[machine].memory)}")
        kept, gain = self.rooms[0].device
        if kept and gain:
            lines.append(f"its device keeps up to {byte_size(kept)} of them, {gain:.1f} times as fast")
        elif kept:
            lines.append(
                "its device does not count here: it was not measured yet; the next start may divide anew"
            )
        return lines


async def share(options: Options, config: EngineConfig) -> Share:
    """Returns the division of a model's experts among the machines of --cluster. Raises LaunchError,
    WrongUsage, UsageError where they have no room."""
    cluster = Cluster.of(options, options.written["cluster"])
    notice(f"looking at the machines of {cluster.address}")
    looks = await cluster.look(config.model, again=False)
    for why in (wrong := differing(looks)).values():
        log.warning(f"warning: {why}")
    return await asyncio.to_thread(_share, cluster, options, config, looks, wrong)


def _share(
    cluster: Cluster,
    options: Options,
    asked: EngineConfig,
    looks: dict[str, dict[str, Any]],
    wrong: dict[str, str],
) -> Share:
    able = {name: look for name, look in looks.items() if name not in wrong}
    here = next((name for name, look in able.items() if look["here"]), None)
    if here is None:
        raise LaunchError(f"Ray does not reach this machine: see {COMMAND} cluster status")
    for name in [name for name, look in able.items() if not look["model"]]:
        log.warning(
            f"warning: machine {name} has no {asked.model}, and is left out: put a copy there, or share it"
        )
        del able[name]
    names = (here, *sorted(set(able) - {here}))
    now = situation(asked, Cores.here().default_workers())
    source = open_model(asked.model or model_dir())
    wanted = options.written.get("replicas", 0)
    rooms: tuple[Room, ...] = ()
    variants = {each: look["variant"] for each, look in able.items()}
    for name in formats(asked, source):
        if "floe" in name:
            raise WrongUsage(
                f"--format {name}: its experts are for one machine alone; --cluster takes the others"
            )
        if not same_bits(set(variants.values()), name):
            continue
        shape = expert_shape(source.config, asked.tile, format_named(name))
        tile_bytes = -(-StoreLayout(shape, format_named(name)).total_bytes // shape.tiles)
        own = replace(now.config, format=name, speculate="off")  # no layer drafts on several machines
        plan_here = smallest(needs(source, own, name), own, now.policy.uses_device, GOOD_CONTEXT)
        free = min(
            pool.free - pool.needed + pool.parts["experts"]
            for pool in plan_here.pools(now.machine)
            if "experts" in pool.parts
        )
        others = [Room(each, _room(able[each]), coarse(able[each]["rate"])) for each in names[1:]]
        of_device = device_of(own, plan_here, now.machine)
        rooms = Room(here, free, coarse(able[here]["rate"]), of_device), *others
        if (division := plan(shape.tiles, tile_bytes, rooms, wanted)) is not None:
            pieces = max(look["workers"] for look in able.values())
            lanes = LanePlan(division.bounds, tuple(sorted(division.parts[0])), pieces)
            config = replace(asked, lanes=lanes, format=name)
            keys, ports = MachineList((), *new_keys()), options.written.get("host_ports", (0, 0))
            return Share(cluster, config, keys, names, rooms, division, shape.layers, ports, able)
    if not rooms:
        kernels = ", ".join(f"{each} {variant}" for each, variant in variants.items())
        raise UsageError(f"in {name} unequal kernels add otherwise ({kernels}): give --format int8 or int4")
    there = ", ".join(f"{room.name} {byte_size(max(0, room.memory))}" for room in rooms)
    need = byte_size(shape.tiles * tile_bytes)
    raise UsageError(
        f"{source.name} does not fit: in {name} its experts need {need}, in {count(shape.tiles, 'tile')} of"
        f" {byte_size(tile_bytes)}, and the machines have room for: {there}: join another machine, or give a"
        " smaller --format"
    )


def device_of(config: EngineConfig, plan_here: Plan, machine: Machine) -> tuple[int, float]:
    """Returns the bytes of experts that the coordinator's device keeps, and how many times as fast as the
    workers it computes them, coarsely: by --costs or the latest costs that were measured here, of this model
    in this format if there are any. 0.0 where there are none, or the policy uses no device."""
    if not plan_here.slab:
        return 0, 0.0
    pools = plan_here.pools(machine)
    every = pools[2:] if machine.cards or machine.gpu is not None else pools[:1]
    grows = machine.gpu is not None and config.expert_cache is None
    kept = sum(pool.parts["slab"] + grows * max(0, pool.free - pool.needed) for pool in every)
    records = []
    for _, record in measured_here(user_folder("CACHE")):
        on_host = record.setting.device == "cpu"
        if on_host == (machine.gpu is None) and record.setting.emulation == config.emulation:
            records.append(record)
    wanted = str(config.model or model_dir()), config.format
    records.sort(key=lambda record: (record.model, record.setting.format) != wanted)
    known = [Costs.load(config.costs)] if config.costs else [record.costs for record in records]
    if not known or not known[0].device[0]:
        return kept, 0.0
    return kept, coarse(known[0].host[0] / known[0].device[0])


def _room(look: dict[str, Any]) -> int:
    return int(min(look["memory"] - FREE_BYTES, look["shm"]))


def lost(share: Share) -> list[tuple[str, str]]:
    """Returns for each machine what its loss costs."""
    division, found = share.division, []
    for machine, name in enumerate(share.names):
        alone, size = division.alone(machine), byte_size(division.bytes_of(division.alone(machine)))
        if machine == 0:
            words = "the engine ends: it is the coordinator's"
        elif not division.parts[machine]:
            words = "nothing: it holds no experts"
        elif not alone:
            words = "nothing but speed: replicas answer"
        elif spares := share.spares().get(name):
            spare = spares["machines"][0]
            does = "has loaded" if spare not in spares["memory"] else "has on disk, and slowly serves,"
            words = f"requests wait until {spare} {does} its {size}, after 30 s without it"
        else:
            words = f"requests wait until it is back: no other machine holds its {size}"
        found.append((name, words))
    return found
