"""Process entry: an expert worker. It maps the store, receives Work, returns one Partial per Work.

It is stateless: any worker can redo any Work, with the same bits. It is cheap to restart: few rows need no
torch, and where the store's format needs it for many rows (`workers/kernels/host.py`), a thread imports it
after the first answer.
"""

from __future__ import annotations

import time
from typing import Any

from protocol.messages import Partial, Work, WorkFailed
from shm.control import ControlLine, ControlSegment
from shm.errors import ShmError
from shm.layout import ExpertShape
from shm.store import Store
from workers.child_endpoint import ChildEndpoint
from workers.emulation import sleep_until
from workers.kernels.choice import Choice
from workers.kernels.host import HostKernel
from workers.kernels.native import chosen
from workers.late_import import LateImport
from workers.lifetime import pin
from workers.work_exchange import WorkExchange


def fault_of(work: Work, shape: ExpertShape) -> str | None:
    """Why this Work is invalid, or None. The codec has checked types; this checks values."""
    items, offsets = work.items, work.offsets.tolist()
    if not 0 <= work.layer < shape.layers or work.x.shape[1] != shape.hidden:
        return f"no layer {work.layer} with rows of {work.x.shape[1]} numbers"
    if items.shape[1] != 3 or len(offsets) != len(items) + 1:
        return f"{len(items)} items of {items.shape[1]} numbers with {len(offsets)} offsets"
    if offsets[0] != 0 or offsets[-1] != len(work.rows) or len(work.rows) != len(work.weights):
        return "offsets, rows and weights do not fit each other"
    # Plain numbers are faster than arrays for the few items of a decode step.
    for (expert, lo, hi), start, end in zip(items.tolist(), offsets, offsets[1:], strict=False):
        if not 0 <= expert < shape.experts or lo < 0 or hi > shape.tiles:
            return "an expert or tile outside the model"
        if lo >= hi:
            return "an item without tiles"
        if start > end:
            return "offsets that decrease"
        rows = work.rows[start:end]
        if len(rows) and not (rows[0] >= 0 and rows[-1] < len(work.x)):
            return "a row outside x"
        if len(rows) > 1 and not (rows[1:] > rows[:-1]).all():  # a difference of two could wrap
            return "an item's rows are not ascending"
    return None


def serve(peer: ChildEndpoint, store: Store, line: ControlLine, kernel: HostKernel, slowdown: float) -> None:
    """Answer Work until Shutdown; `line` counts progress. `slowdown` > 1 emulates a slower host."""
    torch = LateImport(kernel, line, restarted=peer.incarnation > 0)
    exchange = WorkExchange(peer)
    while not peer.stopped:
        if (work := exchange.next()) is None:
            continue
        fault = fault_of(work, store.layout.shape)
        if fault is not None:
            exchange.answer(WorkFailed(work.seq, peer.incarnation, fault))
            continue
        torch.prepare(work)
        started = time.perf_counter()
        line.begin(work.seq)
        try:
            y = kernel.compute_work(work, store)
        except (IndexError, MemoryError) as e:
            exchange.answer(WorkFailed(work.seq, peer.incarnation, str(e) or "not enough memory"))
            continue
        finally:
            line.end()
        busy = (time.perf_counter() - started) * slowdown
        sleep_until(started + busy, line.tick)
        if len(work.items):  # a warm-up is no progress: what follows it may end every new worker
            line.tick()
        exchange.answer(Partial(work.seq, peer.incarnation, busy, y))
        torch.begin()
    torch.cancel()


def main(config: dict[str, Any]) -> int:
    """Run a worker; returns its exit code."""
    note = pin(config["cores"])
    peer = ChildEndpoint(config, "work.sock")
    try:
        control = ControlSegment.attach(config["control"])
        with Store.attach(config["store"], config["fingerprint"]) as store:
            peer.announce((note,) if note else ())
            kernels = Choice.from_map(config["kernels"])
            library = chosen(kernels)
            team = None if library is None else library.team(len(config["cores"]))
            line = control.line("worker", peer.index)
            kernel = HostKernel(store.layout, team, line, kernels)
            serve(peer, store, line, kernel, config["host_slowdown"])
            if team is not None:
                team.close()
        control.close()
    except ShmError as e:
        peer.fail(str(e))
        return 1
    finally:
        peer.close()
    return 0
