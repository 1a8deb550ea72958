"""Measured costs are found again, by exactly the setting that they were measured with; no other file is
used.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from thread_engine import CONTEXT, engine_in_threads

from pipeline.calibration import cost_cache, cost_probe
from pipeline.calibration.cost_cache import FOLDER, Record, Setting, find, keep, measured_here
from pipeline.calibration.cost_probe import costs_for, setting_of
from pipeline.config import CoordinatorConfig, ResolvedConfig, WorkerCores
from pipeline.errors import PolicyError
from pipeline.policies.costs import Costs

COSTS = Costs((1, 4), (1e-3, 2e-3), (1e-4, 2e-4), 5e-3, 1e-4, (1e-3, 1e-3))
CPU, CORES = cost_cache.processor()
SETTING = Setting(CPU, CORES, "cpu", "f" * 64, "bf16", "bf16", (1, 1), "avx512", "")
RECORD = Record(SETTING, "/models/m", 3, 4096, 1e9, COSTS)


def path_of(cache: Path, setting: Setting = SETTING) -> Path:
    return cache / FOLDER / setting.name


def test_kept_costs_are_found_and_private(tmp_path: Path) -> None:
    assert find(tmp_path, SETTING) is None
    keep(tmp_path, replace(RECORD, measured=9.0))
    keep(tmp_path, RECORD)
    assert find(tmp_path, SETTING) == RECORD
    assert os.listdir(tmp_path / FOLDER) == [SETTING.name]
    assert path_of(tmp_path).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", [field.name for field in fields(Setting)])
def test_each_setting_has_its_own_costs(tmp_path: Path, name: str) -> None:
    other = {"cores": CORES + 1, "workers": (2,)}.get(name, "other")
    keep(tmp_path, RECORD)
    assert find(tmp_path, replace(SETTING, **{name: other})) is None
    assert find(tmp_path, SETTING) == RECORD


def changed(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("[]"),
        lambda path: path.chmod(0o666),
        changed(lambda data: data.update(version=0)),
        changed(lambda data: data.pop("measured")),
        changed(lambda data: data["setting"].pop("cpu")),
        changed(lambda data: data["setting"].update(cpu=None)),
        changed(lambda data: data["setting"].update(workers=3)),
        changed(lambda data: data.update(setting=7)),
        changed(lambda data: data.update(tiles=0)),
        changed(lambda data: data.update(tile_bytes=0)),
        changed(lambda data: data["costs"].update(link=-1.0)),
        changed(lambda data: data["costs"].pop("host")),
    ],
)
def test_damaged_file_is_removed_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    keep(tmp_path, RECORD)
    damage(path_of(tmp_path))
    assert find(tmp_path, SETTING) is None
    assert not path_of(tmp_path).exists()
    (line,) = caplog.messages
    assert line.startswith(f"{path_of(tmp_path)} is not used, its costs are measured again: ")
    keep(tmp_path, RECORD)
    assert find(tmp_path, SETTING) == RECORD


def test_found_costs_are_in_use_now(tmp_path: Path) -> None:
    """The file's time is that of its last use, which keeps it from being removed first."""
    keep(tmp_path, RECORD)
    os.utime(path_of(tmp_path), (1e9, 1e9))
    assert find(tmp_path, replace(SETTING, format="int4")) is None
    assert path_of(tmp_path).stat().st_mtime == 1e9
    measured_here(tmp_path)
    assert path_of(tmp_path).stat().st_mtime == 1e9
    before = time.time()
    assert find(tmp_path, SETTING) == RECORD
    assert path_of(tmp_path).stat().st_mtime >= before - 1


def test_record_of_another_setting_under_this_name_is_not_used(tmp_path: Path) -> None:
    keep(tmp_path, replace(RECORD, setting=replace(SETTING, format="int4")))
    path_of(tmp_path, replace(SETTING, format="int4")).rename(path_of(tmp_path))
    assert find(tmp_path, SETTING) is None
    assert path_of(tmp_path).exists()


