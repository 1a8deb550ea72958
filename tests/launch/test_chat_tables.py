"""The figures of /stats and of the line below an answer, from counters with known numbers."""

from __future__ import annotations

import asyncio
import logging
import re
from io import StringIO
from typing import Any

import pytest
from counters import TILE, decode
from msgspec.structs import replace
from rich.console import Console, RenderableType

from launch.chat.conversation import Reply
from launch.chat.screen import ERASE_LINE, AnswerView, LogLines, Screen
from launch.chat.tables import counters_table, engine_table, policy_list, policy_options, summary
from launch.errors import WrongUsage
from launch.terminal.interrupts import Interrupts
from pipeline.policies.presets import PRESETS
from protocol.messages import VERSION, Done, Welcome

WELCOME = Welcome(VERSION, "e", "/models/m", "f", "cuda", "lru", True, 100, 100, True, True)


def rows(what: RenderableType) -> dict[str, str]:
    """Cells by the row's name."""
    console = Console(width=80)
    with console.capture() as captured:
        console.print(what)
    cells = [re.split(r" {2,}", line.strip(), maxsplit=1) for line in captured.get().splitlines()]
    return {name: " ".join(rest[0].split()) if rest else "" for name, *rest in cells}


def test_counters_of_the_answer_stand_beside_the_engine_s() -> None:
    prefill = decode(steps=1, rows=7, fetched_tiles=0, host_tiles=90, predicted_tiles=0, wasted_tiles=0)
    stats = {"tile_bytes": TILE, "engine": {"prefill": prefill, "decode": decode(skipped=3.0), "clients": 2}}
    found = rows(
        counters_table(Reply("", 11, 0.1, Done(0, "stop", stats={"engine": {"decode": decode()}})), stats)
    )
    expected = {
        "steps": "10 1 10",
        "tokens computed": "10 7 10",
        "expert tiles": "120 120 120",
        "on the host": "33% 75% 33%",
        "resident on the device": "25% 25% 25%",
        "fetched to the device": "42% - 42%",
        "expert hits": "50% 50% 50%",
        "moved on demand": "50.0 MB - 50.0 MB",
        "prefetched": "20.0 MB - 20.0 MB",
        "used": "60% - 60%",
        "evicted unused": "30% - 30%",
        "needed before complete": "5.0 MB 5.0 MB 5.0 MB",
        "skipped of routed weight": "- - 5%",
        "seconds": "1.00 1.00 1.00",
        "link": "50% 50% 50%",
        "wait": "20% 20% 20%",
        "head": "5% 5% 5%",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "plan" not in found  # no time was spent in it
    assert not {name for name in found if "routed weight" in name} - {"skipped of routed weight"}
    few = rows(counters_table(None, {"engine": {"decode": decode(predicted_tiles=0)}}))
    assert "prefetched" not in few
    assert few["steps"] == "10"
    assert rows(counters_table(None, {}))["steps"] == ""


def test_engine_is_described_by_its_stats() -> None:
    scheduler = {"running": 2, "waiting": 3, "preemptions": 4, "kv_tokens_used": 50, "kv_tokens": 60}
    scheduler |= {"kv_tokens_kept": 7, "conversations": 1, "kv_reused_tokens": 8, "prefill_chunk": 64}
    stats: dict[str, Any] = {
        **{"policy": "daop", "scheduler": scheduler, "tile_bytes": TILE, "clients": {"connected": 9}},
        **{"cache": {"resident_tiles": 10, "capacity_tiles": 20}, "exchange": {"name": "shm"}},
        "prefetch": {"status": "prefetching is off"},
    }
    about = replace(WELCOME, format="int4", backbone_dtype="bf16", emulation="slow link")
    assert rows(engine_table(stats, about)) == {
        "policy": "daop on cuda",
        "model": "/models/m (experts int4, backbone bf16)",
        "requests": "2 running, 3 waiting, 4 preemptions so far",
        "KV cache": "50 of 60 tokens in use, 7 kept for 1 conversation",
        "KV reused": "8 tokens so far",
        "prefill": "64 tokens per step",
        "expert cache": "10 of 20 tiles resident, 10.0 MB",
        "prefetching": "prefetching is off",
        "workers": "get work through shared memory",
        "clients": "9 connected",
        "emulated": "slow link",
    }
    assert rows(engine_table({}, WELCOME)) == {"policy": "lru on cuda", "model": "/models/m"}


@pytest.mark.parametrize(
    ("reason", "tokens", "last"),
    [("length", 5, ["cut at max_tokens"]), ("cancelled", 4, ["cancelled"]), ("stop", 5, [])],
)
def test_summary_has_the_answer_s_figures(reason: str, tokens: int, last: list[str]) -> None:
    stats = {
        **{"decode_tok_s": 12.34, "kv_reused_tokens": 7, "prompt_tokens": 9, "preemptions": 2},
        "engine": {"prefill": decode(), "decode": decode(host_tiles=100), "other": 3},
    }
    reply = Reply("text", tokens, 0.256, Done(0, reason, stats=stats))
    first = [f"{tokens} tokens", "12.3 tok/s", "first 0.26 s", "KV 7/9", "host 47%", "100.0 MB moved"]
    assert summary(reply, "slow link", 5) == [*first, "preempted 2 times", *last, "emulated: slow link"]
    assert summary(Reply("", 0, None, Done(0, "length")), "", 5) == ["0 tokens", "cut at the context's end"]


async def test_answer_in_a_terminal_erases_its_status_and_defers_announcements(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def written() -> str:
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "20")
    screen = Screen(lambda: False)
    with AnswerView(screen, Interrupts()) as view:
        view.queued(2)
        view.queued(1)
        assert written() == f"{ERASE_LINE}queued, position 2{ERASE_LINE}{ERASE_LINE}queued, position 1"
        screen.announce("another client")
        view.append("")
        assert written() == ""
        view.append("two words\x07\n")
        assert written() == f"{ERASE_LINE}two words\ufffd\n"
        view.queued(3)  # after a restart of the engine
        view.append("more")
        assert written() == "more"
        view.notice("dropped a turn")
        assert written() == "\ndropped a turn\n"
        view.append("and then something wraps")
        assert written() == "and then something wraps"
    assert written() == "\nanother client\n"
    screen.announce("at once")
    assert written() == "at once\n"
    with AnswerView(screen, Interrupts()) as view:
        view.append("line\n")
        view.ended()
    assert written() == "line\n"


async def test_log_lines_go_to_the_screen_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """What the log's own handlers write would land within the input line."""
    root, stream = logging.getLogger(), StringIO()
    own = logging.StreamHandler(stream)
    root.addHandler(own)
    try:
        with LogLines(Screen(lambda: False)):
            root.warning("careful")
            await asyncio.sleep(0)
        assert "careful" in capsys.readouterr().out
        assert stream.getvalue() == ""
        root.warning("afterwards")
        assert stream.getvalue() == "afterwards\n"
        assert capsys.readouterr().out == ""
    finally:
        root.removeHandler(own)


def lines(what: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(what)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_list_of_policies_has_a_line_for_each() -> None:
    shown = lines(policy_list("dali", {"window": "4"}))
    assert [line.split()[0] for line in shown[: len(PRESETS)]] == [
        "*" if name == "dali" else name for name in PRESETS
    ]
    assert "in use: dali window=4" in shown
    for approximate in ("daop", "adapmoe"):
        assert any(f" {approximate} " in line and "(approximate)" in line for line in shown)


def test_options_of_a_policy_have_the_values_in_force() -> None:
    shown = {line.split()[0] for line in lines(policy_options("adapmoe", {"gate": "own"})) if line.strip()}
    assert {"gate=own", "prediction=lookahead", "sizes=dp"} <= shown
    assert not any(word.startswith("threshold=") for word in shown)  # an option of the exchanged gate
    assert {"seed=the", "churn=1"} <= {
        line.split()[0] for line in lines(policy_options("random", {"churn": "1"}))
    }
    with pytest.raises(WrongUsage, match="did you mean fiddler"):
        policy_options("fidler", {})


@pytest.mark.parametrize(
    ("fidelity", "expected"),
    [
        ({"exact": True}, ""),
        ({"exact": False, "skipped": 0.0312, "substituted": 0.0}, "approximate: 3.1% skipped"),
        ({"exact": False, "skipped": 0.01, "predicted": 0.5}, "approximate: 1.0% skipped, 50.0% predicted"),
        ({"exact": False, "skipped": 0.0}, "approximate: all computed as routed"),
    ],
)
def test_summary_says_how_far_an_answer_is_approximate(fidelity: dict[str, object], expected: str) -> None:
    reply = Reply("text", 3, 0.1, Done(0, "stop", stats={"fidelity": fidelity}))
    parts = summary(reply, "", 10)
    assert [part for part in parts if "approximate" in part] == ([expected] if expected else [])
