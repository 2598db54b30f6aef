"""The schedule: which sender takes which job, and in which order.

A resource (one direction of an interface, or of a rank's fast link) does one job at a time. A job holds the chosen
sender and all of its receivers for its whole duration; forwarding inside the job is pipelined. Find senders and an
order with a short makespan:

`greedy` makes rounds of jobs that share no resource, each round the best of many random scans (Alpa's rule: most jobs,
then the most even load of the senders), and two list schedules; the shortest counts. It counts work instead of time, so
that every rank that plans gets the same schedule. `bound` is a makespan that no schedule of these jobs beats.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SCANS = 100  # of a round of the greedy schedule, at most
SCAN_WORK = 150_000  # jobs looked at in all scans together: about 0.2 s
LIST_WORK = 400_000  # the same for the list schedule by earliest start


@dataclass(frozen=True)
class Job:
    """`costs[i]` seconds when `senders[i]` sends; `receivers` and `forwarders` are held as well."""

    senders: tuple[str, ...]
    costs: tuple[float, ...]
    receivers: tuple[str, ...]
    forwarders: tuple[str, ...] = ()

    @property
    def least(self) -> float:
        return min(self.costs)

    @property
    def held(self) -> tuple[str, ...]:
        return self.receivers + self.forwarders


@dataclass(frozen=True)
class JobSchedule:
    """`order` of the jobs; for each job (not in that order) the sender's place in its list, start and stop."""

    order: tuple[int, ...]
    sender: tuple[int, ...]
    start: tuple[float, ...]
    stop: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(self.stop, default=0.0)


def simulate(jobs: Sequence[Job], order: Sequence[int], sender: Sequence[int]) -> JobSchedule:
    """Every job starts when all its resources have done what precedes it in `order`."""
    free: dict[str, float] = {}
    start, stop = [0.0] * len(jobs), [0.0] * len(jobs)
    for i in order:
        job, choice = jobs[i], sender[i]
        held = (job.senders[choice], *job.held)
        start[i] = max(free.get(r, 0.0) for r in held)
        stop[i] = start[i] + job.costs[choice]
        for r in held:
            free[r] = stop[i]
    return JobSchedule(tuple(order), tuple(sender), tuple(start), tuple(stop))


def bound(jobs: Sequence[Job]) -> float:
    """No schedule is shorter: what each receiver must take in, what the holders of a set of jobs must send."""
    taken: dict[str, float] = {}
    groups: dict[frozenset[str], float] = {}
    for job in jobs:
        for r in job.receivers:
            taken[r] = taken.get(r, 0.0) + job.least
        key = frozenset(job.senders)
        groups[key] = groups.get(key, 0.0) + job.least
    sets = list(groups) if len(groups) <= 256 else []
    if groups:
        sets.append(frozenset().union(*groups))
    sent = [sum(cost for inner, cost in groups.items() if inner <= outer) / len(outer) for outer in sets]
    return max([*taken.values(), *sent, *(job.least for job in jobs)], default=0.0)


def greedy(jobs: Sequence[Job], seed: int = 0) -> JobSchedule:
    """The shortest of the list schedules and, for not too many jobs, of the rounds."""
    longest_first = sorted(range(len(jobs)), key=lambda i: (-jobs[i].least, i))
    found = [_listed(jobs, longest_first)]
    limit = bound(jobs) * (1 + 1e-9)
    if found[0].makespan > limit and len(jobs) ** 2 <= LIST_WORK:
        found.append(_earliest_first(jobs))
    if min(s.makespan for s in found) > limit and 2 * len(jobs) <= SCAN_WORK:
        found.append(_rounds(jobs, seed))
    return min(found, key=lambda s: s.makespan)


def _choose(job: Job, free: dict[str, float]) -> tuple[float, int]:
    """The earliest (stop, place of the sender)."""
    ready = max((free.get(r, 0.0) for r in job.held), default=0.0)
    return min((max(ready, free.get(s, 0.0)) + c, free.get(s, 0.0), i) for i, (s, c) in _choices(job))[::2]  # type: ignore[return-value]


