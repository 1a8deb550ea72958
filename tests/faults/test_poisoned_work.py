"""A Work that crashes the worker: its request ends with an error, all others are served, and the workers are
restarted. The end of the store is truncated, so that reading the last expert of the last layer is a
SIGBUS."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fork_server
import numpy as np
import pytest
import torch
from fault_engines import LIMIT, State, answer, config, same
from transformers import MixtralForCausalLM
from waiting import until

from launch.processes.supervisor import Supervisor
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.sockets import Identity
from shm.segment import SHM_FOLDER
from shm.store import store_name

LENGTH = 5  # tokens of an answer
DRAWN = 1024  # prompts, of two tokens each
LAST_BYTES = 8192  # truncated from the store's end: part of the last expert's last tile


# A worker's first message is the coordinator's answer to its Ready; its first Work comes later.
HOOK = """
import os, sys, time

if "workers.expert_worker" in sys.argv:
    from workers.child_endpoint import ChildEndpoint

    receive = ChildEndpoint.receive

    def hooked(self, *args, **options):
        for message in receive(self, *args, **options):
            {statement}
            yield message

    ChildEndpoint.receive = hooked
"""


@pytest.fixture
def hook(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Has workers that start from now on execute a statement before they handle a message."""
    monkeypatch.setenv(fork_server.HOOK, str(tmp_path / "hook.py"))

    def write(statement: str) -> None:
        (tmp_path / "hook.py").write_text(HOOK.format(statement=statement))

    return write


@dataclass(frozen=True)
class Prompts:
    """By when their greedy answers use the last expert of the last layer: never; from the start; or not for
    the prompt, but for a token of the answer."""

    innocent: list[list[int]]
    guilty: list[list[int]]
    guilty_later: list[list[int]]


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> Prompts:
    """Classified by the routing of transformers."""
    model = MixtralForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    drawn = torch.from_numpy(np.random.default_rng(3).integers(3, 4096, (DRAWN, 2)))
    tokens, first = drawn, torch.full((DRAWN,), LENGTH)
    with torch.no_grad():
        for step in range(LENGTH):
            out = model(tokens, output_router_logits=True)
            chosen = out.router_logits[-1].topk(2).indices.reshape(DRAWN, -1, 2)
            needs = (chosen == 3).any(-1).any(-1)
            first = torch.where(needs, first.clamp(max=step), first)
            tokens = torch.cat([tokens, out.logits[:, -1].argmax(-1, keepdim=True)], 1)
    return Prompts(*(drawn[chosen].tolist() for chosen in (first == LENGTH, first == 0, first == LENGTH - 2)))


class CutOff:
    """Truncates the store for workers that have mapped it. A store that is too short cannot be attached, so
    its size is restored from the exit of all these workers until their replacements have mapped it, which
    wait for that."""

    def __init__(
        self, supervisor: Supervisor, client: Client, workers: int, hook: Callable[[str], None]
    ) -> None:
        self._store = store_file(client)
        self._size = self._store.stat().st_size
        hook(f"while os.stat({str(self._store)!r}).st_size == {self._size}: time.sleep(0.001)")
        self._supervisor, self._workers = supervisor, workers
        self._mapped: set[Identity] = set()

    async def __aenter__(self) -> None:
        self._update()
        assert self._mapped
        self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            self._update()
            await asyncio.sleep(0.003)

    def _update(self) -> None:
        running = {child: pid for child, pid in self._supervisor.pids.items() if child.role == "worker"}
        if self._mapped:
            if self._mapped.isdisjoint(running):
                self._mapped = set()
                os.truncate(self._store, self._size)
        elif len(running) == self._workers and all(map(self._maps, running.values())):
            self._mapped = set(running)
            os.truncate(self._store, self._size - LAST_BYTES)

    def _maps(self, pid: int) -> bool:
        try:
            return self._store.name in Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # it has just ended
            return False


async def ended(client: Client, prompt: list[int]) -> str:
    """The error that a request ends with."""
    async with asyncio.timeout(LIMIT):
        with pytest.raises(RequestFailed) as failure:
            await answer(client, prompt, LENGTH)
    return str(failure.value)


async def test_replacement_crash_before_its_first_work_does_not_count_against_the_request(
    start_engine, tiny_model, prompts, hook
) -> None:
    """The control line still names the Work in which the first worker crashed; it is no longer computed."""
    hook("if self.generation == 1: os.abort()")
    async with start_engine(config(tiny_model, workers=1)) as (supervisor, client):
        state = State(supervisor, client)
        await state.wait_recovered()
        reference = await answer(client, prompts.guilty[0], LENGTH)
        first, third = Identity("worker", 0, 0), Identity("worker", 0, 2)
        store = store_file(client)
        size = store.stat().st_size
        os.truncate(store, size - LAST_BYTES)
        try:
            request = asyncio.create_task(answer(client, prompts.guilty[0], LENGTH))
            await until(lambda: first not in supervisor.pids, LIMIT)
        finally:
            os.truncate(store, size)
        async with asyncio.timeout(LIMIT):
            assert same(await request, reference)
        stats = await state.wait_recovered("worker", 2)
        assert stats["recovery"]["worker"]["deaths"] == 2
        assert [child for child in supervisor.pids if child.role == "worker"] == [third]


def store_file(client: Client) -> Path:
    return Path(SHM_FOLDER) / store_name(client.welcome.fingerprint)[1:]


@pytest.mark.timeout(300)  # many restarts of workers in sequence, on a machine that may be busy
async def test_only_requests_that_need_the_missing_tile_fail(start_engine, tiny_model, prompts, hook) -> None:
    innocent, guilty = prompts.innocent[:2], [prompts.guilty_later[0], prompts.guilty[0]]
    assert len(innocent) == 2
    async with start_engine(config(tiny_model, workers=2)) as (supervisor, client):
        state = State(supervisor, client)
        await state.wait_recovered()
        references = [await answer(client, prompt, LENGTH) for prompt in innocent]
        async with CutOff(supervisor, client, 2, hook):
            *served, error = await asyncio.gather(
                *(answer(client, prompt, LENGTH) for prompt in innocent), ended(client, guilty[0])
            )
            for tokens, reference in zip(served, references, strict=True):
                assert same(tokens, reference)
            assert "ended 2 workers" in error
            assert "\n" not in error
            for prompt in guilty[1:]:
                assert "ended 2 workers" in await ended(client, prompt)
            stats = await state.wait_recovered("worker", 2 * len(guilty))
            assert stats["recovery"]["worker"]["deaths"] <= 2 * len(guilty) + 2  # a batch, then each alone
            for prompt, reference in zip(innocent, references, strict=True):
                assert same(await answer(client, prompt, LENGTH), reference)
