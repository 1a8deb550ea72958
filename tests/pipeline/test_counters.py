"""The engine's counters: for plans with known work, on an engine without an expert cache, so that every tile
is computed on the host or fetched; and for fidelity, against weights added up by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch
from oracle import Oracle

from pipeline.counters import Counters, Fidelity, StepClock, difference, fidelity
from pipeline.policies.view import Gated, Routing
from protocol.client import Client

on_the_engine = pytest.mark.asyncio(loop_scope="module")

PROMPT = (5, 6, 7, 8, 9)
NEW = 12
STEP = 2 * 2 * 3  # tiles of a decode step of one sequence: layers x top-2 x tiles
TILE_BYTES = 3 * 32 * 64 * 4
ENDS = 4  # this many tokens come before the end token
HOST_FREE = {"rows": [1, 64], "host": [0.0, 0.0], "device": [1.0, 1.0], "link": 1.0, "round_trip": 0.0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def no_cache(start_engine, plain_config, tmp_path_factory):
    """A client, and an end token that the model's answer to PROMPT has after some others."""
    folder = tmp_path_factory.mktemp("m") / "ending"
    shutil.copytree(plain_config.model, folder)
    tokens, _ = Oracle(folder, torch.float32).greedy(PROMPT, NEW)
    end = next(t for t in tokens[ENDS:] if t not in tokens[:ENDS])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    costs = folder / "costs.json"
    costs.write_text(json.dumps(HOST_FREE))
    config = replace(plain_config, expert_cache=0.0, model=folder, costs=costs, policy="fiddler")
    async with start_engine(config) as (_, client):
        yield client, end


async def generated(client: Client) -> dict:
    """The stats of an answer to PROMPT."""
    answer = client.generate(token_ids=PROMPT, max_tokens=NEW, ignore_eos=True, reuse=False)
    return (await answer.result()).done.stats


async def counted(client: Client) -> dict:
    return (await generated(client))["engine"]


ALWAYS = {"attention", "read", "plan", "submit", "shared", "combine", "head"}
PARTS_OF = {"all-host": ALWAYS | {"wait"}, "on-demand": ALWAYS | {"device", "link"}}


@on_the_engine
@pytest.mark.parametrize(("policy", "where"), [("all-host", "host_tiles"), ("on-demand", "fetched_tiles")])
async def test_every_tile_and_second_is_counted_where_it_was_spent(no_cache, policy, where) -> None:
    client, _ = no_cache
    await client.set_policy(policy)
    stats = await generated(client)
    decode, prefill = stats["engine"]["decode"], stats["engine"]["prefill"]
    assert (decode["steps"], decode["rows"]) == (NEW - 1, NEW - 1)  # the prefill gives the first
    assert (prefill["steps"], prefill["rows"]) == (1, len(PROMPT))
    for phase, least, most in ((decode, STEP * (NEW - 1), STEP * (NEW - 1)), (prefill, STEP, 2 * 4 * 3)):
        places = {key: phase[key] for key in ("host_tiles", "resident_tiles", "fetched_tiles")}
        assert least <= places.pop(where) <= most
        assert set(places.values()) == {0}
        assert phase["fetched_bytes"] == phase["fetched_tiles"] * TILE_BYTES
    for name, phase in stats["engine"].items():
        spent = {part for part, seconds in phase["seconds"].items() if seconds > 0}
        assert spent == PARTS_OF[policy]
        assert sum(phase["seconds"].values()) <= stats[f"{name}_s"]
        in_layers = {part: sum(seconds) for part, seconds in phase["layers"]["seconds"].items()}
        assert in_layers == pytest.approx(phase["seconds"] | {"head": 0.0})
        assert (phase["host_busy_s"] > 0) == (policy == "all-host")
        assert phase["host_busy_s"] <= sum(phase["seconds"][part] for part in ("submit", "plan", "wait"))


@on_the_engine
async def test_end_token_ends_an_answer_unless_ignored(no_cache) -> None:
    client, end = no_cache
    await client.set_policy("all-host")
    whole = await client.generate(token_ids=PROMPT, max_tokens=NEW, ignore_eos=True).result()
    assert (len(whole.tokens), whole.done.reason) == (NEW, "length")
    answer = await client.generate(token_ids=PROMPT, max_tokens=NEW).result()
    assert answer.tokens == whole.tokens[: whole.tokens.index(end)]
    assert answer.done.reason == "stop"
    assert whole.text.startswith(answer.text)


def test_difference_of_two_snapshots_counts_what_is_between() -> None:
    counters = Counters(tile_bytes=10, layers=2)
    decode = counters.phases["decode"]
    decode.steps, decode.fetched_tiles = 3, 4
    before = counters.snapshot()
    decode.steps, decode.fetched_tiles = 5, 9
    StepClock(decode).mark("wait")
    change = difference(counters.snapshot(), before)
    assert (change["decode"]["steps"], change["decode"]["fetched_bytes"]) == (2, 50)
    assert change["decode"]["seconds"]["wait"] > 0
    assert change["prefill"] == difference(before, before)["prefill"]


# --- fidelity ------------------------------------------------------------------------------------------

SAID = Routing(np.array([[0, 1], [2, 3]], np.int32), np.array([[0.75, 0.25], [0.5, 0.25]], np.float32))
ON_HOST = np.zeros(4, np.int32)


def booked(gated: Gated, cut: np.ndarray = ON_HOST, stale: bool = False) -> Fidelity:
    meter = Fidelity()
    meter.book(gated, cut, 4, stale)
    return meter


KEPT = Routing(SAID.experts, np.array([[1.0, 0.0], [0.5, 0.25]], np.float32))
REPLACED = Routing(np.array([[0, 1], [1, 3]], np.int32), np.array([[0.75, 0.25], [0.4, 0.35]], np.float32))


@pytest.mark.parametrize(
    ("gated", "changed"),
    [
        (Gated.from_router(SAID), {}),
        (Gated(KEPT, SAID), {"skipped": 0.25}),
        (Gated(REPLACED, SAID), {"substituted": 0.5}),
    ],
)
def test_changed_experts_count_with_the_weight_that_the_router_gave(gated, changed) -> None:
    assert booked(gated) == Fidelity(weight=1.75, **changed)


def test_stale_weight_is_the_hosts_share() -> None:
    """Of expert 0 all four tiles, of 1 none, of 2 one, of 3 two."""
    cut = np.array([0, 4, 3, 2], np.int32)
    meter = booked(Gated(SAID, SAID, predicted=True), cut, stale=True)
    assert meter.stale == pytest.approx(0.75 + 0 + 0.5 / 4 + 0.25 / 2)
    assert meter.predicted == meter.weight == 1.75


def test_fidelity_shares_cover_both_phases() -> None:
    counters = Counters(10, 2)
    before = counters.snapshot()
    counters.phases["prefill"].fidelity.book(Gated.from_router(SAID), ON_HOST, 4, False)
    counters.phases["decode"].fidelity.book(Gated(KEPT, SAID), ON_HOST, 4, False)
    counted = difference(counters.snapshot(), before)
    shares = fidelity(False, counted)
    assert shares["skipped"] == pytest.approx(0.25 / 3.5)
    assert {shares[kind] for kind in ("substituted", "stale", "predicted")} == {0.0}
    assert fidelity(True, counted) == {"exact": True}
    assert fidelity(True, counted, "int8") == {"exact": False, "kv_cache": "int8"}
    assert fidelity(False, counted, "int8") == shares | {"kv_cache": "int8"}
    assert fidelity(False, before)["skipped"] == 0.0
