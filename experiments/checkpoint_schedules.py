"""Monte Carlo of a training job that fails: how much time each checkpoint schedule loses.

    python -m experiments.checkpoint_schedules --gpus 8 --gpus 1024          ten seconds for all sizes, any CPU

Failures come at random (exponential gaps); each has a severity, the nearest level whose copies survive it. Between two
failures the job works, stalls for its saves, and a save counts at a level once it is durable there. After a failure the
job restores the newest copy that survived and repeats what was lost. The waste is the share of time that is not first-
time work. The schedules compared: ours (every level at its own interval, nested), and remote storage alone, which
survives everything: in the background at Daly's interval, with the costs of our own remote level; waiting for it at
Daly's interval; waiting for it at fixed intervals. All have the same failures.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoestring.report import Table
from shoestring.state.levels.policy import GPU_MTTF_HOURS, LEVELS, SHARES, Cost, make_plan

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


Save = tuple[float, tuple[str, ...]]  # seconds of work since the save before it (or the start), its levels


@dataclass(frozen=True)
class SaveSchedule:
    """What is saved after a start or a restart, for ever."""

    saves: Callable[[], Iterator[Save]]
    costs: Mapping[str, Cost]

    def stall(self, levels: Sequence[str]) -> float:
        return sum(self.costs[level].stall_s for level in levels)


def daly_interval(stall_s: float, mttf_s: float) -> float:
    """Daly's higher-order interval for one level (as SCR computes it)."""
    if stall_s >= 2 * mttf_s:
        return mttf_s
    x = stall_s / (2 * mttf_s)
    return math.sqrt(2 * stall_s * mttf_s) * (1 + math.sqrt(x) / 3 + x / 9) - stall_s


def failure_per_s(num_gpus: int) -> float:
    return num_gpus / (GPU_MTTF_HOURS * 3600)


def regular(tau: float, every: Mapping[str, int], costs: Mapping[str, Cost]) -> SaveSchedule:
    """Every `tau` seconds of work a save; the k-th goes to each level whose `every` divides k."""

    def saves() -> Iterator[Save]:
        for k in itertools.count(1):
            yield tau, tuple(level for level, number in every.items() if k % number == 0)

    return SaveSchedule(saves, costs)


def planned(
    costs: Mapping[str, Cost], rates: Mapping[str, float], step_s: float = 1.0, budget: float = 0.01
) -> SaveSchedule:
    """As the checkpointer does it: the plan is made anew at every save, and the first save comes after two steps."""
    stall = SaveSchedule(lambda: iter(()), costs).stall

    def saves() -> Iterator[Save]:
        final = make_plan(costs, rates, step_s, budget)
        since, work, elapsed = dict.fromkeys(costs, 0), 2 * step_s, 0.0
        plan = None
        for k in itertools.count(1):
            elapsed += work
            if plan != final:
                plan = make_plan(costs, rates, step_s, budget, elapsed_s=elapsed)
            levels = plan.levels_due(since)
            if k == 1 and "disk" in costs and "disk" not in levels:
                levels = (*levels, "disk")
            yield work, levels
            since = {level: plan.period + (0 if level in levels else steps) for level, steps in since.items()}
            elapsed += stall(levels)
            work = plan.period * step_s

    return SaveSchedule(saves, costs)


def ours(num_gpus: int) -> SaveSchedule:
    total = failure_per_s(num_gpus)
    return planned(COSTS, {level: total * SHARES[level] for level in LEVELS})


def blocking(tau: float) -> SaveSchedule:
    """Saves that wait for remote storage."""
    return regular(tau, {"remote": 1}, {"remote": Cost(BLOCKING_S, 0.0, COSTS["remote"].restore_s)})


def background(mttf_s: float) -> SaveSchedule:
    """Saves to remote storage beside the training, one at a time."""
    cost = COSTS["remote"]
    return regular(max(daly_interval(cost.stall_s, mttf_s), cost.drain_s), {"remote": 1}, {"remote": cost})


def wasted(schedule: SaveSchedule, failures: Sequence[tuple[float, str]]) -> float:
    """The share of time lost over a job that sees these (seconds since the last, severity) failures."""
    # Of every level: when each save is durable, and the work that it holds, both since the start.
    durable: dict[str, list[float]] = {level: [0.0] for level in schedule.costs}
    held: dict[str, list[float]] = {level: [0.0] for level in schedule.costs}
    longest, work, now = max(gap for gap, _ in failures), 0.0, 0.0
    for seconds, levels in schedule.saves():
        work += seconds
        now += seconds + schedule.stall(levels)
        for level in levels:
            durable[level].append(now + schedule.costs[level].drain_s)
            held[level].append(work)
        if now > longest:
            break
    progress = total = 0.0
    copies = dict.fromkeys(schedule.costs, 0.0)  # work that the newest durable copy of each level holds
    for gap, severity in failures:
        for level in copies:
            if (newest := bisect_right(durable[level], gap) - 1) > 0:
                copies[level] = progress + held[level][newest]
        surviving = [one for one in copies if LEVELS.index(one) >= LEVELS.index(severity)]
        source = max(surviving or list(copies), key=lambda one: copies[one])
        progress = copies[source]
        for level in copies:
            if level not in surviving:
                copies[level] = progress  # what is nearer was lost, and starts from what was restored
        total += gap + schedule.costs[source].restore_s
    return 1 - progress / total


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
            "remote, async (Daly)": background(mttf),
            "remote, waits (Daly)": blocking(daly_interval(BLOCKING_S, mttf)),
            **{f"remote, waits, {tau / 60:.0f} min": blocking(tau) for tau in FIXED_S},
        }
        for name, schedule in schedules.items():
            found.setdefault(name, []).append(wasted(schedule, drawn))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, action="append", help="number of GPUs; may be repeated")
    parser.add_argument("--failures", type=int, default=2000, help="to draw for each number of GPUs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sizes = tuple(sorted(set(args.gpus or NUM_GPUS)))
    found = compare(sizes, args.failures, args.seed)
    rows = [[num, *(f"{found[name][i]:.1%}" for name in found)] for i, num in enumerate(sizes)]
    note = f"Share of time that is not first-time work; {args.failures:,} failures at each size, the same for all."
    Table("Time lost", ["GPUs", *found], rows, note).print()


if __name__ == "__main__":
    main()
