"""The figures of a PhaseProfile, on counters with known numbers."""

from __future__ import annotations

import pytest
from counters import SECONDS, TILE, decode

from launch.profile import CAUSES, PhaseProfile, added
from pipeline.counters import PARTS


def test_every_counted_part_of_a_step_belongs_to_one_cause() -> None:
    assert sorted(part for parts in CAUSES.values() for part in parts) == sorted(PARTS)


def test_profile_shares_causes_and_hit_rates() -> None:
    profile = PhaseProfile(decode(), TILE)
    assert profile.seconds == pytest.approx(1.0)
    expected = {"workers": 0.2, "link": 0.5, "device": 0.1, "attention": 0.15, "head": 0.05}
    assert {cause: share for cause, share in profile.shares.items() if share} == pytest.approx(expected)
    assert profile.host_busy == pytest.approx(0.1)
    assert profile.device_busy == pytest.approx(0.3)
    assert profile.hit_rate == 0.5
    assert profile.hit_rates == [0.0, 0.5, 1.0]
    assert profile.tiles == 120


def test_link_is_busy_for_a_share_of_the_time() -> None:
    assert PhaseProfile(decode() | {"link_busy_s": 0.6}, TILE).link_busy == pytest.approx(0.6)


def test_moved_bytes_are_tiles_times_tile_size() -> None:
    expected = {"demanded": 50, "predicted": 20, "useful": 12, "late": 5, "wasted": 6, "placed": 0}
    moved = PhaseProfile(decode(), TILE).moved
    assert moved == {kind: tiles * TILE for kind, tiles in expected.items()}


def test_layers_are_ordered_by_their_time_in_a_step() -> None:
    layers = PhaseProfile(decode(), TILE).layers
    assert [layer.layer for layer in layers] == [2, 1, 0]
    outside = sum(SECONDS.values()) - SECONDS["head"]
    assert [layer.seconds for layer in layers] == pytest.approx([outside * n / 60 for n in (3, 2, 1)])
    assert layers[0].causes["link"] == pytest.approx(0.5 * 3 / 60)
    assert layers[0].causes["head"] == 0


def test_fidelity_is_a_share_of_the_routed_weight() -> None:
    fidelity = PhaseProfile(decode(skipped=3.0, stale=15.0), TILE).fidelity
    expected = {"skipped": 0.05, "substituted": 0, "stale": 0.25, "predicted": 0, "left": 0}
    assert fidelity == pytest.approx(expected)


def test_profile_without_steps_has_no_hit_rate_and_zero_shares() -> None:
    tree = decode(**dict.fromkeys(SECONDS, 0.0), steps=0, rows=0)
    tree["layers"]["active"] = tree["layers"]["hits"] = [0, 0, 0]
    profile = PhaseProfile(tree, TILE)
    assert profile.hit_rate is None
    assert profile.hit_rates == [None] * 3
    assert profile.host_busy == profile.device_busy == 0
    assert set(profile.shares.values()) == {0.0}


def test_counters_of_several_runs_are_summed() -> None:
    both = added([decode(), decode(link=1.5, stale=6.0)])
    assert both["rows"] == 20
    assert both["layers"]["hits"] == [0, 20, 40]
    assert both["fidelity"]["stale"] == 6.0
    assert PhaseProfile(both, TILE).shares["link"] == pytest.approx(2.0 / 3.0)
