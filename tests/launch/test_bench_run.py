"""The figures of one measured run, from an engine whose counters are known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from launch.bench.measure import SAMPLING, measure, warm_up
from launch.bench.plan import BenchPlan
from launch.bench.profile import COPIES
from launch.command_line.options import parse
from launch.errors import AnswerLost, Disturbed, WrongUsage
from pipeline.config import EngineConfig
from pipeline.policies.presets import PRESETS, make_policy
from pipeline.policies.view import PolicyRequest
from protocol.answer import Answer
from protocol.client import Client
from protocol.messages import Done, Token

COUNTERS = ("rows", "fetched_bytes", *(f"{kind}_tiles" for kind in COPIES))
BEFORE = {"prefill": (7, 30, 4, 1, 1, 1, 1), "decode": (5, 80, 9, 1, 1, 1, 1)}
GROWN = {"prefill": (8, 700, 5, 1, 2, 3, 4), "decode": (4, 200, 11, 5, 6, 7, 20)}


def stats(grown: dict[str, tuple[int, ...]] | None = None) -> dict[str, Any]:
    def phase(name: str) -> dict[str, int]:
        numbers = zip(BEFORE[name], grown[name] if grown else (0,) * 7, strict=True)
        return dict(zip(COUNTERS, map(sum, numbers), strict=True))

    return {"engine": {name: phase(name) for name in BEFORE}, "tile_bytes": 10}


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

    def __init__(self, tokens: int, grown: dict[str, tuple[int, ...]] = GROWN, **end: Any) -> None:
        self._stats = [stats(), stats(grown)]
        self._tokens, self._end = tokens, end
        self.sent: list[dict[str, Any]] = []

    async def stats(self) -> dict[str, Any]:
        return self._stats.pop(0)

    def generate(self, **fields: Any) -> StandInAnswer:
        self.sent.append(fields)
        return StandInAnswer(len(self.sent), self._tokens, dict(self._end))


PROMPTS = ((1, 2, 3, 4), (5, 6, 7, 8))


async def test_figures_are_those_of_the_counters() -> None:
    client = StandInClient(3)
    run, ends = await measure(cast(Client, client), PROMPTS, 3)
    assert [end.request for end in ends] == [1, 2]
    assert run.moved_bytes == 700 + 200 + 10 * (5 + 11) + 10 * (4 + 20)  # demanded, predicted, placed
    assert run.decode == dict(zip(COUNTERS, GROWN["decode"], strict=True))
    assert [(s["token_ids"], s["max_tokens"], s["ignore_eos"]) for s in client.sent] == [
        (prompt, 3, True) for prompt in PROMPTS
    ]
    assert [(s["sampling"].temperature, s["sampling"].seed) for s in client.sent] == [(1.0, 0), (1.0, 1)]


async def test_warm_up_reads_and_writes_as_many_tokens() -> None:
    sent: list[dict[str, Any]] = []

    class Warmed:
        def generate(self, **fields: Any) -> Answer:
            sent.append(fields)
            answer = Answer(0, lambda request: None)
            answer.feed(Done(0, "length"))
            return answer

    await warm_up(cast(Client, Warmed()), ((1, 2, 3), (4, 5, 6)), 8)
    assert [(s["token_ids"], s["max_tokens"], s["ignore_eos"]) for s in sent] == [
        ((1, 2, 3), 8, True),
        ((4, 5, 6), 8, True),
    ]
    assert [s["sampling"] for s in sent] == [replace(SAMPLING, seed=i) for i in range(2)]  # as measured ones


@pytest.mark.parametrize(
    ("client", "error", "line"),
    [
        (StandInClient(3, preemptions=1), Disturbed, "requests were preempted"),
        (StandInClient(3, kv_reused_tokens=1), Disturbed, "not prefilled as a whole"),
        (StandInClient(3, GROWN | {"prefill": (9, *GROWN["prefill"][1:])}), Disturbed, "another client"),
        (StandInClient(3, GROWN | {"decode": (5, *GROWN["decode"][1:])}), Disturbed, "another client"),
        (StandInClient(3, reason="cancelled"), AnswerLost, "it is shutting down"),
        (StandInClient(2), AnswerLost, "an answer has 2 tokens instead of 3"),
    ],
)
async def test_run_that_says_nothing_is_an_error(client, error, line) -> None:
    with pytest.raises(error, match=line):
        await measure(cast(Client, client), PROMPTS, 3)


async def test_answers_without_a_common_step_are_refused() -> None:
    grown = GROWN | {"decode": (0, *GROWN["decode"][1:])}
    with pytest.raises(WrongUsage, match="--gen-len 1 is too short for --batch 2"):
        await measure(cast(Client, StandInClient(1, grown)), PROMPTS, 1)


def plan(*words: str) -> BenchPlan:
    return BenchPlan.of(parse(["bench", *words]))


def test_every_other_round_is_reversed() -> None:
    found = plan("--policy", "fiddler,on-demand,all-host")
    assert [found.order(turn) for turn in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


def test_lengths_that_exceed_the_engine_s_are_refused() -> None:
    found = plan("--prompt-len", "10", "--gen-len", "6", "--batch", "3")
    found.check_lengths(16, 48)
    for context, kv_tokens, words in ((15, 48, "10 .* 6 make 16 .* is 15"), (16, 47, "3 of 16 .* 48 .* 47")):
        with pytest.raises(WrongUsage, match=words):
            found.check_lengths(context, kv_tokens)
    most = EngineConfig().max_sequences
    short = ("--prompt-len", "1", "--gen-len", "2")
    assert plan(*short, "--batch", str(most)).batch == most
    with pytest.raises(WrongUsage, match=f"--batch {most + 1}"):
        plan(*short, "--batch", str(most + 1))
    for words in ("--context 191", "--kv-tokens 383 --batch 2", "--context 400 --prompt-len 337"):
        with pytest.raises(WrongUsage, match=r"context is|it holds"):
            plan(*words.split())
    plan("--context", "192")
    plan("--kv-tokens", "384", "--batch", "2")
    with pytest.raises(WrongUsage, match=r"\.jpg"):
        plan("--plot", "a.jpg")


def test_only_policies_that_run_every_router_are_recorded(tmp_path: Path) -> None:
    record = ("--record", str(tmp_path / "trace"))
    left = {request.name for request in plan().policies} - {
        request.name for request in plan(*record).policies
    }
    assert left == {name for name in PRESETS if not make_policy(PolicyRequest(name), 0).runs_all_routers}
    assert left
    with pytest.raises(WrongUsage, match=min(left)):
        plan(*record, "--policy", f"fiddler,{min(left)}")
