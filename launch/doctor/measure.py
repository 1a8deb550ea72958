"""Measures how fast memory is read here, how fast an engine on the embedded model answers, and how
fast this machine would run a model that need not be there (`launch/forecast.py`).

The last rests on what all cores together read; on what the expert kernel of each format reaches of it, with
the model's own shape and one worker on each core; on the same in the backbone's format, for its products; on
one layer's rest (attention, routing, messages) by a request to the embedded model, whose weights are small.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from launch.command_line.options import Options
from launch.connect import connected
from launch.doctor.machine import Finding
from launch.errors import LaunchError, system_reason
from launch.forecast import Sizes, Speeds, sizes_of
from launch.processes.cores import Cores
from launch.processes.trials import TrialFailed, trial
from launch.terminal.format import percent, rate
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from pipeline.assets import model_dir
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.open import open_config
from pipeline.config import EngineConfig, FormatName
from pipeline.errors import PipelineError
from pipeline.memory.needs import backbone_format
from pipeline.memory.plan import AUTOMATIC
from pipeline.models.facts import expert_shape
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from protocol.errors import ProtocolError
from protocol.files import make_folders
from protocol.program import user_folder
from shm.errors import ShmError
from shm.layout import format_named
from shm.segment import available_memory, byte_size
from workers.reader import read_rate

CHILD = "launch.doctor.child"
STEP, LARGEST = 1 << 26, 1 << 30  # bytes of the buffer: many times what a cache holds
SCRATCH = 1 << 28  # bytes of the file by which a disk is measured
SHARE = 8  # the buffer takes at most 1 / SHARE of the available memory
SECONDS = 0.4  # of each measurement
LIMIT = 60.0  # seconds for a child to start or to end
BUSY = 0.2  # load average for each core, from which on the figures are too low
SPARSE = PolicyRequest("floe-host")  # of which floe formats are expected, where no sparsity is asked for
PROMPT, TOKENS = "A list is", 32
ANSWER_LIMIT = 120.0  # seconds

log = logging.getLogger("tandem")


def reads_of(model: Path) -> Sizes:
    """Returns what a model's experts weigh in the default format. Raises OSError, PipelineError."""
    return sizes_of(open_config(model), EngineConfig(device="cpu", workers=1), AUTOMATIC[0])


# --- memory -------------------------------------------------------------------------------------------------


def busy(load: float, cores: int) -> list[Finding]:
    """Returns a note on a load average that makes the figures measured just after it too low."""
    if load < BUSY * cores:
        return []
    words = f"load average {load:.1f} before measuring: other programs are computing"
    means = "the speeds measured here, and what follows from them, are lower than on an idle machine"
    return [Finding("speed", "note", words, means, "close other programs and run this again")]


async def rates(cores: Sequence[int], experts: Sequence[Any] = (), left_out: float = 0.0) -> list[float]:
    """Returns the bytes a second that these cores together read, and compute with an expert of each kind; see
    `child.py`. Raises TrialFailed."""
    with _buffer() as (fd, size):
        part = size // len(cores) // 4096 * 4096
        base = {"what": "rates", "fd": fd, "size": size, "seconds": SECONDS}
        base |= {"experts": experts, "left_out": left_out}
        async with AsyncExitStack() as stack:
            children = []
            for i, core in enumerate(cores):
                config = base | {"cores": [core], "lo": i * part, "hi": (i + 1) * part}
                children.append(await stack.enter_async_context(trial(CHILD, config, (fd,))))
            for child in children:
                await child.result(LIMIT)
            for child in children:
                await child.go()
            results = [await child.result(LIMIT) for child in children]
    return [sum(map(median, of_kind)) for of_kind in zip(*results, strict=True)]


