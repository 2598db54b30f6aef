"""Intervals of the levels: bounds, nesting, the posterior of the failure rate; the simulator against the formula."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.state.levels.policy import (
    LEVELS,
    Cost,
    Mean,
    Rate,
    best_interval,
    daly_interval,
    duration,
    explain,
    make_plan,
    predicted_waste,
    prior_rates,
)
from shoestring.state.levels.simulate import SaveSchedule, compare, draw_failures, wasted

SECONDS = st.floats(1e-4, 1e4)
COSTS = st.builds(Cost, SECONDS, SECONDS, SECONDS)
RATES = st.floats(1e-8, 1e-2)


@given(st.dictionaries(st.sampled_from(LEVELS), st.tuples(COSTS, RATES), min_size=1), SECONDS, st.floats(1e-3, 0.5))
@settings(max_examples=100, deadline=None)
def test_a_plan_keeps_its_bounds_and_nests(levels: dict, step_s: float, budget: float) -> None:
    plan = make_plan({k: c for k, (c, _) in levels.items()}, {k: r for k, (_, r) in levels.items()}, step_s, budget)
    assert [i.level for i in plan.intervals] == [one for one in LEVELS if one in levels]
    below = step_s
    for i in plan.intervals:
        assert i.multiple >= 1 and i.seconds == pytest.approx(i.multiple * below)
        assert i.seconds >= max(i.cost.drain_s, i.cost.stall_s / budget, step_s) * (1 - 1e-6)
        assert i.steps >= 1
        below = i.seconds if i is not plan.intervals[0] else plan.period * step_s
    # A save that begins after every period is durable before the interval is over, and one is under way at a time.
    durable = plan.intervals[0].cost.drain_s
    assert plan.period >= plan.margin >= 1 and plan.margin * step_s >= durable * (1 - 1e-6)
    # A save of a level is one of every nearer level too, so that it copies what is there.
    for save in (1, 2, 3, math.prod(i.multiple for i in plan.intervals[1:])):
        levels_then = plan.levels_at(save)
        assert levels_then == tuple(i.level for i in plan.intervals)[: len(levels_then)] and levels_then
    assert len(explain(plan)) == len(levels)


@given(COSTS, RATES)
@settings(max_examples=100, deadline=None)
def test_the_interval_of_a_free_level_is_youngs_and_no_other_is_better(cost: Cost, rate: float) -> None:
    free = Cost(cost.stall_s)
    tau, because = best_interval(free, rate, step_s=1e-9, budget=1.0)
    if because.startswith("sqrt"):
        assert tau == pytest.approx(math.sqrt(2 * cost.stall_s / rate))
        least = predicted_waste({"memory": (free, tau)}, {"memory": rate})
        for other in (0.5, 0.9, 1.1, 2.0):
            assert predicted_waste({"memory": (free, tau * other)}, {"memory": rate}) >= least


def test_the_failure_rate_follows_what_happens() -> None:
    rate = Rate(prior_s=3600.0)
    assert rate.per_s == 1 / 3600
    assert rate.after(36000.0).per_s == pytest.approx(1 / 39600)  # ten quiet hours
    assert rate.after(36000.0, events=10).per_s == pytest.approx(11 / 39600)
    assert rate.after(-5.0).per_s == rate.per_s  # a clock that jumped back
    assert rate.after(1e9, events=1000).per_s == pytest.approx(1e-6, rel=0.01)  # the prior is forgotten


def test_unused_levels_hand_their_failures_on() -> None:
    all_levels = prior_rates(LEVELS, 1024)
    two = prior_rates(("memory", "disk"), 1024)
    assert two["memory"].per_s == pytest.approx(all_levels["memory"].per_s)
    assert sum(r.per_s for r in two.values()) == pytest.approx(sum(r.per_s for r in all_levels.values()))
    assert prior_rates(("memory",), 8, mttf_hours=1.0)["memory"].per_s == pytest.approx(1 / 3600)


def test_running_means_follow_a_change() -> None:
    mean = Mean()
    for _ in range(3):
        mean = mean.after(1.0)
    assert mean.value == pytest.approx(1.0)
    for _ in range(20):
        mean = mean.after(5.0)
    assert 4.9 < mean.value < 5.0


def test_the_simulator_agrees_with_the_formula() -> None:
    """A failure an hour, 75/20/5 % by severity; stalls and restores as in the research note: about 6 % are lost."""
    costs = {"memory": Cost(0.2, 0, 20), "peer": Cost(2.0, 0, 60), "remote": Cost(30.0, 0, 400)}
    shares = {"memory": 0.75, "peer": 0.20, "remote": 0.05}
    plan = make_plan(costs, {k: s / 3600 for k, s in shares.items()}, 1.0, budget=1.0)
    assert [round(i.seconds) for i in plan.intervals] == pytest.approx([44, 268, 2078], rel=0.1)
    every = {"memory": 1, "peer": plan.intervals[1].multiple}
    every["remote"] = every["peer"] * plan.intervals[2].multiple
    import random

    draw = random.Random(0)
    failures = [(draw.expovariate(1 / 3600), draw.choices([*shares], [*shares.values()])[0]) for _ in range(20000)]
    simulated = wasted(SaveSchedule(plan.intervals[0].seconds, every, costs), failures)
    assert simulated == pytest.approx(plan.waste, rel=0.1) and 0.055 < simulated < 0.07
    young = SaveSchedule(daly_interval(30.0, 3600.0), {"remote": 1}, {"remote": costs["remote"]})
    assert wasted(young, failures) > 0.18  # one level, at its own best interval


def test_levels_lose_less_than_every_single_schedule_at_every_size() -> None:
    found = compare((8, 1024, 16384), failures=400)
    mine = found.pop("per level (ours)")
    assert all(mine[i] < other[i] for other in found.values() for i in range(3))
    assert mine[2] < 0.5 * min(other[2] for other in found.values())
    assert draw_failures(64, 3, seed=1) == draw_failures(64, 3, seed=1)


def test_durations_for_people() -> None:
    assert [duration(s) for s in (0.0123, 3.4, 600, 7300)] == ["12.3 ms", "3.4 s", "10 min", "2.03 h"]
