"""Expert hosts on loopback: a layer has the bits that one machine computes, whatever becomes of the hosts."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cluster_heads import (
    BOUNDS,
    EXPERTS,
    HIDDEN,
    KEYS,
    LAYERS,
    Head,
    expert_bytes,
    head,
    host_config,
    hosts,
    machine,
    pid_of,
    restart,
)

from launch.cluster.machine import HostActor, LogLines
from launch.runtime import sweep
from pipeline.cluster import place
from pipeline.cluster.keeper import HostKeeper, new_keys
from pipeline.cluster.rows import WireX
from pipeline.config import Machine
from pipeline.errors import PeerLost, ShardFailed, StepInterrupted
from protocol.files import private_directory
from shm.descriptor import describe
from workers.kernels.native import best
from workers.lifetime import PR_SET_PDEATHSIG

EVERY = tuple(range(len(BOUNDS) - 1))


@pytest.fixture(scope="module")
def alone(three_tiles: Path) -> Iterator[Head]:
    """One machine with all lanes."""
    with head(three_tiles, held=EVERY) as whole:
        yield whole


@pytest.fixture(scope="module")
def pair(three_tiles: Path) -> Iterator[list[HostKeeper]]:
    """Two hosts, one of which has a replica of the other's lane. Tests of others may take long in between."""
    configs = (replace(host_config(three_tiles, *held), lease=900.0) for held in ((1,), (1, 2)))
    with hosts(*configs) as keepers:
        yield keepers


@pytest.mark.parametrize(
    ("format", "lanes"), [("int4", [(1,), (2,)]), ("int8", [(1, 2)]), ("bf16", [(1, 2)])]
)
def test_sums_of_several_machines_are_those_of_one(
    three_tiles: Path, format: str, lanes: list[tuple[int, ...]]
) -> None:
    with (
        hosts(*(host_config(three_tiles, *held, format=format) for held in lanes)) as keepers,
        head(three_tiles, *(machine(k.place()) for k in keepers), format=format) as several,
        head(three_tiles, format=format, held=EVERY) as one,
    ):
        for seed, rows in enumerate((1, 1, 3, 40, 64, 65, 200)):
            assert several.sums(seed, rows) == one.sums(seed, rows)


def test_a_killed_host_and_its_worker_change_no_sum(
    three_tiles: Path, pair: list[HostKeeper], alone: Head
) -> None:
    with head(three_tiles, *(machine(k.place()) for k in pair)) as several:
        assert several.sums(0) == alone.sums(0)
        later = [several.ask(seed, 64) for seed in range(8)]
        psutil.Process(pid_of(pair[1])).children()[0].kill()  # a worker
        assert [wait() for wait in later] == [alone.sums(seed, 64) for seed in range(8)]
        later = [several.ask(seed, 64) for seed in range(8)]
        os.kill(first := pid_of(pair[0]), signal.SIGKILL)  # the other one has its lane, too
        assert [wait() for wait in later] == [alone.sums(seed, 64) for seed in range(8)]
        several.update_until(lambda: several.state(0)[0] == "away")
        later = [several.ask(seed, 2) for seed in range(4)]
        os.kill(second := pid_of(pair[1]), signal.SIGKILL)  # nobody has its lanes: what is asked waits
        several.tell(*(machine(restart(k, pid)) for k, pid in zip(pair, (first, second), strict=True)))
        assert [wait() for wait in later] == [alone.sums(seed, 2) for seed in range(4)]


def test_a_copy_answers_where_its_machine_does_not(
    three_tiles: Path, pair: list[HostKeeper], alone: Head
) -> None:
    with head(three_tiles, machine(pair[1].place()), held=EVERY) as several:
        assert several.machines is not None
        assert several.sums(0) == alone.sums(0), "its machine is not there yet"
        several.update_until(lambda: several.state()[0] == "ready")
        assert several.sums(1) == alone.sums(1)
        asked = several.machines.stats()[0]["works"]
        assert asked, "lanes are asked of their machine"
        assert several.sums(2, lo=2) == alone.sums(2, lo=2), "a device computes a share of a copy"
        pid = pid_of(pair[1])
        os.kill(pid, signal.SIGSTOP)
        assert [several.sums(seed, 64) for seed in range(3, 6)] == [alone.sums(s, 64) for s in range(3, 6)]
        os.kill(pid, signal.SIGKILL)
        assert [several.sums(seed) for seed in range(8)] == [alone.sums(seed) for seed in range(8)]
    restart(pair[1], pid)


