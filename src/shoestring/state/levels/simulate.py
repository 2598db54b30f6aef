"""Monte Carlo of a training job that fails: how much time each checkpoint schedule loses.

Failures come at random (exponential gaps); each has a severity, the nearest level whose copies survive it. Between two
failures the job works, stalls for its saves, and a save counts at a level once it is durable there. After a failure the
job restores the newest copy that survived and repeats what was lost. The waste is the share of time that is not first-
time work. The schedules compared: ours (every level at its own interval, nested), the best single level (Daly), and
fixed intervals. All have the same failures and restores; those with a single level wait for remote storage.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoestring.state.levels.policy import GPU_MTTF_HOURS, LEVELS, SHARES, Cost, daly_interval, make_plan

# A job of eight GPUs per host: seconds, assumed (measured, a save to memory stalled 0.03 to 0.05 s). Restores include
# the restart.
COSTS = {
    "memory": Cost(0.2, 1.0, 20.0),
    "peer": Cost(2.0, 15.0, 60.0),
    "disk": Cost(2.0, 30.0, 120.0),
    "remote": Cost(5.0, 120.0, 400.0),
}
BLOCKING_S = 30.0  # a save that waits until remote storage has everything
FIXED_S = (600.0, 1800.0, 7200.0)
NUM_GPUS = tuple(2**k for k in range(3, 15))


@dataclass(frozen=True)
class SaveSchedule:
    """Every `tau` seconds of work a save; the k-th goes to each level whose `every` divides k."""

    tau: float
    every: Mapping[str, int]  # level -> number of saves between two of that level
    costs: Mapping[str, Cost]


def failure_per_s(num_gpus: int) -> float:
    return num_gpus / (GPU_MTTF_HOURS * 3600)


def ours(num_gpus: int, budget: float = 0.01, step_s: float = 1.0) -> SaveSchedule:
    total = failure_per_s(num_gpus)
    plan = make_plan(COSTS, {level: total * SHARES[level] for level in LEVELS}, step_s, budget)
    every, product = {}, 1
    for i, interval in enumerate(plan.intervals):
        product *= interval.multiple if i else 1
        every[interval.level] = product
    return SaveSchedule(plan.intervals[0].seconds, every, COSTS)


def single_level(tau: float, stall_s: float = BLOCKING_S) -> SaveSchedule:
    """One level only, which survives everything: saves that wait for remote storage."""
    cost = Cost(stall_s, 0.0, COSTS["remote"].restore_s)
    return SaveSchedule(tau, {"remote": 1}, {"remote": cost})


def wasted(schedule: SaveSchedule, failures: Sequence[tuple[float, str]]) -> float:
    """The share of time lost over a job that sees these (seconds since the last, severity) failures."""
    progress = total = 0.0
    copies = dict.fromkeys(schedule.every, 0.0)  # work that the newest durable copy of each level holds
    for gap, severity in failures:
        base, saves = progress, _saves_within(schedule, gap)
        stalled = _stall(schedule, saves)
        # Time runs out in the work after the last save, or within the save that follows it.
        progress = base + saves * schedule.tau + min(gap - saves * schedule.tau - stalled, schedule.tau)
        for level, every in schedule.every.items():
            last = saves // every * every
            while last > 0 and last * schedule.tau + _stall(schedule, last) + schedule.costs[level].drain_s > gap:
                last -= every
            if last > 0:
                copies[level] = base + last * schedule.tau
        surviving = [one for one in schedule.every if LEVELS.index(one) >= LEVELS.index(severity)]
        source = max(surviving or list(schedule.every), key=lambda one: copies[one])
        progress = copies[source]
        for level in schedule.every:
            if level not in surviving:
                copies[level] = progress  # what is nearer was lost, and starts from what was restored
        total += gap + schedule.costs[source].restore_s
    return 1 - progress / total


def _stall(schedule: SaveSchedule, saves: int) -> float:
    return sum(schedule.costs[level].stall_s * (saves // every) for level, every in schedule.every.items())


def _saves_within(schedule: SaveSchedule, seconds: float) -> int:
    """Saves that are finished within so many seconds of work and stalls."""
    low, high = 0, int(seconds / schedule.tau) + 1
    while low < high:
        middle = (low + high + 1) // 2
        if middle * schedule.tau + _stall(schedule, middle) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


def draw_failures(num_gpus: int, number: int, seed: int) -> list[tuple[float, str]]:
    draw = random.Random(f"{seed}/{num_gpus}")
    names, weights = list(SHARES), list(SHARES.values())
    rate = failure_per_s(num_gpus)
    return [(draw.expovariate(rate), draw.choices(names, weights)[0]) for _ in range(number)]


def compare(num_gpus: Sequence[int] = NUM_GPUS, failures: int = 2000, seed: int = 0) -> dict[str, list[float]]:
    """{schedule: waste at each number of GPUs}, every schedule under the same failures."""
    found: dict[str, list[float]] = {}
    for num in num_gpus:
        drawn = draw_failures(num, failures, seed)
        mttf = 1 / failure_per_s(num)
        schedules = {
            "per level (ours)": ours(num),
            "Daly, remote only": single_level(daly_interval(BLOCKING_S, mttf)),
            **{f"fixed, every {tau / 60:.0f} min": single_level(tau) for tau in FIXED_S},
        }
        for name, schedule in schedules.items():
            found.setdefault(name, []).append(wasted(schedule, drawn))
    return found
