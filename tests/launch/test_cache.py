"""`launch.py cache`: what is listed, what is pruned, and that nothing in use or unknown is removed."""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import run, store_of

from launch.cache.command import DAY, Entry, remove, scan, select, table
from launch.cli import main
from pipeline.assets import model_dir
from pipeline.calibration import cost_cache
from pipeline.calibration.heat import Heat
from pipeline.checkpoint.open import open_model
from pipeline.config import EngineConfig
from pipeline.memory.needs import needs
from pipeline.models.facts import _described, facts_of, pack
from pipeline.policies.costs import Costs
from pipeline.policies.view import ModelShape
from protocol.program import user_folder
from shm.disk_cache import RECORD, CacheRecord, note_use

STORE, BACKBONE = "5" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    user_folder("CACHE").mkdir()
    return user_folder("CACHE")


def run_cache(*arguments: str) -> tuple[int, str]:
    code, out, err = run("cache", *arguments)
    assert err == ""
    return code, out


def run_json(*arguments: str) -> dict[str, Any]:
    code, out = run_cache(*arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def make_file(path: Path, size: int, days: float) -> Path:
    """A file that was last used so many days ago, with a record if it lies in a fingerprint's folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(size))
    kind = {"store.bin": "store", "backbone.bin": "backbone"}.get(path.name)
    if kind is not None:
        note_use(path.parent, CacheRecord(kind, "/models/mixtral", "int4"))
    then = time.time() - days * DAY
    for each in path.parent.iterdir() if kind else (path,):
        os.utime(each, (then, then))
    return path


def kinds(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["kind"] for entry in entries]


def disk(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Without stores in shared memory, which other tests may have."""
    return [entry for entry in found["entries"] if entry["kind"] != "kept store"]


# --- selection ----------------------------------------------------------------------------------------------


def entry(name: str, size: int, days: float, **fields: Any) -> Entry:
    return Entry("store", Path(f"/c/{name}/store.bin"), size, time.time() - days * DAY, **fields)


A, B, C = entry("a", 10, 9), entry("b", 20, 8), entry("c", 30, 7)
USED = entry("used", 10, 9, in_use="engine e1")
OTHER, KEPT = replace(entry("x", 100, 99), kind="unknown"), replace(entry("y", 100, 9), kind="kept store")


@pytest.mark.parametrize(
    ("entries", "days", "size", "removed", "in_use"),
    [
        ([A, C], 8, None, [A], []),
        ([A, C], 9.1, None, [], []),
        ([A, B, C], None, 60, [], []),
        ([A, B, C], None, 59, [A], []),  # the least recently used first, until the rest fits
        ([A, B, C], None, 50, [A], []),
        ([A, B, C], None, 49, [A, B], []),
        ([A, B, C], None, 0, [A, B, C], []),
        ([USED, B, C], None, 40, [B], [USED]),  # what is in use is named, and does not count as freed
        ([OTHER, A], 0, 50, [A], []),  # unknown files count and are never selected
        ([KEPT], None, 0, [], []),  # stores in memory are selected by age alone
        ([KEPT], 8, 0, [KEPT], []),
        ([KEPT, A, B], 8.5, 20, [KEPT, A], []),
    ],
)
def test_age_and_size_select_what_is_removed(
    entries: list[Entry], days: float | None, size: int | None, removed: list[Entry], in_use: list[Entry]
) -> None:
    assert select(entries, days, size) == (removed, in_use)


# --- files --------------------------------------------------------------------------------------------------


def test_unknown_files_are_listed_and_stay(folder: Path) -> None:
    files = [folder / "notes.txt", folder / STORE / "mine.txt", folder / "costs" / "x.json"]
    for path in (*files, folder / "thesis" / "chapter.tex"):
        make_file(path, 100, 400)
    (folder / "link").symlink_to(files[0])
    found = disk(run_json("--prune", "--older-than", "300", "--to", "0"))
    assert sorted(e["path"] for e in found) == sorted(map(str, (*files, folder / "thesis", folder / "link")))
    assert set(kinds(found)) == {"unknown"}
    assert all(path.exists() for path in files)
    assert cost_cache.measured_here(folder) == []
    assert all(path.exists() for path in files)
    assert "unknown files are of another program or version, and are never removed" in run_cache()[1]


def test_leftovers_of_killed_writers_are_unfinished(folder: Path) -> None:
    temporary = (
        ".about.json.0badcafe",
        ".store.bin.0123abcd",
        ".x.json.deadbeef",
        ".y.json.00000000",
    )
    for place, name in zip((STORE, STORE, "costs", "kernels"), temporary, strict=True):
        make_file(folder / place / name, 10, 1)
    assert kinds(run_json("--prune", "--to", "0")["removed"]) == ["unfinished"] * 4
    assert os.listdir(folder) == []


def test_names_of_files_and_models_cannot_control_the_terminal(folder: Path) -> None:
    make_file(folder / "\x1b[31mred\n", 10, 1)
    make_file(folder / os.fsdecode(b"\xff"), 10, 1)
    make_file(folder / STORE / "store.bin", 10, 40)
    note_use(folder / STORE, CacheRecord("store", "/models/\x1b[32mgreen", "\x1b[33mint4"))
    code, out = run_cache()
    assert code == 0
    assert "\x1b" not in out
    assert out.count("\N{REPLACEMENT CHARACTER}") == 5
    assert "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}\n" in out
    assert "\x1b" not in run_cache("--prune", "--to", "0")[1]


def test_the_use_of_experts_is_listed_with_its_model_and_format(folder: Path) -> None:
    shape = ModelShape(layers=1, experts=2, tiles=1, top_k=1)
    Heat(folder / STORE, CacheRecord("store", "/models/mixtral", "int4"), shape).keep(np.array([[300, 9]]), 1)
    (found,) = (entry for entry in scan(folder) if entry.on_disk)
    assert (found.kind, found.model, found.format) == ("heat", "mixtral", "int4")
    assert kinds(run_json("--prune", "--to", "0")["removed"]) == ["heat"]
    assert os.listdir(folder) == []


def test_costs_are_listed_with_their_model_and_their_use_is_noted(folder: Path) -> None:
    setting = cost_cache.Setting("cpu", 2, "cpu", STORE, "int8", "bf16", (1, 1), "k", "")
    costs = Costs(rows=(1,), host=(1e-3,), device=(1e-3,), link=1e-3, round_trip=1e-4)
    cost_cache.keep(folder, cost_cache.Record(setting, "/models/olmoe", 3, 100, time.time(), costs))
    path = folder / cost_cache.FOLDER / setting.name
    os.utime(path, (0, 0))
    (found,) = scan(folder)[:1]
    assert (found.kind, found.model, found.format, found.last_use) == ("costs", "olmoe", "int8", 0.0)
    assert found.setting == "2 workers, cpu"
    assert "int8, 2 workers, cpu" in table(folder, [found])
    other = cost_cache.Record(replace(setting, workers=()), "/models/olmoe", 3, 100, time.time(), costs)
    cost_cache.keep(folder, other)
    assert {each.setting for each in scan(folder) if each.kind == "costs"} == {
        "2 workers, cpu",
        "no workers, cpu",
    }
    os.utime(path, (0, 0))
    assert cost_cache.find(folder, setting) is not None
    assert path.stat().st_mtime > time.time() - 60


def test_a_row_is_one_line_in_a_pipe_and_no_path_is_broken(folder: Path) -> None:
    made = replace(A, model=f"/models/{'x' * 90}/m", format="bf16", setting="2 workers, cpu", in_use="e1")
    head, row, *_ = table(folder, [made]).splitlines()
    assert head.split() == "kind last use size model and format".split()
    assert row.endswith(f" {made.model}, bf16, 2 workers, cpu (in use by e1)")


def test_facts_say_of_what_model_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = pack(facts_of(open_model(model_dir()).config))
    monkeypatch.setattr("pipeline.models.facts._ask", lambda question: answer)
    _described.__wrapped__(b"{}")
    (found,) = scan(folder)[:1]
    assert (found.kind, found.setting) == ("facts", "8 layers, 8 experts")


@pytest.mark.parametrize("name", ["store.tmp", "backbone.tmp"])
def test_unfinished_file_is_removed_after_the_exit_of_its_writer(folder: Path, name: str) -> None:
    path = make_file(folder / STORE / name, 1000, 3)
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = run_json("--prune", "--to", "0")
        assert kinds(found["kept_in_use"]) == ["unfinished"]
        assert found["kept_in_use"][0]["in_use"] == "its writer"
    assert kinds(run_json("--prune", "--to", "0")["removed"]) == ["unfinished"]
    assert not path.parent.exists()


def test_a_file_that_cannot_be_removed_is_one_line_and_exit_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted")

    make_file(folder / BACKBONE / "backbone.bin", 10, 1)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "--prune", "--to", "0"]) == 1
    (line,) = caplog.messages
    assert "backbone.bin could not be removed" in line
    assert "removed 0 of" in capsys.readouterr().out


