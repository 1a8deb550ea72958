"""The doctor's findings on the costs that engines have measured on this machine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from engines import fingerprint_of

from launch.cli import main
from launch.doctor import costs
from launch.doctor.finding import render
from pipeline.assets import model_dir
from pipeline.calibration.cost_cache import Record, Setting, keep, processor
from pipeline.policies.costs import Costs
from protocol.program import user_folder

# An expert has 4 tiles: host 4 ms, device 0.4 ms, move 8 ms.
COSTS = Costs((1, 64), (1e-3, 8e-3), (1e-4, 2e-4), 2e-3, 5e-5, (3e-4, 2e-3))
SETTING = Setting(*processor(), "cpu", "f" * 64, "bf16", "bf16", (1, 1), "avx512", "")
RECORD = Record(SETTING, str(model_dir()), 4, 10_000_000, 1.6e9, 0.0, COSTS)


def test_costs_of_an_expert_and_a_tile_are_reported(tmp_path: Path) -> None:
    keep(tmp_path, RECORD)
    (found,) = costs.inspect(tmp_path)
    assert (found.topic, found.level, found.do) == ("costs", "ok", "")
    assert found.found.startswith("the embedded model (bf16, 2 workers, cpu; 2020-09-1")
    assert found.found.endswith("one expert: host 4 ms, device 0.4 ms, move 8 ms")
    assert "for 64 tokens: host 32 ms, device 0.8 ms" in found.means
    assert "computed on the host sooner than moved" in found.means
    tile = "one tile of 10.0 MB: host 1 ms (10 GB/s), device 0.1 ms (100 GB/s), link 2 ms (5 GB/s)"
    assert tile in found.means
    assert "round trip to the workers 0.05 ms, a layer without its experts 0.3 ms" in found.means
    assert f"from {tmp_path}/costs/{SETTING.name}: delete it to measure again" in found.means
    assert max(map(len, render([found], "").splitlines())) <= 80


def test_fast_link_makes_moving_the_cheaper_choice(tmp_path: Path) -> None:
    keep(tmp_path, replace(RECORD, costs=replace(COSTS, link=1e-4)))
    (found,) = costs.inspect(tmp_path)
    assert "moved sooner than computed on the host" in found.means


def test_costs_of_a_busy_machine_get_a_note(tmp_path: Path) -> None:
    keep(tmp_path, replace(RECORD, load=5.0 * SETTING.cores))
    (found,) = costs.inspect(tmp_path)
    assert found.level == "note"
    assert f"load average {5.0 * SETTING.cores:.1f} before measuring" in found.means
    assert re.search(rf"rm {tmp_path}/costs/\S+\.json$", found.do)


def test_no_costs_and_many_costs(tmp_path: Path) -> None:
    (none,) = costs.inspect(tmp_path)
    assert none.level == "ok"
    assert "no costs have been measured" in none.found
    for n in range(7):
        keep(tmp_path, replace(RECORD, setting=replace(SETTING, emulation=f"link {n}"), measured=1.6e9 + n))
    found = costs.inspect(tmp_path)
    assert ["link 6" in found[0].found, "link 3" in found[3].found] == [True, True]
    assert found[4].found.startswith("3 older sets")
    assert len(found) == 5


@pytest.mark.usefixtures("known_speeds")
def test_doctor_model_shows_the_costs_of_that_model(tiny_model: Path, capfd) -> None:
    of_int8 = replace(SETTING, store=fingerprint_of(tiny_model, "int8"), format="int8")
    keep(user_folder("CACHE"), replace(RECORD, setting=of_int8, model=str(tiny_model)))
    keep(user_folder("CACHE"), RECORD)  # another model's
    try:
        arguments = ["doctor", "--model", str(tiny_model), "--device", "cpu"]
        assert main([*arguments, "--json"]) == 0
        every = json.loads(capfd.readouterr().out)["costs"]
        assert SETTING.name not in [Path(one["file"]).name for one in every]
        # other tests' engines may have measured this model too, in other formats
        (only,) = [one for one in every if one["setting"]["format"] == "int8"]
        assert Costs.from_json(only["costs"]) == COSTS
        assert Path(only["file"]).name == of_int8.name
        assert main(arguments) == 0
        out = capfd.readouterr().out
        assert "Costs measured here (int8, 2 workers, cpu; 2020-09-1" in out
        assert "one expert: host 4 ms, device 0.4 ms, move 8 ms" in out
        assert max(map(len, out.splitlines())) <= 80
    finally:
        for setting in (of_int8, SETTING):
            (user_folder("CACHE") / "costs" / setting.name).unlink()
