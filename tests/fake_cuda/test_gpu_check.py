"""The check on a GPU (benchmarks/gpu) where there is none: its limits, archives and environment."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from benchmarks.gpu import __main__ as check
from benchmarks.gpu import carried
from benchmarks.gpu.__main__ import run_all
from benchmarks.gpu.stages import FIGURES, STAGES, Stage
from launch.command_line.options import parse

BUILT = Stage("", "build", (sys.executable, "-c", ""), 30, gpu=False)


def python(name: str, code: str, limit: float = 30.0, *, gpu: bool = False) -> Stage:
    return Stage("facts", name, (sys.executable, "-c", code), limit, gpu=gpu)


def found(archive: Path) -> dict[str, str]:
    """Files of an archive by their names, which its folder's name precedes."""
    with tarfile.open(archive) as packed:
        files = [member for member in packed.getmembers() if member.isfile()]
        return {Path(one.name).name: packed.extractfile(one).read().decode() for one in files}


def is_running(number: int) -> bool:
    """A process that has ended and is not waited for yet does not run."""
    try:
        return "zombie" not in Path(f"/proc/{number}/status").read_text()
    except OSError:
        return False


def endings(archive: Path) -> dict[str, str]:
    return {one["name"]: one["ended"] for one in json.loads(found(archive)["report.json"])}


def test_stages_end_at_their_limits_and_the_next_go_on(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(check, "missing_gpu", lambda python: "torch sees no CUDA device")
    monkeypatch.setattr(check, "COMPILED", BUILT)
    # a later stage sees what a killed command would leave
    seen = f"import tarfile; print(*sorted(tarfile.open({str(tmp_path / 'facts.tar.gz')!r}).getnames()))"
    writes = "import sys; open(sys.argv[1], 'w').write('{}')"
    stages = [
        python("fails", "print('words'); raise SystemExit(3)"),
        Stage("facts", "hangs", ("sh", "-c", "sleep 60 & echo $! && wait"), 2, gpu=False),
        Stage("facts", "absent", ("/nonexistent/program",), 5, gpu=False),
        python("on-gpu", "raise SystemExit(1)", gpu=True),
        python("sees", seen),
        Stage("facts", "writes", (sys.executable, "-c", writes, FIGURES), 30, gpu=False),
    ]
    list(run_all(stages, None, tmp_path))
    files = found(tmp_path / "facts.tar.gz")
    assert endings(tmp_path / "facts.tar.gz") == {
        "build": "passed",
        "fails": "failed: exit code 3",
        "hangs": "stopped after 2 s",
        "absent": "not started: No such file or directory",
        "on-gpu": "skipped: torch sees no CUDA device",
        "sees": "passed",
        "writes": "passed",
    }
    assert files["fails.txt"] == "words\n"
    assert files["writes.json"] == "{}"
    assert "facts/fails.txt" in files["sees.txt"]
    assert not is_running(int(files["hangs.txt"]))  # what a stage has started ends with it
    assert [path.name for path in tmp_path.iterdir()] == ["facts.tar.gz"]
    assert capsys.readouterr().err.endswith("no GPU: 1 of 6 stages were skipped: torch sees no CUDA device\n")


def test_nothing_is_measured_without_a_build(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(check, "COMPILED", python("build", "print('no compiler'); raise SystemExit(1)"))
    ended = list(run_all([python("measures", "")], None, tmp_path))
    assert [one.ended for one in ended] == ["failed: exit code 1"]
    assert endings(tmp_path / "facts.tar.gz") == {"build": "failed: exit code 1"}
    said = capsys.readouterr().err
    assert said.endswith("no compiler\nfacts: build: failed: exit code 1; so nothing is measured\n")


def test_an_environment_has_the_wheels_and_the_packages_of_the_python_that_makes_it(
    tmp_path: Path, monkeypatch
) -> None:
    """That Python is an environment's, as this one is: an environment's own are not its system's."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    name = "carriedalong-1.0-py3-none-any.whl"
    described = "carriedalong-1.0.dist-info"
    with zipfile.ZipFile(wheels / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("carriedalong.py", "WORD = 'here'\n")
        wheel.writestr(f"{described}/METADATA", "Metadata-Version: 2.1\nName: carriedalong\nVersion: 1.0\n")
        wheel.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{described}/RECORD", "")
    carried.pack(wheels, tmp_path)
    monkeypatch.setattr(carried, "required", lambda: ["carriedalong", "msgspec", "torch"])
    carried.install(tmp_path, tmp_path / "place")
    code = "import carriedalong, msgspec; print(carriedalong.WORD)"
    done = subprocess.run([tmp_path / "place/bin/python", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("here\n", "")


def test_the_engines_commands_are_understood() -> None:
    lines = [stage.words[2:] for stage in STAGES if stage.words[1] == "launch.py"]
    assert len(lines) >= 5
    for words in lines:
        parse(list(words))
