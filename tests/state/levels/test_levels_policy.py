"""Intervals of the levels: bounds, nesting, the posterior of the failure rate."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.checkpoint_schedules import planned, regular, wasted
from shoestring.state.levels.policy import (
    EARLY_SHARE,
    LEVELS,
    Cost,
    Mean,
    Rate,
    best_interval,
    duration,
    explain,
    make_plan,
    margin_steps,
    predicted_waste,
    prior_rates,
)

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
    names = tuple(i.level for i in plan.intervals)
    for save in (1, 2, 3, math.prod(i.multiple for i in plan.intervals[1:])):
        levels_then = plan.levels_due(dict.fromkeys(names, save * plan.period))
        assert levels_then == names[: len(levels_then)] and levels_then
    assert levels_then == names
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


def worst_losses(cost: Cost, rate: float, step_s: float, budget: float) -> Iterator[tuple[float, float, int]]:
    """At the last moment before each save is durable: (seconds since the start, work that a crash would lose, saves
    begun)."""
    work = now = held = 0.0
    for k, (seconds, _) in enumerate(planned({"memory": cost}, {"memory": rate}, step_s, budget).saves(), 1):
        work, now = work + seconds, now + seconds + cost.stall_s
        yield now + cost.drain_s, work + cost.drain_s - held, k
        held = work


@given(COSTS, RATES, SECONDS, st.floats(1e-3, 0.5))
@settings(max_examples=100, deadline=None)
def test_a_crash_at_any_time_loses_a_tenth_of_the_run_or_what_saving_costs(
    cost: Cost, rate: float, step_s: float, budget: float
) -> None:
    margin = margin_steps(cost, step_s) * step_s
    least = max(cost.drain_s, cost.stall_s / budget)
    floor = max(2 * margin, margin + least) + 2 * step_s
    for now, lost, saves in itertools.islice(worst_losses(cost, rate, step_s, budget), 60):
        assert lost <= max(EARLY_SHARE * now, floor) * (1 + 1e-6)
        assert (saves - 1) * cost.stall_s <= budget * now * (1 + 1e-6)  # the first save is free


@pytest.mark.parametrize("drain_s", [10.0, 120.0])
def test_the_first_saves_to_disk_come_one_at_a_time(drain_s: float) -> None:
    """Though those to memory are close together at first."""
    costs = {"memory": Cost(0.005, 0.02), "disk": Cost(0.001, drain_s)}
    rates = {level: rate.per_s for level, rate in prior_rates(("memory", "disk"), 1).items()}
    now, times = 0.0, []
    for seconds, levels in itertools.islice(planned(costs, rates, 0.1).saves(), 80):
        now += seconds
        times += [now] if "disk" in levels else []
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(gaps) > 3 and min(gaps) > 0.9 * drain_s


def test_a_tiny_run_that_is_killed_early_loses_little() -> None:
    """Steps of 0.1 s and saves of 5 ms: Young's interval would be half a minute."""
    rate = prior_rates(("memory", "disk"), 1)["memory"].per_s
    assert math.sqrt(2 * 0.005 / rate) > 30
    losses = itertools.takewhile(lambda at: at[0] < 25 * 0.1, worst_losses(Cost(0.005, 0.02), rate, 0.1, 0.01))
    assert max(lost for _, lost, _ in losses) < 0.75
    # What that costs where failures do not come early: next to nothing.
    cost, draw = {"memory": Cost(0.005)}, random.Random(0)
    failures = [(draw.expovariate(rate), "memory") for _ in range(300)]
    young = regular(math.sqrt(2 * 0.005 / rate), {"memory": 1}, cost)
    assert wasted(planned(cost, {"memory": rate}, 0.1), failures) == pytest.approx(wasted(young, failures), rel=0.1)


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


def test_durations_for_people() -> None:
    assert [duration(s) for s in (0.0123, 3.4, 600, 7300)] == ["12.3 ms", "3.4 s", "10 min", "2.03 h"]
