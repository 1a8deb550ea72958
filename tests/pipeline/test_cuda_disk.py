"""The engine on the device `cuda`, on a stand-in for the GPU, with some experts on disk: copies that run
late, and frames that are read to again as soon as they may be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from child_messages import LIMIT, child_endpoint, child_socket, control_segment
from fake_gpu import fake_device
from mover_parts import OWN, random_store, with_frames
from test_cuda_engine import agree, texts
from thread_engine import engine_in_threads

from pipeline.checkpoint.open import open_model
from pipeline.engine.engine import Engine
from pipeline.experts.disk_tier import DiskTier
from pipeline.models.facts import expert_shape
from protocol.messages import Shutdown
from shm.control import ControlSegment
from shm.disk_cache import CachedStore
from shm.layout import format_named
from shm.store import Store, store_name
from workers.reader import Readers, serve

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

FRAMES = 5  # of 8 experts, of which a layer has 4


@contextmanager
def reading(folder: Path, store: Store, control: ControlSegment) -> Iterator[DiskTier]:
    """The tier of a store, and a reader in a thread."""
    path = Path(store.manifest.file)
    with child_socket(folder, "read.sock", "reader", OWN) as socket:

        def run() -> None:
            peer = child_endpoint(folder, "reader", "read.sock", OWN)
            file = CachedStore.open(path.parents[1], path.parent.name)
            assert file is not None
            with file, Store.attach(store_name(OWN), OWN, writable=True) as own:
                readers = Readers(file, control.line("reader", 0))
                peer.announce()
                serve(peer, own, readers)
                readers.close()
            peer.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        socket.wait_ready(1, LIMIT)
        try:
            yield DiskTier(store, 2, store.layout.shape.layers, socket, control.line("reader", 0))
        finally:
            socket.send(0, Shutdown())
            thread.join(LIMIT)
            assert not thread.is_alive()


@contextmanager
def engine_on_disk(model: Path, folder: Path, seed: int) -> Iterator[tuple[Engine, DiskTier]]:
    shape = expert_shape(open_model(model).config, 32, format_named("bf16"))
    cache = folder / "cache"
    with (
        fake_device(seed) as (device, _),
        random_store(shape, "cuda_engine") as whole,
        with_frames(whole, cache, FRAMES) as store,
        Store.attach(store_name(OWN), OWN, writable=True) as others,
        control_segment(1) as control,
        reading(folder, store, control) as tier,
        engine_in_threads(model, folder, store=store, device=device, others=others) as (engine, _),
    ):
        engine.tier = engine.pool.tier = tier
        engine.first.memory.mover.stored = tier
        tier.movers.append(engine.first.memory.mover)
        yield engine, tier


@pytest.mark.parametrize("seed", [0, 1])
def test_no_copy_is_made_of_an_expert_that_is_not_there(tiny_model, tmp_path, seed: int) -> None:
    with engine_on_disk(tiny_model, tmp_path, seed) as (engine, tier):
        expected = texts(engine, "all-host")
        for preset in ("on-demand", "mixtral-offloading", "layerwise", "fiddler", "random"):
            agree(texts(engine, preset), expected)
            engine.first.memory.mover.wait_idle()
        agree(texts(engine, "random", churn="1"), expected)
        assert tier.figures.evicted > 0
        assert tier.figures.failed == 0
        resident = engine.first.memory.residency
        assert np.array_equal(resident, engine.first.memory.target) or not engine.first.memory.idle
