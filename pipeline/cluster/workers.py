"""The children of an expert host, its workers and perhaps a reader: started, restarted when they exit, ended
with it.

They are the same processes as an engine's. The host's main thread starts them, since the kernel ends a child
with the thread that started it."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.experts.peers import ExitEvents
from protocol.messages import Hung, WorkerDied, WorkerUp
from protocol.sockets import Identity
from shm.control import ControlSegment
from workers.lifetime import CHILD_PROCESS, environment, pack_config

ROLE, READER = "worker", "reader"
MODULES = {ROLE: "workers.expert_worker", READER: "workers.reader"}
FIRST_PAUSE, LONGEST_PAUSE = (
    0.1,
    5.0,
)  # seconds before the second restart in a row, doubled before each further one
STOP_LIMIT = 2.0  # seconds for all to end

log = logging.getLogger(__name__)


@dataclass
class _Slot:
    """A child through all its generations."""

    role: str
    index: int
    cores: tuple[int, ...]
    generation: int = -1
    process: subprocess.Popen[bytes] | None = None
    lifeline: int = -1  # our end of its pipe
    exits: int = 0  # in a row, before it had done any work
    hung: bool = False
    start_at: float = 0.0  # monotonic seconds


class HostWorkers:
    """Starts and watches them. Used by the host's main thread."""

    def __init__(
        self,
        cores: tuple[tuple[int, ...], ...],
        config: dict[str, Any],
        key: bytes,
        control: ControlSegment,
        exits: ExitEvents,
        output: Path,
        reads: bool,
    ) -> None:
        """`config`: what all are told; `output`: the file to which they print; `reads`: also a reader."""
        slots = [_Slot(ROLE, index, one) for index, one in enumerate(cores)]
        slots += [_Slot(READER, 0, ())] * reads
        self._slots = {(slot.role, slot.index): slot for slot in slots}
        self._config, self._key, self._output = config, key, output
        self._control, self._exits = control, exits

    def check(self) -> None:
        """Report those that have exited, and start those that do not run."""
        now = time.monotonic()
        for slot in self._slots.values():
            if slot.process is not None and (code := slot.process.poll()) is not None:
                self._on_exit(slot, code)
            if slot.process is None and now >= slot.start_at:
                self._start(slot)

    def on_message(self, message: object) -> None:
        """Handle what a pool tells its supervisor."""
        match message:
            case Hung(role=role, index=index, generation=generation):
                slot = self._slots[role, index]
                if slot.generation == generation and slot.process is not None:
                    slot.hung = True
                    slot.process.kill()
            case WorkerUp(role=role, index=index):
                self._slots[role, index].exits = 0

    def stop(self) -> None:
        """End all of them."""
        running = [slot.process for slot in self._slots.values() if slot.process is not None]
        for slot in self._slots.values():
            self._cut(slot)  # whereupon it exits
        until = time.monotonic() + STOP_LIMIT
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()

    def _start(self, slot: _Slot) -> None:
        slot.generation += 1
        self._control.line(slot.role, slot.index).end()
        theirs, slot.lifeline = os.pipe()
        identity = Identity(slot.role, slot.index, slot.generation)
        config = self._config | {"role": slot.role, "index": slot.index, "generation": slot.generation}
        config |= {"cores": list(slot.cores), "identity": identity.prove(self._key)}
        try:
            with open(self._output, "ab") as output:
                slot.process = subprocess.Popen(
                    [*CHILD_PROCESS, MODULES[slot.role], "--lifeline", str(theirs)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(theirs,),
                    env=environment(max(1, len(slot.cores))),
                )
            os.write(slot.lifeline, pack_config(config))
        except OSError as e:  # no memory or descriptor for another process
            log.warning(f"{slot.role} {slot.index} could not be started: {e.strerror}")
            self._cut(slot)
            slot.start_at = time.monotonic() + LONGEST_PAUSE
        finally:
            os.close(theirs)

    def _on_exit(self, slot: _Slot, code: int) -> None:
        """`code`: minus the number of a signal."""
        outside = code in (-9, -15) and not slot.hung
        log.warning(f"{slot.role} {slot.index} exited with {code}; it is being restarted")
        seq = self._control.line(slot.role, slot.index).seq
        self._exits.put(WorkerDied(slot.role, slot.index, slot.generation, not outside, seq))
        self._cut(slot)
        slot.process, slot.hung = None, False
        slot.exits += 1
        again = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(slot.exits - 2, 16)) * (slot.exits > 1)
        slot.start_at = time.monotonic() + again

    def _cut(self, slot: _Slot) -> None:
        if slot.lifeline >= 0:
            os.close(slot.lifeline)
            slot.lifeline = -1
