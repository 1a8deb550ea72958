"""The cache's ages, names, sums and bounds, and what a prune reports; no engine, no other process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cache import command, prune
from launch.cache.entries import WRITING_SECONDS, Entry, scan, writer_of
from launch.cache.prune import DAY, select
from launch.command_line.options import parse
from launch.terminal.interrupts import Interrupts
from protocol.program import user_folder

NOW = 1_700_000_000.0
KEY = "5" * 64
Prune = Callable[..., Any]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still."""
    monkeypatch.setattr(time, "time", lambda: NOW)


def entry(name: str = "a", size: int = 1000, **fields: Any) -> Entry:
    given = {"model": "mixtral", "format": "int4", "last_use": NOW - 3 * DAY} | fields
    return Entry("store", Path(f"/c/{name}/store.bin"), size, given.pop("last_use"), **given)


@pytest.mark.usefixtures("now")
def test_bounds_of_a_prune_are_exact() -> None:
    three = entry(size=1000)
    assert select([three], 3, None).remove == ()  # not older
    assert select([three], 2.9999, None).remove == (three,)
    assert select([three], 0, None).remove == (three,)
    assert select([three], None, None).remove == ()
    assert select([three], None, 1000).remove == ()
    assert select([three], None, 999).remove == (three,)
    used = entry("b", in_use="engine e1")
    assert select([used], 3, None).in_use == ()  # it would not be removed in any case
    assert select([used], 1, None).in_use == (used,)


def test_small_file_is_being_written_for_a_minute(tmp_path: Path) -> None:
    path = tmp_path / ".calibration.txt.0123abcd"
    path.touch()
    for seconds, writer in ((0.0, "its writer"), (0.9, "its writer"), (1.1, "")):
        then = time.time() - seconds * WRITING_SECONDS
        os.utime(path, (then, then))
        assert writer_of(path) == writer
    assert writer_of(tmp_path / "store.tmp") == ""  # removed meanwhile


def test_keys_of_leases_are_those_of_the_entries_folders() -> None:
    store = Entry("store", Path(f"/c/{KEY}/store.bin"), 1, 0.0)
    assert (store.fingerprint, store.on_disk) == (KEY, True)
    assert store.lease_key == Entry("backbone", Path(f"/c/{KEY}/backbone.bin"), 1, 0.0).lease_key
    assert Entry("costs", Path("/c/costs/abc.json"), 1, 0.0).lease_key == "abc"
    assert not replace(store, kind="kept store").on_disk


@pytest.fixture
def pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Prune:
    """Runs the command on entries of 1, 2 and 4 kB; `outcome`: of each removal."""

    async def pruned(*words: str, outcome: Callable[[Entry], bool] = lambda entry: True) -> Any:
        entries = [
            entry(name, size, last_use=100.0) for name, size in (("a", 1000), ("b", 2000), ("c", 4000))
        ]
        removed: list[str] = []

        def remove(one: Entry) -> bool:
            removed.append(one.path.parent.name)
            return outcome(one)

        monkeypatch.setattr(command, "scan", lambda folder: entries)
        monkeypatch.setattr(command, "remove", remove)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        code = await command.cache(parse(["cache", "--prune", *words]), Interrupts())
        return code, capsys.readouterr().out, removed

    return pruned


async def test_entry_that_an_engine_uses_by_now_is_kept(pruned: Prune) -> None:
    code, text, _ = await pruned("--to", "0", outcome=lambda one: one.size != 2000)
    assert code == 0
    assert text.count("kept: store of mixtral in int4, 2.0 kB") == 1
    assert ": in use by an engine\n" in text
    assert "removed 2 of 3, 5.0 kB; 2.0 kB stay on disk\n" in text
    assert "that is more than --to 0 B: the rest is in use or unknown\n" in text


def test_entries_are_found_by_their_last_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and other folders are unknown; the folder of the leases is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = user_folder("CACHE")
    for name, days in ((f"{KEY}/backbone.bin", 2), ("other/deep/file", 5), ("notes", 1), ("costs/x.json", 4)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
        for each in (path, *path.parents):
            if each != folder and folder in each.parents:
                os.utime(each, (time.time() - days * DAY,) * 2)
    (folder / ".locks").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / KEY)
    found = [one for one in scan(folder) if one.on_disk]
    assert [(one.kind, one.path.name) for one in found] == [
        ("unknown", "other"),
        ("unknown", "x.json"),
        ("backbone", "backbone.bin"),
        ("unknown", "notes"),
        ("unknown", "link"),
    ]
    assert [one.size for one in found[:4]] == [100] * 4
    assert not any(one.on_disk for one in scan(tmp_path / "none"))
    assert prune.remove(found[2])
    assert not (folder / KEY).exists()
