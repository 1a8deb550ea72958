"""The supervisor's side of the loader: a control socket, a lifeline, a real process."""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import decoding
import numpy as np
import torch
import zmq
from fork_server import ForkedChild

from protocol.codec import decode
from protocol.messages import Failed, Progress, Ready
from protocol.sockets import Identity, bind_router, ipc_endpoint
from shm.layout import ExpertShape
from shm.store import Store, store_name
from workers.lifetime import environment, pack_config

SECONDS = 30  # no loader of these tests takes longer


@dataclass
class Outcome:
    """The messages, log lines and exit code of a loader."""

    code: int
    messages: list[object] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # of its stderr
    pid: int = 0

    @property
    def stages(self) -> list[str]:
        """The stages it reported, in order."""
        return list(dict.fromkeys(m.stage for m in self.messages if isinstance(m, Progress)))

    @property
    def ready(self) -> Ready:
        assert self.code == 0
        assert isinstance(self.messages[-1], Ready), self.messages
        return self.messages[-1]

    @property
    def source(self) -> str:
        return self.ready.notes[0].partition(":")[0].removeprefix("source ")

    @property
    def failed(self) -> Failed:
        assert isinstance(self.messages[-1], Failed), self.messages
        assert "\n" not in self.messages[-1].text
        return self.messages[-1]

    @property
    def refusal(self) -> str:
        """The line for wrong input."""
        assert (self.code, self.failed.usage) == (2, True)
        return self.failed.text


class Child:
    """A running loader and the supervisor's end of its lifeline. `lines`: its stderr, after `end`."""

    def __init__(self, config: dict) -> None:
        read_end, self.lifeline = os.pipe()
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
        self.process = ForkedChild("pipeline.loader", read_end, env=environment(1), stderr=self._stderr)
        os.close(read_end)
        os.write(self.lifeline, pack_config(config))

    def end(self) -> int:
        try:
            return self.process.wait(timeout=SECONDS)
        finally:
            self.process.kill()
            if self.lifeline >= 0:
                os.close(self.lifeline)
            self._stderr.seek(0)
            self.lines = self._stderr.read().splitlines()
            self._stderr.close()


class Supervisor:
    """The supervisor's side: a runtime directory, a control socket, a cache folder."""

    def __init__(self, folder: Path, context: zmq.Context) -> None:
        self.runtime = folder / "engine"
        self.runtime.mkdir(mode=0o700)
        self.cache = folder / "cache"
        self.context = context
        self.control = bind_router(context, ipc_endpoint(self.runtime, "control.sock"))
        self.generation = 0
        self.fingerprints: set[str] = set()  # of stores to remove at the end

    def config(self, model: Path, **changes: object) -> dict:
        self.generation += 1
        return {
            "engine": "test",
            "runtime": str(self.runtime),
            "log_level": "INFO",
            "role": "loader",
            "index": 0,
            "generation": self.generation,
            "identity": self.identity,
            "model": str(model),
            "format": "f32",  # unlike the checkpoints' bf16, so that stores are cached on disk
            "tile": 32,
            "cache_dir": str(self.cache),
            "reserve_bytes": 0,
            "nodes": [],
            "keep_store": False,
        } | changes

    @property
    def identity(self) -> bytes:
        return Identity("loader", 0, self.generation).prove(b"k" * 32)

    def start(self, model: Path, **changes: object) -> Child:
        return Child(self.config(model, **changes))

    def finish(self, child: Child) -> Outcome:
        """Collect its messages until it exits."""
        messages: list[object] = []
        while child.process.poll() is None or self.control.poll(100):
            if self.control.poll(100):
                sender, *frames = self.control.recv_multipart()
                assert sender == self.identity
                messages.append(decode(frames))
                if isinstance(messages[-1], Ready):
                    self.fingerprints.add(messages[-1].fingerprint)
        return Outcome(child.end(), messages, child.lines, child.process.pid)

    def load(self, model: Path, **changes: object) -> Outcome:
        return self.finish(self.start(model, **changes))


def in_memory(fingerprint: str) -> Path:
    return Path("/dev/shm") / store_name(fingerprint)[1:]


def exists(fingerprint: str) -> bool:
    return in_memory(fingerprint).exists()


def assert_right(fingerprint: str, tensors: dict[str, torch.Tensor]) -> None:
    """Assert that the store holds the checkpoint's experts."""
    with Store.attach(store_name(fingerprint), fingerprint) as store:
        layout = store.layout
        assert layout.shape == ExpertShape(2, 3, 64, 100, 32)
        for layer in range(2):
            for expert in range(3):
                tiles = [
                    decoding.decode(layout.format, store.tiles(layer, expert, t, t + 1), 64, 32)
                    for t in range(layout.shape.tiles)
                ]
                decoded = np.concatenate(tiles, axis=1)  # [3, 128, 64]
                at = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                gate, down, up = (tensors[f"{at}.w{n}.weight"].float().numpy() for n in (1, 2, 3))
                np.testing.assert_array_equal(decoded[:, :100], np.stack((gate, up, down.T)))
                assert not decoded[:, 100:].any()
