"""How many channels are best gathered for one copy (FloE's chunks): what a chunk costs, and how long it lets
a demanded order wait.

    python -m benchmarks.chunks [--rows 10,25,50,100,whole] [--link-gbps X] [--kept 0.2] [--rounds N] [--json]

A prefetcher process for each size gathers a share of the channels of Mixtral-8x7B's experts in `floe` (16 KB
each) into slots in host memory, by orders and landings over its socket. `gb_s`: of one expert's kept
channels, from the order to their last landing. `wait_ms`: of 16 channels that are demanded while predicted
ones are gathered, from their order to their landing. The sizes take turns; medians. `whole`: a slot's, 896
channels. Memory stands in for the link; --link-gbps paces it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pipeline.experts.fetch_link import DEMANDED, PREDICTED, FetchLink, Order

from benchmarks.floe import MIXTRAL
from pipeline.arrays import IntArray
from pipeline.device import open_device
from pipeline.experts.peers import ChildServerSocket, ExitEvents
from protocol.messages import Shutdown
from protocol.sockets import Identity
from shm.layout import ExpertShape, FloeFormat, StoreLayout, format_named
from shm.manifest import StoreManifest
from shm.segment import unlink
from shm.store import Store, StoreBuilder, store_name
from workers import prefetcher
from workers.child_endpoint import ChildEndpoint

SHAPE = ExpertShape(1, 4, MIXTRAL.hidden, MIXTRAL.intermediate, MIXTRAL.tile)
FORMAT = "floe"
WHOLE = "whole"
DEMAND = 16  # channels of the order that waits
HEAD_START = 1e-3  # s that predicted channels are gathered before it comes
LIMIT = 30.0  # s for any landing
KEY = b"k" * 32


class Gathers:
    """Orders to a running prefetcher."""

    def __init__(self, link: FetchLink, slots: list[int], kept: float) -> None:
        self._link, self._slots, self._kept = link, slots, kept
        self._random, self._expert = np.random.default_rng(0), 0

    def bandwidth(self) -> float:
        """Bytes a second of one expert's kept channels."""
        channels = self._channels(self._kept)
        began = time.perf_counter()
        self._wait(self._order(channels, self._slots, DEMANDED), len(channels))
        return len(channels) * _record() / (time.perf_counter() - began)

    def wait(self) -> float:
        """Seconds until a demand's channels land."""
        predicted = self._order(self._channels(self._kept), self._slots[1:], PREDICTED)
        until = time.perf_counter() + HEAD_START
        while time.perf_counter() < until:
            self._link.update(1)
        began = time.perf_counter()
        self._wait(self._order(self._channels(1)[:DEMAND], self._slots[:1], DEMANDED), DEMAND)
        seconds = time.perf_counter() - began
        self._link.cancel(predicted)
        while not predicted.final:
            self._link.update(10)
        return seconds

    def _channels(self, share: float) -> IntArray:
        """Of another expert each time, so that no cache holds them."""
        self._expert = (self._expert + 1) % SHAPE.experts
        chosen = self._random.permutation(SHAPE.padded)[: round(share * SHAPE.padded)]
        return np.sort(chosen).astype(np.int32)

    def _order(self, channels: IntArray, slots: list[int], urgency: int) -> Order:
        needed = -(-len(channels) // SHAPE.tile)
        return self._link.gather(0, self._expert, channels, slots[:needed], urgency)

    def _wait(self, order: Order, count: int) -> None:
        end = time.perf_counter() + LIMIT
        while order.landed < count:
            self._link.update(10)
            if time.perf_counter() > end:
                raise TimeoutError(f"{order.landed} of {count} channels landed within {LIMIT:g} s")


def _record() -> int:
    format = format_named(FORMAT)
    assert isinstance(format, FloeFormat)
    return format.channel_bytes(SHAPE.hidden)


@contextmanager
def running(sizes: list[int], gbps: float | None, kept: float) -> Iterator[list[Gathers]]:
    """A store without weights, a slab, and a prefetcher for each chunk's size."""
    fingerprint = f"{os.getpid():032x}"
    slots = 1 + -(-round(kept * SHAPE.padded) // SHAPE.tile)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-chunks-")))
        name = store_name(fingerprint)
        builder = StoreBuilder.create(name, StoreManifest(fingerprint, SHAPE, FORMAT, "chunks"))
        stack.callback(unlink, name)
        builder.finish()
        tile_bytes = StoreLayout(SHAPE, format_named(FORMAT)).tile_bytes
        slab = open_device("cpu").open_slab(f"/tandem-chunks{os.getpid()}-slab", slots, tile_bytes)
        stack.callback(slab.close)
        socket = ChildServerSocket(
            folder, "fetch.sock", "prefetcher", fingerprint, KEY, ExitEvents(), lambda _: None
        )
        stack.callback(socket.close)
        found = []
        for index, size in enumerate(sizes):
            link = FetchLink(socket, slab.address(), None, index=index)
            child = get_context("spawn").Process(
                target=_serve, args=(index, size, folder, fingerprint, gbps), daemon=True
            )
            child.start()
            stack.callback(child.join, LIMIT)
            stack.callback(socket.send, index, Shutdown())
            if not link.wait_up(LIMIT):
                raise TimeoutError(f"the prefetcher did not start: {link.refusal}")
            found.append(Gathers(link, list(range(slots)), kept))
        yield found


def _serve(index: int, size: int, folder: Path, fingerprint: str, gbps: float | None) -> None:
    prefetcher.CHUNK_BYTES = size
    identity = Identity("prefetcher", index, 0)
    given = {**asdict(identity), "identity": identity.prove(KEY)}
    given |= {"runtime": str(folder), "fingerprint": fingerprint}
    endpoint = ChildEndpoint(given, "fetch.sock", supervised=False)
    try:
        with Store.attach(store_name(fingerprint), fingerprint, writable=True) as store:
            endpoint.announce()
            prefetcher.CopyLoop(endpoint, store, gbps, lambda: None).serve()
    finally:
        endpoint.close()


def measure(rows: list[str], gbps: float | None, kept: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each chunk."""
    speeds: dict[str, list[float]] = {name: [] for name in rows}
    waits: dict[str, list[float]] = {name: [] for name in rows}
    sizes = [(SHAPE.tile if name == WHOLE else int(name)) * _record() for name in rows]
    with running(sizes, gbps, kept) as every:
        for round_number in range(rounds + 1):
            for name, gathers in zip(rows, every, strict=True):
                speed, wait = gathers.bandwidth(), gathers.wait()
                if round_number:  # the first one touches pages
                    speeds[name].append(speed)
                    waits[name].append(wait)
    return [
        {"rows": name, "gb_s": median(speeds[name]) / 1e9, "wait_ms": median(waits[name]) * 1e3}
        for name in rows
    ]


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="10,25,50,100,whole", help="channels of a chunk")
    parser.add_argument("--link-gbps", type=float, help="pace copies to so many GB/s")
    parser.add_argument("--kept", type=float, default=0.2, help="share of an expert's channels")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = given.rows.split(",")
    if not all(name == WHOLE or (name.isdigit() and int(name)) for name in rows):
        parser.error(f"--rows takes numbers and `{WHOLE}`, not {given.rows}")
    if not 0 < given.kept <= 1 or given.rounds < 1 or (given.link_gbps is not None and given.link_gbps <= 0):
        parser.error("--kept is a share, --rounds at least 1, --link-gbps above 0")
    found = measure(rows, given.link_gbps, given.kept, given.rounds)
    if given.json:
        print(json.dumps(found))
        return 0
    for row in found:
        print(f"{row['rows']:>6} channels  {row['gb_s']:6.2f} GB/s  a demand waits {row['wait_ms']:6.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
