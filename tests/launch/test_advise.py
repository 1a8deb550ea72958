"""`launch.py advise` for machines that are not here: by numbers, by a file of costs, on recorded routing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plain_calibration import plain_calibration

from launch.advise.search import Search
from launch.cli import main
from launch.forecast import Priced, Setting, by_replay, drawn, sizes_of
from launch.planning import host_memory
from pipeline.calibration.file import NAME, save
from pipeline.checkpoint.open import open_config, open_model
from pipeline.config import EngineConfig
from pipeline.models.registry import model_spec
from pipeline.policies.costs import Costs
from pipeline.policies.view import PolicyRequest
from protocol.program import user_folder

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


def test_several_requests_at_once_are_of_a_described_machine(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--policy", "all-host", "--format", "int8", "--batch", "4"]
    four, one = advise(capsys, *MACHINE, *only), advise(capsys, *MACHINE, *only[:-2])
    assert "4 requests at once" in str(four["routing"])
    assert speeds(four)["int8", "all-host"] > speeds(one)["int8", "all-host"]
    assert "--batch" in refusal(capsys, *only)


def test_every_format_has_a_plan_and_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = advise(capsys, *MACHINE, "--policy", "all-host,on-demand", "--host-gb", "11")
    fits = {each["format"]: each["fits"] for each in found["formats"]}  # type: ignore[attr-defined]
    assert fits == {"bf16": False, "int8": True, "int4": True, "int4-g128": True}
    assert {format for format, _ in speeds(found)} == {"int8", "int4", "int4-g128"}
    found = advise(capsys, *MACHINE, "--policy", "all-host", "--host-gb", "3", code=1)
    assert found["estimates"] == found["advice"] == []


def test_the_answer_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*MACHINE, "--policy", "layerwise,fiddler,daop", "--format", "int8", "--expert-cache", "0.25"]
    found = advise(capsys, *options)
    best, *_ = found["advice"]  # type: ignore[misc]
    assert best == "--policy fiddler --format int8 --expert-cache 0.25"
    approximate = {each["policy"]: each["exact"] for each in found["estimates"]}  # type: ignore[attr-defined]
    assert approximate == {"layerwise": True, "fiddler": True, "daop": False}
    assert main([*MODEL, *options]) == 0
    table = capsys.readouterr().out
    assert "Advice" in table
    assert all(len(line) <= 80 for line in table.splitlines())


def test_experts_on_disk_take_what_reading_them_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Also chosen where nothing fits; a device that has experts whole leaves fewer to be read."""
    only = [*MACHINE, "--policy", "all-host,layerwise", "--format", "int4", "--expert-cache", "0.25"]
    half = [*only, "--host-memory", "1.6GB"]

    def estimates(*options: str) -> dict[str, Any]:
        found: Any = advise(capsys, *options)
        return {each["policy"]: each for each in found["estimates"]} | {"advice": found["advice"]}

    there, slow = estimates(*only), estimates(*half, "--disk-gbps", "1")
    for policy in ("all-host", "layerwise"):
        read, time = slow[policy]["read"], 1 / slow[policy]["tok_s"] - 1 / there[policy]["tok_s"]
        assert time == pytest.approx(read / 1e9, rel=0.05)
    assert 0 < slow["layerwise"]["read"] < slow["all-host"]["read"]
    assert slow["all-host"]["first_token_s"] > there["all-host"]["first_token_s"] + 1
    assert slow["advice"][0].endswith("--host-memory 1.6GB")
    chosen = estimates(*only, "--disk-gbps", "1", "--host-gb", "7")
    assert 0 < chosen["all-host"]["host_memory"] < 3e9
    assert host_memory(2_999_999_999) == "--host-memory 2.9999GB", "what it says fits, too"
    assert "--disk-gbps" in refusal(capsys, *half)
    assert main([*MODEL, *only, "--disk-gbps", "1", "--host-gb", "4"]) == 1
    assert "those of two layers" in capsys.readouterr().out


def test_policies_that_need_all_experts_in_memory_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "tandem", "--format", "floe-int4", "--host-memory", "1.6GB", "--disk-gbps", "1"]
    assert main([*MODEL, *MACHINE, *options]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "tandem left out: policy tandem has the up matrices of all experts on the device" in out
    assert "does not fit" not in out


def test_an_incomplete_or_unknown_machine_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "--link-gbps", "25")
    assert "--host-gbps" in line
    assert "--gpu-gb" in line
    assert "\n" not in line
    assert "did you mean 4090-pcie4" in refusal(capsys, "--machine", "4090-pcie5")


def test_speed_is_that_of_the_costs_and_of_a_steps_rest() -> None:
    sizes = sizes_of(open_config(Path("shape:mixtral-8x7b/4")), EngineConfig(device="cpu", workers=2), "int4")
    text = drawn(sizes.header, prompt=32, chunk=32, seed=0)
    costs = Costs((1, 64), (1e-4, 2e-3), (5e-5, 4e-4), link=3e-4, round_trip=1e-4, other=(2e-4, 2e-4))
    setting = Setting(PolicyRequest("all-host"), "int4", sizes.needs.tiles // 2, 0.5)
    plain = by_replay(setting, sizes, Priced(costs, 2e-3), text, 32, 0)
    layer = 2 * sizes.header.shape.tiles * 1e-4 + 1e-4 + 2e-4  # of two experts
    assert 0 < plain.planning < 1
    assert (1 - plain.planning) / plain.tok_s == pytest.approx(4 * layer + 2e-3)


def test_a_trial_records_and_prices_this_machine(
    tiny_model: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`advise` starts one engine. Its trace gives the routing and the rest of a step, its policies the costs;
    a preset that needs a calibration is replayed with the model's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = open_model(tiny_model)
    spec = model_spec(source.config)
    measured = plain_calibration(len(spec.moe_layers), spec.experts, spec.hidden)
    save(user_folder("CACHE") / source.fingerprint("calibration", 0) / NAME, measured, {})
    options = ["--device", "cpu", "--workers", "1", "--expert-cache", "0.5", "--prompt-len", "16"]
    arguments = ["advise", "--model", str(tiny_model), *options, "--policy", "all-host,adapmoe", "--json"]
    assert main(arguments) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["machine"].startswith("this machine, ")
    assert {each["policy"] for each in report["estimates"]} == {"all-host", "adapmoe"}
    assert all(0 < each["tok_s"] < 1e5 for each in report["estimates"])
    assert report["advice"]


@pytest.mark.parametrize(
    ("speeds", "advised"),
    [
        ({"bf16": 74, "int8": 109, "int4": 117}, ["int4", "int8", "bf16"]),
        ({"bf16": 74, "int8": 115, "int4": 117}, ["int8", "bf16"]),
        ({"bf16": 74, "int8": 60, "int4": 117}, ["int4", "bf16"]),
        ({"bf16": 117, "int8": 60, "int4": 100}, ["bf16"]),
    ],
)
def test_every_more_exact_format_is_advised_that_is_not_slower_than_a_still_more_exact_one(
    speeds: dict[str, float], advised: list[str]
) -> None:
    formats: Any = [SimpleNamespace(sizes=SimpleNamespace(format=name), fits=True) for name in speeds]
    nothing: Any = None
    search = Search(nothing, formats, nothing, 0, 0, lambda: None)
    policy = PolicyRequest("tandem")
    made: list[Any] = [
        SimpleNamespace(setting=SimpleNamespace(format=name, policy=policy), exact=True, tok_s=speed)
        for name, speed in speeds.items()
    ]
    search.estimates = made
    assert [each.setting.format for each in search.recommended()] == advised