def test_other_files_of_the_folder_are_neither_read_nor_removed(tmp_path: Path) -> None:
    keep(tmp_path, RECORD)
    others = [tmp_path / FOLDER / name for name in ("notes.json", "0" * 16 + ".json", SETTING.name + ".old")]
    for other in others:
        other.write_text("{")
    foreign = replace(RECORD, setting=replace(SETTING, cpu="another"))
    keep(tmp_path, foreign)
    assert measured_here(tmp_path) == [(path_of(tmp_path), RECORD)]
    assert all(other.exists() for other in others)
    assert find(tmp_path, foreign.setting) == foreign


def test_symbolic_link_is_not_followed_nor_a_huge_file_read(tmp_path: Path) -> None:
    keep(tmp_path, RECORD)
    elsewhere = tmp_path / "elsewhere.json"
    path_of(tmp_path).rename(elsewhere)
    path_of(tmp_path).symlink_to(elsewhere)
    assert find(tmp_path, SETTING) is None
    assert elsewhere.exists()
    path_of(tmp_path).unlink()
    path_of(tmp_path).write_text(" " * (2 << 20))
    assert find(tmp_path, SETTING) is None


def test_unwritable_folder_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    keep(tmp_path, RECORD)
    assert "costs could not be kept" in caplog.text
    assert find(tmp_path, SETTING) is None
    assert measured_here(tmp_path) == []


def test_costs_of_this_machine_are_listed_newest_first(tmp_path: Path) -> None:
    new = replace(RECORD, setting=replace(SETTING, format="int4"), measured=2e9)
    for record in (RECORD, new, replace(RECORD, setting=replace(SETTING, cores=CORES + 1))):
        keep(tmp_path, record)
    assert measured_here(tmp_path) == [(path_of(tmp_path, new.setting), new), (path_of(tmp_path), RECORD)]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_second_start_does_not_measure_again(tiny_model: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cost_probe, "BUDGET", 0.1)
    cache = tmp_path / "cache"
    config = ResolvedConfig()
    with engine_in_threads(tiny_model, tmp_path) as (engine, _):
        mover = engine.first.memory.mover

        def coordinator(config: ResolvedConfig) -> CoordinatorConfig:
            return CoordinatorConfig(
                engine="e",
                runtime=tmp_path,
                generation=0,
                key=b"",
                control="",
                store="",
                fingerprint="a" * 64,
                model=tiny_model,
                cache=cache,
                workers=WorkerCores.equal(1),
                slab=True,
                options=config,
            )

        setting = setting_of(engine, coordinator(replace(config, link_gbps=3.0)))
        assert engine.device.library is not None
        kernels = engine.device.library.variant
        assert setting == Setting(
            *(CPU, CORES, "cpu", "a" * 64, config.format, config.backbone_dtype, (1,)),
            *(kernels, "link paced to 3 GB/s"),
        )
        began = time.time()
        first = costs_for(engine, coordinator(config), CONTEXT)
        moved = mover.demanded
        assert costs_for(engine, coordinator(config), CONTEXT) == first
        assert mover.demanded == moved  # no fetch was timed
        ((path, record),) = measured_here(cache)
        assert record.costs == first
        assert record.setting == replace(setting, emulation="")
        assert (record.model, path.name) == (str(tiny_model), record.setting.name)
        assert began <= record.measured <= time.time()
        assert (record.tiles, record.tile_bytes) == (engine.shape.tiles, engine.layout.tile_bytes)
        path.write_text("damaged")
        again = costs_for(engine, coordinator(config), CONTEXT)
        assert mover.demanded > moved
        ((path, record),) = measured_here(cache)
        assert record.costs == again

        costs_for(engine, coordinator(replace(config, link_gbps=1.0)), CONTEXT)
        assert len(measured_here(cache)) == 2
        file = tmp_path / "costs.json"
        file.write_text(json.dumps(replace(COSTS, per="expert").to_json()))
        moved = mover.demanded
        given = costs_for(engine, coordinator(replace(config, costs=file)), CONTEXT)
        assert given == replace(COSTS, per="expert").for_tiles(engine.shape.tiles)
        assert mover.demanded == moved
        with pytest.raises(PolicyError, match=r"no\.json"):
            costs_for(engine, coordinator(replace(config, costs=tmp_path / "no.json")), CONTEXT)
