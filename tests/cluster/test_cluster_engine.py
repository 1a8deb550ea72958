"""An engine whose experts lie on three machines on loopback: the tokens are those of one machine."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from asyncio import Queue
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from cluster_heads import KEYS, LAYERS, PLAN, TILE, host_config, hosts, machine, pid_of, restart

from launch.processes.supervisor import Supervisor
from pipeline.config import EngineConfig, LanePlan, MachineList
from protocol.client import Client
from protocol.errors import RequestFailed

CONFIG = EngineConfig(policy="all-host", device="cpu", tile=TILE, workers=2, chunk=64)


async def tokens_of(client: Client) -> tuple[int, ...]:
    """Three answers that are decoded together."""
    answers = [client.generate(token_ids=[5, 6, seed], max_tokens=40, ignore_eos=True) for seed in range(3)]
    results = [await answer.result() for answer in answers]
    return tuple(token for result in results for token in result.tokens)


async def test_tokens_of_three_machines_are_those_of_one(three_tiles: Path) -> None:
    config = replace(CONFIG, model=three_tiles, format="int8", name=f"t{os.getpid()}-cluster")
    async with Supervisor(config, log_level="WARNING") as one, Client.connect(one.endpoint) as client:
        expected = await tokens_of(client)
    with hosts(*(host_config(three_tiles, lane, format="int8") for lane in (1, 2))) as keepers:
        machines = MachineList(tuple(machine(k.place()) for k in keepers), *KEYS)
        config = replace(config, lanes=PLAN)
        async with (
            Supervisor(config, log_level="WARNING", machines=machines) as several,
            Client.connect(several.endpoint) as client,
        ):
            assert await tokens_of(client) == expected
            asked = client.generate(token_ids=[5, 6, 0], max_tokens=40, ignore_eos=True)
            pid = pid_of(keepers[0])
            os.kill(pid, signal.SIGKILL)
            again = machine(restart(keepers[0], pid))
            await several.set_machines((again, machines.machines[1]))
            assert (await asked.result()).tokens == expected[:40]
            os.kill(pid := pid_of(keepers[1]), signal.SIGKILL)
            asked, heard = client.generate(token_ids=[5, 6, 0], max_tokens=40, ignore_eos=True), Queue[str]()
            asked.on_waiting = heard.put_nowait
            assert f"lane 2 of the experts: {keepers[1].config.name}" in await heard.get()
            await several.set_machines((again, machine(restart(keepers[1], pid))))
            assert (await asked.result()).tokens == expected[:40]
            stats = await client.stats()
    assert [known["state"] for known in stats["machines"]] == ["ready", "ready"]


async def test_equal_lanes_have_equal_bits_also_of_unequal_machines(three_tiles: Path) -> None:
    lanes = LanePlan((0, 1, 3), (0, 1), pieces=2, rows=64)
    config = replace(CONFIG, model=three_tiles, format="int4", name=f"t{os.getpid()}-bits", lanes=lanes)

    async def bits(client: Client) -> list[tuple[int, float]]:
        answer = client.generate(token_ids=[5, 6, 7, 8, 9], max_tokens=24, ignore_eos=True)
        return [(token.token, token.margin) async for token in answer]

    async with Supervisor(config, log_level="WARNING") as one, Client.connect(one.endpoint) as client:
        expected = await bits(client)
    unequal = host_config(three_tiles, 1, format="int4", lanes=replace(lanes, held=(1,)))
    with hosts(unequal) as (keeper,):
        machines = MachineList((machine(keeper.place()),), *KEYS)
        config = replace(config, workers=1, lanes=replace(lanes, held=(0,)))
        async with (
            Supervisor(config, log_level="WARNING", machines=machines) as several,
            Client.connect(several.endpoint) as client,
        ):
            assert await bits(client) == expected


async def running(client: Client, count: int) -> None:
    """Wait until so many requests run."""
    async with asyncio.timeout(60):
        while (await client.stats())["scheduler"]["running"] != count:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


async def scores_of(client: Client, said: Queue[str]) -> int:
    """Returns how many log-probabilities a text has."""
    scores = client.score(on_waiting=said.put_nowait, token_ids=[5, 6, 7])
    return sum([len(block.chosen) async for block in scores])


async def test_requests_that_wait_for_a_machine_say_so_and_can_be_cancelled(three_tiles: Path) -> None:
    pytest.importorskip("uvicorn", reason="of the extra `serve`")
    http = importlib.import_module("httpx2")
    name = f"t{os.getpid()}-waits"
    config = replace(CONFIG, model=three_tiles, format="int4", name=name, lanes=PLAN, http="127.0.0.1:0")
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "stream": True, "ignore_eos": True}
    with hosts(host_config(three_tiles, 1, 2)) as (keeper,):
        machines = MachineList((machine(keeper.place()),), *KEYS)
        async with (
            Supervisor(config, log_level="WARNING", machines=machines) as engine,
            Client.connect(engine.endpoint) as client,
            http.AsyncClient(base_url=engine.http, timeout=60) as web,
        ):
            expected = await tokens_of(client)
            lost = psutil.Process(pid_of(keeper))
            lost.suspend()
            kept, dropped = [
                client.generate(token_ids=[5, 6, seed], max_tokens=40, ignore_eos=True) for seed in (0, 1)
            ]
            kept.on_waiting = (heard := list[str]()).append
            await running(client, 2)
            await dropped.cancel()
            assert (await dropped.result()).done.reason == "cancelled"
            async with web.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                while not (line := await anext(lines)).startswith(": waiting for lane 1 of the experts: "):
                    assert not line.startswith("data"), line
                assert keeper.config.name in line
                assert "tcp://" not in line
                await running(client, 2)
            await running(client, 1)  # the engine has heard that this client is gone
            said: Queue[str] = Queue()
            scored = asyncio.create_task(scores_of(client, said))
            assert (await said.get()).startswith("lane 1 of the experts: ")
            calibrated = asyncio.create_task(client.calibrate(token_ids=[5, 6, 7, 8] * 70, tokens=256))
            await asyncio.sleep(0)  # it is asked for
            more = client.generate(token_ids=[5], max_tokens=40)
            calibrated.cancel()
            await running(client, 3)  # a request runs when the calibration before it has ended
            await more.cancel()
            assert lost.status() == psutil.STATUS_STOPPED
            lost.resume()
            assert await scored == 2
            assert (await kept.result()).tokens == expected[:40]
            assert heard[0].startswith("lane 1 of the experts: ")
            assert heard[-1] == "", "it goes on"
            phase = (await client.stats())["engine"]["prefill"]
            assert phase["fidelity"]["weight"] == pytest.approx(LAYERS * phase["rows"]), "each row once"


async def test_policies_that_use_a_device_see_to_this_machine_s_share(three_tiles: Path) -> None:
    config = replace(CONFIG, model=three_tiles, format="f32", name=f"t{os.getpid()}-policies")
    async with Supervisor(config, log_level="WARNING") as one, Client.connect(one.endpoint) as client:
        expected = await tokens_of(client)
    with hosts(host_config(three_tiles, 1, 2, format="f32")) as (keeper,):
        machines = MachineList((machine(keeper.place()),), *KEYS)
        config = replace(config, lanes=PLAN, expert_cache=0.5)
        async with (
            Supervisor(config, log_level="WARNING", machines=machines) as several,
            Client.connect(several.endpoint) as client,
        ):
            for policy in ("layerwise", "fiddler", "tandem", "on-demand"):
                await client.set_policy(policy)
                assert await tokens_of(client) == expected, policy
                if policy in ("fiddler", "tandem"):
                    ((way, each),) = (await client.stats())["costs"]["machines"]
                    assert each > 0, "what they plan with has the other machine"
                    assert way >= 0
            with pytest.raises(RequestFailed, match="one machine alone, unless with early=0"):
                await client.set_policy("daop")
            (known,) = (await client.stats())["machines"]
            assert (known["share"], known["state"]) == (2 / 3, "ready")
            assert min(known[name] for name in ("sent_bytes", "received_bytes", "computing_us")) > 0
