"""Orders of a pipeline's work, and what each would take: pure functions on integers.

Every stage computes the forward pass (F) and the backward pass (B) of every micro-batch. An order says in which
sequence. `stages` P, `micros` m, stage i from 0; how many forward passes run before the first backward:

    gpipe        m             all of them: most activations, and the waits of both directions once
    1f1b         P - i         as few as keep every stage busy when a hop costs nothing
    eager1f1b    2(P - i) - 1  one more per hop to the last stage and back, so that hops are hidden behind other
                               micro-batches (arXiv 2211.05322)
    interleaved  every rank has several stages, a micro-batch passes each rank several times (arXiv 2104.04473)

`simulate` runs an order with given times on links that carry one tensor at a time in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shoestring.errors import UserError

Kind = Literal["F", "B", "I", "W"]  # forward, backward; or the backward pass for inputs and for weights apart


class StagePass(NamedTuple):
    stage: int
    kind: Kind
    micro: int


Order = list[list[StagePass]]  # of each rank


def warm_up(schedule: str, stages: int, micros: int, stage: int) -> int:
    """Forward passes of a stage before its first backward pass; also the most activations that it holds."""
    most = {"gpipe": micros, "1f1b": stages - stage, "eager1f1b": 2 * (stages - stage) - 1}
    return min(micros, most[schedule])


def make_order(schedule: str, stages: int, micros: int, *, chunks: int = 1) -> Order:
    """`stages` of all ranks together; `chunks` of them on each rank (interleaved), dealt in turns."""
    if schedule == "interleaved":
        return _interleaved(stages // chunks, chunks, micros)
    if schedule == "zero-bubble":
        return [_zero_bubble(stages, micros, stage) for stage in range(stages)]
    return [_one_by_one(stage, warm_up(schedule, stages, micros, stage), micros) for stage in range(stages)]


def _one_by_one(stage: int, warm: int, micros: int) -> list[StagePass]:
    """`warm` forward passes, then one backward and one forward pass in turns."""
    tasks = [StagePass(stage, "F", micro) for micro in range(warm)]
    for micro in range(micros):
        tasks.append(StagePass(stage, "B", micro))
        if warm + micro < micros:
            tasks.append(StagePass(stage, "F", warm + micro))
    return tasks


def _zero_bubble(stages: int, micros: int, stage: int) -> list[StagePass]:
    """ZB-H1 (arXiv 2401.10241): 1F1B whose backward pass for weights waits until the stage would idle."""
    warm, late = min(micros, stages - stage), stage
    tasks = [StagePass(stage, "F", micro) for micro in range(warm)]
    for micro in range(micros):
        tasks.append(StagePass(stage, "I", micro))
        if micro >= late:
            tasks.append(StagePass(stage, "W", micro - late))
        if warm + micro < micros:
            tasks.append(StagePass(stage, "F", warm + micro))
    return [*tasks, *(StagePass(stage, "W", micro) for micro in range(max(0, micros - late), micros))]


def _interleaved(ranks: int, chunks: int, micros: int) -> Order:
    """Rounds of `ranks` micro-batches through each chunk in turns; forward from the first chunk, backward from the
    last."""
    if micros % ranks:
        raise UserError(f"pipeline=interleaved needs micro-batches in multiples of {ranks}, got {micros}")
    total = chunks * micros

    def nth(number: int, rank: int, kind: Kind) -> StagePass:
        round_, place = divmod(number, ranks * chunks)
        chunk = place // ranks
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return StagePass(chunk * ranks + rank, kind, round_ * ranks + place % ranks)

    order = []
    for rank in range(ranks):
        warm = min(total, (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1)
        tasks = [nth(i, rank, "F") for i in range(warm)]
        for i in range(total):
            tasks.append(nth(i, rank, "B"))
            if warm + i < total:
                tasks.append(nth(warm + i, rank, "F"))
        order.append(tasks)
    return order


# -- what an order takes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds of a stage's passes, and of a tensor on a link."""

    forward: float = 1.0
    backward: float = 2.0
    hop: float = 0.0

    def of(self, kind: Kind) -> float:
        return {"F": self.forward, "B": self.backward, "I": self.backward / 2, "W": self.backward / 2}[kind]


