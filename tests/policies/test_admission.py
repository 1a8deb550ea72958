"""Admission in the background: its rule against brute force, the cache against a plain simulation, and what
it gains and refuses on links of all speeds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from math import inf

import numpy as np
import pytest
from policy_machine import COSTS, Machine, make_routing, make_view, policy

from pipeline.arrays import IntArray
from pipeline.models.routing import Softmax
from pipeline.policies.admission import Prices, pays
from pipeline.policies.costs import MACHINES, Costs, derived
from pipeline.policies.view import ModelShape, Policy, Routing
from pipeline.replay.machine import Replay
from pipeline.traces.synthetic import PROFILES, SyntheticText
from pipeline.traces.trace import Header, TracedStep

SHAPE = ModelShape(layers=1, experts=8, tiles=2, top_k=1)
# an expert takes 20 on the host, of which the device saves 16, and as many on the link: a quarter of a step
PLAIN = Costs((1,), (10.0,), (2.0,), link=10.0, round_trip=0.0, other=(60.0,))


@pytest.mark.parametrize("hot", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("cold", [0.0, 0.1, 0.5, 1.0])
def test_an_admission_pays_where_every_course_of_its_steps_takes_less_time(hot: float, cold: float) -> None:
    """All courses of use of the newcomer and of its victim, with their probabilities."""
    host, device = 3.0, 1.25
    for stay, delay in ((1, 0), (2, 1), (3, 0), (4, 1), (4, 3), (4, 4)):
        without = with_it = 0.0
        for uses in product((0, 1), repeat=2 * stay):
            new, old = uses[:stay], uses[stay:]
            chance = hot ** sum(new) * (1 - hot) ** (stay - sum(new))
            chance *= cold ** sum(old) * (1 - cold) ** (stay - sum(old))
            without += chance * (host * sum(new) + device * sum(old))
            landed = sum(new[delay:])
            moved = host  # of the host's memory the copy takes what a use takes
            with_it += chance * (moved + host * (sum(new) - landed) + device * landed + host * sum(old))
        if abs(without - with_it) > 1e-9:
            assert pays(hot, cold, stay, delay, host / (host - device)) == (with_it < without)


def test_the_costs_say_what_a_copy_takes_and_saves() -> None:
    shape = ModelShape(layers=4, experts=8, tiles=2, top_k=3)
    costs = Costs((1,), (10.0,), (2.0,), 5.0, round_trip=1.0, other=(7.0,), launch=0.5, fetch=3.0)
    prices = Prices(costs, shape)
    assert (prices.copy, prices.least) == (3 + 2 * 5, 20 / (20 - 4))
    assert prices.layer(3, 1) == 7 + 1 + 20
    assert prices.layer(3, 0) == 7 + 0.5 + 3 * 4
    assert prices.layer(3, 3) == 7 + 1 + 3 * 20
    assert prices.soonest == pytest.approx(13 / (4 * prices.layer(3, 3)))
    assert Prices(replace(costs, device=(10.0,)), shape).least == inf
    nothing = Prices(Costs((1,), (0.0,), (0.0,), 0.0, 0.0), shape)  # a file may say so
    assert nothing.least == nothing.soonest == inf


class Course:
    """A policy on one layer, one expert a step; copies land after so many steps."""

    def __init__(self, made: Policy, capacity: int, costs: Costs = PLAIN) -> None:
        view = make_view(SHAPE, capacity * SHAPE.tiles, costs)
        self.machine = Machine(made, view, np.random.default_rng(0))
        self.machine.start()
        self.cut = -1  # of the expert that was used last

    def use(self, *experts: int) -> set[int]:
        """Returns the experts that the cache keeps after these steps."""
        for expert in experts:
            routing = Routing(np.array([[expert]], np.int32), np.ones((1, 1), np.float32))
            self.cut = int(self.machine.layer(0, routing).cut[expert])
        return set(np.flatnonzero(self.machine.view.target[0]).tolist())


def test_a_second_miss_in_time_admits_in_the_place_of_the_least_recently_used() -> None:
    course = Course(policy("cache"), 2)
    assert course.use() == {0, 1}  # nothing is known yet
    assert course.use(0, 1) == {0, 1}
    assert course.cut == SHAPE.tiles
    assert course.use(5) == {0, 1}
    assert course.cut == 0  # on the host
    assert course.use(*[0] * 8, 5) == {0, 1}  # too late: the first miss is as good as forgotten
    assert course.use(0, 0, 5, 5) == {0, 5}  # 1 has not been used for longest
    assert course.use(5) == {0, 5}
    assert course.cut == SHAPE.tiles


def test_an_expert_as_cold_as_the_oldest_stays_out() -> None:
    """Experts in turns: each is missed again within the window, and none is used more than those held."""
    course = Course(policy("cache"), 3)
    held = course.use(0, 1, 2)
    assert course.use(*[0, 1, 2, 3] * 6) == held


def test_no_more_copies_are_under_way_than_land_in_time() -> None:
    course = Course(policy("cache"), 4, replace(PLAIN, link=200.0))
    course.machine.landing = 0.0
    course.use(*[0, 1, 2, 3], *[0] * 12)
    kept = course.use(6, 6, 6, 6)
    assert 6 in kept
    assert course.use(7, 7, 7, 7) == kept  # the first has not landed
    course.machine.landing = 1.0
    assert 7 in course.use(0, 7, 7)


@pytest.mark.parametrize(
    ("costs", "reason"),
    [
        (replace(PLAIN, device=(10.0,)), "by the costs the device is hardly faster than the host"),
        (replace(PLAIN, device=(9.9,)), "by the costs the device is hardly faster than the host"),
        (replace(PLAIN, link=2800.0), "by the costs the link brings it 70 tokens late, when it has no use"),
    ],
)
def test_where_no_copy_can_pay_none_is_ordered_and_a_note_says_so(costs: Costs, reason: str) -> None:
    course = Course(policy("cache"), 2, costs)
    held = course.use()
    assert course.use(*[5, 6, 5, 5, 6, 7, 7, 7] * 20) == held
    assert policy("cache").notes(course.machine.view) == (f"cache: no expert is admitted: {reason}",)
    assert policy("cache").notes(make_view(SHAPE, 4, PLAIN)) == ()


def test_misses_that_the_device_computes_enter_as_in_on_demand() -> None:
    """llama.cpp's rule: each miss is uploaded, and the least recently used leaves."""
    shape = ModelShape(layers=2, experts=9, tiles=2, top_k=3)
    rng = np.random.default_rng(1)
    routings = [make_routing(shape, rng, 1) for _ in range(60)]

    def targets(made: Policy) -> list[IntArray]:
        machine = Machine(made, make_view(shape, 19, COSTS), np.random.default_rng(0))
        machine.start()
        found = []
        for index, routing in enumerate(routings):
            machine.layer(index % shape.layers, routing)
            found.append(machine.view.target)
        return found

    ours = targets(policy("cache", assignment="device", placement="empty"))
    assert np.array_equal(ours, targets(policy("on-demand")))


