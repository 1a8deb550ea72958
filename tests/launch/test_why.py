"""/why and /stats, on counters with known numbers, in 80 columns."""

from __future__ import annotations

import re
from typing import Any

import pytest
from counters import TILE, decode
from rich.console import Console, RenderableType

from launch.chat.conversation import Reply
from launch.chat.tables import counters_table
from launch.chat.why import ADVICE, POLICY_ADVICE, advice, why_text
from launch.errors import WrongUsage
from launch.phase_profile import CAUSES, PhaseProfile
from pipeline.policies.presets import PRESETS
from protocol.messages import VERSION, Done, Welcome

WELCOME = Welcome(VERSION, "e", "/models/m", "f", "cuda", "lru", True, 100, 100, True, True)
EXACT = {"exact": True}


def reply(tree: dict[str, Any], **stats: Any) -> Reply:
    own = {"policy": "mixtral-offloading", "fidelity": EXACT, "engine": {"prefill": tree, "decode": tree}}
    return Reply("an answer", 11, 0.1, Done(0, "stop", stats=own | stats))


def shown(what: RenderableType) -> str:
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        console.print(what)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert max(map(len, lines)) <= 80
    return "\n".join(lines)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_why_shows_time_by_cause_and_by_layer() -> None:
    prefetch = {"on": False, "says": "prefetching is off for 256 steps"}
    text = shown(why_text(reply(decode()), {"tile_bytes": TILE, "prefetch": prefetch}, WELCOME))
    words = flat(text)
    assert "A token took 100 ms under mixtral-offloading: waiting for the link 50%, waiting for the" in words
    assert "waiting for the workers 20%" in words
    assert re.findall(r"^layer (\d)", text, re.M) == ["2", "1", "0"]
    causes = r"link 25\.0 ms, workers 10\.0 ms, attention 7\.50 ms"
    assert re.search(rf"^layer 2 +47\.5 ms +100% +{causes}$", text, re.M)
    assert "hits: 50% of the needed experts" in words
    assert "moved on demand: 5.0 MB per token, 10% of it already being prefetched" in words
    assert "prefetched: 2.0 MB per token, 60% of it used, 30% evicted unused" in words
    assert "prefetching is off for 256 steps" in words
    assert "fidelity: exact" in words
    assert "Most of the time is spent waiting for the link: " in words
    assert "/policy fiddler" in words


def test_why_shows_the_fidelity_of_an_approximate_policy() -> None:
    shares = {"exact": False, "skipped": 0.0, "substituted": 0.034, "stale": 0.25, "predicted": 0.5}
    words = flat(shown(why_text(reply(decode(), fidelity=shares), {"tile_bytes": TILE}, WELCOME)))
    assert "fidelity: approximate; of the routed weight: " in words
    assert "substituted 3.4%, stale 25.0%, predicted 50.0%" in words
    assert "skipped" not in words


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("policy", PRESETS)
def test_advice_is_for_the_largest_cause_and_never_the_policy_in_use(cause: str, policy: str) -> None:
    profile = PhaseProfile(decode(**{CAUSES[cause][0]: 5.0}), TILE)
    sentence = advice(profile, policy, same_cores=False)
    expected = POLICY_ADVICE[cause][1] if cause in POLICY_ADVICE else ADVICE[cause]
    assert sentence.startswith(expected.partition("{}")[0])
    assert ("/policy " in sentence) == (cause in POLICY_ADVICE)
    for name in re.findall(r"/policy ([\w-]+)", sentence):
        assert name in PRESETS
        assert name != policy


@pytest.mark.parametrize("policy", ["on-demand", "all-host"])
def test_advice_for_an_emulated_device_is_all_host(policy: str) -> None:
    sentence = advice(PhaseProfile(decode(), TILE), policy, same_cores=True)
    assert ("/policy all-host" in sentence) == (policy != "all-host")


def test_why_needs_an_answer_of_several_tokens() -> None:
    with pytest.raises(WrongUsage, match="no answer"):
        why_text(None, {}, WELCOME)
    with pytest.raises(WrongUsage, match="at most one token"):
        why_text(reply(decode(steps=0)), {"tile_bytes": TILE}, WELCOME)
    with pytest.raises(WrongUsage, match="at most one token"):
        why_text(Reply("", 0, None, Done(0, "cancelled", stats={})), {}, WELCOME)


def test_stats_shows_prefetching_and_fidelity() -> None:
    tree = decode(stale=15.0)
    stats = {"tile_bytes": TILE, "engine": {"prefill": tree, "decode": tree}}
    text = shown(counters_table(reply(tree), stats))
    assert re.search(r"^expert hits( +50%){4}$", text, re.M)
    assert re.search(r"^prefetched( +20.0 MB){4}$", text, re.M)
    assert re.search(r"^  used( +60%){4}$", text, re.M)
    assert re.search(r"^stale of routed weight( +25%){4}$", text, re.M)
    assert "substituted" not in text
    assert "link" in text
