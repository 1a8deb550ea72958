"""What an engine has learned of its costs, as the next one reads it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.cost_updates import SIDES, SINGLE
from pipeline.engine.layer_times import ENOUGH, KINDS, LONG_ENOUGH
from pipeline.engine.learned_costs import NOTHING, Corrections, Learned
from pipeline.policies.costs import Costs

COSTS = Costs((1, 16), (1.0, 2.0), (1.0, 1.5), 3.0, round_trip=0.5, launch=0.25, fetch=0.125)
FACTORS = st.floats(1e-3, 1e3)
SECONDS = st.floats(allow_nan=False, allow_infinity=False)
CORRECTIONS = st.builds(
    Corrections,
    st.fixed_dictionaries(
        {side: st.tuples(*[FACTORS] * (1 if side in SINGLE else len(COSTS.rows))) for side in SIDES}
    ),
    st.dictionaries(st.integers(0, 20), st.fixed_dictionaries(dict.fromkeys(KINDS, SECONDS))),
)


@given(CORRECTIONS)
def test_corrections_return_from_json(corrections: Corrections) -> None:
    data = json.loads(json.dumps(corrections.to_json()))
    assert Corrections.from_json(data, len(COSTS.rows)) == corrections


def test_nothing_returns_from_json() -> None:
    assert Corrections.from_json(json.loads(json.dumps(Learned(COSTS).corrections.to_json())), 2).beside == {}
    assert Corrections.from_json(None, 2) == Corrections.from_json({}, 2) == NOTHING
    assert Learned(COSTS, NOTHING).in_force(1).costs == COSTS


def test_the_next_engine_plans_with_what_was_learned() -> None:
    first = Learned(COSTS)
    for rows, seconds, count in ((1, 0.5, ENOUGH), (200, 4.0, LONG_ENOUGH)):
        for _ in range(count):
            first.layers(rows).begin_step()
            first.layers(rows).note("both", 1.0, 1.0 + seconds)
            first.layers(rows).end_step()
    learned = Learned(COSTS, first.corrections)
    assert learned.in_force(1).costs.both == 0.5
    assert learned.in_force(255).costs.both == 4.0, "rows of the same power of two"
    assert learned.corrections == first.corrections
    assert learned.in_force(64).costs == COSTS
