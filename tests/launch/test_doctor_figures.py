"""What the doctor makes of measured rates and of plans, with the measurements given."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.command_line.options import parse
from launch.doctor import costs, model_plan, speeds
from launch.doctor.bandwidth import embedded
from launch.doctor.proof import Proof
from launch.doctor.speeds import measure_speeds
from launch.forecast import QUANTILES, Spread
from launch.processes.cores import Cores
from launch.processes.trials import TrialFailed
from launch.terminal.interrupts import Interrupts
from pipeline.calibration.cost_cache import Record, Setting, keep, processor
from pipeline.checkpoint.open import open_model
from pipeline.config import EngineConfig
from pipeline.memory.plan import AUTOMATIC
from pipeline.policies.costs import Costs

SHAPE = Path("shape:mixtral-8x7b/2")
Given = Callable[..., Any]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Given:
    """measure_speeds, where each process reads 10 GB/s, the n-th format 4 - n GB/s, and a matrix 12 GB/s."""

    async def measured(names: list[str], tok_s: float = 100.0, failure: str = "", **asked: Any) -> Any:
        runs: list[list[dict[str, Any]]] = []

        async def run_children(module: str, configs: list[dict[str, Any]], fd: int) -> Any:
            assert module == speeds.CHILD
            runs.append(configs)
            kinds = [10e9, *(4e9 - 1e9 * n for n in range(len(configs[0]["experts"])))]
            kinds += [] if configs[0]["matrix"] is None else [12e9]
            return [[[rate] * 3 for rate in kinds] for _ in configs]

        async def prove(options: object, interrupts: object, device: str) -> Proof:
            assert device == "cpu"
            return Proof("cpu", failure, rate=tok_s)

        monkeypatch.setattr(speeds, "run_children", run_children)
        monkeypatch.setattr(speeds, "prove", prove)
        monkeypatch.setattr(os, "getloadavg", lambda: (7.0, 8.0, 9.0))
        config = EngineConfig(device="cpu", **asked)
        options = parse(["doctor", "--model", str(SHAPE)])
        return await measure_speeds(open_model(SHAPE), config, names, options, Interrupts()), runs

    return measured


async def test_speeds_are_sums_over_the_cores(measured: Given) -> None:
    cores = Cores.here().computing
    found, runs = await measured(["bf16", "int8"])
    assert found.cores == cores
    assert found.load == 7.0
    assert {name: spread.usual for name, spread in found.experts.items()} == {
        "bf16": pytest.approx(4e9 * cores),
        "int8": pytest.approx(3e9 * cores),
    }
    assert found.backbone.usual == pytest.approx(12e9)  # of one process with all cores
    assert found.memory == pytest.approx(max(10e9 * cores, 12e9))
    small = embedded()
    expected = (1 / 100.0 - small.token / (10e9 * cores)) / small.layers
    assert found.layer == pytest.approx(expected)
    together, matrix = runs
    assert [config["cores"] for config in together] == [
        [core] for cpus in Cores.here().for_workers(Cores.here().default_workers()) for core in cpus.cores
    ]
    assert [config["lo"] for config in together[1:]] == [config["hi"] for config in together[:-1]]
    assert together[0]["lo"] == 0 < together[-1]["hi"] <= matrix[0]["size"]
    assert [name for name, _ in together[0]["experts"]] == ["bf16", "int8"]
    assert together[0]["matrix"] is None
    (alone,) = matrix
    assert (alone["experts"], alone["cores"], alone["lo"], alone["hi"]) == ([], [], 0, alone["size"])
    assert alone["matrix"] == ("bf16", 4096, cores)
    assert found.to_map() == {
        **{"memory_gbps": found.memory / 1e9, "backbone_gbps": found.backbone.usual / 1e9},
        "expert_kernels_gbps": {name: spread.usual / 1e9 for name, spread in found.experts.items()},
        **{"layer_overhead_s": found.layer, "load_average": 7.0, "cores": cores},
    }


async def test_quantized_backbone_is_measured_as_the_experts_are(measured: Given) -> None:
    found, runs = await measured(["bf16"], backbone_dtype="int8")
    assert len(runs) == 1
    assert [name for name, _ in runs[0][0]["experts"]] == ["bf16", "int8"]
    assert found.backbone.usual == pytest.approx(3e9 * found.cores)
    assert [*found.experts] == ["bf16"]


async def test_overhead_of_a_layer_is_never_negative_and_a_failure_is_named(measured: Given) -> None:
    found, _ = await measured(["bf16"], tok_s=1e9)
    assert found.layer == 0.0
    with pytest.raises(TrialFailed, match=r"^no engine$"):
        await measured(["bf16"], failure="no engine")


def test_spread_sums_quantiles_of_processes() -> None:
    found = Spread.of([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    assert (found.slow, found.usual, found.fast) == pytest.approx((13.2, 22.0, 30.8))
    assert QUANTILES == (0.1, 0.5, 0.9)


# --- the plan of a model ------------------------------------------------------------------------------------


def shown(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["doctor", "--model", str(SHAPE), "--device", "cpu", *words]) == code
    return capfd.readouterr().out


@pytest.mark.usefixtures("known_speeds")
def test_expected_speeds_are_beside_their_formats(capfd: pytest.CaptureFixture[str]) -> None:
    report = json.loads(shown(capfd, "--json"))
    text = shown(capfd)
    rates = [row["expected"]["tok_s"] for row in report["formats"]]
    assert rates == sorted(rates)
    rows = {
        line.strip().split("  ")[0]: line.split()
        for line in text.splitlines()
        if line.startswith(("tok/s, about", "  range", "  memory's limit", "context (tokens)"))
    }
    assert [float(cell) for cell in rows["tok/s, about"][2:]] == pytest.approx(rates, rel=0.05)
    limits = [row["expected"]["memory_limit_tok_s"] for row in report["formats"]]
    assert [float(cell) for cell in rows["memory's limit"][2:]] == pytest.approx(limits, rel=0.05)
    ranges = [tuple(map(float, cell.split("-"))) for cell in rows["range"][1:]]
    assert ranges == [pytest.approx(row["expected"]["tok_s_range"], rel=0.05) for row in report["formats"]]
    assert rows["context (tokens)"][2:] == [str(row["context"]) for row in report["formats"]]
    assert report["speeds"]["cores"] == 2
    assert (report["device"], report["policy"], report["model"]) == ("cpu", "all-host", str(SHAPE))
    assert "with --device cpu --policy all-host" in text
    assert "2 layers with 8 experts, 2 active per token; context of up to 32768 tokens" in text


def test_speeds_that_cannot_be_measured_leave_the_plan(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise TrialFailed("too little memory is available to measure")

    monkeypatch.setattr(model_plan, "measure_speeds", fail)
    text = shown(capfd)
    assert "The expected tok/s are unknown: too little memory is available to measure" in " ".join(
        text.split()
    )
    assert "tok/s, about" not in text
    report = json.loads(shown(capfd, "--json"))
    assert report["speeds"] is None
    assert [row["expected"] for row in report["formats"]] == [None] * len(AUTOMATIC)


@pytest.mark.usefixtures("known_speeds")
def test_formats_beside_the_asked_one_are_shown_and_not_chosen(capfd: pytest.CaptureFixture[str]) -> None:
    report = json.loads(shown(capfd, "--format", "int8", "--json"))
    assert sorted(row["format"] for row in report["formats"]) == sorted(AUTOMATIC)
    assert report["chosen"]["format"] == "int8"
    text = shown(capfd, "--format", "int8")
    (line,) = [line for line in text.splitlines() if "chosen" in line]
    heads = next(line for line in text.splitlines() if line.split()[:1] == ["available"]).split()[1:]
    assert line.split()[heads.index("int8")] == "chosen"
    assert line.split().count("chosen") == 1
    assert re.search(r"--format int8 --context \d+ --kv-tokens \d+$", text, re.M)


# --- costs --------------------------------------------------------------------------------------------------

COSTS = Costs((1, 64), (1e-3, 8e-3), (1e-4, 2e-4), 2e-3, 5e-5, (3e-4, 2e-3))
SETTING = Setting(*processor(), "cpu", "f" * 64, "bf16", "bf16", (), "avx512", "slow link")
RECORD = Record(SETTING, "/m", 4, 10_000_000, 1.6e9, 0.0, COSTS)


def test_costs_are_headed_by_their_setting(tmp_path: Path) -> None:
    busy = replace(RECORD, load=5.0 * SETTING.cores)
    plain, loaded = costs.paragraphs([(tmp_path / "a", RECORD), (tmp_path / "b", busy)])
    assert plain[0].startswith("bf16, no workers, cpu, emulated: slow link; 2020-09-1")
    assert plain[1] == [
        *costs.explained(RECORD),
        f"from {tmp_path}/a: delete it to measure again; --costs FILE overrides it",
    ]
    assert loaded[1][-2].startswith("too high: other programs were computing (load average ")
    assert len(loaded[1]) == len(plain[1]) + 1
    assert len(costs.paragraphs([(tmp_path, RECORD)] * 9)) == costs.SHOWN
    assert costs.to_map(tmp_path / "a", RECORD) == {"file": f"{tmp_path}/a"} | RECORD.to_json()


def test_only_costs_of_a_models_stores_are_its(tmp_path: Path) -> None:
    keep(tmp_path, RECORD)
    keep(tmp_path, replace(RECORD, setting=replace(SETTING, store="e" * 64), measured=1.7e9))
    assert [record.setting.store for _, record in costs.of_model(tmp_path, {"f" * 64, "d" * 64})] == [
        "f" * 64
    ]
    newest = costs.of_model(tmp_path, {"f" * 64, "e" * 64})
    assert [record.measured for _, record in newest] == [1.7e9, 1.6e9]


def test_expert_is_moved_only_where_that_takes_less_time() -> None:
    for host, moved in ((1.0, False), (0.75, False), (1.25, True)):
        times = replace(COSTS, host=(host, 8.0), device=(0.5, 1.0), link=0.5)
        assert ("moved sooner" in costs.explained(replace(RECORD, costs=times))[1]) is moved
    tile = costs.explained(replace(RECORD, costs=replace(COSTS, device=(0.0, 0.0))))[3]
    assert "device 0 ms, link 2 ms (5 GB/s)" in tile  # no time has no rate
