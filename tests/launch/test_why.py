"""/why, /stats, /policy and the line below an answer, on counters with known numbers, in 80 columns; and the
REPL's screen."""

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
from launch.chat.repl import LogLines, Screen
from launch.chat.why import why_text
from launch.errors import WrongUsage
from launch.profile import CAUSES
from pipeline.counters import PARTS
from protocol.messages import VERSION, Done, Welcome

WELCOME = Welcome(VERSION, "e", "/models/m", "f", "cuda", "lru", True, 100, 100, True, True)
STATS = {"cache": {"capacity_tiles": 25, "all_tiles": 100}}


def reply(tree: dict[str, Any], **stats: Any) -> Reply:
    own = {"policy": "mixtral-offloading", "fidelity": {"exact": True}}
    return Reply("an answer", 11, 0.1, Done(0, "stop", stats=own | {"engine": {"decode": tree}} | stats))


def shown(what: RenderableType) -> str:
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        console.print(what)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert max(map(len, lines)) <= 80
    return "\n".join(lines)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_why_shows_time_by_cause_and_by_layer_and_what_would_help() -> None:
    stats = {"tile_bytes": TILE, "prefetch": {"status": "prefetching is off for 256 steps"}}
    stats |= {"policy": "mixtral-offloading", "policy_status": "resident: the first 3 layers"}
    away = {"name": "c", "state": "away", "why": "the connection has ended"}
    near = {"name": "b", "state": "ready", "share": 0.3, "round_trip_us": 1137.4, "computing_us": 800}
    stats["machines"] = [near | {"waited_s": 1.5}, away]
    stats["engine"] = {"decode": {"seconds": {"wait": 4.0, "attention": 6.0}}}
    text = shown(why_text(reply(decode()), stats, WELCOME))
    words = flat(text)
    assert "machine b: 30% of each expert, 1,137 us a layer, of which it computes 800; 15% of all" in words
    assert "machine c is away: the connection has ended" in words
    assert "A token took 100 ms under mixtral-offloading: waiting for the link 50%, experts on the" in words
    assert re.findall(r"^layer (\d)", text, re.M) == ["2", "1", "0"]
    causes = r"link 25\.0 ms, workers 10\.0 ms, attention 7\.50 ms"
    assert re.search(rf"^layer 2 +47\.5 ms +100% +{causes}$", text, re.M)
    for expected in (
        "hits: 50% of the needed experts were resident",
        "computing: the host (experts) 10% of the time, the device (attention, head, its",
        "moved on demand: 5.0 MB per token, 10% of it already being prefetched",
        "prefetched: 2.0 MB per token, 60% of it used, 30% evicted unused",
        "prefetching is off for 256 steps",
        "resident: the first 3 layers",
        "fidelity: exact",
        "What may help (what begins with -- is given at the next start):",
    ):
        assert expected in words
    assert re.search(r"^/policy tandem +divides missing", text, re.M)
    busy = decode(link=0.0, wait=0.0, fetched_tiles=0, host_tiles=0, host_busy=0.0, attention=0.85)
    text = flat(shown(why_text(reply(busy), stats | {"policy": "dali"}, WELCOME)))
    assert "No setting is known that would make this faster." in text
    assert "resident: the" not in text


def test_why_needs_an_answer_of_several_tokens() -> None:
    with pytest.raises(WrongUsage, match="no answer"):
        why_text(None, {}, WELCOME)
    with pytest.raises(WrongUsage, match="at most one token"):
        why_text(reply(decode(steps=0)), {"tile_bytes": TILE}, WELCOME)
    with pytest.raises(WrongUsage, match="at most one token"):
        why_text(Reply("", 0, None, Done(0, "cancelled", stats={})), {}, WELCOME)


def advised(
    tree: dict[str, Any], policy: str = "mixtral-offloading", workers: bool = False, **welcome: Any
) -> list[str]:
    """The settings, those for the largest share of the time first."""
    about = replace(WELCOME, **{"format": "bf16", "backbone_dtype": "bf16"} | welcome)
    stats = STATS | {"tile_bytes": TILE} | ({"exchange": {"name": "shm"}} if workers else {})
    text = shown(why_text(reply(tree, policy=policy), stats, about))
    return re.findall(r"^(/policy \w+|--[a-z-]+(?: int4| 0)?) ", text, re.M)


def test_advice_is_about_what_took_the_time() -> None:
    """50 % link, 20 % workers, 15 % attention; and without a link 50 % attention, 20 % workers."""
    cache = "--expert-cache"
    assert advised(decode()) == ["/policy tandem", cache, "--format int4"]
    assert advised(decode(), "tandem", format="int4") == [cache]
    on_host = decode(link=0.0, device=0.0, wait=0.2, submit=0.3, attention=0.5, head=0.0)
    formats = ["--backbone-dtype int4", "--format int4"]
    assert advised(on_host, "all-host", device="cpu") == formats
    both = [formats[0], "--workers 0", formats[1]]
    assert advised(on_host, "all-host", workers=True, device="cpu") == both
    assert advised(on_host, "all-host", workers=True) == ["/policy tandem", "--format int4"]
    assert advised(on_host, "all-host", device="cpu", format="int4", backbone_dtype="int8") == formats[:1]
    assert advised(decode(link=0.0, wait=0.0, device=0.9, attention=0.0), "dali") == []


async def test_log_lines_go_to_the_screen_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """What the log's own handlers write would land within the input line."""
    root, stream = logging.getLogger(), StringIO()
    own = logging.StreamHandler(stream)
    root.addHandler(own)
    try:
        with LogLines(Screen(lambda: False)).installed():
            root.warning("careful")
            await asyncio.sleep(0)
        assert "careful" in capsys.readouterr().out
        assert stream.getvalue() == ""
        root.warning("afterwards")
        assert stream.getvalue() == "afterwards\n"
        assert capsys.readouterr().out == ""
    finally:
        root.removeHandler(own)


def test_every_counted_part_of_a_step_belongs_to_one_cause() -> None:
    assert sorted(part for parts in CAUSES.values() for part in parts) == sorted(PARTS)
