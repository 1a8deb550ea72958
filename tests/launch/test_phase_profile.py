"""The figures of a PhaseProfile, on counters with known numbers."""

from __future__ import annotations

import pytest
from counters import SECONDS, TILE, decode

from launch.profile import CAUSES, PhaseProfile, added
from pipeline.counters import PARTS


def test_every_counted_part_of_a_step_belongs_to_one_cause() -> None:
    assert sorted(part for parts in CAUSES.values() for part in parts) == sorted(PARTS)


def test_link_is_busy_for_a_share_of_the_time() -> None:
    assert PhaseProfile(decode() | {"link_busy_s": 0.6}, TILE).link_busy == pytest.approx(0.6)


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
