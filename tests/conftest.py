"""Fixtures of all tests: a folder, a tiny model, engines, and the session's leak check.

The tests have runtime and cache directories and a store space (`shm.store.store_space`) of their own, so
that a user's engines are neither seen nor touched. A session that leaves a process, a segment or a runtime
directory behind fails and lists it. `-n 2` runs the tests in two processes, each with its own of all these.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fork_server import SERVER, SETTINGS
from hypothesis import settings
from leaks import leaks, segments
from safetensors.numpy import save_file

from launch.processes.monitor import Limits
from launch.processes.supervisor import Supervisor
from pipeline.assets import model_dir
from pipeline.config import EngineConfig
from protocol.client import Client
from shm.locks import build_folder
from shm.store import STORE_SPACE

settings.register_profile("machines of any speed", deadline=None)
settings.load_profile("machines of any speed")

TESTS = Path(__file__).parent
SHARE = 0.02  # of the time of all tests; a file that takes more belongs into LONGEST
LONGEST = (
    "parity/test_survey.py",
    "parity/test_family_formats.py",
    "parity/test_families.py",
    "parity/test_parity.py",
    "launch/test_engine_lifecycle.py",
    "launch/test_cluster_ray.py",
    "cluster/test_cluster_engine.py",
    "cluster/test_hosts.py",
    "faults/test_coordinator_restart.py",
    "launch/test_calibrate.py",
    "launch/test_stress.py",
    "kernels/test_cuda_compiler.py",
    "gateway/test_pages.py",
    "launch/test_doctor.py",
    "faults/test_poisoned_work.py",
    "faults/test_text_faults.py",
    "pipeline/test_many_clients.py",
    "pipeline/test_clients_hostile.py",
    "faults/test_worker_restart.py",
    "faults/test_supervisor_signals.py",
    "launch/test_reconnect.py",
    "launch/test_bench.py",
    "faults/test_prefetcher_restart.py",
    "pipeline/test_scheduler.py",
    "pipeline/test_step_graphs.py",
)
CHUNK = 64  # tokens
EXIT_SECONDS = 60.0  # orphans have this long to notice that their parent has exited
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # the name of one of several processes; else ""


def _place() -> Path:
    """A new folder with a short name, because paths of sockets are short. One of several processes creates it
    in the folder of the starting process, from which it inherits the environment."""
    if not WORKER:
        return Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))
    place = Path(os.environ["XDG_RUNTIME_DIR"]) / WORKER
    place.mkdir(mode=0o700)
    return place


PLACE = _place()

os.environ["XDG_RUNTIME_DIR"] = str(PLACE)
os.environ["XDG_CACHE_HOME"] = str(PLACE / "cache")
os.environ[STORE_SPACE] = "_".join(PLACE.parts[2:]).replace("-", "_")

# Where nohup or a shell's & started this process, it ignores these signals, and so would every process that a
# test starts and interrupts. A handler is not inherited; this process still does not end.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)

# Torch in this process shares the cores with engines: its idle threads must not spin. Read on import.
os.environ |= SETTINGS

SERVER.install()

EngineFactory = Callable[..., AbstractAsyncContextManager[tuple[Supervisor, Client]]]


@pytest.fixture(scope="session")
def start_engine() -> EngineFactory:
    """`async with start_engine(config) as (supervisor, client)`: a real engine, supervised by this process.
    Where the config has none, it gets a name and a chunk, so that none is measured. `limits`: the
    supervisor's."""
    names = itertools.count()

    @asynccontextmanager
    async def start(
        config: EngineConfig, limits: Limits | None = None
    ) -> AsyncIterator[tuple[Supervisor, Client]]:
        name = config.name or f"t{os.getpid()}-{next(names)}"
        named = replace(config, name=name, chunk=config.chunk or CHUNK)
        async with (
            Supervisor(named, log_level="WARNING", limits=limits) as supervisor,
            Client.connect(supervisor.endpoint, name="tests") as client,
        ):
            yield supervisor, client

    return start


