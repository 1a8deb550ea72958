"""Several machines: tokens a second on paper, and the paper checked against expert hosts.

    python -m benchmarks.cluster paper --model deepseek-v3 --machines 100,100,100 [--gbit 10] [--trip-us 450]
    python -m benchmarks.cluster check [--hidden 2048] [--rounds 300] [--quantile 0.5]

`paper`: a decode step of one row, by a machine's reading rate in GB/s, the link of each machine and the time
that a layer's way there and back takes beside computing. Tiles are divided as `launch/cluster/plan.py` does.

`check`: one expert host with CURVE on loopback, and the coordinator's lane in this process. Rates
come from the smallest and the largest lanes, computed in turns; the lanes between are predicted and measured.
Both "machines" share this one's cores, so what is measured there is an upper limit.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from launch.cluster.plan import divide
from pipeline.arrays import FloatArray
from pipeline.checkpoint.open import open_model
from pipeline.cluster.keeper import HostConfig, HostKeeper, new_keys
from pipeline.cluster.machines import Machines
from pipeline.cluster.pool import LanesPool
from pipeline.config import LanePlan, Machine, MachineList, WorkerCores
from pipeline.experts.division import Divider, split_layer
from pipeline.experts.peers import ExitEvents
from pipeline.experts.pool import computing
from pipeline.loader import Loading
from pipeline.models.facts import expert_shape, facts_of
from pipeline.policies.view import Routing
from protocol.machines import HostHello
from shm.layout import StoreLayout, format_named
from shm.locks import StoreLease
from shm.store import Store
from workers.kernels.native import VERSION as KERNELS
from workers.kernels.native import best, store_kernel

FORMAT, TILE, EXPERTS, TOP = "int4", 128, 8, 2
LANES = (1, 2, 4, 8)  # tiles of a lane that are measured
SUM_BYTES = 4  # of a number that comes back
CODE_BYTES = 1 + 4 / 64  # of one that goes there, with its group's largest


# --- on paper -----------------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """What a layer's seconds are made of."""

    reading: Sequence[float]  # bytes a second of each machine, the coordinator's first
    link: float  # bytes a second of a machine's
    exchange: float  # seconds of a layer's way there and back, beside computing and the link's bytes


def layer_seconds(held: Sequence[float], hidden: int, rates: Rates) -> float:
    """Returns the seconds of a layer's experts for one row. `held`: bytes that each machine reads. All that
    comes and goes passes the coordinator's link."""
    moved = (len(held) - 1) * hidden * (SUM_BYTES + CODE_BYTES) / rates.link
    times = [size / rate for size, rate in zip(held, rates.reading, strict=True)]
    others = max((seconds + rates.exchange + moved for seconds in times[1:]), default=0.0)
    return max(times[0], others)


def paper(model: str, reading: Sequence[float], rates: Rates, rest: float) -> tuple[list[float], float]:
    """Returns each machine's share of an expert, and the tokens a second of one request. `rest`: seconds of a
    layer beside its routed experts."""
    config = open_model(Path(f"shape:{model}")).config
    facts, shape = facts_of(config), expert_shape(config, None, format_named(FORMAT))
    layout = StoreLayout(shape, format_named(FORMAT))
    tiles = divide(shape.tiles, 1, [shape.tiles] * len(reading), reading)
    assert tiles is not None
    held = [float(count * layout.tile_bytes * facts.top_k) for count in tiles]
    seconds = layer_seconds(held, shape.hidden, rates) + rest
    return [count / shape.tiles for count in tiles.tolist()], 1 / (shape.layers * seconds)


# --- measured -----------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """Seconds of a layer of one row."""

    lane_bytes: int  # that each of the two machines reads
    whole: float
    own: float  # the coordinator's lane alone


class _Quiet:
    def stage(self, name: str, total: int) -> Callable[[int], None]:
        return lambda done: None


def _write_model(folder: Path, hidden: int, tiles: int) -> Path:
    """Returns a model with random weights whose experts are two lanes of so many tiles."""
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": 2 * tiles * TILE, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP, "vocab_size": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / f"{tiles}.json").write_text(json.dumps(config))
    return Path(f"shape:{folder / f'{tiles}.json'}")


