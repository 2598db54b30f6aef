"""What the planner of resharding is compared with, and its plans against the bound of the links; simulated.

python -m experiments.reshard_strategies          ten seconds, any CPU

natural order            the same chains, but the first holder sends, in the order of the tasks
a message to each        every receiver also gets its own message
exact                    branch and bound over senders and orders, for few jobs: how far greedy schedules are from it
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.reshard import BENCH, LLAMA_8B, PLANS, moved_tensors
from benchmarks.results import record
from shoestring.errors import as_command
from shoestring.state.reshard.plan import (
    ReshardPlan,
    Route,
    Routed,
    assemble,
    inside,
    job_between,
    make_plan,
    routes_of,
    wire_bound,
)
from shoestring.state.reshard.schedule import Job, JobSchedule, bound, greedy, simulate
from shoestring.state.reshard.tasks import Bundle, MovedTensor, Piece, bundles_of, classes_of
from shoestring.state.reshard.topology import Topology

EXACT_NODES = 30_000  # half a second to a second


def natural(jobs: Sequence[Job]) -> JobSchedule:
    """The first sender for each job, in the given order: what a plan without a schedule does."""
    return simulate(jobs, range(len(jobs)), [0] * len(jobs))


def natural_plan(tensors: Mapping[str, MovedTensor], topology: Topology) -> ReshardPlan:
    classes = tuple(classes_of(tensors))
    bundles = bundles_of(classes)
    copies, routes = routes_of(bundles, topology, classes)
    return assemble(
        classes, copies, routes, natural([job for job, _ in routes]), topology, wire_bound(bundles, topology)
    )


def naive_plan(tensors: Mapping[str, MovedTensor], topology: Topology) -> ReshardPlan:
    """A message to each receiver."""
    classes = tuple(classes_of(tensors))
    bundles = bundles_of(classes)
    kept: dict[int, list[Piece]] = {}
    routes: list[Routed] = []
    for b in bundles:
        own = set(b.senders) & set(b.receivers)
        for rank in sorted(own):
            kept.setdefault(rank, []).extend(b.pieces)
        others = tuple(r for r in b.receivers if r not in own)
        routes += separately(replace(b, receivers=others), topology)
    copies = [(rank, tuple(pieces)) for rank, pieces in sorted(kept.items())]
    times = natural([job for job, _ in routes])
    return assemble(classes, copies, routes, times, topology, wire_bound(bundles, topology))


def separately(b: Bundle, topology: Topology) -> list[Routed]:
    routes: list[Routed] = []
    sender = b.senders[0]
    for rank in b.receivers:
        route = Route("send", replace(b, receivers=(rank,)), (sender,), ((-1, rank),))
        if topology.host(rank) == topology.host(sender):
            routes.append((inside(route.bundle, topology, 0)[0], route))
        else:
            routes.append((job_between((sender,), [rank], b.num_bytes, topology), route))
    return routes


def exact(jobs: Sequence[Job], first: JobSchedule | None = None) -> tuple[JobSchedule, bool]:
    """Branch and bound; whether the result is the optimum, or only the best found within EXACT_NODES."""
    first = first or greedy(jobs)
    limit = bound(jobs) * (1 + 1e-9)
    best: list[object] = [first.makespan, first.order, first.sender]
    nodes = 0

    def visit(left: tuple[int, ...], free: dict[str, float], now: float, order: list[int], sender: list[int]) -> bool:
        """False: out of nodes."""
        nonlocal nodes
        nodes += 1
        reach: float = best[0]  # type: ignore[assignment]
        if reach <= limit:
            return True
        if nodes > EXACT_NODES:
            return False
        if not left:
            best[:] = [now, tuple(order), tuple(sender)]
            return True
        if _rest_bound(jobs, left, free) >= reach * (1 - 1e-12):
            return True
        seen: set[Job] = set()
        for i in left:
            job = jobs[i]
            if job in seen:  # equal jobs in one order only
                continue
            seen.add(job)
            rest = tuple(j for j in left if j != i)
            for place, (s, cost) in enumerate(zip(job.senders, job.costs, strict=True)):
                stop = max([free.get(s, 0.0), *(free.get(r, 0.0) for r in job.held)]) + cost
                if stop >= best[0] * (1 - 1e-12):  # type: ignore[operator]
                    continue
                then = dict(free)
                for r in (s, *job.held):
                    then[r] = stop
                sender[i] = place
                if not visit(rest, then, max(now, stop), [*order, i], sender):
                    return False
        return True

    done = visit(tuple(range(len(jobs))), {}, 0.0, [], [0] * len(jobs))
    found = simulate(jobs, best[1], best[2])  # type: ignore[arg-type]
    return found, done


def _rest_bound(jobs: Sequence[Job], left: Sequence[int], free: dict[str, float]) -> float:
    taken: dict[str, float] = {}
    senders: dict[str, None] = {}  # in a fixed order: every rank must add up alike
    work = 0.0
    for i in left:
        work += jobs[i].least
        senders.update(dict.fromkeys(jobs[i].senders))
        for r in jobs[i].receivers:
            taken[r] = taken.get(r, 0.0) + jobs[i].least
    busy = sum(free.get(s, 0.0) for s in senders)
    return max([(busy + work) / len(senders), *(free.get(r, 0.0) + cost for r, cost in taken.items())])


def main() -> None:
    for case, (_, src, dst, topology) in PLANS.items():
        moved = moved_tensors(LLAMA_8B, src, dst)
        seconds = []
        for _ in range(3):
            began = time.process_time()
            plan = make_plan(moved, topology)
            seconds.append(time.process_time() - began)
        naive, in_order = naive_plan(moved, topology), natural_plan(moved, topology)
        config = {"model": "8b", "src": str(src), "dst": str(dst), "nic": topology.nic}
        record(
            bench=BENCH, case=case, metric="makespan_s", unit="s", samples=[plan.makespan], baseline="bound",
            baseline_value=plan.bound, ratio=plan.bound / plan.makespan,
            quality={"naive_s": round(naive.makespan, 5), "natural_s": round(in_order.makespan, 5),
                     "slow_gb": round(plan.slow_bytes / 1e9, 3), "naive_slow_gb": round(naive.slow_bytes / 1e9, 3)},
            config=config,
        )  # fmt: skip
        record(bench=BENCH, case=case, metric="plan_s", unit="s", samples=seconds, config=config)
        print(
            f"{case}: {plan.makespan:.4f} s, bound {plan.bound:.4f} s, natural {in_order.makespan:.4f} s, "
            f"a message to each {naive.makespan:.4f} s; planned in {statistics.median(seconds) * 1e3:.0f} ms",
            flush=True,
        )


if __name__ == "__main__":
    as_command(main)
