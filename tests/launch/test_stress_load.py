"""The load of a stress run, and its command, against clients whose answers are given."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from launch.command_line.options import parse
from launch.errors import WrongUsage
from launch.stress import command
from launch.stress.load import End, Request, ask
from launch.terminal.interrupts import Interrupts
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import EngineGone, MalformedMessage, ProtocolError
from protocol.messages import VERSION, Done, Sampling, Token, Welcome

WELCOME = Welcome(
    VERSION,
    "e",
    "m",
    "f",
    "cpu",
    "all-host",
    True,
    4096,
    256,
    True,
    True,
    "",
    format="bf16",
    backbone_dtype="bf16",
)
Ends = Callable[[int], "Done | ProtocolError"]


class AnsweringClient:
    """Answers "a<n>" to its n-th request, and the end that `ends` gives; `idle`: stats, the last for ever."""

    def __init__(self, ends: Ends = lambda number: Done(0, "length")) -> None:
        self.welcome = WELCOME
        self.strays = 0
        self.sent: list[dict[str, Any]] = []
        self.idle: list[dict[str, Any]] = [{"scheduler": {}, "clients": {"connected": 1}}]
        self._ends = ends

    def generate(self, **fields: Any) -> Answer:
        self.sent.append(fields)
        number = len(self.sent) - 1
        answer = Answer(0, lambda request: None)
        answer.feed(Token(0, 0, 7, f"a{number}"))
        answer.feed(self._ends(number))
        return answer

    async def stats(self) -> dict[str, Any]:
        self.strays += 2  # messages that come before this reply
        return self.idle.pop(0) if len(self.idle) > 1 else self.idle[0]


REQUEST = Request("r", "p", None, 9, Sampling())


@pytest.mark.parametrize(
    ("end", "expected", "error", "text"),
    [
        (Done(0, "stop", text="!", stats={"a": 1}), End.STOP, "", "a0!"),
        (Done(0, "length"), End.LENGTH, "", "a0"),
        (Done(0, "error", "too long", usage=True), End.REFUSED, "too long", ""),
        (Done(0, "error", "it broke"), End.FAILED, "it broke", ""),
        (EngineGone("gone"), End.GONE, "gone", ""),
        (MalformedMessage("odd"), End.FAILED, "odd", ""),
    ],
)
async def test_each_end_of_an_answer_is_told_from_the_others(
    end: Done | ProtocolError, expected: End, error: str, text: str
) -> None:
    outcome = await ask(cast(Client, AnsweringClient(lambda number: end)), REQUEST)
    assert (outcome.end, outcome.error, outcome.text) == (expected, error, text)
    assert [token.text for token in outcome.tokens] == ["a0"]
    assert outcome.ended >= outcome.arrivals[0] >= outcome.sent
    assert outcome.served is (expected in (End.STOP, End.LENGTH))
    assert outcome.stats == ({"a": 1} if expected is End.STOP else {})


async def test_answer_without_any_message_is_lost() -> None:
    class Silent:
        def generate(self, **_: Any) -> Answer:
            return Answer(0, lambda request: None)

    outcome = await ask(cast(Client, Silent()), REQUEST, silence=1e-3)
    assert (outcome.end, outcome.error) == (End.LOST, "no message for 0.001 s after 0 tokens")


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def stressed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> Any:
    """Runs the command of these entries on one stand-in for every connection."""

    async def stressed(client: AnsweringClient, *words: str, entries: str = '{"prompt": "p"}') -> Any:
        @asynccontextmanager
        async def where(*_: object) -> AsyncIterator[str]:
            yield "ipc:///nowhere/client.sock"

        @asynccontextmanager
        async def connect(*_: object, name: str, retry: float) -> AsyncIterator[AnsweringClient]:
            yield client

        monkeypatch.setattr(command, "endpoint", where)
        monkeypatch.setattr(Client, "connect", connect)
        (tmp_path / "script").write_text(entries)
        line = ["stress", "--script", str(tmp_path / "script"), "--connect", "--json", *words]
        try:
            await command.stress(parse(line), Interrupts())
        finally:
            out = capsys.readouterr().out
        return json.loads(out)

    return stressed


def stats(connected: int = 1, **scheduler: int) -> dict[str, Any]:
    return {"scheduler": scheduler, "clients": {"connected": connected}}


@pytest.mark.parametrize(
    ("held", "leaks"),
    [
        ({"running": 1}, ["1 request still running"]),
        ({"waiting": 2}, ["2 requests still queued"]),
        ({"kv_tokens_used": 64, "kv_tokens_kept": 1}, None),
        ({"steps": 9}, []),
    ],
)
async def test_what_the_engine_holds_afterwards_is_a_leak(
    stressed: Any, monkeypatch: pytest.MonkeyPatch, held: dict[str, int], leaks: list[str] | None
) -> None:
    monkeypatch.setattr(command, "IDLE_SECONDS", 0.0)
    client = AnsweringClient()
    client.idle = [stats(**held)]
    found = await stressed(client)
    both = ["64 tokens of KV still in use", "1 token of KV still kept"]
    assert found["details"]["leaks"] == (both if leaks is None else leaks)
    assert found["leaks_checked"]


@pytest.mark.parametrize(
    ("tokenizer", "template", "entries", "error"),
    [
        (False, True, '{"prompt": "p"}', "no tokenizer"),
        (True, False, '{"prompt": "p"}\n{"turns": ["t"], "name": "the talk"}', "the talk is a chat"),
        (True, False, '{"prompt": "p"}', None),
    ],
)
async def test_script_that_the_model_cannot_read_is_refused(
    stressed: Any, tokenizer: bool, template: bool, entries: str, error: str | None
) -> None:
    client = AnsweringClient()
    client.welcome = Welcome(
        VERSION, "e", "m", "f", "cpu", "all-host", True, 4096, 256, tokenizer, template, format="bf16"
    )
    if error is None:
        await stressed(client, entries=entries)
        return
    with pytest.raises(WrongUsage, match=error):
        await stressed(client, entries=entries)
    assert client.sent == []
