"""`launch.py advise` for machines that are not here: by numbers, by a file of costs, on recorded routing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.advise.estimate import Setting, estimate
from launch.advise.hardware import FromFile, Priced
from launch.advise.report import Report
from launch.advise.routing import RecordedText, drawn
from launch.advise.search import Search, fitting
from launch.advise.sizes import Sizes, sizes_of
from launch.advise.trial import DEVICE, HOST, Ran, fitted
from launch.bench.run import Run
from launch.cli import main
from pipeline.checkpoint.open import open_config
from pipeline.config import EngineConfig
from pipeline.counters import PARTS
from pipeline.memory.plan import Machine
from pipeline.policies.costs import Costs
from pipeline.policies.view import PolicyRequest

MACHINE = ["--host-gbps", "60", "--link-gbps", "25", "--gpu-gb", "12", "--gpu-gbps", "1000"]
MODEL = ["advise", "--model", "shape:mixtral-8x7b/4"]


def advise(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, object]:
    assert main([*MODEL, "--json", *options]) == code
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main([*MODEL, *options]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.strip()


def speeds(found: dict[str, object]) -> dict[tuple[str, str], float]:
    estimates = found["estimates"]
    assert isinstance(estimates, list)
    return {(each["format"], each["policy"]): each["tok_s"] for each in estimates}


def test_a_faster_link_speeds_up_what_waits_for_it_and_the_host_what_it_computes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    only = ["--policy", "all-host,on-demand", "--format", "bf16", "--expert-cache", "0.1"]
    slow = speeds(advise(capsys, *MACHINE, *only))
    # ten times the rates of both that share the host's memory
    faster = [*only, "--host-gbps", "600", "--link-gbps", "250", "--gpu-gb", "12", "--gpu-gbps", "1000"]
    fast = speeds(advise(capsys, *faster))
    for policy in ("all-host", "on-demand"):
        assert 5 < fast["bf16", policy] / slow["bf16", policy] <= 10.1


def test_every_format_has_a_plan_and_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = advise(capsys, *MACHINE, "--policy", "all-host,on-demand", "--host-gb", "11")
    fits = {each["format"]: each["fits"] for each in found["formats"]}  # type: ignore[attr-defined]
    assert fits == {"bf16": False, "int8": True, "int4": True, "int4-g128": True}
    assert {format for format, _ in speeds(found)} == {"int8", "int4", "int4-g128"}
    found = advise(capsys, *MACHINE, "--policy", "all-host", "--host-gb", "3", code=1)
    assert found["estimates"] == found["advice"] == []


def test_the_answer_is_a_command_with_what_changes_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*MACHINE, "--policy", "layerwise,fiddler,daop", "--format", "int8", "--expert-cache", "0.25"]
    found = advise(capsys, *options)
    best, *_ = found["advice"]  # type: ignore[misc]
    assert best == "--policy fiddler --format int8 --expert-cache 0.25"
    changes = {each["words"]: each["ratio"] for each in found["changes"]}  # type: ignore[attr-defined]
    assert changes["2 GB more of expert cache"] > 1
    assert changes["the host's memory 10 % faster"] > 1
    approximate = {each["policy"]: each["exact"] for each in found["estimates"]}  # type: ignore[attr-defined]
    assert approximate == {"layerwise": True, "fiddler": True, "daop": False}
    assert main([*MODEL, *options]) == 0
    table = capsys.readouterr().out
    assert "Advice" in table
    assert "What this does not know" in table
    assert all(len(line) <= 80 for line in table.splitlines())


def test_costs_of_a_file_are_of_one_format(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--costs", "daop-table-1", "--gpu-gb", "12", "--policy", "all-host,on-demand"]
    found = advise(capsys, *options)
    assert {format for format, _ in speeds(found)} == {"bf16"}
    # two experts of 3.583 ms and a round trip of 0.02 in each of 4 layers, and the layer's own 0.132
    assert speeds(found)["bf16", "all-host"] == pytest.approx(
        1e3 / (4 * (2 * 3.583 + 0.02 + 0.132)), rel=0.01
    )
    assert "--gpu-gb" in refusal(capsys, "--costs", "daop-table-1")
    assert "leave one" in refusal(capsys, *options, "--link-gbps", "20")


def test_an_incomplete_or_unknown_machine_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "--link-gbps", "25")
    assert "--host-gbps" in line
    assert "--gpu-gb" in line
    assert "\n" not in line
    assert "did you mean 4090-pcie4" in refusal(capsys, "--machine", "4090-pcie5")


def test_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "a.svg"
    options = ["--policy", "fiddler,on-demand", "--format", "int8", "--plot", str(picture)]
    found = advise(capsys, *MACHINE, *options)
    assert set(found["curves"]) == {"fiddler", "on-demand"}  # type: ignore[call-overload]
    text = picture.read_text("utf-8")
    assert "what fits" in text or "<svg" in text


async def test_a_machine_without_gpu_may_be_fastest_without_workers() -> None:
    """A machine with costs of one format, where all-host was measured with --workers 0 as well."""
    config = EngineConfig(device="cpu", workers=2)
    sizes = sizes_of(open_config(Path("shape:mixtral-8x7b/4")), config, "int4")
    text = drawn(sizes.header, prompt=32, chunk=32, batch=1, seed=0)
    costs = Costs((1, 64), (1e-4, 2e-3), (1e-4, 2e-3), link=1e-3, round_trip=1e-4, other=(2e-4, 2e-4))
    hardware = FromFile("a machine", costs, Machine(10**11, 10**11, None), device="cpu")
    hardware.without_workers = 1.5
    search = Search(hardware, [fitting(sizes, config, hardware)], text, 32, 0, lambda: None)
    await search.presets([PolicyRequest("all-host"), PolicyRequest("on-demand")])
    await search.what_if()
    report = Report(open_config(Path("shape:mixtral-8x7b/4")), hardware, config, text, 32, 1, search.advice)
    best, plain, _ = search.advice.estimates
    assert best.tok_s == pytest.approx(1.5 * plain.tok_s)
    assert report.to_json()["advice"] == ["--policy all-host --format int4 --workers 0"]
    assert all(1 <= change.ratio < 1.2 for change in search.advice.changes)
    assert "\n  --policy all-host --format int4 --workers 0\n" in report.render()


def test_costs_are_fitted_to_two_runs_so_that_their_replays_take_as_long() -> None:
    """Runs made by replays with other costs than the probe's: the fit finds these costs."""
    config = EngineConfig(device="cpu", workers=2)
    sizes = sizes_of(open_config(Path("shape:mixtral-8x7b/4")), config, "int4")
    text = drawn(sizes.header, prompt=32, chunk=32, batch=1, seed=0)
    probed = Costs((1, 64), (1e-4, 2e-3), (5e-5, 4e-4), link=3e-4, round_trip=1e-4, other=(2e-4, 2e-4))
    sides = {"host": (1.5e-4, 3e-3), "device": (6e-5, 4.8e-4), "other": (5e-4, 5e-4)}
    true = Priced(replace(probed, **sides, link=4e-4, round_trip=3e-4), rest=2e-3)
    cache = sizes.needs.tiles // 2
    host, device = (_ran(request, true, sizes, text, cache) for request in (HOST, DEVICE))
    found = fitted(probed, host, device, sizes, cache, text)
    for name in ("host", "device", "other"):
        assert getattr(found.costs, name) == pytest.approx(getattr(true.costs, name), rel=0.01)
    assert found.costs.link == pytest.approx(true.costs.link, rel=0.02)
    assert found.costs.round_trip == pytest.approx(true.costs.round_trip, rel=0.02)
    assert found.rest == pytest.approx(true.rest, rel=0.01)
    assert found.rest_of(1.0) == found.rest, "no planning was measured"