def test_a_part_that_no_memory_has_room_for_is_served_from_disk(three_tiles: Path, alone: Head) -> None:
    config = host_config(three_tiles, 1, 2, name="host-that-is-lost")
    on_disk = replace(config, name="host-on-disk", disk_memory=5 * expert_bytes(three_tiles, 1, 2))
    with hosts(config) as (lost,), head(three_tiles, machine(lost.place())) as several:
        assert several.sums(0) == alone.sums(0)
        later = [several.ask(seed, 64) for seed in range(4)]
        os.kill(pid := pid_of(lost), signal.SIGKILL)  # for good: nobody starts it again
        with hosts(on_disk) as (keeper,):
            stand_in = machine(keeper.place())
            several.tell(stand_in)
            assert [wait() for wait in later] == [alone.sums(seed, 64) for seed in range(4)]
            assert [several.sums(seed) for seed in range(16)] == [alone.sums(seed) for seed in range(16)]
            later = [several.ask(seed, 64) for seed in range(4)]
            children = psutil.Process(pid_of(keeper)).children()
            next(child for child in children if "workers.reader" in child.cmdline()).kill()
            assert [wait() for wait in later] == [alone.sums(seed, 64) for seed in range(4)]
            os.kill(before := pid_of(keeper), signal.SIGKILL)
            stand_in = machine(restart(keeper, before))
            several.tell(stand_in)
            assert several.sums(4) == alone.sums(4)
            several.tell(stand_in, machine(restart(lost, pid)))
            known = several.machines
            assert known is not None
            several.update_until(lambda: [each["state"] for each in known.stats()] == ["ready"] * 2)
            assert several.sums(3) == alone.sums(3)
            assert known.stats()[1]["works"], "one that has all of it in memory is asked first"


def test_an_expert_that_is_not_there_is_refused(three_tiles: Path) -> None:
    """Also where a host finds experts in its memory by their numbers."""
    config = host_config(three_tiles, 1, 2, name="host-of-a-few")
    on_disk = replace(config, disk_memory=5 * expert_bytes(three_tiles, 1, 2))
    x = WireX(False, np.ones((1, HIDDEN), np.float32).view(np.int8))
    with hosts(on_disk) as (keeper,), head(three_tiles, machine(keeper.place())) as several:
        assert several.machines is not None
        several.machines.wait_ready([1, 2], 60)
        for layer, expert in ((0, -1), (0, EXPERTS), (LAYERS, 0)):
            pieces = [describe(layer, [[expert, 0, 1]], [0, 1], [0], [1.0], 1)]
            question = several.machines.ask({1: pieces}, x, 1)
            with pytest.raises(ShardFailed, match="no such expert"):
                several.machines.wait(question)


def test_a_stand_in_takes_what_of_its_budget_is_free(three_tiles: Path, alone: Head) -> None:
    config = replace(host_config(three_tiles, 1, 2, name="host-of-much"), disk_memory=1 << 50)
    with hosts(config) as (keeper,), head(three_tiles, machine(keeper.place())) as several:
        assert several.sums(0) == alone.sums(0)
    keeper = HostKeeper(replace(config, reserve_bytes=1 << 50))
    try:
        with suppress(PeerLost):  # where it fails before it is looked at
            keeper.start()
        said = place.read(config.name)
        while said is None or said.state != "failed":
            with suppress(PeerLost):
                said = keeper.check() or said
        assert "0 B are free" in said.error
    finally:
        keeper.stop()


def test_a_silent_host_is_not_waited_for(three_tiles: Path, pair: list[HostKeeper], alone: Head) -> None:
    with head(three_tiles, *(machine(k.place()) for k in pair)) as several:
        assert several.sums(1) == alone.sums(1)
        first = pair[0].place()
        assert first is not None
        os.kill(first.pid, signal.SIGSTOP)
        try:
            assert several.sums(2) == alone.sums(2)
        finally:
            os.kill(first.pid, signal.SIGCONT)
        several.update_until(lambda: several.state(0)[0] == "ready")
        assert [several.sums(seed) for seed in range(4)] == [alone.sums(seed) for seed in range(4)]


