"""The doctor on this machine: whole runs, trials in child processes, its report."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

from engines import engines_left, launch
from machines import GB, write

from launch.doctor import gpu
from launch.doctor.bandwidth import LARGEST, buffer_size, example
from launch.doctor.finding import Finding, render

TOPICS = {"cpu", "threads", "kernels", "memory", "shared memory", "software"}
TOPICS |= {"places", "gpu", "speed", "engine", "costs"}


async def test_gpu_driver_is_checked_with_the_installed_torch(tmp_path: Path) -> None:
    """The device nodes are files of the test; torch's findings depend on this machine."""
    write(tmp_path, dev__nvidiactl="", proc__driver__nvidia__version="NVIDIA Kernel Module  550.54.14  Thu")
    found, rate = await gpu.inspect(example(), tmp_path)
    assert found[0].found == "NVIDIA driver 550.54.14"
    assert len(found) > 1
    if rate is None:
        assert found[-1].level == "problem"
    else:
        assert rate > 0
        assert "host to device" in found[-1].found


def test_buffer_exceeds_the_cache_and_not_the_memory() -> None:
    assert buffer_size(32 << 20, 64 * GB) == 256 << 20
    assert buffer_size(512 << 20, 64 * GB) == LARGEST
    assert 0 < buffer_size(32 << 20, 1 * GB) <= GB // 8
    assert buffer_size(None, 64 * GB) > 0
    assert buffer_size(32 << 20, 100_000_000) == 0


def test_report_fits_80_columns_and_is_plain() -> None:
    finding = Finding(
        "cpu", "problem", "found [bold]x[/bold] " * 8, "means " * 30, "one command\nanother " * 9
    )
    text = render([finding, Finding("memory", "ok", "much", "")], "Engines run here.")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text
    assert text.count("> ") == len(finding.do.splitlines())
    assert text.endswith("\n\nEngines run here.\n")


def test_doctor_examines_every_topic_and_starts_an_engine() -> None:
    done = launch("doctor", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report.keys() == {"ok", "findings", "measured"}
    assert report["ok"] is True
    assert {f["topic"] for f in report["findings"]} == TOPICS
    for finding in report["findings"]:
        assert finding.keys() == {"topic", "level", "found", "means", "do"}
        assert finding["level"] in ("ok", "note", "problem")
        assert finding["found"]
    measured = report["measured"]
    for name in ("read_one_core_gbps", "read_all_cores_gbps", "copy_gbps", "ceiling_tok_s"):
        assert measured[name] > 0
    assert measured["cores"] == len(os.sched_getaffinity(0))
    assert measured["engine"]["tokens"] == 32
    assert 0 < measured["engine"]["idle_shares"]["workers"] < 1
    assert "idle while it decoded" in str(report["findings"])
    assert "Traceback" not in done.stderr
    assert engines_left() == []


def test_runtime_directory_open_to_others_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "tandem").mkdir()
    (tmp_path / "tandem").chmod(0o755)
    done = launch("doctor", "--log-level", "error", env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == ""
    assert "is open to other users" in " ".join(done.stdout.split())
    assert "chmod 700" in done.stdout
    assert "Engines do not run on this machine" in done.stdout
    assert "\x1b" not in done.stdout


def test_file_size_limit_of_zero_is_a_problem() -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # shared-memory segments are files too

    done = launch("doctor", "--json", executed=True, preexec_fn=limited)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    (engine,) = [f for f in report["findings"] if f["topic"] == "engine"]
    assert engine["level"] == "problem"
    assert report["measured"]["engine"]["failure"] in engine["found"]
    assert "memory was not measured" in json.dumps(report["findings"])
    assert engines_left() == []
