"""What is written for later reaches the disk in this order: the file, its name, the folder that has it.
A power failure then leaves the old file or the new one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from plain_calibration import plain_calibration
from small_store import build, write_cache

from launch.chat.conversation import save as save_conversation
from pipeline.backbone.disk_cache import BackboneCache
from pipeline.calibration import cost_cache
from pipeline.calibration import file as calibration_file
from pipeline.calibration.cost_cache import Record, Setting
from pipeline.policies.costs import Costs
from shm.atomic_file import atomic_file
from shm.segment import unlink
from shm.store import Store, store_name

FINGERPRINT = "1f" * 32
SETTING = Setting("cpu", 2, "cpu", FINGERPRINT, "bf16", "bf16", (1,), "kernels", "")
RECORD = Record(SETTING, "m", 3, 4096, 1e9, Costs((1,), (1e-3,), (1e-4,), 5e-3, 1e-4, (1e-3,)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Each fsync with the path of its file, each rename with the new path."""
    found: list[tuple[str, Path]] = []
    fsync, replace = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        fsync(descriptor)
        found.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def noted_replace(source: Path, target: Path) -> None:
        replace(source, target)
        found.append(("rename", Path(source)))

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return found


def backbone(folder: Path) -> None:
    cache = BackboneCache(folder, FINGERPRINT)
    cache.keep("a", np.arange(1000, dtype=np.uint8))
    cache.finish()
    for thread in threading.enumerate():
        if thread.name == "backbone cache":
            thread.join()


def store(folder: Path) -> None:
    build(FINGERPRINT)
    try:
        with Store.attach(store_name(FINGERPRINT)) as built:
            write_cache(folder, built, lambda done: None)
    finally:
        unlink(store_name(FINGERPRINT))


def output(folder: Path) -> None:
    with atomic_file(folder / "figure.png") as file:
        file.write(b"x")


WRITERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "store": (store, f"{FINGERPRINT}/store.bin"),
    "backbone": (backbone, f"{FINGERPRINT}/backbone.bin"),
    "costs": (lambda folder: cost_cache.keep(folder, RECORD), f"costs/{RECORD.setting.name}"),
    "calibration": (
        lambda folder: calibration_file.save(
            folder / FINGERPRINT / calibration_file.NAME, plain_calibration(2, 3), {}
        ),
        f"{FINGERPRINT}/{calibration_file.NAME}",
    ),
    "conversation": (lambda folder: save_conversation(folder / "chat.json", None, ()), "chat.json"),
    "output": (output, "figure.png"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_synced_before_its_rename_and_its_folder_after_it(
    name: str, tmp_path: Path, calls: list[tuple[str, Path]]
) -> None:
    write, path = WRITERS[name][0], tmp_path / WRITERS[name][1]
    write(tmp_path)
    assert path.exists()
    renames = [i for i, (kind, _) in enumerate(calls) if kind == "rename"]
    assert len(renames) >= 1
    for i in renames:
        temporary = calls[i][1]
        assert temporary.parent == path.parent
        assert calls[i - 1] == ("sync", temporary)
        assert calls[i + 1] == ("sync", path.parent)
