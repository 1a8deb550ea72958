"""Engines for kill tests: finds their processes, and all files and segments that they have not removed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from fork_server import ForkedPython
from waiting import wait_until

from pipeline.checkpoint.index import CheckpointIndex, fingerprint
from pipeline.models.facts import expert_shape
from shm.layout import format_named
from shm.locks import build_folder
from shm.store import store_name

ROOT = Path(__file__).resolve().parents[1]
SHM = Path("/dev/shm")
LIMIT = 300.0  # seconds for any step of an engine
EXIT_LIMIT = (
    60.0  # seconds in which children notice that their supervisor has ended; a few on an idle machine
)
ANSWER_LIMIT = 8.0  # seconds for a client to start and be answered
MARK = "SUPERVISOR_KILLS"  # in the environment of an engine's processes: finds them without their parent
ASK = "generate --prompt-tokens 5,6,7 --ignore-eos".split()


@dataclass
class Place:
    """The directories of engines that are killed, and their model."""

    folder: Path
    model: Path
    options: tuple[str, ...]
    key: str = field(init=False)

    def __post_init__(self) -> None:
        index = CheckpointIndex.open(self.model)
        self.key = fingerprint(index, "bf16", expert_shape(index.config, None, format_named("bf16")).tile)
        for folder in (self.runtime, self.cache):
            folder.mkdir(mode=0o700, exist_ok=True)

    @property
    def runtime(self) -> Path:
        return self.folder / "run"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def remains(self, name: str) -> list[str]:
        """All files, segments and processes of an engine of this name, by kind."""
        found = [f"segment {path.name.split('-')[-2]}" for path in SHM.glob(f"tandem-{name}-*")]
        if (SHM / store_name(self.key)[1:]).exists():
            found.append("store")
        found += ["directory" for path in (self.runtime / "tandem").glob("*") if path.name != ".locks"]
        found += [f"lock .{p.suffix[1:]}" for p in build_folder().glob(f"{self.key[:16]}.*")]
        found += ["half-written cache" for _ in self.cache.glob("tandem/*/store.tmp")]
        return found + ["empty folder" for p in self.cache.glob("tandem/*") if not any(p.iterdir())]


class Engine:
    """A `launch.py serve` in a place. Its processes have a mark, and are all killed at the end of the
    block."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name = place, name
        self._mark = uuid.uuid4().hex
        self._clients: list[subprocess.Popen[str]] = []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end of the block
        command = ["serve", "--name", name, "--model", str(place.model), "--device", "cpu", *place.options]
        self.process = self._launch(*command, stdout=subprocess.PIPE, mark=self._mark)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for client in self._clients:
            client.kill()
        for process in (self.process, *self._clients):
            process.communicate(timeout=LIMIT)
        self._log.close()

    def wait_ready(self) -> None:
        """Raises RuntimeError, with the engine's log, where it does not start."""
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            self._log.seek(0)
            raise RuntimeError(f"the engine did not start: {self._log.read()[-2000:]}")

    def processes(self) -> list[psutil.Process]:
        """The running processes, including the supervisor."""
        return list(marked(self._mark))

    def doing(self) -> str:
        """The running children as text: "loader", "coordinator, 2 workers"."""
        commands, words = [], []
        for process in self.processes():
            with suppress(psutil.Error):  # it has exited
                commands.append(" ".join(process.cmdline()))
        for role in ("loader", "coordinator", "expert_worker", "prefetcher", "pipeline.text"):
            name = "text" if role == "pipeline.text" else role.removeprefix("expert_")
            if count := sum(role in command for command in commands):
                words.append(name if count == 1 else f"{count} {name}s")
        return ", ".join(words) or "no children"

    def ask(self, tokens: int) -> None:
        """Start a client, and wait for the first text of its answer, or for a while where the model has no
        tokenizer."""
        command = [*ASK, "--max-tokens", str(tokens), "--connect", self.name]
        client = self._launch(*command, stdout=subprocess.PIPE, mark="")
        self._clients.append(client)
        assert client.stdout is not None
        select.select([client.stdout], [], [], ANSWER_LIMIT)

    def kill(self) -> str:
        """SIGKILL the supervisor, and wait until its children have exited, too: which ran before.

        The children are listed while the supervisor is stopped: one that is being executed shows no
        environment, and so no mark, but it holds the supervisor's lock already.
        """
        doing = self.doing()
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(LIMIT)

        def left() -> list[psutil.Process]:
            return [*filter(runs, children), *self.processes()]

        assert wait_until(lambda: not left(), EXIT_LIMIT), (doing, left())
        return doing

    def next_start(self) -> None:
        """Wait for an engine of the same name to start, answer and exit. Raises RuntimeError with its log."""
        command = ["--name", self.name, "--model", str(self.place.model), "--device", "cpu"]
        with self._launch(*ASK, "--max-tokens", "1", *command, *self.place.options, mark="") as client:
            if client.wait(LIMIT) != 0:
                self._log.seek(0)
                raise RuntimeError(f"the next start failed: {self._log.read()[-2000:]}")

    def _launch(self, *words: str, mark: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        places = {"XDG_RUNTIME_DIR": str(self.place.runtime), "XDG_CACHE_HOME": str(self.place.cache)}
        return ForkedPython(
            str(ROOT / "launch.py"),
            *words,
            env=os.environ | places | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=self._log,
        )


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def marked(mark: str) -> Iterator[psutil.Process]:
    """By their environments, which a test that waits reads again and again."""
    sought = f"{MARK}={mark}\0".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, psutil.Error):
            if sought in Path(f"/proc/{name}/environ").read_bytes() and runs(
                found := psutil.Process(int(name))
            ):
                yield found
