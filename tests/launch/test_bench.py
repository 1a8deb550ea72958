"""`launch.py bench`: its figures, the alternating order of the policies, and its errors."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Launched, engines_left, run
from waiting import wait_until

from launch.bench.measure import make_prompts, measure
from launch.cli import main
from launch.runtime import find_engine
from pipeline.policies.presets import PRESETS
from protocol.client import Client

pytestmark = pytest.mark.timeout(300)  # several engines start, on a machine that may be busy

SHORT = "--prompt-len 24 --gen-len 16".split()
LONGER = "--prompt-len 24 --gen-len 230".split()  # answers overlap however late one of them begins
FIGURES = ("prefill_tok_s", "decode_tok_s", "first_token_s")


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[str]:
    """A running engine of the tiny model with an expert cache; its name."""
    arguments = ["--model", str(tiny_model), "--device", "cpu", "--workers", "2", "--chunk", "16"]
    with Launched(
        "serve", "--name", "bench", "--policy", "layerwise", "--link-gbps", "5", *arguments
    ) as engine:
        name, _ = engine.line().split()
        yield name
        engine.send(signal.SIGINT)
        assert engine.end()[0] == 0


# --- against an engine ----------------------------------------------------------------------------------


async def test_figures_lie_between_the_engine_s_own_and_the_wall_clock(engine: str) -> None:
    async with Client.connect(find_engine(engine).endpoint, name="tests") as client:
        prompts = await make_prompts(client, 3, 40, seed=0)
        assert [len(p) for p in prompts] == [40, 40, 40]
        assert len(set(prompts)) == 3
        assert await make_prompts(client, 3, 40, seed=0) == prompts

        await client.set_policy("on-demand")
        began = time.perf_counter()
        alone, (done,) = await measure(client, prompts[:1], 100)
        elapsed = time.perf_counter() - began
        # The client's times contain the engine's, and lie within this test's, however busy the machine is.
        prefill, decode = 40 / alone.prefill_tok_s, 99 / alone.decode_tok_s
        assert alone.first_token_s == pytest.approx(prefill)
        assert prefill >= done.stats["prefill_s"] > 0
        assert done.stats["prefill_s"] + done.stats["decode_s"] <= prefill + decode <= elapsed
        assert done.stats["decode_s"] > done.stats["prefill_s"]  # so a wrong rate of decode breaks a bound
        assert alone.decode["host_tiles"] == 0
        assert alone.decode["fetched_bytes"] > 0

        await client.set_policy("all-host")
        together, ends = await measure(client, prompts, 100)
        assert len(ends) == 3
        assert together.decode["host_tiles"] > 0
        assert together.decode["fetched_bytes"] == 0


async def test_policies_alternate_and_the_engine_s_is_restored(engine: str) -> None:
    seen: list[str] = []
    async with Client.connect(find_engine(engine).endpoint, name="tests") as client:
        await client.set_policy("layerwise")
        client.on_policy = lambda changed: seen.append(changed.policy)
        code, out, err = await asyncio.to_thread(
            run,
            *("bench", "--connect", engine, "--policy", "all-host,on-demand", "--json"),
            *("--set", "on-demand.placement=first-layers", "--rounds", "2", "--batch", "2", *LONGER),
        )
        assert code == 0, err
        assert (await client.stats())["policy"] == "layerwise"
    forwards = ["all-host", "on-demand"]
    # all-host first: it reads what is not measured
    assert [*"all-host".split(), *forwards, *reversed(forwards), *forwards, "layerwise"] == seen[-8:]
    assert set(seen[:-8]) <= {"all-host"}

    found = json.loads(out)
    assert set(found) == {"config", "policies", "emulation", "notes"}
    assert found["emulation"] == "link paced to 5 GB/s"
    expected = {"prompt_len": 24, "gen_len": 230, "batch": 2, "rounds": 2, "device": "cpu", "workers": None}
    assert expected.items() <= found["config"].items()
    check_policies(found, forwards, rounds=2)
    host, demand = found["policies"]
    assert demand["options"] == {"placement": "first-layers"}
    assert (host["host_share"], host["moved_bytes_per_token"]) == (1, 0)
    assert demand["host_share"] == 0
    assert demand["moved_bytes_per_token"] > 0


def test_approximate_policy_is_compared_with_an_exact_one(engine: str, tmp_path: Path) -> None:
    """From layer 1 on, the second of the tiny model's two, daop computes experts from stale hidden states."""
    picture = tmp_path / "bench.png"
    code, out, err = run(
        *("bench", "--connect", engine, "--policy", "daop,on-demand", "--json"),
        *("--set", "daop.placement=popular", "--set", "daop.first_layer=1"),
        *("--rounds", "1", "--ppl-tokens", "16", "--plot", str(picture), *SHORT),
    )
    assert code == 0, err
    found = json.loads(out)
    daop, demand = found["policies"]
    assert (daop["exact"], demand["exact"]) == (False, True)
    fidelity = daop["decode"]["fidelity"]
    assert fidelity["exact"] is False
    assert all(0 <= fidelity[kind] <= 1 for kind in ("skipped", "substituted", "stale", "predicted"))
    assert 0 < fidelity["stale"] <= fidelity["predicted"] <= 0.55  # one of two layers
    assert demand["decode"]["fidelity"] == {"exact": True} | dict.fromkeys(fidelity.keys() - {"exact"}, 0)
    perplexity = daop["decode"]["perplexity"]
    assert (perplexity["exact_policy"], perplexity["tokens"], perplexity["prefill"]) == ("on-demand", 16, 24)
    ratio = perplexity["approximate"] / perplexity["exact"]
    assert ratio != 1
    assert perplexity["difference_percent"] == pytest.approx(100 * (ratio - 1), abs=0.05)  # four digits
    assert demand["decode"]["perplexity"] is None
    assert len(demand["decode"]["hit_rate_by_layer"]) == 2
    assert demand["decode"]["bytes_per_token"]["demanded"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def check_policies(found: dict[str, Any], names: list[str], rounds: int) -> None:
    policies = found["policies"]
    assert [p["name"] for p in policies] == names
    assert policies[0]["prefill_ratio"] == policies[0]["decode_ratio"] == 1
    for policy in policies:
        assert policy["exact"] is PRESETS[policy["name"]].exact
        assert 0 <= policy["host_share"] <= 1
        for figure in FIGURES:
            spread = policy[figure]
            assert len(spread["runs"]) == rounds
            assert 0 < spread["min"] <= spread["median"] <= spread["max"] < math.inf
            assert {spread["min"], spread["max"]} <= set(spread["runs"])


async def test_measured_prompts_are_not_counted(engine: str) -> None:
    """Neither while they are tokenized nor in any run, so that no placement by use has learned from them."""
    async with Client.connect(find_engine(engine).endpoint, name="tests") as client:
        counted = []
        for _ in range(2):
            arguments = ("--connect", engine, "--policy", "fiddler,daop", "--set", "daop.placement=popular")
            code, out, err = await asyncio.to_thread(
                run, "bench", *arguments, "--rounds", "1", "--ppl-tokens", "16", "--json", *SHORT
            )
            assert code == 0, err
            counted.append((await client.stats())["counted_tokens"])
            assert json.loads(out)["config"]["counted_tokens"] == counted[-1] >= 256
        assert counted[0] == counted[1]
        await client.generate(token_ids=(5, 6, 7), max_tokens=3, ignore_eos=True).result()
        assert (await client.stats())["counted_tokens"] == counted[1] + 5, "bench must leave counting on"


async def test_interrupted_bench_restores_the_policy(engine: str) -> None:
    changes: list[str] = []
    async with Client.connect(find_engine(engine).endpoint, name="tests") as client:
        await client.set_policy("layerwise")
        client.on_policy = lambda changed: changes.append(changed.policy)
        with Launched(
            *("bench", "--connect", engine, "--policy", "all-host,on-demand"), *("--rounds", "1000", *SHORT)
        ) as launched:
            assert await asyncio.to_thread(wait_until, lambda: len(changes) > 3, 60.0)
            launched.send(signal.SIGINT)
            code, out, err = await asyncio.to_thread(launched.end)
        assert (code, out) == (1, "")
        assert err.splitlines()[-1] == "launch.py: interrupted"
        assert (await client.stats())["policy"] == "layerwise"
        assert (await client.stats())["scheduler"]["running"] == 0


# --- with an engine of its own --------------------------------------------------------------------------


def test_every_preset_runs_without_policy_and_without_a_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model / name, tmp_path)
    arguments = ["--model", str(tmp_path), "--device", "cpu", "--workers", "2", "--expert-cache", "0.5"]
    code, out, err = run("bench", *arguments, "--name", "own", "--rounds", "1", "--json", *SHORT)
    assert code == 0, err
    found = json.loads(out)
    left_out = found["config"]["left_out"]
    assert left_out
    check_policies(found, [name for name in PRESETS if name not in ("random", *left_out)], rounds=1)
    for name, why in left_out.items():
        assert PRESETS[name]
        assert ("--format floe-int4" if name.startswith("floe") else "launch.py calibrate") in why
    assert found["emulation"] == ""
    assert found["config"]["prompts"] == "random ids"
    assert found["config"]["workers"] == 2
    assert found["config"]["expert_cache"] == 0.5
    assert found["config"]["cache_tiles"] > 0
    assert "own" not in engines_left()


