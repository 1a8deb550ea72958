"""`generate` and `score`, with an engine that answers known tokens and log-probabilities."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from counters import decode
from msgspec.structs import replace

from launch import generate as generating
from launch.command_line.options import parse
from launch.errors import AnswerLost, WrongUsage
from launch.score import command as scoring
from launch.terminal.interrupts import Interrupts
from protocol.answer import Answer
from protocol.errors import RequestFailed
from protocol.messages import VERSION, ChatMessage, Done, Sampling, Scores, Token, Welcome

VOCABULARY = 7
CHAT = Sampling(0.7, top_p=0.8)
WELCOME = Welcome(
    VERSION, "e", "/models/m", "f", "cpu", "daop", False, VOCABULARY, 16, True, True, sampling=CHAT
)
STATS = {"prefill_tok_s": 81.2, "decode_tok_s": 12.34, "prompt_tokens": 3, "fidelity": {"exact": False}}
TABLE = np.log(np.random.default_rng(1).dirichlet(np.ones(VOCABULARY), 40)).astype(np.float32)


class StandInEngine:
    """Answers "ab" and the end; row i of its scores is row `first token + i` of TABLE."""

    def __init__(self) -> None:
        self.welcome = WELCOME
        self.end: Done | None = Done(0, "stop", text="!", stats=dict(STATS))
        self.sent: list[dict[str, Any]] = []
        self.block = 3  # rows
        self.scored = 100  # rows, the first 100 of them exact

    def generate(self, **fields: Any) -> Answer:
        self.sent.append(fields)
        answer = Answer(0, lambda request: None)
        for index, text in enumerate("ab"):
            answer.feed(Token(0, index, 5 + index, text))
        if self.end is not None:
            answer.feed(self.end)
        return answer

    async def score(self, **fields: Any) -> AsyncIterator[Scores]:
        self.sent.append(fields)
        ids = np.array(fields.get("token_ids") or [1, 2, 3, 4], np.int32)
        rows = TABLE[: len(ids)] - ids[0]  # of another window, other figures
        chosen = rows[np.arange(len(ids) - 1), ids[1:]]
        for start in range(0, len(ids), self.block):
            stop = start + self.block
            self.scored += len(ids[start:stop])
            none = np.empty((0, 0), np.int32), np.empty((0, 0), np.float32)
            yield Scores(0, start, ids[start:stop], chosen[start:stop], rows[start:stop], *none)

    async def stats(self) -> dict[str, Any]:
        return {"policy": "dali", "engine": {"decode": self._decode()}}

    def _decode(self) -> dict[str, Any]:
        return decode(weight=60.0 * self.scored, stale=15.0 * (self.scored - 100))


def run_on(engine: StandInEngine, module: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The command's coroutine, on a line that connects to this engine."""

    @asynccontextmanager
    async def client(*_: object) -> AsyncIterator[StandInEngine]:
        yield engine

    monkeypatch.setattr(module, "reconnecting_client", client)
    command = module.__name__.split(".")[1]  # launch.score.command has score
    connect = [] if "--connect" in words else ["--connect"]
    return getattr(module, command)(parse([command, *words, *connect]), Interrupts())


@pytest.fixture
def stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "prompt").write_text("two\nlines\n\n")
    with open(tmp_path / "prompt") as file:
        monkeypatch.setattr("sys.stdin", file)
        yield


