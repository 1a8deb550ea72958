"""The check on a GPU: `make gpu`, or

    python -m benchmarks.gpu [facts] [primitives] [engine] [--stage NAME] [--wheels FOLDER] [--out FOLDER]

Three commands of less than ten minutes each, on 16 cores: facts about the machine and correctness; what the
cost model stands on; whole engines. Each begins with a build of the C libraries, and with `--wheels` before
it with an environment from our packages carried along (`benchmarks/gpu/carried.py`), so that a machine with
Python, torch, a C compiler and no network is enough. Where one of these fails nothing is measured. The stages
run one after the other, each in a process of its own with its own limit; one that fails is reported, and the
next goes on. After each stage COMMAND.tar.gz in the folder has all that the command has found so far: the
stages' outputs, the figures of those that measure as JSON, and `report.json`, how they ended. Short tables
are printed last. Without a GPU the stages that need one are skipped, and one line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.carried import PLACE
from benchmarks.gpu.stages import COMPILED, ENVIRONMENT, FIGURES, PYTHON, STAGES, Stage

ROOT = Path(__file__).parents[2]
COMMAND_LIMIT = 570.0  # seconds of one command
SHOWN = 60  # last lines of a stage's table
SAID = 10  # last lines of a stage without which nothing is measured
COUNTS = re.compile(r"(\d+) (passed|skipped)\b(?=[^\n]* in [\d.]+s)")  # in pytest's last line
NO_GPU = "f'torch {torch.__version__} sees no CUDA device'"
GPU = f"import sys, torch; torch.cuda.is_available() or sys.exit({NO_GPU})"


@dataclass(frozen=True)
class Outcome:
    command: str
    name: str
    ended: str  # "passed..", "failed: exit code N", "stopped after N s", "skipped: ..", "not started: .."
    seconds: float
    output: str = ""  # file name

    @property
    def passed(self) -> bool:
        return self.ended.startswith("passed")


def missing_gpu(python: str) -> str:
    """Returns why the stages that need a GPU cannot run; "" where there is one."""
    try:
        done = subprocess.run([python, "-c", GPU], cwd=ROOT, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "torch does not answer"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["torch fails"])[-1]


def run(stage: Stage, python: str, folder: Path, limit: float) -> Outcome:
    output, began = folder / f"{stage.name}.txt", time.monotonic()
    given = {PYTHON: python, FIGURES: str(folder.resolve() / f"{stage.name}.json")}
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                [given.get(word, word) for word in stage.words],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
            )  # fmt: skip
        except OSError as e:
            return Outcome(stage.command, stage.name, f"not started: {e.strerror}", 0.0)
        try:
            code = process.wait(limit)
            ended = _passed(stage, output) if code == 0 else f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
        finally:
            _stop(process)
    return Outcome(stage.command, stage.name, ended, time.monotonic() - began, output.name)


def _passed(stage: Stage, output: Path) -> str:
    """Returns how a stage that exited with 0 has ended: pytest does so where tests were skipped, which say
    why."""
    if "pytest" not in stage.words:
        return "passed"
    counts = {word: int(number) for number, word in COUNTS.findall(output.read_text(errors="replace"))}
    if not counts.get("passed"):
        return f"skipped: all tests, see {output.name}"
    skipped = counts.get("skipped", 0)
    return f"passed, {skipped} tests skipped, see {output.name}" if skipped else "passed"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a stage with the processes that it has started: an engine's end with their supervisor; what
    outlives a shell, as a compiler does, is killed."""
    if process.poll() is not None:
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Command:
    """One of the three, with all that it has found in an archive of `out`."""

    def __init__(self, name: str, wheels: Path | None, out: Path, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.outcomes: list[Outcome] = []
        self._archive = out / f"{name}.tar.gz"
        self._deadline = time.monotonic() + COMMAND_LIMIT
        self._wheels, self._python = wheels, sys.executable

    def begin(self) -> bool:
        """Make what every stage needs. Returns False, having said why, where that failed."""
        stages = [COMPILED]
        if self._wheels is not None:
            words = (*ENVIRONMENT.words, str(self._wheels.resolve()))
            stages.insert(0, replace(ENVIRONMENT, words=words))
        for stage in stages:
            outcome = self._run(replace(stage, command=self.name))
            if not outcome.passed:
                print(*self.lines(outcome, SAID), sep="\n", file=sys.stderr)
                print(
                    f"{self.name}: {outcome.name}: {outcome.ended}; so nothing is measured", file=sys.stderr
                )
                return False
            if stage.name == ENVIRONMENT.name:
                self._python = str(PLACE / "bin/python")
        return True

    def run(self, stages: Sequence[Stage]) -> None:
        """Run all of them within the command's limit; the archive is written after each."""
        reason = missing_gpu(self._python)
        for stage in stages:
            self._run(stage, reason if stage.gpu else "")
        if reason:
            number = sum(stage.gpu for stage in stages)
            print(f"no GPU: {number} of {len(stages)} stages were skipped: {reason}", file=sys.stderr)

    def _run(self, stage: Stage, reason: str = "") -> Outcome:
        left = self._deadline - time.monotonic()
        if reason or left < 1:
            reason = reason or "no time is left"
            outcome = Outcome(stage.command, stage.name, f"skipped: {reason}", 0.0)
        else:
            print(f"{stage.command}: {stage.name} ...", file=sys.stderr, flush=True)
            outcome = run(stage, self._python, self.folder, min(stage.limit, left))
        self.outcomes.append(outcome)
        report = json.dumps([asdict(one) for one in self.outcomes], indent=1)
        (self.folder / "report.json").write_text(report + "\n")
        part = self._archive.with_suffix(".part")
        with tarfile.open(part, "w:gz") as archive:
            archive.add(self.folder, self.name)
        part.replace(self._archive)  # whoever is killed meanwhile leaves the one before
        return outcome

    def lines(self, outcome: Outcome, number: int) -> list[str]:
        """Returns the last lines of a stage's output."""
        if not outcome.output:
            return []
        return (self.folder / outcome.output).read_text(errors="replace").splitlines()[-number:]


def run_all(stages: Sequence[Stage], wheels: Path | None, out: Path) -> Iterator[Outcome]:
    """Run the commands of these stages one after the other, and show their tables."""
    for name in dict.fromkeys(stage.command for stage in stages):
        with TemporaryDirectory(prefix="tandem-gpu-") as folder:
            own = [stage for stage in stages if stage.command == name]
            command = Command(name, wheels, out, Path(folder))
            if command.begin():
                command.run(own)
            tables = {stage.name for stage in own if stage.table}
            for one in command.outcomes:
                if one.name in tables and (lines := command.lines(one, SHOWN)):
                    print(f"--- {name}, {one.name}", *lines, sep="\n")
            yield from command.outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description="The check on a GPU.")
    commands = list(dict.fromkeys(stage.command for stage in STAGES))
    parser.add_argument("command", nargs="*", help=f"{', '.join(commands)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the archives")
    parser.add_argument("--stage", action="append", choices=[stage.name for stage in STAGES])
    parser.add_argument("--wheels", type=Path, help="folder that `benchmarks.gpu.carried` has filled")
    arguments = parser.parse_args()
    if unknown := set(arguments.command) - set(commands):
        parser.error(f"{unknown.pop()!r} is none of {', '.join(commands)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = [
        stage
        for stage in STAGES
        if stage.command in (arguments.command or commands)
        and (arguments.stage is None or stage.name in arguments.stage)
    ]
    outcomes = list(run_all(chosen, arguments.wheels, arguments.out))
    for one in outcomes:
        print(f"{one.command:11} {one.name:15} {one.seconds:6.0f} s  {one.ended}")
    print(f"report: {arguments.out}")
    return int(not all(one.passed for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