# --- engines ------------------------------------------------------------------------------------------------


async def test_an_engine_keeps_its_files_and_notes_their_use(
    folder: Path, tiny_model: Path, start_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=tiny_model, device="cpu", format="int8", backbone_dtype="int8", workers=1, name="cachetest"
    )
    async with start_engine(config):
        pass
    first = disk(run_json())
    size_of = {e["kind"]: e["bytes"] for e in first}
    planned = needs(open_model(tiny_model), EngineConfig(device="cpu", backbone_dtype="int8"), "int8")
    assert size_of["store"] == planned.store
    assert size_of["backbone"] > 0
    model = tiny_model.name
    assert sorted((e["kind"], e["model"], e["format"]) for e in first) == [
        ("backbone", model, "int8"),
        ("store", model, "int8"),
    ]
    assert not any(e["in_use"] for e in first)
    for found in first:
        # Not 0, which stands for a folder without a record: its last use is when the file was written.
        os.utime(os.path.join(os.path.dirname(found["path"]), RECORD), (DAY, DAY))
    async with start_engine(replace(config, policy="fiddler")):
        entries = run_json()["entries"]
        assert time.time() - min(e["last_use"] for e in entries) < 60, "reading did not note the use"
        (store,) = (e for e in scan(folder) if e.path == store_of(tiny_model, "int8"))
        assert (store.kind, store.model, store.in_use) == ("kept store", model, "an engine")
        assert remove(store) is False
        removed = run_json("--prune", "--to", "0")["removed"]  # which costs the engine nothing
        assert sorted(kinds(removed)) == ["backbone", "costs", "store"]
    assert os.listdir(folder) == []


async def test_a_kept_store_is_listed_and_removed(folder: Path, tiny_model: Path, start_engine: Any) -> None:
    config = EngineConfig(model=tiny_model, device="cpu", format="f32", workers=1, keep_store=True)
    async with start_engine(config):
        pass
    assert disk(run_json()) == []  # float32 of float32 is not kept on disk
    path = store_of(tiny_model, "f32")
    (kept,) = (e for e in run_json()["entries"] if e["path"] == str(path))
    assert (kept["kind"], kept["model"], kept["format"]) == ("kept store", tiny_model.name, "f32")
    assert kept["in_use"] is None
    # Not by the command: it would remove other stores that were kept on this machine, too.
    (entry,) = (e for e in scan(folder) if e.path == path)
    assert select([entry], 0, None) == ([entry], [])
    assert entry.size == kept["bytes"] > 0
    assert remove(entry)
    assert path not in [e.path for e in scan(folder)]
