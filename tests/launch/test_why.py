"""/why and /stats: what they say of counters whose numbers are known, in 80 columns."""

from __future__ import annotations

import re
from typing import Any

import pytest
from counters import TILE, decode
from rich.console import Console, RenderableType

from launch.chat.conversation import Reply
from launch.chat.tables import counters_table
from launch.chat.why import ADVICE, OTHER, advice, why_text
from launch.errors import WrongUsage
from launch.phase_profile import CAUSES, PhaseProfile
from pipeline.policies.presets import PRESETS
from protocol.messages import VERSION, Done, Welcome

WELCOME = Welcome(VERSION, "e", "/models/m", "f", "cuda", "lru", True, 100, 100, True, True)
EXACT = {"exact": True}


def reply(tree: dict[str, Any], **stats: Any) -> Reply:
    told = {"policy": "mixtral-offloading", "fidelity": EXACT, "engine": {"prefill": tree, "decode": tree}}
    return Reply("an answer", 11, 0.1, Done(0, "stop", stats=told | stats))


def shown(what: RenderableType) -> str:
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        console.print(what)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert max(map(len, lines)) <= 80
    return "\n".join(lines)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_why_says_where_the_time_of_a_token_went_and_what_each_layer_waited_for() -> None:
    prefetch = {"on": False, "says": "prefetching rests for 256 steps"}
    text = shown(why_text(reply(decode()), {"tile_bytes": TILE, "prefetch": prefetch}, WELCOME))
    words = flat(text)
    assert "A token took 100 ms under mixtral-offloading: waiting for the link 50 %, waiting for the" in words
    assert re.findall(r"^layer (\d)", text, re.M) == ["2", "1", "0"]
    causes = r"link 25\.0 ms, workers 10\.0 ms, attention 7\.50 ms"
    assert re.search(rf"^layer 2 +47\.5 ms +100 % +{causes}$", text, re.M)
    assert "hits: 50 % of the needed experts" in words
    assert "5 MB a token when a step needed it, 10 % of it on its way already" in words
    assert "prefetched: 2 MB a token, 60 % of it of use, 30 % dropped unused" in words
    assert "prefetching rests for 256 steps" in words
    assert "fidelity: exact" in words
    assert "It waits for the link: " in words
    assert "/policy fiddler" in words


def test_why_says_what_an_approximation_left_out() -> None:
    shares = {"exact": False, "skipped": 0.0, "substituted": 0.034, "stale": 0.25, "predicted": 0.5}
    words = flat(shown(why_text(reply(decode(), fidelity=shares), {"tile_bytes": TILE}, WELCOME)))
    assert "fidelity: approximate; of the weight that the routers gave" in words
    assert "substituted 3.4 %, stale 25.0 %, predicted 50.0 %" in words
    assert "skipped" not in words


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("policy", PRESETS)
def test_advice_is_for_what_takes_most_and_never_for_the_policy_in_use(cause: str, policy: str) -> None:
    profile = PhaseProfile(decode(**{CAUSES[cause][0]: 5.0}), TILE)
    said = advice(profile, policy, same_cores=False)
    expected = OTHER[cause][1] if cause in OTHER else ADVICE[cause]
    assert said.startswith(expected.partition("{}")[0])
    for name in re.findall(r"/policy ([\w-]+)", said):
        assert name in PRESETS
        assert name != policy


@pytest.mark.parametrize("policy", ["on-demand", "all-host"])
def test_where_the_device_is_the_host_moving_helps_nobody(policy: str) -> None:
    said = advice(PhaseProfile(decode(), TILE), policy, same_cores=True)
    assert ("/policy all-host" in said) == (policy != "all-host")


def test_there_must_be_an_answer_of_more_than_a_token() -> None:
    with pytest.raises(WrongUsage, match="no answer"):
        why_text(None, {}, WELCOME)
    with pytest.raises(WrongUsage, match="one token"):
        why_text(reply(decode(steps=0)), {"tile_bytes": TILE}, WELCOME)
    with pytest.raises(WrongUsage, match="one token"):
        why_text(Reply("", 0, None, Done(0, "cancelled", stats={})), {}, WELCOME)


def test_stats_shows_what_was_predicted_and_what_was_left_out() -> None:
    tree = decode(stale=15.0)
    stats = {"tile_bytes": TILE, "engine": {"prefill": tree, "decode": tree}}
    text = shown(counters_table(reply(tree), stats))
    assert re.search(r"^expert hits( +50 %){4}$", text, re.M)
    assert re.search(r"^prefetched( +20 MB){4}$", text, re.M)
    assert re.search(r"^  of use( +60 %){4}$", text, re.M)
    assert re.search(r"^stale of routed weight( +25 %){4}$", text, re.M)
    assert "substituted" not in text
    assert "link" in text
