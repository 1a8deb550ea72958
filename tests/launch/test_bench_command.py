"""The order of a benchmark's steps, and what becomes of their outcomes, on an engine of known answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from counters import decode

from launch.bench import command
from launch.bench.measure import Run
from launch.command_line.options import parse
from launch.errors import Disturbed
from launch.terminal.interrupts import Interrupts
from pipeline.policies.placements import ENOUGH_TOKENS
from pipeline.policies.presets import PRESETS
from protocol.answer import Answer
from protocol.errors import EngineGone, ProtocolError, RequestFailed
from protocol.messages import VERSION, Done, PolicyChanged, Scores, Welcome

WELCOME = Welcome(
    VERSION, "e", "/m", "f", "cuda", "dali", True, 50, 256, False, False, format="int8", backbone_dtype="bf16"
)


class StandInEngine:
    """Notes in order which policy was set, and what was asked under it."""

    def __init__(self) -> None:
        self.welcome, self.on_policy = WELCOME, None
        self.kv_tokens = 1024
        self.counted = ENOUGH_TOKENS
        self.events: list[Any] = []
        self.refused: dict[str, ProtocolError] = {}
        self.policy, self.runs = "dali", 0

    async def stats(self) -> dict[str, Any]:
        return {
            "scheduler": {"kv_tokens": self.kv_tokens, "prefill_chunk": 32},
            **{"counted_tokens": self.counted, "policy": "dali", "policy_options": {"a": "b"}},
            **{"tile_bytes": 10, "emulation": "slow", "cache": {"capacity_tiles": 7}},
        }

    async def set_policy(self, name: str, options: Any = None, *, counted: bool = True) -> PolicyChanged:
        self.events.append((name, options or {}, counted))
        if name in self.refused:
            raise self.refused[name]
        self.policy = name
        return PolicyChanged(0, name, PRESETS[name].exact, (f"note {len(self.events) % 2} of {name}",))

    def generate(self, **fields: Any) -> Answer:
        self.events.append((len(fields["token_ids"]), fields["max_tokens"]))
        answer = Answer(0, lambda request: None)
        answer.feed(Done(0, "length"))
        return answer

    async def score(self, **fields: Any) -> AsyncIterator[Scores]:
        self.events.append("score")
        for block in ():
            yield block

    async def measure(self, prompts: Any, gen_len: int) -> tuple[Run, list[Done]]:
        self.runs += 1
        self.events.append(([len(prompt) for prompt in prompts], gen_len))
        return Run(float(self.runs), 0.1, float(self.runs), decode()), []


SHORT = ("--prompt-len", "100", "--gen-len", "4", "--batch", "2", "--ppl-tokens", "0", "--rounds", "2")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    async def bench(engine: StandInEngine, *words: str, connect: bool = True) -> dict[str, Any]:
        @asynccontextmanager
        async def connected(*_: object) -> AsyncIterator[StandInEngine]:
            yield engine

        async def measure(client: StandInEngine, prompts: Any, gen_len: int) -> Any:
            return await client.measure(prompts, gen_len)

        monkeypatch.setattr(command, "connected", connected)
        monkeypatch.setattr(command, "measure", measure)
        line = ["bench", *words, *["--connect"] * connect, "--json"]
        assert await command.bench(parse(line), Interrupts()) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return bench


async def test_every_policy_is_warmed_until_the_slowest_has_settled(bench: Any) -> None:
    """DALI's cache changes after each of its windows; a run's own requests are too short for that."""
    engine = StandInEngine()
    await bench(engine, "--policy", "all-host,dali", "--set", "dali.window=8", *SHORT)
    assert {event for event in engine.events if isinstance(event[0], int)} == {(64, 128)}
    engine = StandInEngine()
    await bench(engine, "--policy", "all-host,dali", "--set", "dali.window=64", *SHORT)
    assert {event for event in engine.events if isinstance(event[0], int)} == {(64, 192)}  # the context's end


async def test_engine_that_has_counted_little_reads_other_text_first(bench: Any) -> None:
    engine = StandInEngine()
    engine.counted = ENOUGH_TOKENS - 1
    await bench(engine, "--policy", "all-host", *SHORT)
    assert engine.events[0] == ("all-host", {}, True)  # what it reads then is counted
    at = engine.events.index(("all-host", {}, False))
    assert at > 1
    assert not any(len(event) == 3 for event in engine.events[1:at])  # under no other policy


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ((), RequestFailed("it broke")),  # not because of what was asked for
        (("--policy", "all-host,on-demand"), RequestFailed("it needs a cache", usage=True)),
    ],
)
async def test_other_refusals_end_a_benchmark(bench: Any, words: Any, refused: RequestFailed) -> None:
    engine = StandInEngine()
    engine.refused = {"on-demand": refused}
    with pytest.raises(RequestFailed, match=str(refused)):
        await bench(engine, *words, *SHORT)
    assert engine.events[-1] == ("dali", {"a": "b"}, True)


async def test_policy_of_another_client_is_left_as_it_is(bench: Any) -> None:
    engine = StandInEngine()
    measure = engine.measure

    async def disturbed(prompts: Any, gen_len: int) -> Any:
        engine.on_policy(PolicyChanged(-1, "layerwise", True))  # type: ignore[misc]
        return await measure(prompts, gen_len)

    engine.measure = disturbed  # type: ignore[method-assign]
    with pytest.raises(Disturbed, match="another client set the policy layerwise meanwhile"):
        await bench(engine, "--policy", "all-host", *SHORT)
    assert ("dali", {"a": "b"}, True) not in engine.events


@pytest.mark.parametrize("error", [EngineGone("gone"), RequestFailed("no such policy")])
async def test_policy_that_cannot_be_restored_is_no_error(
    bench: Any, error: ProtocolError, caplog: pytest.LogCaptureFixture
) -> None:
    engine = StandInEngine()
    engine.refused = {"dali": error}
    await bench(engine, "--policy", "all-host", *SHORT)
    warned = "the engine's earlier policy, dali, was not set again: no such policy" in caplog.text
    assert warned is isinstance(error, RequestFailed)