@contextmanager
def _pools(model: Path, tiles: int, cache: Path) -> Iterator[tuple[LanesPool, LanesPool, Store]]:
    """A pool whose second lane another process holds, and one with the first lane alone."""
    plan, keys = LanePlan((0, tiles, 2 * tiles), (0,), pieces=1), new_keys()
    theirs = LanePlan(plan.bounds, (1,), plan.pieces)
    named = f"bench-{os.getpid()}-{tiles}", model, FORMAT, TILE, theirs, "127.0.0.1"
    keeper = HostKeeper(HostConfig(*named, keys[0], ((),), cache))
    told: dict[str, Any] = {"model": str(model), "tile": TILE, "format": FORMAT, "cache_dir": str(cache)}
    loading = Loading(told | {"part": plan.part.plain(), "nodes": [], "reserve_bytes": 0}, _Quiet())
    loading.load()
    lease = StoreLease.acquire(loading.fingerprint)
    try:
        with Store.attach(loading.name, loading.fingerprint) as store:
            place = keeper.start()
            machine = Machine(place.name, place.endpoint, place.key, place.lanes)
            variant = best().variant
            hello = HostHello(KERNELS, variant, loading.whole, FORMAT, plan.bounds, plan.pieces)
            machines = Machines(MachineList((machine,), *keys), hello, ExitEvents(), lambda: None)
            try:
                cores = WorkerCores.equal(1)
                both, own = (
                    LanesPool(Divider(cores, EXPERTS, tiles), cores, computing(store_kernel(store)))
                    for _ in range(2)
                )
                both.use_lanes(plan, store.layout, machines)
                own.use_lanes(LanePlan((0, tiles), (0,), plan.pieces), store.layout, None)
                both.wait_machines(120)
                yield both, own, store
            finally:
                machines.close()
    finally:
        keeper.stop()
        lease.release(keep=False)


def measure(folder: Path, hidden: int, tiles: int, rounds: int, quantile: float) -> Layer:
    """Compute layers on both machines, and on this one, in turns. `quantile`: of what they take."""
    random = np.random.default_rng(0)
    none = np.zeros(EXPERTS, np.int32)
    with _pools(_write_model(folder, hidden, tiles), tiles, folder / "cache") as (both, own, store):
        size = TOP * tiles * store.layout.tile_bytes

        def once(pool: LanesPool) -> float:
            chosen = random.permutation(EXPERTS)[:TOP].astype(np.int32)[None]
            x: FloatArray = random.standard_normal((1, hidden), np.float32)
            routing = Routing(chosen, np.full((1, TOP), 0.5, np.float32))
            split = split_layer(routing, none, none, tiles, 0)
            started = time.perf_counter()
            pool.submit(split, x).result()
            return time.perf_counter() - started

        taken = np.array([[once(pool) for pool in (both, own)] for _ in range(rounds)])[rounds // 10 :]
    whole, alone = np.quantile(taken, quantile, axis=0).tolist()
    return Layer(size, whole, alone)


def fit(few: Layer, many: Layer) -> Rates:
    """Returns the rates by which the smallest and the largest lanes take as long as measured."""
    reading = (many.lane_bytes - few.lane_bytes) / (many.own - few.own)
    there = (many.lane_bytes - few.lane_bytes) / (many.whole - few.whole)
    return Rates((reading, there), np.inf, few.whole - few.lane_bytes / there)


# --- the program --------------------------------------------------------------------------------------------


def _check(hidden: int, rounds: int, quantile: float) -> None:
    with TemporaryDirectory(prefix="bc-", dir="/tmp") as place:
        measured = [measure(Path(place), hidden, tiles, rounds, quantile) for tiles in LANES]
    rates = fit(measured[0], measured[-1])
    here, there = (rate / 1e9 for rate in rates.reading)
    print(f"{here:.1f} GB/s here, {there:.1f} there; {1e6 * rates.exchange:.0f} us there and back")
    print("| a lane, kB | here alone, us | measured, us | predicted, us |\n|---|---|---|---|")
    for one in measured:
        predicted = layer_seconds([one.lane_bytes] * 2, hidden, rates)
        figures = one.lane_bytes / 1e3, 1e6 * one.own, 1e6 * one.whole, 1e6 * predicted
        print("| " + " | ".join(f"{figure:,.0f}" for figure in figures) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_paper, of_check = kinds.add_parser("paper"), kinds.add_parser("check")
    of_paper.add_argument("--model", default="deepseek-v3")
    of_paper.add_argument("--machines", default="100,100,100,100", help="GB/s of each, this one first")
    of_paper.add_argument("--gbit", type=float, default=10.0)
    of_paper.add_argument("--trip-us", type=float, default=450.0)
    of_paper.add_argument("--rest-us", type=float, default=250.0, help="of a layer beside its routed experts")
    of_check.add_argument("--hidden", type=int, default=2048)
    of_check.add_argument("--rounds", type=int, default=300)
    of_check.add_argument("--quantile", type=float, default=0.5, help="less where others use the cores")
    given = parser.parse_args()
    if given.kind == "check":
        return _check(given.hidden, given.rounds, given.quantile)
    reading = [1e9 * float(rate) for rate in given.machines.split(",")]
    rates = Rates(reading, given.gbit * 1e9 / 8 * 0.94, given.trip_us / 1e6)
    shares, tokens = paper(given.model, reading, rates, given.rest_us / 1e6)
    words = ", ".join(f"{share:.0%}" for share in shares)
    print(f"{given.model} in {FORMAT} on {len(reading)} machines that hold {words}: {tokens:.1f} tokens/s")


if __name__ == "__main__":
    main()
