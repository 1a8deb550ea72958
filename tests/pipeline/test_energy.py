"""Energy by counters that begin again, and by the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.energy import GPU_WATTS, PROCESSOR_WATTS, EnergyMeter, modelled_watts


def package(powercap: Path, name: str, joules: float) -> None:
    zone = powercap / name
    zone.mkdir(exist_ok=True)
    (zone / "energy_uj").write_text(f"{round(1e6 * joules)}\n")
    (zone / "max_energy_range_uj").write_text("100000000\n")


def test_counters_are_summed_from_the_start_on_also_where_they_begin_again(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 90)
    package(tmp_path, "intel-rapl:1", 10)
    package(tmp_path, "intel-rapl:0:0", 50)  # a part of a package, which has it already
    gpus = [7.0, 1.0]
    meter = EnergyMeter(tmp_path, lambda: gpus)
    assert meter.joules() == {"processors": 0, "gpus": 0}
    package(tmp_path, "intel-rapl:0", 5)
    package(tmp_path, "intel-rapl:1", 12)
    package(tmp_path, "intel-rapl:0:0", 60)
    gpus = [9.0, 1.5]
    assert meter.joules() == pytest.approx({"processors": 15 + 2, "gpus": 2.5})
    package(tmp_path, "intel-rapl:0", 6)
    assert meter.joules()["processors"] == pytest.approx(18)


def test_what_has_no_counter_is_left_out(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path, list).joules() == {}
    (tmp_path / "intel-rapl:0").mkdir()  # one that may not be read
    assert EnergyMeter(tmp_path / "nowhere", list).joules() == EnergyMeter(tmp_path, list).joules() == {}


def test_the_model_is_power_by_busy_time() -> None:
    (idle, busy), (gpu_idle, gpu_busy) = PROCESSOR_WATTS, GPU_WATTS
    assert modelled_watts(0, 0, gpu=True) == idle + gpu_idle
    assert modelled_watts(1, 1, gpu=True) == busy + gpu_busy
    assert modelled_watts(0.5, 0.25, gpu=True) - idle - gpu_idle == pytest.approx(
        (busy - idle) / 2 + (gpu_busy - gpu_idle) / 4
    )
    assert modelled_watts(0.8, 0.8, gpu=False) == busy