# --- wrong input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--policy fidler", ["fidler", "fiddler"]),
        ("--policy fiddler,all-host,fiddler", ["fiddler", "2 times"]),
        ("--policy all-host,,fiddler", ["all-host,,fiddler", "a name is missing"]),
        ("--policy ,", ["a name is missing"]),
        ("--policy all-host,adapmoe", ["adapmoe needs a calibration", "calibrate --text FILE"]),
        ("--policy all-host,on-demand --set on-demand.placemen=first-layers", ["placemen", "placement"]),
        ("--set on-demand.placement=first-layers", ["--policy"]),
        ("--prompt-len 250 --gen-len 7", ["257 tokens", "256"]),
        ("--prompt-len 0", ["--prompt-len", "at least 1"]),
        ("--rounds 0", ["--rounds", "at least 1"]),
        ("--ppl-tokens -1", ["--ppl-tokens", "at least 0"]),
        ("--context 64", ["192 tokens", "64"]),
        ("--batch 8 --prompt-len 180", ["2048 tokens", "1024", "--kv-tokens"]),
        ("--plot bench.jpeg", ["bench.jpeg", ".png", ".pdf"]),
        ("--plot /dev/null/no/bench.png", ["/dev/null/no/bench.png", "Not a directory"]),
        ("--record x.trace --policy all-host,daop", ["daop", "cannot be replayed", "--set daop.predict=0"]),
        ("--connect missing", ["missing"]),
    ],
)
def test_wrong_usage_is_one_line(arguments, words, tiny_model, complaint) -> None:
    model = [] if "--connect" in arguments else ["--model", str(tiny_model)]
    line = complaint("bench", *model, *arguments.split())
    for word in words:
        assert word in line


def test_lengths_are_checked_against_a_running_engine(engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--connect", engine, "--prompt-len", "250", "--gen-len", "7"]) == 2
    assert "257 tokens" in capfd.readouterr().err