def test_a_preset_that_plans_longer_in_a_replay_is_predicted_to_plan_longer() -> None:
    """By as many times as the device's run planned longer than its replay took."""
    config = EngineConfig(device="cpu", workers=2)
    sizes = sizes_of(open_config(Path("shape:mixtral-8x7b/4")), config, "int4")
    text = drawn(sizes.header, prompt=32, chunk=32, batch=1, seed=0)
    costs = Costs((1, 64), (1e-4, 2e-3), (5e-5, 4e-4), link=3e-4, round_trip=1e-4, other=(2e-4, 2e-4))
    cache = sizes.needs.tiles // 2
    host, device = (_ran(request, Priced(costs, 2e-3), sizes, text, cache) for request in (HOST, DEVICE))
    device.run.decode["seconds"]["plan"] = 10 * 1e-3  # of ten steps
    found = fitted(costs, host, device, sizes, cache, text)
    assert found.rest_of(found.planned) == pytest.approx(found.rest)
    assert found.rest_of(3 * found.planned) == pytest.approx(found.rest + 2e-3)
    assert found.rest_of(0.0) == pytest.approx(max(0.0, found.rest - 1e-3))


def _ran(request: PolicyRequest, priced: Priced, sizes: Sizes, text: RecordedText, cache: int) -> Ran:
    """What an engine with these costs would have counted in one run of the text."""
    found = estimate(Setting(request, sizes.format, cache, 0.5), sizes, priced, text, 32, 0)
    shape, costs, steps = sizes.header.shape, priced.costs, 10
    tiles = steps * shape.layers * shape.top_k * shape.tiles
    host = tiles if request is HOST else 0
    step = 1 / found.tok_s
    parts = dict.fromkeys(PARTS, 0.0)
    parts["attention"] = steps * shape.layers * costs.other[0]
    parts["device"] = (tiles - host) * costs.device[0]
    parts["link"] = 0.0 if host else steps * (step - priced.rest) - parts["attention"] - parts["device"]
    parts["wait"] = host * costs.host[0] + (steps * shape.layers * costs.round_trip if host else 0.0)
    tree = {"host_tiles": host, "resident_tiles": tiles - host, "fetched_tiles": 0, "seconds": parts}
    tree |= {"steps": steps, "rows": steps, "host_busy_s": host * costs.host[0]}
    run = Run(1.0, 1.0, found.tok_s, 0, 0.0, host / tiles, decode=tree)
    return Ran(request, 32, run)