@pytest.mark.usefixtures("stdin")
@pytest.mark.parametrize(
    "words", ["hello", "-", "--prompt-tokens 1,6", "hello --chat", "hi --chat --system be"]
)
async def test_prompt_is_sent_as_it_was_given(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StandInEngine()
    line = words.split()
    more = ["--max-tokens", "9", "--stop", "END", "--ignore-eos", "--seed", "4"]
    assert await run_on(engine, generating, monkeypatch, *line, *more) == 0
    prompts: dict[str, dict[str, Any]] = {
        "hello": {"prompt": "hello"},
        "-": {"prompt": "two\nlines\n"},  # but the end of the last line
        "--prompt-tokens 1,6": {"token_ids": (1, 6)},
        "hello --chat": {"messages": (ChatMessage("user", "hello"),)},
        "hi --chat --system be": {"messages": (ChatMessage("system", "be"), ChatMessage("user", "hi"))},
    }
    (sent,) = engine.sent
    sampling = replace(CHAT if "--chat" in words else Sampling(), seed=4)
    settings = {"max_tokens": 9, "stop": ["END"], "ignore_eos": True, "sampling": sampling}
    assert {**sent, "stop": list(sent["stop"])} == prompts[words] | settings
    assert list(sent.get("token_ids", ())) in ([1, 6], [])


async def test_answer_as_json_and_as_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = StandInEngine()
    await run_on(engine, generating, monkeypatch, "hello", "--json")
    figures = {"prefill_tok_s": 81.2, "decode_tok_s": 12.34, "fidelity": {"exact": False}}
    expected = {"token_ids": [5, 6], "text": "ab!", "finish_reason": "stop", "policy": "daop", **figures}
    out = capsys.readouterr().out
    assert json.loads(out) == expected | {"stats": STATS}
    engine.welcome = replace(WELCOME, emulation="link paced")
    engine.end = Done(0, "length", stats={"policy": "dali"})
    await run_on(engine, generating, monkeypatch, "hello", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["finish_reason"], found["policy"]) == ("ab", "length", "dali")
    assert (found["stats"]["emulation"], found["decode_tok_s"]) == ("link paced", None)
    for words, reason, end in (
        ("", "stop", ""),
        ("", "length", "context is full"),
        ("--max-tokens 2", "length", "--max-tokens reached"),
    ):
        engine.end = Done(0, reason, text="!", stats=dict(STATS))
        await run_on(engine, generating, monkeypatch, "hello", *words.split())
        out, err = capsys.readouterr()
        assert out == "ab!\n"
        assert "2 tokens, 12.3 tok/s; prompt of 3, 81 tok/s" in err
        assert end in err
        assert ("--max-tokens" in err or "full" in err) is bool(end)
        assert "approximate" in err


@pytest.mark.parametrize(
    ("texts", "end", "error"),
    [
        (True, Done(0, "error", "no memory"), AnswerLost),
        (False, Done(0, "error", "no memory", usage=True), RequestFailed),
    ],
)
async def test_answer_that_the_engine_does_not_finish_is_an_error(
    texts: bool, end: Done, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = StandInEngine()
    engine.end = end
    if not texts:
        answer = Answer(0, lambda request: None)
        answer.feed(end)
        monkeypatch.setattr(engine, "generate", lambda **_: answer)
    with pytest.raises(error, match="no memory") as raised:
        await run_on(engine, generating, monkeypatch, "hello")
    assert getattr(raised.value, "usage", True)


@pytest.mark.parametrize("words", ["", "--json"])
async def test_interrupted_answer_is_shown_as_far_as_it_came(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = StandInEngine()
    engine.end = None
    interrupted = Interrupts()
    interrupted.received = True
    monkeypatch.setattr(f"{__name__}.Interrupts", lambda: interrupted)
    command = asyncio.create_task(run_on(engine, generating, monkeypatch, "hello", *words.split()))
    await asyncio.sleep(0.01)
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    out, err = capsys.readouterr()
    if words:
        shown = json.loads(out)
        assert (shown["text"], shown["finish_reason"], shown["stats"]) == ("ab", "cancelled", {})
    else:
        assert out == "ab\n"
        assert "cancelled" in err


@pytest.mark.parametrize(("tokens", "windows"), [(16, 1), (40, 4), (1, 1)])
async def test_score_says_what_it_was_of(
    tokens: int,
    windows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "ids").write_text(json.dumps([1] * tokens))
    engine = StandInEngine()
    line = ["--tokens", str(tmp_path / "ids")]
    assert await run_on(engine, scoring, monkeypatch, *line, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["windows"], found["policy"]) == (tokens, windows, "dali")
    assert found["fidelity"]["exact"] is False
    assert found["fidelity"]["stale"] == 0.25  # of this score alone
    if tokens > 1:
        assert found["perplexity"] == pytest.approx(math.exp(found["mean_nll"]), rel=1e-5)
    await run_on(engine, scoring, monkeypatch, *line, "--stepwise")
    shown = capsys.readouterr().out
    assert shown.startswith(f"{tokens} tokens")
    assert (f"({windows} windows of 16)" in shown) is (windows > 1)
    assert shown.endswith("; approximate, under dali\n")
    again = engine.sent[windows:]
    assert all(sent["stepwise"] and not sent["full"] for sent in again)
    assert again[0]["prefill"] == 1
    assert all(sent["prefill"] > 1 for sent in again[1:])  # rows of the window before
    engine.welcome = replace(WELCOME, kv_dtype="int8")
    await run_on(engine, scoring, monkeypatch, *line)
    assert capsys.readouterr().out.endswith("; approximate, KV cache in int8 and under dali\n")


@pytest.mark.parametrize(
    ("context", "ids", "error"),
    [(16, [1, 7], "7 is no token; this model's ids end at 6"), (1, [1, 2], "context has 1 token")],
)
async def test_score_that_this_engine_cannot_compute_is_refused(
    context: int, ids: list[int], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ids").write_text(json.dumps(ids))
    engine = StandInEngine()
    engine.welcome = replace(WELCOME, context=context)
    with pytest.raises(WrongUsage, match=error):
        await run_on(engine, scoring, monkeypatch, "--tokens", str(tmp_path / "ids"))
    assert engine.sent == []


async def test_score_of_no_finite_numbers_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TABLE", np.full_like(TABLE, np.nan))
    (tmp_path / "ids").write_text("[1, 2, 3, 4]")
    line = ["--tokens", str(tmp_path / "ids"), "--out", str(tmp_path / "rows.npy")]
    with pytest.raises(RequestFailed, match=r"^the model's logits are not finite$"):
        await run_on(StandInEngine(), scoring, monkeypatch, *line)
    assert not (tmp_path / "rows.npy").exists()