def test_the_cache_begins_with_what_earlier_starts_used() -> None:
    heat = np.array([[0, 0, 5, 0, 9, 0, 0, 1]], np.int64)
    view = replace(make_view(SHAPE, 6, PLAIN), heat=heat)
    made = policy("cache")
    assert made.keeps_heat
    assert np.flatnonzero(made.placement(view)[0]).tolist() == [2, 4, 7]
    machine = Machine(made, view, np.random.default_rng(0))
    machine.start()
    course = Course.__new__(Course)
    course.machine = machine
    assert course.use(*[0] * 6) == {0, 2, 4}  # the least used of them left first
    assert not policy("fiddler").keeps_heat


# --- on drawn routing ---------------------------------------------------------------------------------------


@cache
def text() -> tuple[Header, list[TracedStep], list[TracedStep], np.ndarray]:
    shape = ModelShape(3, 128, 2, 8)
    header = Header("drawn", "0" * 16, "0" * 16, shape, 1, Softmax(8, rescaled=True), 0)
    drawn = SyntheticText(header, PROFILES["qwen3-30b-a3b"], 3)
    return header, drawn.steps(0, 1, 32), drawn.steps(0, 1, 160), drawn.counts(1000)


def seconds(link_gbps: float, share: float, **options: str) -> tuple[float, int]:
    """Seconds of a text after another one, and the tiles that moved in the background."""
    header, warm, steps, counts = text()
    shape, weights = header.shape, 3 * 2048 * 768
    rates = replace(MACHINES["4090-pcie4"], link_gbps=link_gbps)
    capacity = round(share * shape.layers * shape.experts * shape.tiles)
    costs = derived(rates, weights * 4.25 / 8, weights)
    replay = Replay(header, policy("cache", **options), costs, capacity, popularity=counts)
    replay.run(warm)
    began, placed = replay.now, replay.mover.placed
    replay.run(steps)
    return replay.now - began, replay.mover.placed - placed


@pytest.mark.parametrize("share", [0.06, 0.25])
def test_admissions_never_cost_time_and_gain_it_as_far_as_the_link_goes(share: float) -> None:
    gains = []
    for gbps in (25.0, 2.0, 0.2, 0.02, 1e-4):
        static, none = seconds(gbps, share, replacement="keep")
        admitting, moved = seconds(gbps, share)
        assert not none
        assert admitting <= 1.01 * static
        gains.append(static / admitting)
    assert gains[0] > 1.15
    assert gains[0] > gains[2] > gains[4] - 0.01
    assert moved == 0  # over the slowest link
