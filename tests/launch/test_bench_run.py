"""The figures of one measured run, from an engine whose counters are known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from launch.bench.measure import measure
from launch.bench.plan import BenchPlan
from launch.command_line.options import parse
from launch.errors import AnswerLost, Disturbed, WrongUsage
from pipeline.policies.presets import PRESETS, make_policy
from pipeline.policies.view import PolicyRequest
from protocol.client import Client
from protocol.messages import Done, Token

BEFORE = {"prefill": 7, "decode": 5}
GROWN = {"prefill": 8, "decode": 4}


def stats(grown: dict[str, int]) -> dict[str, Any]:
    return {"engine": {name: {"rows": BEFORE[name] + grown[name]} for name in BEFORE}, "energy": {}}


class StandInAnswer:
    def __init__(self, request: int, count: int, end: dict[str, Any]) -> None:
        self.done = Done(request, end.pop("reason", "length"), stats=end)
        self._count = count

    async def __aiter__(self) -> AsyncIterator[Token]:
        for index in range(self._count):
            await asyncio.sleep(0)  # all answers in turn
            yield Token(self.done.request, index, 5, "x")


class StandInClient:
    """An engine that gives each answer so many tokens, and these counters."""

    def __init__(self, tokens: int, grown: dict[str, int] = GROWN, **end: Any) -> None:
        self._stats = [stats(dict.fromkeys(BEFORE, 0)), stats(grown)]
        self._tokens, self._end = tokens, end
        self.sent: list[dict[str, Any]] = []

    async def stats(self) -> dict[str, Any]:
        return self._stats.pop(0)

    def generate(self, **fields: Any) -> StandInAnswer:
        self.sent.append(fields)
        return StandInAnswer(len(self.sent), self._tokens, dict(self._end))


PROMPTS = ((1, 2, 3, 4), (5, 6, 7, 8))


@pytest.mark.parametrize(
    ("client", "error", "line"),
    [
        (StandInClient(3, preemptions=1), Disturbed, "requests were preempted"),
        (StandInClient(3, GROWN | {"prefill": 9}), Disturbed, "another client"),
        (StandInClient(3, GROWN | {"decode": 5}), Disturbed, "another client"),
        (StandInClient(3, reason="cancelled"), AnswerLost, "it is shutting down"),
        (StandInClient(2), AnswerLost, "an answer has 2 tokens instead of 3"),
    ],
)
async def test_run_that_says_nothing_is_an_error(client, error, line) -> None:
    with pytest.raises(error, match=line):
        await measure(cast(Client, client), PROMPTS, 3)


async def test_answers_without_a_common_step_are_refused() -> None:
    grown = GROWN | {"decode": 0}
    with pytest.raises(WrongUsage, match="--gen-len 1 is too short for --batch 2"):
        await measure(cast(Client, StandInClient(1, grown)), PROMPTS, 1)


def plan(*words: str) -> BenchPlan:
    return BenchPlan.of(parse(["bench", *words]))


def test_only_policies_that_run_every_router_are_recorded(tmp_path: Path) -> None:
    record = ("--record", str(tmp_path / "trace"))
    left = {request.name for request in plan().policies} - {
        request.name for request in plan(*record).policies
    }
    assert left == {name for name in PRESETS if not make_policy(PolicyRequest(name), 0).runs_all_routers}
    assert left
    with pytest.raises(WrongUsage, match=min(left)):
        plan(*record, "--policy", f"fiddler,{min(left)}")
