"""The load of a stress run: clients with separate connections take a script's entries from one queue."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace

from launch.stress.requests import End, Outcome, Request, ask
from launch.stress.script import Entry
from protocol.client import Client
from protocol.messages import ChatMessage


@dataclass
class Load:
    """The outcomes of the clients' requests so far."""

    outcomes: list[list[Outcome]]  # of each client, in the order in which they ended
    unsent: int = 0  # turns after an unserved one, and entries left in the queue when all clients stopped
    seconds: float = 0.0
    strays: dict[int, int] = field(default_factory=dict)  # client -> messages for requests that had ended

    @property
    def all(self) -> list[Outcome]:
        return [outcome for outcomes in self.outcomes for outcome in outcomes]


async def run_load(
    clients: list[Client], entries: Iterable[Entry], load: Load, ended: Callable[[Outcome], None]
) -> None:
    """Send every entry once, and call `ended` for each request. A client stops when its engine has ended."""
    queue = deque(enumerate(entries))
    began = time.perf_counter()

    async def serve(client: Client, outcomes: list[Outcome]) -> None:
        while queue:
            number, entry = queue.popleft()
            served = 0
            async for outcome in _serve(client, entry, f"{number}"):
                served += 1
                outcomes.append(outcome)
                ended(outcome)
            load.unsent += entry.requests - served
            if outcomes[-1].end is End.GONE:
                break

    try:
        async with asyncio.TaskGroup() as group:
            for client, outcomes in zip(clients, load.outcomes, strict=True):
                group.create_task(serve(client, outcomes))
    finally:
        load.seconds = time.perf_counter() - began
        load.unsent += sum(entry.requests for _, entry in queue)


async def count_strays(clients: list[Client], load: Load) -> None:
    """Set `load.strays`; to be called when no request runs. Messages sent before a Stats arrive before it."""
    for number, client in enumerate(clients):
        await client.stats()
        load.strays[number] = client.strays


async def _serve(client: Client, entry: Entry, conversation: str) -> AsyncIterator[Outcome]:
    await asyncio.sleep(entry.delay)
    request = Request(
        entry.name, entry.prompt, entry.messages, entry.max_tokens, entry.sampling, entry.cancel_after
    )
    if entry.turns is None:
        yield await ask(client, request)
        return
    messages: tuple[ChatMessage, ...] = ()
    for number, text in enumerate(entry.turns, 1):
        messages += (ChatMessage("user", text),)
        label = f"{entry.name}, turn {number}"
        turn = replace(request, label=label, messages=messages, conversation=conversation)
        outcome = await ask(client, turn)
        yield outcome
        if not outcome.served:
            return
        messages += (ChatMessage("assistant", outcome.text),)
