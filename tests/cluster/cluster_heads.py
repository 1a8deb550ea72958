"""Machines on loopback for tests: real expert hosts, and a head whose pool lives in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.checkpoint.open import open_model
from pipeline.cluster.keeper import HostConfig, HostKeeper, new_keys
from pipeline.cluster.machines import Machines
from pipeline.cluster.place import HostPlace
from pipeline.cluster.pool import LanesPool
from pipeline.config import LanePlan, Machine, MachineList, WorkerCores
from pipeline.experts.division import Divider, split_layer
from pipeline.experts.peers import ExitEvents
from pipeline.experts.pool import computing
from pipeline.loader import Loading
from pipeline.models.facts import expert_shape, narrowed
from pipeline.policies.view import Routing
from protocol.machines import HostHello
from protocol.messages import MachineRecord, SetMachines
from shm.layout import StoreLayout, format_named
from shm.store import Store
from workers.kernels.native import VERSION as KERNELS
from workers.kernels.native import best, store_kernel

TILE, EXPERTS, LAYERS, HIDDEN, TOP = 128, 4, 2, 128, 2
BOUNDS = (0, 1, 2, 3)  # lanes of one tile each; the last tile is padded
PLAN = LanePlan(BOUNDS, (0,), pieces=2, rows=64)
KEYS = new_keys()  # of the coordinator


def host_config(model: Path, *held: int, format: str = "int4", **changes: Any) -> HostConfig:
    """Describes a host of these lanes with one worker."""
    name = f"host-{os.getpid()}-{format}-" + "-".join(map(str, held))
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "tandem"
    of_host = name, model, format, TILE, replace(PLAN, held=held), "127.0.0.1", KEYS[0], ((),), cache
    return replace(HostConfig(*of_host), **changes)


def expert_bytes(model: Path, *held: int) -> int:
    """What these lanes of an expert take in memory, of whole pages."""
    kind = format_named("int4")
    whole = expert_shape(open_model(model).config, TILE, kind)
    return StoreLayout(narrowed(replace(PLAN, held=held).part, whole), kind).expert_pages


@contextmanager
def hosts(*configs: HostConfig) -> Iterator[list[HostKeeper]]:
    """Keeps these hosts running until the end of the block."""
    keepers = [HostKeeper(config) for config in configs]
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(HostKeeper.start, keepers))
        yield keepers
    finally:
        for keeper in keepers:
            keeper.stop()


def pid_of(keeper: HostKeeper) -> int:
    running = keeper.place()
    assert running is not None
    return running.pid


def restart(keeper: HostKeeper, pid: int) -> HostPlace:
    """Let a keeper start its host again, which had this process id."""
    while (now := keeper.check()) is None or now.pid == pid:
        time.sleep(0.02)
    return now


def machine(place: HostPlace | None) -> Machine:
    assert place is not None
    return Machine(place.name, place.endpoint, place.key, place.lanes)


@dataclass
class Head:
    """A pool of this process, which computes its own lanes itself."""

    pool: LanesPool
    machines: Machines | None
    exits: ExitEvents
    tiles: int

    def tell(self, *machines: Machine) -> None:
        """These are the machines from now on."""
        self.exits.machines.append(SetMachines(tuple(MachineRecord(*astuple(m)) for m in machines)))

    def state(self, index: int = 0) -> tuple[str, str]:
        """A machine's state, and why it is in it."""
        assert self.machines is not None
        known = self.machines.stats()[index]
        return known["state"], known["why"]

    def update_until(self, done: Callable[[], object]) -> None:
        """Look for messages until something is so."""
        assert self.machines is not None
        while not done():
            self.machines.update(10)

    def sums(self, seed: int, rows: int = 1, lo: int = 0) -> bytes:
        """The bits of a random layer's lanes."""
        return self.ask(seed, rows, lo)()

    def ask(self, seed: int, rows: int = 1, lo: int = 0) -> Callable[[], bytes]:
        """Begin a random layer, of which a device computes the first `lo` tiles; returns what waits for its
        bits."""
        random = np.random.default_rng(seed)
        chosen = np.stack([random.permutation(EXPERTS)[:TOP] for _ in range(rows)]).astype(np.int32)
        routing = Routing(chosen, random.random((rows, TOP), np.float32))
        x: FloatArray = random.standard_normal((rows, HIDDEN), np.float32) * np.float32(3)
        begin, none = np.full(EXPERTS, lo, np.int32), np.zeros(EXPERTS, np.int32)
        ticket = self.pool.submit(split_layer(routing, begin, none, self.tiles, seed % LAYERS), x)
        return lambda: np.stack(ticket.parts()).tobytes()


class _Quiet:
    def stage(self, name: str, total: int) -> Callable[[int], None]:
        return lambda done: None


@contextmanager
def head(
    model: Path, *machines: Machine, format: str = "int4", held: tuple[int, ...] = (0,), **hello: Any
) -> Iterator[Head]:
    """A head that holds these lanes; the machines hold the others. `hello`: what it says instead."""
    plan = replace(PLAN, held=held)
    told = {"model": str(model), "tile": TILE, "format": format, "part": plan.part.plain(), "nodes": []}
    told |= {"reserve_bytes": 0, "cache_dir": str(Path(os.environ["XDG_CACHE_HOME"]) / "tandem")}
    with ExitStack() as closing:
        loading = Loading(told, _Quiet())
        closing.callback(loading.load_leased().release, keep=False)
        store = closing.enter_context(Store.attach(loading.name, loading.fingerprint))
        shape, exits = store.layout.shape, ExitEvents()
        others = None
        if machines or not plan.part.whole:
            said = HostHello(KERNELS, best().variant, loading.whole, format, plan.bounds, plan.pieces)
            said = type(said)(**{name: getattr(said, name) for name in said.__struct_fields__} | hello)
            others = Machines(MachineList(machines, *KEYS), said, exits, lambda: None, plan.copies)
            closing.callback(others.close)
        cores = WorkerCores.equal(1)
        pool = LanesPool(Divider(cores, EXPERTS, shape.tiles), cores, computing(store_kernel(store)))
        pool.use_lanes(plan, store.layout, others)
        yield Head(pool, others, exits, shape.tiles)
