"""The use of experts in earlier starts is found again by later ones, and a damaged file is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.arrays import Counts
from pipeline.calibration.heat import ENOUGH_TOKENS, LASTING_TOKENS, NAME, Heat
from pipeline.policies.view import ModelShape
from shm.disk_cache import CacheRecord, read_record

SHAPE = ModelShape(layers=2, experts=3, tiles=1, top_k=2)
RECORD = CacheRecord("store", "/models/m", "int4")


def heat(folder: Path) -> Heat:
    return Heat(folder / "f", RECORD, SHAPE)


def counts(tokens: int) -> Counts:
    return np.array([[2, 1, 1], [0, 2, 2]], np.int64) * tokens // 2


def test_each_start_adds_its_counts_and_the_latest_ones_weigh_most(tmp_path: Path) -> None:
    first = heat(tmp_path)
    assert first.earlier is None
    first.keep(counts(100), ENOUGH_TOKENS)
    assert not (tmp_path / "f").exists()  # too few to be worth it
    first.keep(counts(100), least=1)
    first.keep(counts(400), ENOUGH_TOKENS)
    (tmp_path / "f" / NAME).unlink()
    first.keep(counts(600), ENOUGH_TOKENS)
    assert not (tmp_path / "f" / NAME).exists()  # few more than were written
    first.keep(counts(1000), ENOUGH_TOKENS)
    second = heat(tmp_path)
    assert second.earlier is not None
    assert np.array_equal(second.earlier, counts(1000))
    second.keep(counts(10 * LASTING_TOKENS), ENOUGH_TOKENS)
    third = heat(tmp_path)
    assert third.earlier is not None
    assert np.allclose(third.earlier, counts(LASTING_TOKENS), atol=1)
    assert (tmp_path / "f" / NAME).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o700
    assert read_record(tmp_path / "f") == RECORD
    assert sorted(os.listdir(tmp_path / "f")) == ["about.json", NAME]


def changed(counts: object, **more: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({"counts": counts, "version": 1} | more))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.chmod(0o666),
        lambda path: os.truncate(path, 1 << 30),
        changed([[1, 1, 1], [1, 1, 1]], version=2),
        changed([[1, 1, 1], [1, 1, 1]], version=None),
        changed([[1, 1, 1], [1, 1]]),
        changed([[1, 1], [1, 1]]),
        changed([]),
        changed([[1, 1, 1], [1, 1, -1]]),
        changed([[1, 1, 1], [1, 1, 1e30]]),
        changed([[1, 1, 1], [1, 1, "1"]]),
        changed(None),
    ],
)
def test_a_damaged_file_is_removed_with_a_message_and_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    heat(tmp_path).keep(counts(1000), ENOUGH_TOKENS)
    damage(tmp_path / "f" / NAME)
    again = heat(tmp_path)
    assert again.earlier is None
    assert not (tmp_path / "f" / NAME).exists()
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / 'f' / NAME} is not used, experts are counted anew: ")
    again.keep(counts(1000), ENOUGH_TOKENS)
    assert heat(tmp_path).earlier is not None


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "f").write_text("a file in the folder's place")
    one = heat(tmp_path)
    one.keep(counts(1000), ENOUGH_TOKENS)
    one.keep(counts(1001), ENOUGH_TOKENS)  # not again at once
    assert [line.split(":")[0] for line in caplog.messages[1:]] == [
        f"the use of experts could not be kept in {tmp_path / 'f' / NAME}"
    ]
