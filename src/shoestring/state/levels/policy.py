"""How often each level of checkpoints is saved: pure arithmetic on measured costs and observed failures.

A level is a place that a copy of the training state survives in: `memory` of the own host (a process crash), `peer`
memory (the loss of a host), `disk`, `remote` storage. Saving at level l stalls training for C_l seconds, is durable
D_l seconds later, and is restored in R_l seconds; failures whose nearest surviving copy is at level l come at the rate
lambda_l. To first order the share of time that is lost is

    waste = sum_l [ C_l / tau_l + lambda_l (tau_l / 2 + D_l + R_l) ]        (Young, per level)

and each level's own best interval is tau_l = sqrt(2 C_l / lambda_l), never below D_l (one save at a time), the step
time, and C_l / budget. Intervals are nested: each is a whole multiple of the one before, so that a higher level copies
what a lower one holds already.

The formula holds for failures that do not depend on time. Many runs fail in their first minutes, when an interval of
the formula would lose most of what was done. So the nearest level is also saved after every tenth of the time since
the start, as far as the other bounds allow. That is some 24 saves for each factor of ten in time, until the formula's
interval is the shorter one.

Rates start from a prior and follow the events: lambda_l = (1 + events) / (prior mean time to failure + time observed),
the mean of a Gamma posterior. All times are seconds. Left out: doing any of it (pace.py, measured.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

LEVELS = ("memory", "peer", "disk", "remote")  # nearest first
# Shares of failures by what survives them, at a thousand GPUs and more: most are crashes of processes, which leave the
# memory of the host alone (DLRover), then single hosts, then racks.
SHARES = {"memory": 0.75, "peer": 0.20, "disk": 0.04, "remote": 0.01}
# Reported: 7.9 hours at 1,024 GPUs. Llama 3 (419 interruptions in 54 days on 16,384 GPUs) would give 50,000.
GPU_MTTF_HOURS = 8000.0
EARLY_SHARE = 0.1  # of the time since the start: the most that a crash may lose, where saves are cheap enough
JOB_MTTF_HOURS = 24.0  # what does not grow with the number of GPUs: defects, full memory, a machine that is taken away


@dataclass(frozen=True)
class Cost:
    """Seconds that one save stalls training, that it takes to be durable, and that a restore takes."""

    stall_s: float
    drain_s: float = 0.0
    restore_s: float = 0.0


@dataclass(frozen=True)
class Rate:
    """Failures that a level must answer for: a Gamma posterior over events per second."""

    prior_s: float  # mean time to such a failure before anything was observed
    events: int = 0
    observed_s: float = 0.0

    @property
    def per_s(self) -> float:
        return (1 + self.events) / (self.prior_s + self.observed_s)

    def after(self, seconds: float, events: int = 0) -> Rate:
        return replace(self, observed_s=self.observed_s + max(seconds, 0.0), events=self.events + events)


@dataclass(frozen=True)
class Mean:
    """A running mean: plain over the first few, then the newest counts a fifth."""

    value: float = 0.0
    count: int = 0

    def after(self, seen: float) -> Mean:
        weight = max(1 / (self.count + 1), 0.2)
        return Mean(self.value + weight * (seen - self.value), self.count + 1)


@dataclass(frozen=True)
class Interval:
    """What was chosen for one level, and which of the bounds decided."""

    level: str
    seconds: float
    multiple: int  # of the level before it; of the step for the first
    steps: int
    because: str
    cost: Cost
    per_hour: float  # failures that this level answers for


@dataclass(frozen=True)
class IntervalPlan:
    intervals: tuple[Interval, ...]
    step_s: float
    waste: float = field(default=0.0)  # predicted share of time lost

    def levels_due(self, since: Mapping[str, int]) -> tuple[str, ...]:
        """The levels that a save goes to, nearest first. `since`: steps since the last save of a level. The save that
        is nearest to the end of a level's interval goes to it, and to all nearer levels. (Steps, not saves: saves are
        closer together in the first minutes.)"""
        due = [n for n, one in enumerate(self.intervals) if since[one.level] >= one.steps - self.period // 2]
        return tuple(interval.level for interval in self.intervals[: max(due, default=0) + 1])

    @property
    def steps(self) -> int:
        """The interval of the nearest level in steps: a crash loses no more. A save begins `margin` steps earlier."""
        return self.intervals[0].steps

    @property
    def margin(self) -> int:
        """Steps that a save of the nearest level has to become durable."""
        return margin_steps(self.intervals[0].cost, self.step_s)

    @property
    def period(self) -> int:
        """Steps from one save to the next."""
        return self.steps - self.margin


def prior_rates(levels: Sequence[str], num_gpus: int, mttf_hours: float | None = None) -> dict[str, Rate]:
    """Rates before anything was seen. The share of a level that is not used falls to the next one that is."""
    per_hour = 1 / mttf_hours if mttf_hours else 1 / JOB_MTTF_HOURS + num_gpus / GPU_MTTF_HOURS
    shares = dict.fromkeys(levels, 0.0)
    for level, share in SHARES.items():
        taker = next((one for one in LEVELS[LEVELS.index(level) :] if one in shares), levels[-1])
        shares[taker] += share
    return {level: Rate(3600.0 / (per_hour * max(share, 1e-6))) for level, share in shares.items()}


def margin_steps(cost: Cost, step_s: float) -> int:
    """Half as many steps again as a save takes to be durable, because it does not always take the same time."""
    return max(1, math.ceil(1.5 * cost.drain_s / step_s - 1e-9))


def best_interval(
    cost: Cost, rate: float, step_s: float, budget: float, elapsed_s: float = math.inf
) -> tuple[float, str]:
    """(seconds, the bound that decided) for one level on its own, so many seconds after the start."""
    wanted = {
        "sqrt(2 x stall / failure rate)": math.sqrt(2 * cost.stall_s / rate),
        f"{EARLY_SHARE:.0%} of the time since the start": EARLY_SHARE * elapsed_s,
    }
    shorter = min(wanted, key=lambda name: wanted[name])
    bounds = {
        shorter: wanted[shorter],
        "the time one save takes to be durable": cost.drain_s,
        "one step": step_s,
        f"the overhead budget of {budget:.1%}": cost.stall_s / budget,
    }
    because = max(bounds, key=lambda name: bounds[name])
    return bounds[because], because


def make_plan(
    costs: Mapping[str, Cost],
    rates: Mapping[str, float],
    step_s: float,
    budget: float = 0.01,
    least_period_s: float = 0.0,
    elapsed_s: float = math.inf,
) -> IntervalPlan:
    """Intervals of the levels in `costs` (nearest first): each best on its own, then rounded to whole multiples.

    `least_period_s`: between two saves of the nearest level, because its slots are read for so long. `elapsed_s`:
    since the run was started or resumed.
    """
    assert step_s > 0 and 0 < budget <= 1
    intervals: list[Interval] = []
    below = step_s
    for level in (one for one in LEVELS if one in costs):
        cost, rate = costs[level], rates[level]
        seconds, because = best_interval(cost, rate, step_s, budget, math.inf if intervals else elapsed_s)
        least = max(cost.drain_s, cost.stall_s / budget)  # rounding may not break these
        multiple = max(1, round(seconds / below), math.ceil(least / below - 1e-9))
        # A save of the nearest level begins `margin` steps before its interval ends, so that it is durable by then;
        # one save at a time, and no more of them than the budget allows.
        margin = 0 if intervals else margin_steps(cost, step_s)
        if not intervals:
            multiple = max(multiple, 2 * margin, margin + math.ceil(max(least, least_period_s) / below - 1e-9))
        tau = multiple * below
        intervals.append(Interval(level, tau, multiple, round(tau / step_s), because, cost, rate * 3600))
        below = tau - margin * step_s
    waste = predicted_waste({i.level: (i.cost, i.seconds) for i in intervals}, rates)
    return IntervalPlan(tuple(intervals), step_s, waste)


def predicted_waste(levels: Mapping[str, tuple[Cost, float]], rates: Mapping[str, float]) -> float:
    """The first-order share of time lost; the formula at the top of this file."""
    return sum(
        cost.stall_s / tau + rates[level] * (tau / 2 + cost.drain_s + cost.restore_s)
        for level, (cost, tau) in levels.items()
    )


def explain(plan: IntervalPlan) -> list[list[str]]:
    """One row per level: level, interval, steps, stall, durable after, failures an hour, reason."""
    return [
        [
            i.level,
            duration(i.seconds),
            f"{i.steps:,}",
            duration(i.cost.stall_s),
            duration(i.cost.drain_s),
            f"{i.per_hour:.3g}",
            i.because + ("" if i is plan.intervals[0] else f", {i.multiple} saves of the level above"),
        ]
        for i in plan.intervals
    ]


EXPLAINED = ["level", "interval", "steps", "stall", "durable after", "failures per hour", "decided by"]


def duration(seconds: float) -> str:
    """Seconds for people: 12 ms, 3.4 s, 5.1 min, 2.0 h."""
    for limit, unit, name in ((1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 3600:.3g} h"
