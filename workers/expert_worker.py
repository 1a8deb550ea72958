"""Process entry: an expert worker. It maps the store, receives Work, returns one Partial per Work.

It holds no state that matters: any worker can redo any Work, and for the same Work the bits are the
same. It is cheap to replace: it says Ready before it imports torch.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from protocol.messages import Abandon, Partial, Work, WorkFailed
from shm.control import ControlLine, ControlSegment
from shm.errors import ShmError
from shm.layout import ExpertShape, StoreLayout
from shm.store import Store
from workers.lifetime import pin
from workers.peer import Peer

if TYPE_CHECKING:
    from torch import Tensor

    from workers.kernels.reference import ReferenceKernel

log = logging.getLogger(__name__)

PACE = 0.5  # seconds of an emulated computation between two signs of progress


class HostExperts:
    """The store's experts as this process computes them. Imports torch when it is made."""

    def __init__(self, store: Store, threads: int, line: ControlLine) -> None:
        import torch

        from workers.kernels.reference import ReferenceKernel

        torch.set_num_threads(threads)
        # Work and store are mapped read-only on purpose, and nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._torch = torch
        self._store = store
        self._kernel: ReferenceKernel = ReferenceKernel(store.layout, line.tick)

    def run(self, work: Work) -> Tensor:
        """The weighted sum over the items: float32 [R, H], a row for each row of `work.x`."""
        torch = self._torch
        with torch.inference_mode():
            x = torch.from_numpy(work.x)
            y: Tensor = torch.zeros_like(x)
            activations = self._kernel.activations(x)
            rows = torch.from_numpy(work.rows.astype(np.int64))
            weights = torch.from_numpy(work.weights).unsqueeze(1)
            for (expert, lo, hi), start, end in zip(
                work.items.tolist(), work.offsets.tolist(), work.offsets[1:].tolist(), strict=False
            ):
                tiles = torch.from_numpy(self._store.tiles(work.layer, expert, lo, hi))
                chosen = rows[start:end]
                y.index_add_(0, chosen, self._kernel.run(tiles, activations[chosen]) * weights[start:end])
        return y


def fault_of(work: Work, shape: ExpertShape) -> str | None:
    """Why this Work cannot be done, or None. The codec has checked types; this checks what they say."""
    items, offsets = work.items, work.offsets
    if not 0 <= work.layer < shape.layers or work.x.shape[1] != shape.hidden:
        return f"no layer {work.layer} with rows of {work.x.shape[1]} numbers"
    if items.shape[1] != 3 or len(offsets) != len(items) + 1:
        return f"{len(items)} items of {items.shape[1]} numbers with {len(offsets)} offsets"
    if offsets[0] != 0 or offsets[-1] != len(work.rows) or len(work.rows) != len(work.weights):
        return "offsets, rows and weights do not fit each other"
    if (np.diff(offsets) < 0).any():
        return "offsets that decrease"
    if len(work.rows) and not (work.rows.min() >= 0 and work.rows.max() < len(work.x)):
        return "a row outside x"
    if len(items) == 0:
        return None
    low, high = items.min(axis=0), items.max(axis=0)
    if low[0] < 0 or high[0] >= shape.experts or low[1] < 0 or high[2] > shape.tiles:
        return "an expert or tile outside the model"
    return None if (items[:, 1] < items[:, 2]).all() else "an item without tiles"


def serve(peer: Peer, store: Store, line: ControlLine, threads: int, slowdown: float) -> None:
    """Answer Work until Shutdown; progress is counted on `line`. `slowdown` > 1 waits after each Work, to
    stand in for a slower host."""
    layout: StoreLayout = store.layout
    experts: HostExperts | None = None  # with the first Work: until then this process is cheap
    waiting: deque[Work] = deque()
    while not peer.stopped:
        for message in peer.receive(wait=not waiting):
            if isinstance(message, Work):
                waiting.append(message)
            elif isinstance(message, Abandon):
                waiting = deque(w for w in waiting if w.seq != message.seq)
            else:
                log.warning("unexpected %s", type(message).__name__)
        if waiting:
            work = waiting.popleft()
            line.tick()
            fault = fault_of(work, layout.shape)
            if fault is not None:
                peer.send(WorkFailed(work.seq, peer.incarnation, fault))
                continue
            if experts is None:
                experts = HostExperts(store, threads, line)
            started = time.perf_counter()
            line.begin(work.seq)
            y = experts.run(work).numpy()
            line.end()
            busy = time.perf_counter() - started
            if slowdown > 1:
                wait(busy * (slowdown - 1), line)
                busy *= slowdown
            peer.send(Partial(work.seq, peer.incarnation, busy, y))


def wait(seconds: float, line: ControlLine) -> None:
    """Stand in for computing so long."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(min(left, PACE))
        line.tick()


def main(config: dict[str, Any]) -> int:
    """A worker's life; the exit code."""
    note = pin(config["cores"])
    peer = Peer(config, "work.sock")
    try:
        store = Store.attach(config["store"], config["fingerprint"])
        control = ControlSegment.attach(config["control"])
    except ShmError as e:
        peer.fail(str(e))
        peer.close()
        return 1
    peer.announce((note,) if note else ())
    serve(peer, store, control.line("worker", peer.index), config["threads"], config["host_slowdown"])
    peer.close()
    store.close()
    control.close()
    return 0
