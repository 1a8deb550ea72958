"""The loader process as the supervisor starts it: the sources of a store, and failures."""

import os
import time
from contextlib import suppress
from subprocess import TimeoutExpired

import tiny_checkpoint
from loader_harness import SECONDS, Supervisor, assert_right, exists, in_memory

from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.index import fingerprint as fingerprint_of
from protocol.codec import decode, encode
from protocol.messages import VERSION, Progress, Ready, Shutdown
from protocol.sockets import bind_router, ipc_endpoint
from shm.locks import StoreLease, build_lock
from shm.segment import byte_size, unlink
from shm.store import BUILDING, Store, pack_head, store_name
from workers.lifetime import EXIT_PARENT_GONE


def test_store_comes_from_checkpoint_then_segment_then_cache(supervisor, model):
    first = supervisor.load(model)
    fingerprint = first.ready.fingerprint
    weights = sum(t.nbytes for t in tiny_checkpoint.expert_tensors().values())
    note = f"source checkpoint: {byte_size(weights)} read from the checkpoint, 0 B from the cache"
    generation = supervisor.generation
    assert first.ready == Ready(VERSION, "loader", 0, generation, first.pid, fingerprint, (note,))
    assert first.stages == ["allocating", "encoding the experts", "writing the cache"]
    assert first.lines == []
    assert all(0 <= m.done <= m.total for m in first.messages if isinstance(m, Progress))
    assert_right(fingerprint, tiny_checkpoint.expert_tensors())

    second = supervisor.load(model)
    assert second.ready.fingerprint == fingerprint
    assert second.ready.notes == ("source attached: 0 B read from the checkpoint, 0 B from the cache",)

    assert StoreLease.acquire(fingerprint).release(keep=False)
    third = supervisor.load(model)
    size = (supervisor.cache / fingerprint / "store.bin").stat().st_size
    assert third.ready.notes == (
        f"source cache: 0 B read from the checkpoint, {byte_size(size)} from the cache",
    )
    assert_right(fingerprint, tiny_checkpoint.expert_tensors())


def test_the_last_message_waits_for_a_supervisor_that_is_slow_to_take_the_connection(supervisor, model):
    endpoint = ipc_endpoint(supervisor.runtime, "control.sock")
    supervisor.load(model)
    supervisor.control.close()
    child = supervisor.start(model)
    with suppress(TimeoutExpired):
        child.process.wait(3)
    supervisor.control = bind_router(supervisor.context, endpoint)
    assert supervisor.finish(child).source == "attached"


def test_concurrent_loaders_build_one_store(supervisor, model):
    children = [supervisor.start(model), supervisor.start(model)]
    messages: dict[bytes, list[object]] = {}
    deadline = time.monotonic() + SECONDS
    while any(c.process.poll() is None for c in children) or supervisor.control.poll(100):
        assert time.monotonic() < deadline
        if supervisor.control.poll(100):
            sender, *frames = supervisor.control.recv_multipart()
            messages.setdefault(sender, []).append(decode(frames))
    assert [c.end() for c in children] == [0, 0]
    supervisor.fingerprints |= {received[-1].fingerprint for received in messages.values()}
    notes = sorted(received[-1].notes[0].split(":")[0] for received in messages.values())
    assert notes == ["source attached", "source checkpoint"]


def test_unfinished_store_of_a_killed_loader_is_made_again(supervisor, model):
    fingerprint = supervisor.load(model).ready.fingerprint
    with Store.attach(store_name(fingerprint)) as store:
        manifest = store.manifest
    unlink(store_name(fingerprint))
    in_memory(fingerprint).write_bytes(pack_head(manifest, BUILDING))
    outcome = supervisor.load(model)
    assert outcome.source == "cache"
    assert len(outcome.lines) == 1
    assert "unfinished" in outcome.lines[0]
    assert_right(fingerprint, tiny_checkpoint.expert_tensors())


def test_unused_stores_are_removed_first(supervisor, model):
    """A store without a lease, as of an engine killed at its start, is removed before the new one."""
    stale = supervisor.load(model, tile=16).ready.fingerprint
    outcome = supervisor.load(model)
    assert "removed the unused store" in outcome.lines[0]
    assert not exists(stale)


# --- failures -----------------------------------------------------------------------------------------


def test_too_little_memory_is_a_usage_error(supervisor, model):
    assert "--format" in supervisor.load(model, reserve_bytes=1 << 60).refusal
    assert not exists(fingerprint_of(CheckpointIndex.open(model), "f32", 32))


def test_bad_models_and_formats_are_one_line(supervisor, model, tmp_path):
    cases = [(tmp_path / "nowhere", {}, "does not exist"), (model, {"format": "int3"}, "unknown format")]
    incomplete = tiny_checkpoint.expert_tensors()
    incomplete.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight")
    cases.append((tiny_checkpoint.write(tmp_path / "a", incomplete), {}, "lacks the tensor"))
    for folder, changes, message in cases:
        outcome = supervisor.load(folder, **changes)
        assert message in outcome.refusal
        assert outcome.stages == []
    assert not supervisor.cache.exists()


def wait_for_waiting(supervisor: Supervisor) -> bytes:
    """The identity of a loader that has reported waiting for another engine."""
    assert supervisor.control.poll(SECONDS * 1000)
    sender, *frames = supervisor.control.recv_multipart()
    message = decode(frames)
    assert isinstance(message, Progress)
    assert message.stage.startswith("waiting")
    return sender


def test_shutdown_ends_a_waiting_loader(supervisor, model):
    fingerprint = supervisor.load(model).ready.fingerprint
    with build_lock(fingerprint):
        child = supervisor.start(model)
        sender = wait_for_waiting(supervisor)
        supervisor.control.send_multipart([sender, *encode(Shutdown())])
        assert child.end() == 0


def test_loader_exits_with_its_supervisor(supervisor, model):
    fingerprint = supervisor.load(model).ready.fingerprint
    with build_lock(fingerprint):
        child = supervisor.start(model)
        wait_for_waiting(supervisor)
        os.close(child.lifeline)
        child.lifeline = -1
        assert child.end() in (EXIT_PARENT_GONE, -9)