def test_a_host_is_adopted_with_the_same_configuration_and_ended_with_another(
    three_tiles: Path, pair: list[HostKeeper]
) -> None:
    running = pair[0].place()
    assert HostKeeper(pair[0].config).start() == running
    assert HostKeeper(replace(pair[0].config, lease=50.0)).start() == running
    assert running is not None
    other = HostKeeper(replace(pair[0].config, coordinator_key=new_keys()[0])).start()
    assert other.pid != running.pid
    assert pair[0].start().pid not in (running.pid, other.pid)


def test_a_host_takes_a_port_of_those_that_it_may(three_tiles: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = host_config(three_tiles, 1, name="host-of-a-range", ports=(port, port + 20))
        with hosts(config) as (keeper,):
            assert port < int(machine(keeper.place()).endpoint.rpartition(":")[2]) <= port + 20
        with (
            pytest.raises(PeerLost, match=rf"^an expert host .* {port} \(--host-ports\): [\w ]* in use$"),
            hosts(replace(config, ports=(port, port))),
        ):
            pass


def test_another_key_is_not_answered(three_tiles: Path, pair: list[HostKeeper]) -> None:
    running = machine(pair[0].place())
    with head(three_tiles, replace(running, key=new_keys()[0])) as several:
        several.update_until(lambda: "key" in several.state()[1])
    with hosts(replace(host_config(three_tiles, 2), coordinator_key=new_keys()[0])) as (keeper,):
        other = machine(keeper.place())
        with head(three_tiles, other) as several:
            several.update_until(lambda: "key" in several.state()[1])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"kernels": 1}, "kernels have version"),
        ({"variant": "portable"}, "for portable"),
        ({"fingerprint": "0" * 64}, "copy of the model"),
        ({"format": "int8"}, "in int4, the coordinator's in int8"),
        ({"bounds": (0, 2, 3)}, "other lanes"),
    ],
)
def test_a_host_refuses_what_would_change_bits(
    three_tiles: Path, pair: list[HostKeeper], said: dict[str, object], why: str
) -> None:
    with head(three_tiles, *(machine(k.place()) for k in pair), **said) as several:
        assert several.machines is not None
        with pytest.raises(PeerLost, match=why):
            several.machines.wait_ready([1, 2], 60)


def test_a_start_ends_with_what_it_waited_for(three_tiles: Path) -> None:
    absent = Machine("b", "", "", (1, 2), "failed: no room")
    for held in ((0,), EVERY):  # with copies it needs nobody
        with head(three_tiles, absent, held=held) as several:
            assert several.machines is not None
            with nullcontext() if held == EVERY else pytest.raises(PeerLost, match=r"b has no.*no room"):
                several.machines.wait_ready([1, 2], 0.1)


