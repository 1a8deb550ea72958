"""A calibration's file: it is read back unchanged, and any other file is refused."""

from __future__ import annotations

import json
import os
import stat
import zlib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from calibrations import abouts, calibrations
from equal_values import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_calibration import plain_calibration
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from pipeline.calibration.file import NAME, calibration_path, load, read, save, summary
from pipeline.checkpoint.open import open_model
from pipeline.errors import CalibrationError
from pipeline.policies.calibration import Calibration
from shm.disk_cache import RECORD, CacheRecord, read_record

SMALL = plain_calibration(2, 3, threshold=0.005, first_gate=np.ones((3, 4), np.float32))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / ("ab" * 32) / NAME


@given(calibration=calibrations(), about=abouts)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_calibration_is_read_back_unchanged(path: Path, calibration: Calibration, about: dict) -> None:
    save(path, calibration, about)
    found, found_about = read(path)
    assert found_about == about
    for field in fields(Calibration):
        assert same(getattr(found, field.name), getattr(calibration, field.name)), field.name
    assert not found.decode_counts.flags.writeable
    assert sorted(p.name for p in path.parent.iterdir()) == ["about.json", "calibration.safetensors"]


def test_file_and_folder_are_private(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o755)
    save(path, SMALL, {"model": "small", "notes": ["nothing to note"]})
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_use_of_a_calibration_is_recorded(path: Path) -> None:
    """When it is written and when it is loaded, but not when it is only looked at."""
    save(path, SMALL, {"model": "small"})
    assert read_record(path.parent) == CacheRecord("calibration", "small", "")
    record = path.with_name(RECORD)
    os.utime(record, (1e9, 1e9))
    read(path)
    assert record.stat().st_mtime == 1e9
    load(path)
    assert record.stat().st_mtime > 1e9
    os.utime(record, (1e9, 1e9))
    save(path, SMALL, {"model": "small"})
    assert record.stat().st_mtime > 1e9
    save(path, SMALL, {})
    assert read_record(path.parent) == CacheRecord("calibration", "", "")


def test_far_too_large_file_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.calibration.file.MOST_BYTES", 1 << 20)
    save(path, SMALL, {})
    with path.open("r+b") as file:
        file.truncate((1 << 20) + 1)
    with pytest.raises(CalibrationError, match="it is larger than 1 MB"):
        load(path)


def test_each_model_has_its_own_folder(tiny_model: Path, tmp_path: Path) -> None:
    one = calibration_path(tmp_path, open_model(tiny_model))
    other = calibration_path(tmp_path, open_model(Path("shape:mixtral-8x7b/2")))
    assert one.parent.parent == other.parent.parent == tmp_path
    assert one != other


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_file_is_refused(path: Path, data: st.DataObject) -> None:
    save(path, SMALL, {"model": "small"})
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        found = load(path)
    except CalibrationError as e:
        complaint = str(e)
    else:  # a changed blank or escape of the header may be harmless
        complaint = str(path)
        assert all(same(getattr(found, f.name), getattr(SMALL, f.name)) for f in fields(Calibration))
    assert str(path) in complaint
    assert "\n" not in complaint


def rewrite(path: Path, changes: dict) -> None:
    """Rewrite the file with other metadata and tensors (None: without it) and a valid checksum, whether
    or not they are consistent."""
    tensors = {name: new for name, new in changes.items() if new is None or isinstance(new, np.ndarray)}
    facts = {name: new for name, new in changes.items() if name not in tensors}
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    all_facts = json.loads(header["__metadata__"]["tandem"]) | facts
    all_tensors = {n: a for n, a in (load_tensors(data) | tensors).items() if a is not None}
    if "crc32" not in facts:
        del all_facts["crc32"]
        checksum = zlib.crc32(json.dumps(all_facts, sort_keys=True).encode())
        for name, array in sorted(all_tensors.items()):
            checksum = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), checksum))
        all_facts["crc32"] = checksum
    path.write_bytes(save_tensors(all_tensors, {"tandem": json.dumps(all_facts)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 5}, "of version 5"),
        ({"version": "x"}, "of version x"),
        ({"fingerprint": "cd" * 32}, "another model"),
        ({"crc32": 7}, "damaged"),
        ({"about": 7}, "not a complete calibration"),
    ],
)
def test_other_and_damaged_calibrations_are_refused(path: Path, changes: dict, message: str) -> None:
    save(path, SMALL, {})
    rewrite(path, changes)
    with pytest.raises(CalibrationError, match=message) as failure:
        load(path)
    assert str(path) in str(failure.value)
    assert "calibrate again" in str(failure.value)


def test_missing_shared_and_foreign_files_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="No such file"):
        load(path)
    save(path, SMALL, {})
    path.chmod(0o622)
    with pytest.raises(CalibrationError, match="is open to other users"):
        load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CalibrationError, match="is not a file"):
        load(path)
    path.unlink()
    path.write_bytes(save_tensors({"weight": np.ones(3, np.float32)}))
    with pytest.raises(CalibrationError, match="not a complete calibration"):
        load(path)


def test_full_disk_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, SMALL, {"model": "old"})
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(path, replace(SMALL, threshold=0.1), {"model": "new"})
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


FOUND = replace(
    plain_calibration(3, 2, threshold=0.0625, first_gate=np.ones((2, 4), np.float32)),
    decode_counts=np.array([[10, 20], [30, 40], [50, 60]]),
    accuracy={
        "raw": np.array([0.9, 0.25, 0.75], np.float32),
        "residual": np.array([0.8, 0.375, 0.625], np.float32),
        "first": np.array([0.7, 0.1, 0.2], np.float32),
    },
    sensitivity=np.array([1, 0.0625, 4], np.float32),  # a quarter, all and an eighth may be dropped
    kept=np.array([[[0, 0, 1], [0, 1, 0]]] * 3, np.float32),
)
BARE = replace(FOUND, sensitivity=None, threshold=None, first_gate=None)


def test_each_number_of_a_summary() -> None:
    """Raw and residual predictions begin with the second layer, the first gate's are of the first alone."""
    assert summary(FOUND, {"model": "m"}) == {
        "model": "m",
        "accuracy": {"raw": 0.5, "residual": 0.5, "first": pytest.approx(0.7)},
        "threshold": 0.0625,
        "up": "",
        "max_loss": None,
        "sparsity": None,
        "single_expert_share": pytest.approx((0.25 + 1 + 0.125) / 3),
    }
    accuracy = FOUND.accuracy | {"residual": np.array([0, 0.5, 1], np.float32)}
    assert summary(replace(FOUND, accuracy=accuracy), {})["accuracy"]["residual"] == 0.75


def test_numbers_that_were_not_measured_are_none() -> None:
    found = summary(BARE, {})
    assert found["threshold"] is found["single_expert_share"] is None
    assert found["accuracy"] == {"raw": 0.5, "residual": 0.5, "first": None}
    one = plain_calibration(1, 2, first_gate=np.ones((2, 4), np.float32))
    assert summary(one, {})["accuracy"] == {"raw": None, "residual": None, "first": 1.0}
