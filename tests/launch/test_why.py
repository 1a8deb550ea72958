"""/why and /stats, on counters with known numbers, in 80 columns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from counters import TILE, decode
from msgspec.structs import replace
from rich.console import Console, RenderableType

from launch.bench.profile import PhaseProfile
from launch.chat.conversation import Reply
from launch.chat.levers import EMBEDDED_COST, SCORE, Lever, levers
from launch.chat.tables import counters_table, engine_table
from launch.chat.why import why_text
from launch.errors import WrongUsage
from pipeline.assets import model_dir
from protocol.messages import VERSION, Done, Welcome

WELCOME = Welcome(VERSION, "e", "/models/m", "f", "cuda", "lru", True, 100, 100, True, True)
EXACT = {"exact": True}
WORKERS = [{"role": "worker"}] * 2
STATS = {"peers": WORKERS, "cache": {"capacity_tiles": 25, "all_tiles": 100}}


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
    prefetch = {"on": False, "status": "prefetching is off for 256 steps"}
    text = shown(
        why_text(reply(decode()), {"tile_bytes": TILE, "prefetch": prefetch, "peers": WORKERS}, WELCOME)
    )
    words = flat(text)
    assert "A token took 100 ms under mixtral-offloading: waiting for the link 50%, waiting for the" in words
    assert "waiting for the workers 20%" in words
    assert re.findall(r"^layer (\d)", text, re.M) == ["2", "1", "0"]
    causes = r"link 25\.0 ms, workers 10\.0 ms, attention 7\.50 ms"
    assert re.search(rf"^layer 2 +47\.5 ms +100% +{causes}$", text, re.M)
    assert "hits: 50% of the needed experts" in words
    assert "the device waited 20.0 ms for the host and 50.0 ms for the link" in words
    assert "moved on demand: 5.0 MB per token, 10% of it already being prefetched" in words
    assert "prefetched: 2.0 MB per token, 60% of it used, 30% evicted unused" in words
    assert "prefetching is off for 256 steps" in words
    assert "fidelity: exact" in words
    assert "/policy fiddler" in words


def test_why_shows_the_fidelity_of_an_approximate_policy() -> None:
    shares = {"exact": False, "skipped": 0.0, "substituted": 0.034, "stale": 0.25, "predicted": 0.5}
    words = flat(shown(why_text(reply(decode(), fidelity=shares), {"tile_bytes": TILE}, WELCOME)))
    assert "fidelity: approximate; of the routed weight: " in words
    assert "substituted 3.4%, stale 25.0%, predicted 50.0%" in words
    assert "skipped" not in words


def test_why_says_what_the_policy_arranged_while_it_is_in_force() -> None:
    stats = {"policy": "tandem", "policy_status": "resident: the first 3 of 8 layers whole"}
    assert stats["policy_status"] in flat(shown(why_text(reply(decode(), policy="tandem"), stats, WELCOME)))
    assert "resident:" not in flat(shown(why_text(reply(decode()), stats, WELCOME)))


def found(tree: dict[str, Any], policy: str = "mixtral-offloading", **welcome: Any) -> dict[str, Lever]:
    """By setting, in the order of the gains."""
    about = replace(WELCOME, format="bf16", backbone_dtype="bf16", **welcome)
    return {lever.setting: lever for lever in levers(PhaseProfile(tree, TILE), STATS, about, policy)}


def test_largest_gain_of_workers_that_wait_for_messages_is_no_workers() -> None:
    """100 ms a token: 20 of waiting, 8 of which the workers computed, 30 of messages."""
    seconds = {"link": 0.0, "device": 0.0, "wait": 0.2, "submit": 0.2, "combine": 0.1, "attention": 0.5}
    tree = decode(**seconds, head=0.0, host_busy=0.08, fetched_tiles=0, resident_tiles=0)
    ranked = found(tree, "all-host", device="cpu")
    assert next(iter(ranked)) == "--workers 0"
    assert ranked["--workers 0"].seconds == pytest.approx(0.1 - 0.03 - 0.012)
    assert ranked["--backbone-dtype int4"].seconds == pytest.approx(0.1 - 0.05 * (1 - 4.5 / 16))
    assert ranked["--format int4"].seconds == pytest.approx(0.1 - 0.008 * (1 - 4.5 / 16))
    assert ranked["--format int4"].bound
    assert not ranked["--workers 0"].bound
    assert "--format int8" not in ranked  # 4 ms of 100 are within the noise
    gains = [lever.seconds for lever in ranked.values()]
    assert gains == sorted(gains)
    assert ranked["--format int4"].effect.endswith(SCORE)
    assert not any(setting.startswith("/policy") for setting in ranked)


def test_levers_of_a_link_are_policies_and_a_larger_cache() -> None:
    """100 ms a token: 50 for 5 tiles over the link, 20 for 4 tiles of the workers, 2.5 ms each."""
    ranked = found(decode())
    others, host, link, missing = 0.03, 0.01 / 4, 0.01, 9
    split = ranked["/policy tandem"]
    assert split.seconds == pytest.approx(others + missing * host * link / (host + link))
    assert split.bound
    assert ranked["/policy fiddler"].seconds == pytest.approx(others + missing * host)
    assert ranked["--expert-cache 0.5"].seconds == pytest.approx(0.1 - 0.07 / 3)
    assert "--workers 0" not in ranked  # on a GPU
    assert "--backbone-dtype int4" not in ranked  # quantized on the CPU only
    assert "/policy fiddler" not in found(decode(), "fiddler")


def test_levers_without_a_gpu_read_experts_in_place() -> None:
    """100 ms a token: 50 for the link, 10 of the device, and 10 of the workers for 4 of the 12 tiles."""
    ranked = found(decode(), "on-demand", device="cpu")
    assert ranked["/policy all-host"].seconds == pytest.approx(0.1 - 0.05 - 0.01 - 0.01 + 12 * 0.0025)
    slow = decode(device=0.3, attention=0.0, link=0.0, fetched_tiles=0)
    spent = sum(slow["seconds"].values()) / 10
    ranked = found(slow, "hybrimoe", device="cpu")
    assert ranked["/policy all-host"].seconds == pytest.approx(spent - 0.03 + 3 * 0.0025)
    assert not any("cache" in setting or "fiddler" in setting for setting in ranked)
    assert "/policy all-host" not in found(
        decode(fetched_tiles=0, link=0.0, device=0.05), "layerwise", device="cpu"
    )
    unknown = decode(host_tiles=0, host_busy=0.0)
    assert "/policy all-host" not in found(unknown, "on-demand", device="cpu")
    assert "/policy all-host" not in found(decode(), "all-host", device="cpu")


def test_formats_in_use_and_larger_ones_are_no_lever() -> None:
    least = PhaseProfile(decode(), TILE)
    about = replace(WELCOME, device="cpu", format="int4", backbone_dtype="int8")
    settings = {lever.setting for lever in levers(least, {}, about, "all-host")}
    assert settings == {"--backbone-dtype int4"}


def test_cost_of_a_format_is_named_where_it_was_measured() -> None:
    experts = found(decode(), "all-host", device="cpu", model=str(model_dir()))["--format int4"]
    assert experts.effect == "72% fewer bytes than bf16 to read; perplexity +0.69% on held-out text"
    documented = Path("docs/kernels.md").read_text("utf-8")
    for name, cost in EMBEDDED_COST.items():
        assert re.search(rf"^\| {name} \| [0-9.]+ \| \+{100 * cost:.2f} % \|$", documented, re.M)


def test_why_shows_gains_or_that_none_is_known() -> None:
    text = shown(why_text(reply(decode()), {"tile_bytes": TILE}, WELCOME))
    assert re.search(r"^What would help, from 10\.0 tok/s:$", text, re.M)
    assert re.search(r"^/policy tandem +at most 20\.8 tok/s +divides missing", text, re.M)
    text = flat(text)
    assert "computing: the host (experts) 10% of the time, the device (attention, head, its" in text
    busy = decode(link=0.0, wait=0.0, fetched_tiles=0, host_tiles=0, host_busy=0.0, attention=0.85)
    assert "No setting is known that would make this 5% faster." in shown(
        why_text(reply(busy), {"tile_bytes": TILE}, WELCOME)
    )


def test_without_workers_the_host_s_experts_are_named_so() -> None:
    text = flat(shown(why_text(reply(decode()), {"tile_bytes": TILE, "peers": []}, WELCOME)))
    assert "experts on the host 20%" in text
    assert "waiting for the workers" not in text


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
    assert "  plan" not in text  # no step spent time on it
    quiet = decode(predicted_tiles=0, useful_tiles=0, wasted_tiles=0, late_tiles=0, host_tiles=0, link=0.0)
    text = shown(counters_table(None, {"tile_bytes": TILE, "engine": {"prefill": quiet, "decode": quiet}}))
    for absent in ("prefetched", "evicted", "on the host", "link"):
        assert absent not in text
    assert re.search(r"^  fetched to the device( +62%){2}$", text, re.M)


def test_stats_names_the_embedded_model() -> None:
    text = shown(engine_table({}, replace(WELCOME, model=str(model_dir()))))
    assert re.search(r"^model +the embedded model$", text, re.M)
    assert re.search(r"^model +/models/m$", shown(engine_table({}, WELCOME)), re.M)


def test_why_says_which_costs_changed_and_how_many_tiles_were_resident() -> None:
    updates = {"host": {"prefill": 3.0, "decode": 2.0}, "device": {"prefill": 2.0, "decode": 1.0}}
    updates["link"] = {"prefill": 1.0, "decode": 0.8}
    tree = decode()
    tree["layers"]["hit_tiles"] = [40, 40, 80]
    words = flat(shown(why_text(reply(tree), {"cost_updates": updates, "peers": WORKERS}, WELCOME)))
    assert "hits: 50% of the needed experts were resident, and 67% of their tiles" in words
    assert "costs: the host takes 2.00 times, the link takes 0.80 times as long" in words
    for side in updates.values():
        side["decode"] = 1.0
    words = flat(shown(why_text(reply(decode()), {"cost_updates": updates, "peers": WORKERS}, WELCOME)))
    assert "costs:" not in words
    assert "of their tiles" not in words


def test_what_is_idle_is_shown_where_a_gpu_has_timed_steps() -> None:
    tree = decode() | {"device_timed": {"of_s": 0.4, "busy_s": 0.1}, "link_busy_s": 0.6}
    stats = {"tile_bytes": TILE}
    text = flat(shown(why_text(reply(tree), stats, WELCOME)))
    assert "idle, by the GPU's own clock: GPU 75%, link 40%, workers 90% of the time" in text
    assert "the GPU's own clock" not in flat(shown(why_text(reply(decode()), stats, WELCOME)))
