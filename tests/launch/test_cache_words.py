"""The cache's ages, names, sums and bounds, and what a prune reports; no engine, no other process."""

from __future__ import annotations

import json
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
from launch.cache.report import age, describe, free_bytes, table, to_json
from launch.command_line.options import parse
from launch.terminal.interrupts import Interrupts
from protocol.user_folders import user_folder
from shm.errors import ShmError

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
@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "just now"),
        (59, "just now"),
        (60, "1 minute ago"),
        (3599, "59 minutes ago"),
        (3600, "1 hour ago"),
        (7199, "1 hour ago"),
        (86399, "23 hours ago"),
        (86400, "1 day ago"),
        (2 * 86400, "2 days ago"),
    ],
)
def test_age_is_in_the_largest_whole_unit(seconds: float, words: str) -> None:
    assert age(NOW - seconds) == words


@pytest.mark.usefixtures("now")
def test_entries_are_described_by_their_model_or_file() -> None:
    assert describe(entry()) == "store of mixtral in int4, 1.0 kB, used 3 days ago"
    plain = replace(entry(format=""), kind="calibration")
    assert describe(plain) == "calibration of mixtral, 1.0 kB, used 3 days ago"
    unfinished = replace(entry(), kind="unfinished", path=Path("/c/x/store.tmp"), format="")
    assert describe(unfinished) == "unfinished store.tmp, 1.0 kB, used 3 days ago"
    odd = replace(entry(), kind="unknown", path=Path("/c/a\x1bb"), format="")
    assert describe(odd) == "unknown of a\ufffdb, 1.0 kB, used 3 days ago"


@pytest.mark.usefixtures("now")
def test_table_has_sums_and_only_the_columns_that_it_needs(tmp_path: Path) -> None:
    kept = replace(entry(size=5000), kind="kept store", path=Path("/dev/shm/x"))
    text = table(tmp_path, [entry(), entry("b", 500), kept])
    assert "in use by" not in text
    assert "unknown files" not in text
    assert f"{tmp_path}: 1.5 kB in 2 entries, " in text
    assert text.endswith("; in shared memory: 5.0 kB in 1 entry\n")
    used = table(tmp_path, [entry(in_use="engine e1"), replace(entry("c"), kind="unknown")])
    assert "in use by" in used
    assert "engine e1" in used
    assert "unknown files are of another program or version, and are never removed\n" in used
    assert "shared memory" not in used
    empty = table(tmp_path, [])
    assert empty.startswith(f"{tmp_path}: 0 B in 0 entries, ")
    assert empty.count("\n") == 1
    found = to_json(tmp_path, [entry(), kept])
    assert (found["bytes"], found["folder"], len(found["entries"])) == (1000, str(tmp_path), 2)
    assert found["entries"][0] | {"path": ""} == {
        **{"kind": "store", "path": "", "bytes": 1000, "model": "mixtral", "format": "int4"},
        **{"last_use": NOW - 3 * DAY, "in_use": None, "setting": None},
    }
    assert free_bytes(tmp_path / "not" / "there") == pytest.approx(free_bytes(tmp_path), rel=0.01)


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


async def test_prune_reports_what_it_removed_and_what_stays(pruned: Prune) -> None:
    code, text, removed = await pruned("--to", "5kB")
    assert (code, removed) == (0, ["a", "b"])
    assert "removed 2 of 3, 3.0 kB; 4.0 kB stay on disk\n" in text
    assert "more than" not in text
    code, text, removed = await pruned("--to", "5kB", "--dry-run")
    assert (code, removed) == (0, [])
    assert text.count("would remove: store of mixtral in int4") == 2
    assert "would remove 2 of 3, 3.0 kB; 4.0 kB stay on disk\n" in text


async def test_entry_that_an_engine_uses_by_now_is_kept(pruned: Prune) -> None:
    code, text, _ = await pruned("--to", "0", outcome=lambda one: one.size != 2000)
    assert code == 0
    assert text.count("kept: store of mixtral in int4, 2.0 kB") == 1
    assert ": in use by an engine\n" in text
    assert "removed 2 of 3, 5.0 kB; 2.0 kB stay on disk\n" in text
    assert "that is more than --to 0 B: the rest is in use or unknown\n" in text


@pytest.mark.parametrize("error", [PermissionError(1, "not permitted"), ShmError("no lock")])
async def test_entry_that_cannot_be_removed_is_not_freed(
    pruned: Prune, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(one: Entry) -> bool:
        if one.size == 1000:
            raise error
        return True

    code, out, removed = await pruned("--older-than", "1", "--json", outcome=fail)
    found = json.loads(out)
    assert (code, removed) == (1, ["a", "b", "c"])  # the others are removed all the same
    sizes = {key: [one["bytes"] for one in found[key]] for key in ("removed", "kept_in_use", "failed")}
    assert sizes == {"removed": [2000, 4000], "kept_in_use": [], "failed": [1000]}
    assert (found["freed_bytes"], found["bytes"], found["dry_run"]) == (6000, 1000, False)
    assert [one["bytes"] for one in found["entries"]] == [1000]
    assert "/c/a/store.bin could not be removed: " in caplog.text


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


def test_file_left_half_written_is_removed(tmp_path: Path) -> None:
    left = replace(entry(), kind="unfinished", path=tmp_path / "half.tmp")
    left.path.write_bytes(b"x")
    assert not prune.remove(left)  # its writer may go on
    assert left.path.exists()
    os.utime(left.path, (NOW, NOW))
    assert prune.remove(left)
    assert not left.path.exists()