def test_a_wait_for_a_lost_machine_is_told_until_it_ends_and_is_nobodys_time(
    three_tiles: Path, pair: list[HostKeeper], alone: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.cluster.machines.SAY_SECONDS", 0.0)
    with head(three_tiles, Machine("b", "tcp://127.0.0.1:1", KEYS[0], (1, 2))) as several:
        assert several.machines is not None
        waits, heard, uncounted = several.machines, list[str](), time.monotonic() - several.machines.clock()
        waits.tell(heard.append, lambda: len(heard) > 0)
        with pytest.raises(StepInterrupted, match=r"b .*is away"):
            several.sums(0)
        assert heard[0].startswith("lane 1 of the experts: b is away")
        assert time.monotonic() - waits.clock() > uncounted
        with monkeypatch.context() as soon:
            soon.setattr("pipeline.cluster.machines.WAIT_LIMIT", 0.0)
            with pytest.raises(ShardFailed, match="there was no answer") as failed:
                several.sums(0)
            assert "tcp://" not in str(failed.value), "a client reads it"
        waits.tell(heard.append, lambda: False)
        several.tell(*(machine(k.place()) for k in pair))
        assert several.sums(0) == alone.sums(0)
        assert heard[-1] == "", "it goes on"


def test_unequal_variants_are_refused_where_they_differ(three_tiles: Path) -> None:
    other = {"variant": "avx2" if best().variant != "avx2" else "avx512"}
    with hosts(host_config(three_tiles, 1, 2, format="bf16")) as (keeper,):
        running = machine(keeper.place())
        with head(three_tiles, running, format="bf16", **other) as several:
            several.update_until(lambda: several.state()[0] == "refused")


def test_a_host_that_ends_in_its_start_is_noticed_at_once(
    three_tiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.cluster.keeper.PYTHON", ("/bin/false",))
    with pytest.raises(PeerLost, match="has exited in its start"):
        HostKeeper(host_config(three_tiles, 1, name="host-of-no-program")).start()


def test_a_place_is_whose_lock_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, name = [], "host-of-a-place"

    def swept(path: Path) -> Path:
        made.append(private_directory(path))
        if len(made) == 1:
            sweep()  # by the start of an engine, before the lock is there
        return path

    monkeypatch.setattr(place, "private_directory", swept)
    first = place.claim(name)
    assert first is not None
    assert len(made) == 2
    shutil.rmtree(first[0])  # as at a logout
    second = place.claim(name)
    assert second is not None
    place.remove(*first)
    assert place.runs(name)
    place.remove(*second)
    assert not second[0].exists()


def test_a_host_ends_after_its_lease(three_tiles: Path, alone: Head) -> None:
    # The head is there first: the lease begins when the host has loaded.
    with ExitStack() as closing:
        several = closing.enter_context(head(three_tiles, Machine("a", "", "", (1, 2))))
        config = host_config(three_tiles, 1, 2, name="host-of-a-lease", lease=2.0)
        (keeper,) = closing.enter_context(hosts(config))
        several.tell(machine(keeper.place()))
        assert several.sums(5) == alone.sums(5)
        running = keeper.place()
        assert running is not None
        os.kill(running.pid, signal.SIGSTOP)
        several.tell()
        resumed = time.monotonic() + 1.5 * config.lease
        several.update_until(lambda: time.monotonic() > resumed)
        several.tell(machine(running))
        several.update_until(lambda: several.machines and several.machines.stats())
        os.kill(running.pid, signal.SIGCONT)
        several.update_until(lambda: several.state()[0] == "ready" or keeper.place() is None)
        assert keeper.place() == running, "it could not hear while it was stopped"
        assert several.sums(6) == alone.sums(6)
        assert keeper.wait_exit(60)
        assert not place.folder_of(keeper.config.name).exists()
        ended = keeper.check()
        assert ended is not None
        assert ended.state == "ended"


def test_the_actor_passes_on_what_a_host_has_logged(three_tiles: Path) -> None:
    config = host_config(three_tiles, 1, name="host-of-an-actor").plain()
    del config["cores"]
    actor, known = HostActor([config | {"workers": 1}]), dict[str, Any]()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)  # this process is none of Ray's

    def watch_until(done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        nonlocal known
        while not known or not done(*known.values()):
            known = actor.watch(known)
        return dict(known["host-of-an-actor"])

    try:
        pid = watch_until(lambda host: host["state"] == "ready")["pid"]
        psutil.Process(pid).children()[0].kill()
        os.kill(watch_until(lambda host: "exited with -9" in str(host["lines"]))["pid"], signal.SIGKILL)
        host = watch_until(lambda host: host["state"] == "ready" and host["pid"] != pid)
        lines = [text for *_, text in host["lines"]]
        assert "worker 0 exited with -9; it is being restarted" in lines, "also of a host before"
        log = LogLines("host-of-an-actor")
        log.read()
        told = [list(line) for line in log.latest]
        assert told == host["lines"][-len(told) :], "another actor names lines in the same way"
    finally:
        actor.stop()


def test_a_host_that_cannot_load_says_why(tmp_path: Path) -> None:
    keeper = HostKeeper(host_config(tmp_path / "none", 1))
    try:
        with suppress(PeerLost):  # where it fails before it is looked at
            keeper.start()
        assert keeper.wait_exit(60)
        said = place.read(keeper.config.name)
        assert said is not None
        assert (said.state, "does not exist" in said.error) == ("failed", True)
    finally:
        keeper.stop()