@pytest.fixture(scope="session")
def tiny_model() -> Iterator[Path]:
    """A Mixtral of 2 layers and 4 experts with random weights and the embedded model's tokenizer, which
    starts quickly. Hidden 64, intermediate 96, vocabulary 4096, context 256."""
    folder = PLACE / "tiny"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_dir() / name, folder / name)
    write_mixtral(folder, layers=2, hidden=64, intermediate=96, experts=4, vocabulary=4096, context=256)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def three_tiles(tiny_model: Path) -> Iterator[Path]:
    """A model like the tiny one whose experts have three tiles of 128 channels, the last of which is
    padded."""
    folder = PLACE / "three"
    shutil.copytree(tiny_model, folder)
    write_mixtral(folder, layers=2, hidden=128, intermediate=360, experts=4, vocabulary=4096, context=256)
    yield folder
    shutil.rmtree(folder)


def write_mixtral(
    folder: Path, *, layers: int, hidden: int, intermediate: int, experts: int, vocabulary: int, context: int
) -> None:
    """Write config.json and model.safetensors of a random Mixtral: 4 heads, 2 of keys and values, top-2."""
    heads, kv_heads = 4, 2
    head = hidden // heads
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        moe = layer + "block_sparse_moe."
        tensors |= {
            layer + "input_layernorm.weight": np.ones(hidden, np.float32),
            layer + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            layer + "self_attn.q_proj.weight": matrix(heads * head, hidden),
            layer + "self_attn.k_proj.weight": matrix(kv_heads * head, hidden),
            layer + "self_attn.v_proj.weight": matrix(kv_heads * head, hidden),
            layer + "self_attn.o_proj.weight": matrix(hidden, heads * head),
            moe + "gate.weight": matrix(experts, hidden),
        }
        for e in range(experts):
            tensors[f"{moe}experts.{e}.w1.weight"] = matrix(intermediate, hidden)
            tensors[f"{moe}experts.{e}.w2.weight"] = matrix(hidden, intermediate)
            tensors[f"{moe}experts.{e}.w3.weight"] = matrix(intermediate, hidden)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no process ends with one of them while the others are idle."""
    place = {str(TESTS / name): index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(str(item.path), len(place)))


def pytest_collection_finish() -> None:
    """Torch in this process computes with one thread: tests run in several processes and beside engines, and
    a product that waits until its second thread gets a core takes up to thirty times as long. And what was
    imported is no garbage: collections, of which pytest makes ten at its end alone, leave it aside."""
    gc.freeze()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not WORKER:
        session.config.stash[_SEGMENTS] = segments()
        session.config.stash[_LEAKS] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """One of several processes has exited. The leaks of a killed one are found at the end."""
    node.config.stash[_LEAKS] += getattr(node, "workeroutput", {}).get("leaks", [])


@pytest.hookimpl(trylast=True)  # when the other processes, if there are any, have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    SERVER.close()
    before = session.config.stash.get(_SEGMENTS, None)
    deadline = time.monotonic() + EXIT_SECONDS
    while (found := leaks(PLACE, before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if WORKER:
        session.config.workeroutput["leaks"] = found
    else:
        all_found = session.config.stash[_LEAKS]
        all_found += [leak for leak in found if leak not in all_found]
        if all_found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    shutil.rmtree(PLACE, ignore_errors=True)
    shutil.rmtree(build_folder().parent, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = terminalreporter.config.stash.get(_LEAKS, [])
    if found:
        terminalreporter.section("leaked by this session", red=True)
    for leak in found:
        terminalreporter.line(leak)
    kinds = ("passed", "failed", "error", "skipped")
    counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in kinds}
    total = sum(counts.values())
    words = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count or kind == "passed")
    terminalreporter.line(f"tests: {total} ({words}), leaks: {len(found)}")
    for name, seconds in _DURATIONS.items():
        if seconds > SHARE * sum(_DURATIONS.values()) and len(_DURATIONS) > 2 / SHARE and name not in LONGEST:
            terminalreporter.line(f"tests/conftest.py: LONGEST lacks {name}, {seconds:.0f} s")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _DURATIONS[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration


_DURATIONS: Counter[str] = Counter()  # seconds by file
_SEGMENTS = pytest.StashKey[set[str]]()
_LEAKS = pytest.StashKey[list[str]]()
