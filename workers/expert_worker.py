"""Process entry: an expert worker. It maps the store, receives Work, answers each.

It is stateless: any worker can redo any Work, with the same bits. It is cheap to restart, because it
imports no torch.
"""

from __future__ import annotations

import time
from typing import Any

from shm.control import ControlLine, ControlSegment
from shm.errors import ShmError
from shm.store import Store
from workers.child_endpoint import ChildEndpoint
from workers.copiers import sleep_until
from workers.kernels.native import WorkKernel, best, store_kernel
from workers.lifetime import pin
from workers.work_exchange import WorkExchange


def serve(peer: ChildEndpoint, line: ControlLine, kernel: WorkKernel, slowdown: float) -> None:
    """Answer Work until Shutdown; `line` counts progress. `slowdown` > 1 emulates a slower host."""
    exchange = WorkExchange(peer, kernel.hidden)
    while not peer.stopped:
        if (task := exchange.next()) is None:
            continue
        started, used = time.perf_counter(), time.thread_time() if slowdown > 1 else 0.0
        line.begin(task.seq)
        try:
            try:
                tally = kernel.compute(task.descriptor, task.x, task.y)
            finally:
                line.end()  # before any answer, after which an exit is not put down to this Work
        except (IndexError, MemoryError) as e:
            exchange.refuse(task, str(e))
            continue
        busy = time.perf_counter() - started
        if slowdown > 1:  # not of a pause in which another process had the core
            busy = slowdown * (time.thread_time() - used)
            sleep_until(started + busy, line.tick)
        if not task.warm_up:  # which is no progress: what follows it may end every new worker
            line.tick()
        exchange.answer(task, busy, tally)


def main(config: dict[str, Any]) -> int:
    """Run a worker; returns its exit code."""
    note = pin(config["cores"])
    peer = ChildEndpoint(config, "work.sock", config.get("supervised", True))
    try:
        control = ControlSegment.attach(config["control"])
        with Store.attach(config["store"], config["fingerprint"]) as store:
            team = best().team(len(config["cores"]))
            line = control.line("worker", peer.index)
            kernel = store_kernel(store, team, line, generation=peer.generation)
            peer.announce((note,) if note else ())
            serve(peer, line, kernel, config["host_slowdown"])
            if team is not None:
                team.close()
        control.close()
    except ShmError as e:
        peer.fail(str(e))
        return 1
    finally:
        peer.close()
    return 0