@dataclass
class Timeline:
    """When each task ran, by rank."""

    ran: list[list[tuple[StagePass, float, float]]]
    live: list[int] = field(default_factory=list)  # the most micro-batches whose activations a rank held

    @property
    def makespan(self) -> float:
        return max(end for tasks in self.ran for _, _, end in tasks)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        busy = sum(end - start for tasks in self.ran for _, start, end in tasks)
        return 1 - busy / (len(self.ran) * self.makespan)


def simulate(order: Order, costs: Costs, *, blocking: bool = False) -> Timeline:
    """Ranks run their tasks in order; what a stage needs crosses a link, which carries one tensor at a time.
    `blocking`: a rank waits until what it sends has arrived."""
    num_ranks = len(order)
    last = max(task.stage for tasks in order for task in tasks)
    arrived: dict[StagePass, float] = {}  # when the input of a task is there
    link_free: dict[tuple[int, int], float] = {}
    rank_free = [0.0] * num_ranks
    ran: list[list[tuple[StagePass, float, float]]] = [[] for _ in range(num_ranks)]
    places = [0] * num_ranks

    def needs(task: StagePass) -> bool:
        outer = (task.kind == "F" and task.stage == 0) or (task.kind in "BI" and task.stage == last)
        return task.kind != "W" and not outer

    def send(task: StagePass, end: float) -> None:
        target = task.stage + (1 if task.kind == "F" else -1)
        if task.kind == "W" or not 0 <= target <= last:
            return
        link = (task.stage % num_ranks, target % num_ranks)
        begins = max(end, link_free.get(link, 0.0))
        link_free[link] = begins + costs.hop
        arrived[StagePass(target, task.kind, task.micro)] = begins + costs.hop
        if blocking:
            rank_free[task.stage % num_ranks] = begins + costs.hop

    while any(places[rank] < len(order[rank]) for rank in range(num_ranks)):
        # The task that can begin first, so that tensors take their places on a link in the order of time.
        ready = [
            (max(rank_free[rank], arrived.get(task, 0.0)), rank, task)
            for rank in range(num_ranks)
            if places[rank] < len(order[rank]) and ((task := order[rank][places[rank]]) in arrived or not needs(task))
        ]
        assert ready, "the order waits for itself"
        start, rank, task = min(ready)
        end = start + costs.of(task.kind)
        ran[rank].append((task, start, end))
        rank_free[rank] = end
        places[rank] += 1
        send(task, end)
    return Timeline(ran, [most_live(tasks) for tasks in order])


def most_live(tasks: Sequence[StagePass]) -> int:
    """The most micro-batches whose activations are held at once."""
    held = most = 0
    for task in tasks:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[task.kind]
        most = max(most, held)
    return most


# -- the choice ---------------------------------------------------------------------------------------------


SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b", "eager1f1b", "interleaved", "zero-bubble")
CHUNKS = 2  # stages of a process with pipeline=interleaved
HIDDEN_HOP = 0.15  # of a forward pass: shorter hops are hidden by 1f1b's order well enough


def choose(forward: float, hop: float, fits: Callable[[int], bool], stages: int, micros: int) -> tuple[str, str]:
    """1f1b or eager1f1b by a measured hop, and why; `fits`: whether so many live micro-batches fit the first stage."""
    ratio = hop / max(forward, 1e-9)
    live = warm_up("eager1f1b", stages, micros, 0)
    measured = f"a hop takes {hop * 1e3:.1f} ms, a forward pass {forward * 1e3:.1f} ms"
    if ratio <= HIDDEN_HOP:
        return "1f1b", f"{measured}: {ratio:.2f} of it, at most {HIDDEN_HOP}"
    if not fits(live):
        return "1f1b", f"{measured}, and the {live} live micro-batches of eager1f1b do not fit"
    return "eager1f1b", f"{measured}: {ratio:.2f} of it, more than {HIDDEN_HOP}"