def _choices(job: Job) -> list[tuple[int, tuple[str, float]]]:
    return list(enumerate(zip(job.senders, job.costs, strict=True)))


def _listed(jobs: Sequence[Job], order: Sequence[int]) -> JobSchedule:
    free: dict[str, float] = {}
    sender = [0] * len(jobs)
    for i in order:
        stop, sender[i] = _choose(jobs[i], free)
        for r in (jobs[i].senders[sender[i]], *jobs[i].held):
            free[r] = stop
    return simulate(jobs, order, sender)


def _earliest_first(jobs: Sequence[Job]) -> JobSchedule:
    """Always the job that can start first; of those the one whose receivers have most left to take."""
    free: dict[str, float] = {}
    to_take: dict[str, float] = {}
    users: dict[str, list[int]] = {}  # of each resource
    for i, job in enumerate(jobs):
        for r in job.receivers:
            to_take[r] = to_take.get(r, 0.0) + job.least
        for r in {*job.senders, *job.held}:
            users.setdefault(r, []).append(i)

    def offer(i: int) -> tuple[tuple[float, float, int], int, float]:
        """What job i would do now: (start, -rest of its receivers, i), place of the sender, stop."""
        stop, place = _choose(jobs[i], free)
        rest = max((to_take[r] for r in jobs[i].receivers), default=0.0)
        return (stop - jobs[i].costs[place], -rest, i), place, stop

    left = {i: offer(i) for i in range(len(jobs))}
    order, sender = [], [0] * len(jobs)
    while left:
        (_, _, i), place, stop = min(left.values())
        del left[i]
        order.append(i)
        sender[i] = place
        used = (jobs[i].senders[place], *jobs[i].held)
        for r in used:
            free[r] = stop
        for r in jobs[i].receivers:
            to_take[r] -= jobs[i].least
        for other in {k for r in used for k in users[r] if k in left}:  # for all others nothing has changed
            left[other] = offer(other)
    return simulate(jobs, order, sender)


def _rounds(jobs: Sequence[Job], seed: int) -> JobSchedule:
    draw = random.Random(seed)
    left, load = list(range(len(jobs))), {s: 0.0 for job in jobs for s in job.senders}
    order: list[int] = []
    sender = [0] * len(jobs)
    work = SCAN_WORK
    while left:
        best: tuple[tuple[float, float], list[tuple[int, int]], dict[str, float]] | None = None
        # Rounds are at least as many as the jobs of the busiest resource; assume a quarter of the jobs fit each.
        for _ in range(max(1, min(SCANS, work // (4 * len(left))))):
            work -= len(left)
            scan = _scan(jobs, draw.sample(left, len(left)), load, draw)
            if best is None or scan[0] < best[0]:
                best = scan
        assert best is not None
        _, taken, load = best
        for i, place in taken:
            order.append(i)
            sender[i] = place
        gone = {i for i, _ in taken}
        left = [i for i in left if i not in gone]
    return simulate(jobs, order, sender)


def _scan(
    jobs: Sequence[Job], order: Sequence[int], load: dict[str, float], draw: random.Random
) -> tuple[tuple[float, float], list[tuple[int, int]], dict[str, float]]:
    """Jobs that share no resource, taken in `order`; the key is smaller for better rounds."""
    busy: set[str] = set()
    load, taken = dict(load), []
    for i in order:
        job = jobs[i]
        if not busy.isdisjoint(job.held):
            continue
        idle = [(place, s) for place, s in enumerate(job.senders) if s not in busy]
        if not idle:
            continue
        if len(idle) == 1:
            place, chosen = idle[0]
        else:
            most = max(load[s] for s in job.senders)
            scale = most or 1.0
            place, chosen = draw.choices(idle, [(most - load[s]) / scale + 1e-3 for _, s in idle])[0]
        busy.add(chosen)
        busy.update(job.held)
        load[chosen] += job.costs[place]
        taken.append((i, place))
    mean = sum(load.values()) / len(load)
    return (-len(taken), sum((v - mean) ** 2 for v in load.values())), taken, load
