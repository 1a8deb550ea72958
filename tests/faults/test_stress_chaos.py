"""Short runs of `stress --chaos` on real engines."""

from __future__ import annotations

import asyncio
import json
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkedPython

from launch.equality import rounding_bound
from launch.errors import WrongUsage
from launch.stress.chaos import Chaos, Injector, wait_recovered
from launch.stress.load import End, Entry, Load, Request, ask, compare_all, count_strays, run_load
from launch.stress.report import StressRun, report
from pipeline.config import EngineConfig
from protocol.client import Client
from protocol.messages import Sampling

ROOT = Path(__file__).parents[2]
PROMPTS = ("A list of", "def main():", "The harbour was quiet when", "One, two,")
ENTRIES = [
    *(Entry(prompt, prompt=prompt, max_tokens=40) for prompt in PROMPTS),
    Entry("cut", prompt="SELECT name FROM", max_tokens=60, cancel_after=20),
    Entry("talk", turns=("What is a list?", "And a tuple?"), max_tokens=20),
]
KILLS = 6
PEERS = ("worker", "prefetcher")  # at their exits clients lose nothing
LIMIT = 90.0  # seconds of chaos; about ten on an idle machine


def config(model: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=model, device="cpu", format="f32", backbone_dtype="f32", workers=2, **settings)


def runtime(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://")).parent


async def test_four_clients_lose_no_answer_to_kills(start_engine, tiny_model: Path) -> None:
    """Workers and the prefetcher are killed while four clients are served, until enough of them were."""
    settings = {"policy": "on-demand", "expert_cache": 0.5}
    async with start_engine(config(tiny_model, **settings)) as (engine, client), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client.connect(engine.endpoint)) for _ in range(4)]
        injector = Injector(client.stats, runtime(engine.endpoint), Chaos(("kill",), 2.0, 5, PEERS))
        await injector.begin()
        run = StressRun("here", client.welcome, rounding_bound("f32", "f32"), Load([[] for _ in clients]))
        run.chaos = injector
        async with asyncio.timeout(LIMIT), injector:
            while sum(fault.decoding for fault in injector.faults) < KILLS:
                await run_load(clients, ENTRIES, run.load, lambda outcome: None)
        await injector.recover()
        await compare_all(client, run.load.all, run.bound, run.findings.append)
        await count_strays(clients, run.load)
        run.finished = True
    found = report(run)
    assert found["passed"], found["details"]
    assert found["unsent"] == 0
    assert found["requests"] % 7 == 0
    faults = found["chaos"]
    assert faults["kills_during_decode"] >= KILLS
    assert sum(faults["respawns"].values()) == faults["total"] == sum(faults["faults"]["kill"].values())
    waits = faults["kill_to_every_next_token_s"]
    assert 0 < waits["median"] <= waits["max"]


async def test_kills_change_no_bit_of_the_answers(start_engine, tiny_model: Path) -> None:
    """One client, one request after the other, `all-host`: plans and batches are the same, so tokens and
    margins must be, where each prompt is computed whole."""
    async with start_engine(config(tiny_model, policy="all-host")) as (engine, client):
        undisturbed = [await answer(client, prompt) for prompt in PROMPTS]
        before = (await client.stats())["peers"]
        rounds = 0
        injector = Injector(client.stats, runtime(engine.endpoint), Chaos(("kill",), 3.0, 1, PEERS))
        async with asyncio.timeout(LIMIT), injector:
            while sum(fault.decoding for fault in injector.faults) < KILLS // 2:
                assert [await answer(client, prompt) for prompt in PROMPTS] == undisturbed
                rounds += 1
        assert rounds > 0
        assert await wait_recovered(client.stats, before, injector.faults, 30.0) == []
        assert [await answer(client, prompt) for prompt in PROMPTS] == undisturbed


async def answer(client: Client, prompt: str) -> list[tuple[int, int, float]]:
    """Every token, its runner-up and its margin, to the last bit."""
    outcome = await ask(client, Request("a", prompt, None, 40, Sampling(), reuse=False))
    assert outcome.end in (End.LENGTH, End.STOP), outcome.error
    return [(step.token, step.runner_up, step.margin) for step in outcome.steps]


def test_stress_command_with_hostile_messages(tiny_model: Path, tmp_path: Path) -> None:
    """The seed's first fault comes after 20 ms: it is seen however short the load is."""
    script = tmp_path / "script.jsonl"
    script.write_text("\n".join(json.dumps({"prompt": p, "max_tokens": 40}) for p in PROMPTS))
    command = [str(ROOT / "launch.py"), "stress", "--script", str(script), "--model", str(tiny_model)]
    command += "--format f32 --backbone-dtype f32 --policy on-demand --device cpu --clients 4".split()
    command += "--repeat 5 --chaos corrupt --chaos-rate 4 --seed 137 --json".split()
    with ForkedPython(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, (out, err)
    assert "dropped a malformed message" not in err  # as intended, and counted in the report
    chaos = json.loads(out)["chaos"]
    assert (chaos["kinds"], chaos["seed"]) == (["corrupt"], 137)
    assert chaos["faults"]["corrupt"]["client"] >= 1
    sockets = {"client.sock", "work.sock", "fetch.sock", "control.sock", "text.sock"}
    assert set(chaos["hostile_messages"]["sent"]) == sockets
    assert all(chaos["malformed"].values())
    assert not any(chaos["respawns"].values())
    assert chaos["whole_after_s"] is not None


async def test_chaos_needs_workers_or_a_prefetcher(start_engine, tiny_model: Path) -> None:
    alone = EngineConfig(model=tiny_model, device="cpu", format="f32", workers=0)
    async with start_engine(alone) as (engine, client):
        chaos = Chaos(("kill", "corrupt", "stop"), 2.0, seed=5)
        with pytest.raises(WrongUsage, match=r"^--chaos kill,stop: this engine has neither workers nor"):
            await Injector(client.stats, runtime(engine.endpoint), chaos).begin()
