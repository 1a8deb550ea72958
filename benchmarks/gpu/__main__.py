"""The check on a GPU: `make gpu`, or

    python -m benchmarks.gpu [facts] [primitives] [engine] [--stage NAME] [--out FOLDER]

Three commands of eight minutes at most each, on 16 cores: facts about the machine and correctness; what the
cost model stands on; whole engines. The stages of a command run one after the other, each in a process of
its own with its own limit; one that fails is reported, and the next goes on. Each writes its output into the
folder, those that measure also their figures as JSON; `report.json` has how they ended, and short tables
come last. Needs no network. Without a GPU the stages that need one are skipped, and one line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PYTHON = sys.executable
ROOT = Path(__file__).parents[2]
COMMAND_LIMIT = 480.0  # seconds of one command
SHOWN = 60  # last lines of a stage's table
COUNTS = re.compile(r"(\d+) (passed|skipped)\b(?=[^\n]* in [\d.]+s)")  # in pytest's last line
FIGURES = "FIGURES"  # in a command: the stage's JSON file
NO_GPU = "f'torch {torch.__version__} sees no CUDA device'"
GPU = f"import sys, torch; torch.cuda.is_available() or sys.exit({NO_GPU})"


@dataclass(frozen=True)
class Stage:
    command: str
    name: str
    words: tuple[str, ...]
    limit: float  # seconds
    gpu: bool = True
    table: bool = False  # its output is one


@dataclass(frozen=True)
class Outcome:
    command: str
    name: str
    ended: str  # "passed..", "failed: exit code N", "stopped after N s", "skipped: ..", "not started: .."
    seconds: float
    output: str = ""  # file name


def module(name: str, *options: str) -> tuple[str, ...]:
    return (PYTHON, "-m", name, *options)


def tests(*words: str) -> tuple[str, ...]:
    return module("pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *words)


def launch(*words: str) -> tuple[str, ...]:
    return (PYTHON, "launch.py", *words)


def bench(shape: str) -> tuple[str, ...]:
    model = f"--model shape:{shape} --device cuda --format int4 --backbone-dtype int4"
    return launch("bench", *model.split(), *ALL.split(), *LENGTHS.split())


ALL = "--policy all-host,on-demand,layerwise,fiddler,tandem --sweep cache=0.25,0.5,1"
LENGTHS = "--prompt-len 64 --gen-len 32 --rounds 2 --ppl-tokens 0"
BUILD = "from setuptools import setup; setup()"  # as pyproject.toml says
LINK = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
CARD = f"name,driver_version,{LINK},memory.total,memory.free"
HOST = "lscpu; free -b; df -B1 /dev/shm /tmp; ulimit -a; uname -a"
# One format, one shape.
SMALLEST = tests("tests/gpu/test_cuda_tiles.py", "-k", "layers_have and 1-1-int4 and not int4-")
STEPS = "tests/gpu/test_cuda_steps.py"
WHOLE = tests(STEPS, "tests/gpu/test_cuda_quantized.py", "tests/gpu/test_channels_on_gpu.py")
CALIBRATE = "calibrate --device cuda --text pipeline/assets/heldout/python.txt --calibrate-tokens 1024"
CHAOS = "stress --device cuda --policy on-demand --expert-cache 0.25 --chaos kill,stop"

PRIMITIVES = {"copies": 25, "latencies": 25, "host": 20, "partials": 20, "locking": 60}

# Limits are for 16 cores and a disk cache without compiled kernels. Those of a command are together its limit
# at most, so that every stage is reached. What matters most comes first.
STAGES = (
    Stage("facts", "build", (PYTHON, "-c", BUILD, "build_ext", "--inplace"), 90, gpu=False),
    Stage("facts", "card", ("nvidia-smi", f"--query-gpu={CARD}", "--format=csv"), 5, table=True),
    Stage("facts", "kernels-bits", tests("tests/gpu/test_cuda_tiles.py"), 90),
    Stage("facts", "device-tests", tests("tests/gpu/test_cuda.py"), 75),
    Stage("facts", "parity", tests("tests/gpu/test_cuda_parity.py"), 80),
    Stage("facts", "quantized", WHOLE, 80),
    Stage("facts", "computer", ("sh", "-c", HOST), 5, gpu=False),
    Stage("facts", "machine", ("nvidia-smi", "-q"), 10),
    Stage("facts", "links", ("nvidia-smi", "topo", "-m"), 5),
    Stage("facts", "sanitizer", ("compute-sanitizer", "--error-exitcode", "9", *SMALLEST), 40),
    Stage("primitives", "kernels", module("benchmarks.gpu.kernels", "--out", FIGURES), 110, table=True),
    *(
        Stage(
            "primitives", name, module("benchmarks.gpu.primitives", name, "--out", FIGURES), limit, table=True
        )
        for name, limit in PRIMITIVES.items()
    ),
    Stage("primitives", "attention", module("benchmarks.gpu.attention", "--out", FIGURES), 40, table=True),
    Stage("primitives", "doctor", launch("doctor"), 50),
    Stage("engine", "mixtral", bench("mixtral-8x7b/8"), 110, table=True),
    Stage("engine", "qwen3", bench("qwen3-30b-a3b/12"), 90, table=True),
    Stage("engine", "graphs", module("benchmarks.gpu.graphs", "--out", FIGURES), 80, table=True),
    Stage("engine", "killed", launch(*CHAOS.split()), 50),
    Stage("engine", "memory-back", ("nvidia-smi", "--query-gpu=memory.used", "--format=csv"), 5, table=True),
    Stage("engine", "calibrate", launch(*CALIBRATE.split()), 45),
)


def missing_gpu() -> str:
    """Returns why the stages that need a GPU cannot run; "" where there is one."""
    try:
        done = subprocess.run([PYTHON, "-c", GPU], cwd=ROOT, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "torch does not answer"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["torch fails"])[-1]


def run(stage: Stage, folder: Path, limit: float) -> Outcome:
    output, began = folder / f"{stage.name}.txt", time.monotonic()
    words = [
        str(folder.resolve() / f"{stage.name}.json") if word == FIGURES else word for word in stage.words
    ]
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
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
    """End a stage with the processes that it has started: an engine's end with their supervisor."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_all(stages: Sequence[Stage], folder: Path) -> list[Outcome]:
    """All of them, within the limits of their commands; the report is written after each."""
    reason = missing_gpu()
    outcomes: list[Outcome] = []
    spent: dict[str, float] = {}
    for stage in stages:
        left = COMMAND_LIMIT - spent.get(stage.command, 0.0)
        if stage.gpu and reason:
            outcome = Outcome(stage.command, stage.name, f"skipped: {reason}", 0.0)
        elif left < 1:
            outcome = Outcome(stage.command, stage.name, "skipped: no time is left", 0.0)
        else:
            print(f"{stage.command}: {stage.name} ...", file=sys.stderr, flush=True)
            outcome = run(stage, folder, min(stage.limit, left))
        spent[stage.command] = spent.get(stage.command, 0.0) + outcome.seconds
        outcomes.append(outcome)
        report = json.dumps([asdict(one) for one in outcomes], indent=1)
        (folder / "report.json").write_text(report + "\n")
    if reason:
        number = sum(stage.gpu for stage in stages)
        print(f"no GPU: {number} of {len(stages)} stages were skipped: {reason}", file=sys.stderr)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description="The check on a GPU.")
    commands = list(dict.fromkeys(stage.command for stage in STAGES))
    parser.add_argument("command", nargs="*", help=f"{', '.join(commands)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report")
    parser.add_argument("--stage", action="append", choices=[stage.name for stage in STAGES])
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
    outcomes = run_all(chosen, arguments.out)
    for stage, one in zip(chosen, outcomes, strict=True):
        if stage.table and one.output:
            lines = (arguments.out / one.output).read_text(errors="replace").splitlines()
            print(f"--- {one.command}, {one.name}", *lines[-SHOWN:], sep="\n")
    for one in outcomes:
        print(f"{one.command:11} {one.name:15} {one.seconds:6.0f} s  {one.ended}")
    print(f"report: {arguments.out}")
    return int(not all(one.ended.startswith("passed") for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
