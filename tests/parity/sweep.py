"""Compare many random configurations of all families with transformers, by hand (with PYTHONPATH=. where the
project is not installed):

    python tests/parity/sweep.py --count 50 --seed 1              the models, in this process
    python tests/parity/sweep.py --count 20 --seed 1 --engine     whole engines, with random settings

Prints a line for each and ends with exit code 1 if any differs by more than the tests allow.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import torch
import transformers
from comparison import scored
from families import Case, save
from family_draws import drawn
from in_process import InProcess
from numpy.typing import NDArray
from oracle import EXACT, Oracle

from launch.errors import StartFailed
from launch.processes.supervisor import Supervisor
from pipeline.config import EngineConfig
from pipeline.errors import PipelineError
from protocol.client import Client

Rows = NDArray[np.float32]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--engine", action="store_true", help="start an engine for each")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    most = 0.0
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as place:
        os.environ |= {"XDG_RUNTIME_DIR": place, "XDG_CACHE_HOME": f"{place}/cache"}
        for number in range(given.first, given.first + given.count):
            random = Random(f"{given.seed}/{number}")
            case = drawn(random, number)
            form = f"{'v5' if case.fused else 'v4'} {str(case.dtype)[6:]}{' shards' if case.shards else ''}"
            print(f"{case} {form} {case.options}", flush=True)
            with tempfile.TemporaryDirectory(dir=place) as folder:
                try:
                    error, own = compare(case, Path(folder), random, given.engine)
                except (PipelineError, StartFailed) as e:
                    print(f"    refused: {e}  <<<<<<")
                    most = math.inf
                    continue
            most = max(most, error)
            mark = "" if error < EXACT else "  <<<<<<"
            print(f"    {error:.1e} (transformers itself {own:.1e}){mark}", flush=True)
    print(f"the largest difference is {most:.1e}")
    return int(most >= EXACT)


def compare(case: Case, folder: Path, random: Random, engine: bool) -> tuple[float, float]:
    """The largest difference of any log-probability, and that between transformers in float32 and float64."""
    save(case, folder)
    oracle, exact = Oracle(folder, torch.float32), Oracle(folder, torch.float64)
    vocabulary, lengths = range(case.config["vocab_size"]), (25, random.randint(50, 120))
    texts = [tuple(random.choices(vocabulary, k=length)) for length in lengths]
    expected = [oracle.logprobs(text) for text in texts]
    own = [exact.logprobs(text) for text in texts]
    found = asyncio.run(by_engine(folder, texts, random)) if engine else in_process(folder, texts)
    doubled = [rows for rows in expected for _ in (False, True)]
    return distance(found, doubled), distance(own, expected)


def distance(some: list[Rows], others: list[Rows]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


def in_process(folder: Path, texts: list[tuple[int, ...]]) -> list[Rows]:
    """Log-probabilities of each text, in chunks and stepwise."""
    found = []
    with InProcess(folder, compiled=True) as model:
        for text in texts:
            n = len(text)
            found.append(model.logprobs(text, [*[16] * (n // 16), *([n % 16] if n % 16 else [])]))
            found.append(model.logprobs(text, [20, *[1] * (n - 20)]))
    return found


async def by_engine(folder: Path, texts: list[tuple[int, ...]], random: Random) -> list[Rows]:
    """As `in_process`."""
    config = EngineConfig(
        model=folder,
        name=f"sweep{os.getpid()}",
        format="f32",
        backbone_dtype="f32",
        chunk=random.choice((7, 16, 64)),
        workers=random.choice((1, 2, 3)),
        tile=random.choice((None, 8, 16, 20)),
        expert_cache=random.choice((0.0, 0.3, 1.0)),
        policy="random",
        policy_options={"seed": str(random.randrange(1000)), "churn": "1"},
    )
    found = []
    async with (
        Supervisor(config, log_level="WARNING") as supervisor,
        Client.connect(supervisor.endpoint, name="sweep") as client,
    ):
        for text in texts:
            for stepwise in (False, True):
                found.append(await scored(client, text, stepwise))
    return found


if __name__ == "__main__":
    sys.exit(main())