@contextmanager
def _buffer() -> Iterator[tuple[int, int]]:
    """Yields a nameless file in memory and its size. Raises TrialFailed."""
    size = min(LARGEST, available_memory() // SHARE) // STEP * STEP
    if size <= 0:
        raise TrialFailed("too little memory is available to measure")
    fd = os.memfd_create("tandem-doctor")
    try:
        os.posix_fallocate(fd, 0, size)
        yield fd, size
    except OSError as e:
        raise TrialFailed(f"no buffer of {byte_size(size)}: {e.strerror}") from e
    finally:
        os.close(fd)


# --- an engine ----------------------------------------------------------------------------------------------


async def prove(options: Options, interrupts: Interrupts, device: str) -> dict[str, Any]:
    """Start an engine on the embedded model, on this device (auto: the default) and with the workers of the
    options, and send a request. Returns its figures; `start_s`: until it accepted clients, including a first
    import of torch. Raises TrialFailed with its error."""
    level = str(options.written.get("log_level", "warning"))
    workers = {name: value for name, value in options.written.items() if name == "workers"}
    engine = Options("generate", {"device": device, "log_level": level} | workers)
    began, before = time.monotonic(), log.level
    log.setLevel(level.upper())
    try:
        async with connected(engine, interrupts) as client:
            start = time.monotonic() - began
            async with asyncio.timeout(ANSWER_LIMIT):
                result = await client.generate(prompt=PROMPT, max_tokens=TOKENS, ignore_eos=True).result()
    except TimeoutError:
        raise TrialFailed(f"no answer within {ANSWER_LIMIT:g} s") from None
    except OSError as e:
        raise TrialFailed(system_reason(e)) from e
    except (LaunchError, PipelineError, ProtocolError, ShmError) as e:
        raise TrialFailed(str(e)) from e
    finally:
        log.setLevel(before)
    figures = {"start_s": start, "tokens": len(result.tokens), "policy": client.welcome.policy}
    return figures | {"decode_tok_s": result.done.stats.get("decode_tok_s", 0.0)}


# --- a model that need not be there -------------------------------------------------------------------------


async def measure_speeds(
    source: ModelSource, asked: EngineConfig, names: Sequence[str], options: Options, interrupts: Interrupts
) -> Speeds:
    """Takes about ten seconds. `names`: the formats. Raises TrialFailed."""
    notice("measuring how fast this machine would run it: about ten seconds")
    here, load = Cores.here(), os.getloadavg()[0]
    cores = [core for cpus in here.for_workers(here.default_workers()) for core in cpus.cores]
    every = [*names, backbone_format(source, asked)]
    kinds = [(name, expert_shape(source.config, asked.tile, format_named(name)).plain()) for name in every]
    reads, *paces = await rates(cores, kinds, left_out(asked))
    tok_s = (await prove(options, interrupts, "cpu"))["decode_tok_s"]
    small = reads_of(model_dir())
    layer = max(0.0, 1 / tok_s - small.token / reads) / small.header.shape.layers
    experts = dict(zip(names, paces, strict=False))
    return Speeds(max(reads, *paces), experts, paces[-1], layer, load, len(cores))


def disk_rate() -> float:
    """Returns the bytes a second that the disk of the cache folder reads, past the page cache. Raises
    TrialFailed."""
    folder = user_folder("CACHE")
    try:
        make_folders(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            for _ in range(SCRATCH // STEP):
                file.write(os.urandom(STEP))
            file.flush()
            os.fsync(file.fileno())
            return read_rate(Path(file.name))
    except OSError as e:
        raise TrialFailed(f"the disk of {folder} cannot be measured: {e.strerror}") from e


def left_out(asked: EngineConfig) -> float:
    """Returns the share of an expert's channels that a token leaves out in a floe format: the policy's, where
    it has a number, else that of SPARSE."""
    if asked.policy is not None:
        wished = make_policy(PolicyRequest(asked.policy, asked.policy_options), 0).sparsity.wished
        if wished is not None and (wished or "sparsity" in asked.policy_options):
            return wished
    return make_policy(SPARSE, 0).sparsity.wished or 0.0


def explain_speeds(names: Sequence[FormatName], speeds: Speeds) -> list[str]:
    """Tells how expected speeds were measured, in lines."""
    reached = ", ".join(f"{name} {percent(speeds.experts[name] / speeds.memory)}" for name in names)
    return [
        *(f"{finding.found}; {finding.means}" for finding in busy(speeds.load, speeds.cores)),
        f"Measured here just now: all cores read up to {rate(speeds.memory)}; the expert kernels reach"
        f" {reached} of that, the backbone {percent(speeds.backbone / speeds.memory)}; the rest of a"
        f" layer takes {1e3 * speeds.layer:.2g} ms.",
    ]
