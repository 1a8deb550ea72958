"""The check on a GPU: `make gpu`, or python -m benchmarks.gpu [--out FOLDER].

Stages run one after the other, each in a process of its own with its own limit; one that fails is reported,
and the next goes on. Each writes its output into the folder, `report.json` has how they ended, and a short
table comes last. Needs no network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

PYTHON = sys.executable
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Stage:
    name: str
    command: tuple[str, ...]
    limit: float  # seconds


@dataclass(frozen=True)
class Outcome:
    name: str
    ended: str  # "passed", "failed: exit code N", "stopped after N s", or why it could not be started
    seconds: float
    output: str  # file name


def module(name: str, *options: str) -> tuple[str, ...]:
    return (PYTHON, "-m", name, *options)


def tests(*paths: str) -> tuple[str, ...]:
    return module("pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *paths)


STAGES = (
    Stage("machine", ("nvidia-smi", "-q"), 60),
    Stage("link", ("nvidia-smi", "topo", "-m"), 60),
    Stage("doctor", (PYTHON, "launch.py", "doctor"), 120),
    Stage("kernels-emulated", tests("tests/kernels"), 400),
    Stage("registers", module("benchmarks.gpu.registers"), 120),
    Stage("kernels-tests", tests("tests/gpu/test_cuda_tiles.py"), 400),
    Stage("kernels", module("benchmarks.gpu.kernels"), 400),
    Stage("device-tests", tests("tests/gpu/test_cuda.py"), 300),
    Stage("quantized", tests("tests/gpu/test_cuda_quantized.py"), 480),
    Stage("parity", tests("tests/gpu/test_cuda_parity.py"), 480),
)


def run(stage: Stage, folder: Path) -> Outcome:
    output, began = folder / f"{stage.name}.txt", time.monotonic()
    with output.open("wb") as file:
        try:
            code = subprocess.run(
                stage.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                timeout=stage.limit, check=False, env=os.environ | {"PYTHONUNBUFFERED": "1"},
            ).returncode  # fmt: skip
            ended = "passed" if code == 0 else f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {stage.limit:.0f} s"
        except OSError as e:
            ended = f"not started: {e.strerror}"
    return Outcome(stage.name, ended, time.monotonic() - began, output.name)


def main() -> int:
    parser = argparse.ArgumentParser(description="The check on a GPU.")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report")
    parser.add_argument("--stage", action="append", choices=[stage.name for stage in STAGES])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for stage in STAGES:
        if arguments.stage is None or stage.name in arguments.stage:
            print(f"{stage.name} ...", file=sys.stderr, flush=True)
            outcomes.append(run(stage, arguments.out))
            report = json.dumps([asdict(one) for one in outcomes], indent=1)
            (arguments.out / "report.json").write_text(report + "\n")
    for one in outcomes:
        print(f"{one.name:18} {one.seconds:6.0f} s  {one.ended}")
    print(f"report: {arguments.out}")
    return int(any(one.ended != "passed" for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
