"""The Monte Carlo of checkpoint schedules against the formula, and what its table says."""

from __future__ import annotations

import random

import pytest

from experiments.checkpoint_schedules import compare, daly_interval, draw_failures, regular, wasted
from shoestring.state.levels.policy import Cost, make_plan


def test_the_simulator_agrees_with_the_formula() -> None:
    """A failure an hour, 75/20/5 % by severity; stalls and restores as in the research note: about 6 % are lost."""
    costs = {"memory": Cost(0.2, 0, 20), "peer": Cost(2.0, 0, 60), "remote": Cost(30.0, 0, 400)}
    shares = {"memory": 0.75, "peer": 0.20, "remote": 0.05}
    plan = make_plan(costs, {k: s / 3600 for k, s in shares.items()}, 1.0, budget=1.0)
    assert [round(i.seconds) for i in plan.intervals] == pytest.approx([44, 268, 2078], rel=0.1)
    every = {"memory": 1, "peer": plan.intervals[1].multiple}
    every["remote"] = every["peer"] * plan.intervals[2].multiple
    draw = random.Random(0)
    failures = [(draw.expovariate(1 / 3600), draw.choices([*shares], [*shares.values()])[0]) for _ in range(20000)]
    simulated = wasted(regular(plan.intervals[0].seconds, every, costs), failures)
    assert simulated == pytest.approx(plan.waste, rel=0.1) and 0.055 < simulated < 0.07
    young = regular(daly_interval(30.0, 3600.0), {"remote": 1}, {"remote": costs["remote"]})
    assert wasted(young, failures) > 0.18  # one level, at its own best interval


def test_levels_lose_less_than_every_single_schedule_at_every_size() -> None:
    found = compare((8, 1024, 16384), failures=400)
    mine = found.pop("per level (ours)")
    assert all(mine[i] < other[i] for other in found.values() for i in range(3))
    assert mine[2] < 0.5 * min(other[2] for other in found.values())
    assert draw_failures(64, 3, seed=1) == draw_failures(64, 3, seed=1)
