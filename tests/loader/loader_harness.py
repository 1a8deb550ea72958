"""The supervisor's side of the loader: a control socket, a lifeline, a real process."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import zmq

import pipeline
from protocol.codec import decode
from protocol.messages import Failed, Ready
from protocol.sockets import Identity, bind_router, ipc_endpoint
from workers.lifetime import pack_config

ROOT = Path(pipeline.__file__).parent.parent  # where child processes find the packages
SECONDS = 30  # no loader of these tests takes longer


@dataclass
class Outcome:
    """What one loader said and how it ended."""

    code: int
    messages: list[object] = field(default_factory=list)

    @property
    def ready(self) -> Ready:
        assert self.code == 0
        assert isinstance(self.messages[-1], Ready), self.messages
        return self.messages[-1]

    @property
    def failed(self) -> Failed:
        assert isinstance(self.messages[-1], Failed), self.messages
        return self.messages[-1]


class Child:
    """One running loader and its end of the lifeline."""

    def __init__(self, config: dict) -> None:
        read_end, self.lifeline = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workers.child", "pipeline.loader", "--lifeline", str(read_end)],
            cwd=ROOT,
            pass_fds=(read_end,),
        )
        os.close(read_end)
        os.write(self.lifeline, pack_config(config))

    def end(self) -> int:
        try:
            return self.process.wait(timeout=SECONDS)
        finally:
            self.process.kill()
            if self.lifeline >= 0:
                os.close(self.lifeline)


class Supervisor:
    """What the loader needs of one: a runtime directory, a control socket, a cache folder."""

    def __init__(self, folder: Path, context: zmq.Context) -> None:
        self.runtime = folder / "engine"
        self.runtime.mkdir(mode=0o700)
        self.cache = folder / "cache"
        self.control = bind_router(context, ipc_endpoint(self.runtime, "control.sock"))
        self.incarnation = 0
        self.fingerprints: set[str] = set()  # of the stores that may have to be removed

    def config(self, model: Path, **changes: object) -> dict:
        self.incarnation += 1
        return {
            "engine": "test",
            "runtime": str(self.runtime),
            "log_level": "INFO",
            "role": "loader",
            "index": 0,
            "incarnation": self.incarnation,
            "identity": self.identity,
            "model": str(model),
            "format": "bf16",
            "tile": 32,
            "cache_dir": str(self.cache),
            "reserve_bytes": 0,
            "keep_store": False,
            "verify": False,
        } | changes

    @property
    def identity(self) -> bytes:
        return Identity("loader", 0, self.incarnation).prove(b"k" * 32)

    def start(self, model: Path, **changes: object) -> Child:
        return Child(self.config(model, **changes))

    def finish(self, child: Child) -> Outcome:
        """Collect its messages until it ends."""
        messages: list[object] = []
        while child.process.poll() is None or self.control.poll(100):
            if self.control.poll(100):
                sender, *frames = self.control.recv_multipart()
                assert sender == self.identity
                messages.append(decode(frames))
                if isinstance(messages[-1], Ready):
                    self.fingerprints.add(messages[-1].fingerprint)
        return Outcome(child.end(), messages)

    def load(self, model: Path, **changes: object) -> Outcome:
        return self.finish(self.start(model, **changes))
