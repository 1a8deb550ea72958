"""The check on a GPU (benchmarks/gpu) on machines without one: its stages' limits and report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.gpu import __main__ as check
from benchmarks.gpu.__main__ import STAGES, Stage, run_all
from launch.command_line.options import parse


def python(name: str, code: str, limit: float = 30.0, *, gpu: bool = False) -> Stage:
    return Stage("facts", name, (sys.executable, "-c", code), limit, gpu=gpu)


def test_stages_end_at_their_limits_and_the_next_go_on(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(check, "missing_gpu", lambda: "torch sees no CUDA device")
    stages = [
        python("fails", "print('words'); raise SystemExit(3)"),
        python("hangs", "import time; time.sleep(60)", 0.3),
        Stage("facts", "absent", ("/nonexistent/program",), 5, gpu=False),
        python("on-gpu", "raise SystemExit(1)", gpu=True),
        Stage(
            "facts",
            "writes",
            (sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write('{}')", check.FIGURES),
            30,
            gpu=False,
        ),
    ]
    run_all(stages, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {one["name"]: one["ended"] for one in report} == {
        "fails": "failed: exit code 3",
        "hangs": "stopped after 0 s",
        "absent": "not started: No such file or directory",
        "on-gpu": "skipped: torch sees no CUDA device",
        "writes": "passed",
    }
    assert (tmp_path / "fails.txt").read_text() == "words\n"
    assert (tmp_path / "writes.json").read_text() == "{}"
    assert capsys.readouterr().err.endswith("no GPU: 1 of 5 stages were skipped: torch sees no CUDA device\n")


def test_the_engines_commands_are_understood() -> None:
    lines = [stage.words[2:] for stage in STAGES if stage.words[1] == "launch.py"]
    assert len(lines) >= 5
    for words in lines:
        parse(list(words))
