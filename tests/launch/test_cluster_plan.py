"""Who holds which tiles of every expert, on machines of any memory and speed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cluster.cluster import Cluster
from launch.cluster.placing import placed
from launch.cluster.plan import Division, Room, StandIns, coarse, divide, plan
from launch.cluster.share import Share, device_of, lost
from launch.planning import situation
from pipeline.assets import model_dir
from pipeline.calibration import cost_cache
from pipeline.checkpoint.open import open_model
from pipeline.config import EngineConfig, LanePlan, Machine, MachineList
from pipeline.memory.needs import needs
from pipeline.memory.plan import smallest
from pipeline.policies.costs import Costs
from protocol.program import user_folder

ROOMS = st.lists(
    st.builds(Room, st.just("m"), st.integers(0, 60), st.sampled_from([1.0, 2.0, 3.5, 8.0])), max_size=5
)


@given(tiles=st.integers(1, 24), rooms=ROOMS, tile=st.integers(1, 7), copies=st.integers(0, 3))
def test_every_tile_has_a_holder_and_nobody_more_than_it_has_room_for(
    tiles: int, rooms: list[Room], tile: int, copies: int
) -> None:
    division = plan(tiles, tile, rooms, copies)
    room = [each.memory // tile for each in rooms]
    if division is None:
        assert sum(room) < tiles or room[0] < 1
        return
    assert division.bounds[0] == 0
    assert division.bounds[-1] == tiles
    assert all(low < high for low, high in pairwise(division.bounds))
    assert division.parts[0], "the coordinator's machine takes part"
    for each, part in zip(rooms, division.parts, strict=True):
        assert len(part) == len(set(part))
        assert division.bytes_of(part) <= each.memory
    holders = [len(division.holders(lane)) for lane in range(division.lanes)]
    assert all(1 <= number <= 1 + copies for number in holders)


@pytest.mark.parametrize("rooms", [(9, 9, 9), (2, 9, 4), (1, 3, 4)])
@pytest.mark.parametrize("rates", [(1.0, 1.0, 1.0), (1.0, 5.0, 2.0), (4.0, 1.0, 1.0)])
def test_no_other_division_reads_its_tiles_sooner(rooms: tuple[int, ...], rates: tuple[float, ...]) -> None:
    held = divide(8, 1, rooms, rates)
    assert held is not None
    every = [each for each in product(*(range(room + 1) for room in rooms)) if sum(each) == 8 and each[0]]
    least = min(max(np.divide(each, rates)) for each in every)
    assert max(held / np.array(rates)) == least


def test_replicas_are_of_all_lanes_where_they_fit_and_else_of_some() -> None:
    def machines(*memory: int) -> list[Room]:
        return [Room("m", each, 1.0) for each in memory]

    whole = plan(6, 1, machines(12, 12, 12), 1)
    assert whole is not None
    assert whole.parts == ((0,), (1, 2), (2, 1))
    two = plan(6, 1, machines(12, 12), 2)
    assert two is not None
    assert two.parts == ((0, 1), (1,)), "the coordinator's machine has copies where no other has room"
    assert two.alone(1) == []
    some = plan(6, 1, machines(2, 4, 2), 1)
    assert some is not None
    assert some.parts == ((0,), (1, 2), (2,))
    none = plan(6, 1, machines(12, 12), 0)
    assert none is not None
    assert [none.alone(machine) for machine in range(2)] == [[0], [1]]
    assert none.spares(1, machines(12, 12)) == [0]
    assert none.spares(1, machines(5, 12)) == []


@pytest.mark.parametrize(
    ("memory", "machines", "on_disk", "cost"),
    [
        ((6, 4, 4, 12), ["d"], {}, "d has loaded its 4 B"),
        ((5, 4, 4, 4), ["a"], {"a": 2}, "a has on disk, and slowly serves, its 4 B"),
        ((4, 4, 4, 4), None, {}, "no other machine holds its 4 B"),
    ],
)
def test_a_lost_part_goes_to_memory_or_else_to_disk(
    memory: tuple[int, ...], machines: list[str] | None, on_disk: dict[str, int], cost: str
) -> None:
    rooms = tuple(Room(name, each, 1.0) for name, each in zip("abcd", memory, strict=True))
    division = Division((0, 3, 7, 11, 15), ((0,), (1,), (2,), (3,)), 1)
    cluster, keys = Cluster("a:6379", Path("token"), None), MachineList((), "", "")
    shared = Share(cluster, EngineConfig(), keys, tuple("abcd"), rooms, division, 4, (0, 0), {})
    known = shared.spares().get("b")
    assert known == (machines and {"lanes": [1], "machines": machines, "memory": on_disk})
    assert cost in dict(lost(shared))["b"]


def test_a_device_of_the_coordinator_has_it_hold_more() -> None:
    assert divide(12, 1, [12, 12, 12], [1, 1, 1]).tolist() == [4, 4, 4]
    assert divide(12, 1, [12, 12, 12], [1, 1, 1], (12, 2.0)).tolist() == [8, 2, 2], "as three machines"
    assert divide(12, 1, [12, 12, 12], [1, 1, 1], (3, 9.0)).tolist() == [6, 3, 3], "as far as it has room"
    assert divide(12, 1, [5, 12, 12], [1, 1, 1], (12, 2.0)).tolist() == [5, 4, 3], "as far as memory has"


def test_an_emulated_device_counts_as_fast_as_its_costs_say(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    one = {"rows": [1], "host": [3e-4], "device": [1e-4], "link": 1e-3, "round_trip": 1e-5}
    costs.write_text(json.dumps(one))
    config = EngineConfig(device="cpu", policy="tandem", expert_cache=0.5, format="int4", costs=costs)
    now = situation(config, 1)
    need = needs(open_model(model_dir()), now.config, "int4")
    here = smallest(need, now.config, now.policy.uses_device)
    kept, gain = device_of(now.config, here, now.machine)
    assert gain == pytest.approx(3, rel=0.1)
    assert kept >= need.store / 2
    alone = situation(replace(config, policy="all-host"), 1)
    here = smallest(need, alone.config, alone.policy.uses_device)
    assert device_of(alone.config, here, alone.machine) == (0, 0.0)


def test_a_device_is_as_fast_as_it_was_measured_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig(device="cpu", policy="tandem", expert_cache=0.5, format="int4")
    of_models = (str(model_dir()), "a", 4e-4), ("/models/another", "b", 16e-4)
    for measured, (model, digit, host) in enumerate(of_models):
        costs = Costs((1,), (host,), (1e-4,), 1e-3, 1e-5)
        setting = cost_cache.Setting(*cost_cache.processor(), "cpu", 64 * digit, "int4", "", (1,), "", "")
        record = cost_cache.Record(setting, model, 3, 4096, float(measured), costs)
        cost_cache.keep(user_folder("CACHE"), record)
    now = situation(config, 1)
    here = smallest(needs(open_model(model_dir()), now.config, "int4"), now.config, True)
    assert device_of(now.config, here, now.machine)[1] == 4


def test_equal_machines_hold_equal_parts_though_they_are_measured_unequal() -> None:
    rooms = [Room("m", 100, coarse(rate)) for rate in (40e9, 41e9, 39.5e9)]
    division = plan(12, 1, rooms, 0)
    assert division is not None
    assert division.bounds == (0, 4, 8, 12)


def test_the_next_spare_stands_in_where_one_fails() -> None:
    stand_ins = StandIns({"c": ["b", "d"]})
    assert stand_ins.begin("c", {"d"}, failed=False) == "d"
    assert stand_ins.begin("c", {"b", "d"}, failed=False) is None, "it stands in"
    assert stand_ins.begin("c", {"b", "d"}, failed=True) == "b"
    assert stand_ins.begin("c", {"b", "d"}, failed=True) is None, "each tries again by itself"
    assert stand_ins.now("c") == "b"


def test_a_machine_that_is_back_is_stood_in_for_no_longer() -> None:
    stand_ins = StandIns({"c": ["b", "d"]})
    assert stand_ins.begin("c", {"b", "d"}, failed=False) == "b"
    assert stand_ins.end("c") == ["b"]
    assert stand_ins.now("c") is None
    assert stand_ins.begin("c", {"b", "d"}, failed=False) == "b", "for the next loss"
    after_restart = StandIns({"c": ["b", "d"]}, {("c", "d")})
    assert after_restart.end("c") == ["d"]


class Told:
    """A cluster whose liaison says these things."""

    def __init__(self, *said: dict[str, Any]) -> None:
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for one in said:
            self._said.put_nowait(one)

    @asynccontextmanager
    async def liaison(self, what: str, **config: Any) -> AsyncIterator[Told]:
        yield self

    async def result(self, limit: float | None) -> Any:
        return await self._said.get()

    async def go(self) -> None:
        self._said.put_nowait({})


def told(*said: dict[str, Any]) -> Share:
    """The share of an engine whose liaison says these things about the hosts of machines."""
    rooms = tuple(Room(name, 9, 1.0) for name in "abcd")
    division = Division((0, 1, 2), ((0,), (1,), (), ()), 1)
    config = EngineConfig(lanes=LanePlan(division.bounds, (0,), 1))
    looks = {name: {"address": "127.0.0.1"} for name in "abcd"}
    cluster, keys = Told(*({"hosts": hosts, "down": {}} for hosts in said)), MachineList((), "", "")
    return Share(cast(Cluster, cluster), config, keys, tuple("abcd"), rooms, division, 4, (0, 0), looks)


def host(state: str, *lines: tuple[str, int, str]) -> dict[str, Any]:
    """What a liaison says of a host, with lines of its log."""
    return {"endpoint": "tcp://127.0.0.1:1", "key": "k", "lanes": [1], "lines": lines, "state": state}


async def test_of_two_that_have_stood_in_the_one_that_does_now_is_used() -> None:
    share = told({"c for b": {"h-spare": host("ready")}, "d for b": {"h-spare": host("ended")}})
    known: asyncio.Queue[tuple[Machine, ...]] = asyncio.Queue()
    async with placed(share, "e", known.put), asyncio.timeout(60):
        while not (there := [one.name for one in await known.get() if one.endpoint]):
            pass
    assert there == ["c for b"]


async def test_lines_of_a_hosts_log_are_told_once_whichever_actor_reads_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = ("f", 4, "one"), ("f", 8, "two"), ("g", 4, "one")
    read = lines[:1], lines[:2], (), lines[:2], lines[1:], lines[2:]
    share = told(*({"b": {"h": host("ready", *some)}} for some in read), {"b": {"h": host("ended")}})
    known: asyncio.Queue[tuple[Machine, ...]] = asyncio.Queue()
    with caplog.at_level(logging.DEBUG, "tandem"):
        async with placed(share, "e", known.put), asyncio.timeout(60):
            while "ended" not in {machine.why for machine in await known.get()}:
                pass
    passed_on = [text for text in caplog.messages if text.startswith("[b] ")]
    assert passed_on == [f"[b] {text}" for *_, text in lines]
