"""The load of a stress run, and its command, against clients whose answers are given."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from launch.command_line.options import parse
from launch.equality import Comparison, Verdict
from launch.errors import WrongUsage
from launch.stress import command
from launch.stress.load import End, Entry, Finding, Load, Outcome, Request, ask, count_strays, run_load
from launch.stress.report import StressRun, report, report_parts
from launch.terminal.interrupts import Interrupts
from launch.terminal.tables import render
from protocol.answer import Answer
from protocol.client import Client
from protocol.errors import EngineGone, MalformedMessage, ProtocolError, RequestFailed
from protocol.messages import VERSION, ChatMessage, Done, Sampling, Token, Welcome

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


async def loaded(entries: list[Entry], *clients: AnsweringClient) -> tuple[Load, list[Outcome]]:
    load, ended = Load([[] for _ in clients]), list[Outcome]()
    await run_load(cast(list[Client], [*clients]), entries, load, ended.append)
    return load, ended


async def test_entries_are_sent_once_in_order_with_their_fields() -> None:
    chat = (ChatMessage("user", "q"),)
    entries = [
        Entry("text", prompt="p", max_tokens=5, temperature=0.5, seed=3),
        Entry("chat", messages=chat, cancel_after=9),
        Entry("talk", turns=("one", "two", "three"), max_tokens=4),
    ]
    client = AnsweringClient()
    load, ended = await loaded(entries, client)
    assert [outcome.request.label for outcome in ended] == [
        "text",
        "chat",
        *(f"talk, turn {n}" for n in (1, 2, 3)),
    ]
    assert load.outcomes == [ended]
    assert load.all == ended
    assert (load.unsent, load.seconds > 0) == (0, True)
    plain = {"prompt": None, "messages": None, "resume": (), "rival": -1, "reuse": True}
    first, second, *talk = client.sent
    sampling = Sampling(temperature=0.5, seed=3)
    assert first == plain | {"prompt": "p", "max_tokens": 5, "sampling": sampling}
    assert second == plain | {"messages": chat, "max_tokens": 64, "sampling": Sampling()}
    assert ended[1].request.cancel_after == 9
    said = [("user", "one"), ("assistant", "a2"), ("user", "two"), ("assistant", "a3"), ("user", "three")]
    for number, turn in enumerate(talk):
        assert [(m.role, m.content) for m in turn["messages"]] == said[: 2 * number + 1]
        assert (turn["prompt"], turn["max_tokens"]) == (None, 4)


@pytest.mark.parametrize(
    ("end", "sent", "unsent"),
    [
        (Done(0, "length"), 4, 0),
        (Done(0, "stop"), 4, 0),
        (RequestFailed("no"), 2, 2),  # the rest of the conversation
        (EngineGone("gone"), 1, 3),  # and of the queue
    ],
)
async def test_what_an_unserved_turn_leaves_is_counted(
    end: Done | ProtocolError, sent: int, unsent: int
) -> None:
    client = AnsweringClient(lambda number: Done(0, "length") if number else end)
    load, ended = await loaded([Entry("talk", turns=("a", "b", "c")), Entry("text", prompt="d")], client)
    assert (len(client.sent), len(ended), load.unsent) == (sent, sent, unsent)


async def test_other_clients_serve_the_queue_of_one_whose_engine_has_ended() -> None:
    gone, serving = AnsweringClient(lambda number: EngineGone("gone")), AnsweringClient()
    load, ended = await loaded([Entry(f"{n}", prompt="p") for n in range(5)], gone, serving)
    assert [len(outcomes) for outcomes in load.outcomes] == [1, 4]
    assert load.unsent == 0
    assert {outcome.request.label for outcome in ended} == set("01234")


async def test_strays_are_counted_behind_a_reply_of_the_engine() -> None:
    clients = [AnsweringClient() for _ in range(3)]
    load = Load([[], [], []])
    clients[1].strays = 5
    await count_strays(cast(list[Client], clients), load)
    assert load.strays == {0: 2, 1: 7, 2: 2}


# --- one request --------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("cancel_after", "asked", "end"),
    [
        *((number, True, End.CANCELLED) for number in (0, 1, 2)),
        *((number, False, End.FAILED) for number in (5, None)),
    ],
)
async def test_only_an_answer_that_was_to_be_cancelled_ends_as_cancelled(
    cancel_after: int | None, asked: bool, end: End
) -> None:
    cancels: list[int] = []

    def cancel(request: int) -> None:
        cancels.append(request)
        answer.feed(Done(0, "cancelled", text="!", stats={"decode_s": 1.0}))

    answer = Answer(7, cancel)
    for index in range(2):
        answer.feed(Token(0, index, 7, "ab"[index]))
    if not asked:
        cancel(7)
    client = AnsweringClient()
    client.generate = lambda **fields: answer  # type: ignore[method-assign]
    outcome = await ask(cast(Client, client), replace(REQUEST, cancel_after=cancel_after), silence=1.0)
    assert (outcome.end, cancels) == (end, [7])
    assert outcome.error == ("the engine cancelled this answer" if end is End.FAILED else "")
    assert (outcome.text, outcome.stats, outcome.in_order) == ("ab!", {"decode_s": 1.0}, True)
    assert outcome.sent <= outcome.arrivals[0] <= outcome.arrivals[1] <= outcome.ended


# --- the report ---------------------------------------------------------------------------------------------


SNAPSHOT = """\
1 request by 1 client in 2.0 s, 3 tokens, 2 tok/s
all-host on cpu, experts bf16, backbone bf16

requests  completed 1, cancelled 0, refused 0, unsent 0
alone     compared 1, equal 0, near ties 1
errors    mismatches 0, failures 0, lost 0, doubled 0, leaks 0, unhealed 0

milliseconds          p50    p95    p99    max
to the first token  100.0  100.0  100.0  100.0
between tokens      300.0  390.0  398.0  400.0

near ties: first differences where rounding decides, less than 0.5 nats below
the best token; no errors
  r: near-tie
passed: 1 answer compared with the same request run alone
"""


def test_report_of_a_run_that_passed() -> None:
    tokens = [Token(0, index, 5, "x") for index in range(3)]
    outcome = Outcome(REQUEST, 1.0, tokens, [1.1, 1.3, 1.7], End.LENGTH, 2.0)
    findings = [Finding("r", Comparison(Verdict.NEAR_TIE))]
    load = Load([[outcome]], seconds=2.0)
    run = StressRun("s", WELCOME, 0.5, load, findings, leaks_checked=True, finished=True)
    assert render(*report_parts(report(run))) == SNAPSHOT


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


async def test_what_the_engine_releases_in_time_is_no_leak(stressed: Any) -> None:
    client = AnsweringClient()
    # A reply for each of the eight clients' strays, then those of the check.
    client.idle = [*[stats()] * 8, stats(running=1), stats(2), stats()]
    found = await stressed(client)
    assert found["details"]["leaks"] == []
    assert found["leaks_checked"]
    assert len(client.idle) == 1


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
