"""Which requests compute how many rows in a step: continuous batching over a pool of blocks.

`running` is in order of arrival. Each step, within a budget of rows:

1. Requests about to gain a token get one row each, oldest first. If one needs a block and there is none, the *newest*
   running request is preempted: its blocks are freed and it returns to the head of the queue, to be recomputed (mostly
   from the prefix cache) when there is room. Its text does not depend on this.
2. Then their drafts, as far as rows and blocks go; no request is preempted for a draft.
3. Then prefills in progress, oldest first.
4. Then the queue, in order, each with all the blocks of its text at once, unless a request was preempted.

A request whose next token cannot be chosen yet is `late` and gets no row; it keeps its blocks and its place.

So a long prompt never stalls decoding requests, and none starves: the oldest request always gets its row (it may take
every other block, and a request that can never fit is refused on arrival), so it ends, and the next becomes the oldest.

Pure bookkeeping: no tensors, no clock. Left out: priorities; fairness between clients is the server's
(serve/http/fair_line.py), which pauses and resumes requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shoestring.errors import UserError
from shoestring.serve.engine.block_pool import BlockPool
from shoestring.serve.engine.request import NO_DRAFT, Request


class QueueFull(UserError):
    """The waiting queue is at its limit; the server answers 429."""


def check_queue(num_waiting: int, num_new: int, max_waiting: int | None) -> None:
    """Raise QueueFull unless so many more may wait; None: no limit."""
    if max_waiting is not None and num_waiting + num_new > max_waiting:
        raise QueueFull(
            f"{num_waiting} requests are waiting already, as many as max_waiting allows; "
            "try again later or raise max_waiting"
        )


@dataclass
class ScheduledStep:
    work: list[tuple[Request, int]] = field(default_factory=list)  # (request, rows)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        root: Callable[[Request], bytes],
        *,
        max_requests: int,
        chunk: int,
        max_waiting: int | None = None,
    ) -> None:
        """`root` gives the start of the hash chain for a request admitted now."""
        self.pool, self.root = pool, root
        self.max_requests, self.chunk, self.max_waiting = max_requests, chunk, max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.late: set[Request] = set()  # of the running ones

    @property
    def admits(self) -> bool:
        """Whether a request waits and another may run."""
        return bool(self.waiting) and len(self.running) < self.max_requests

    def add(self, request: Request) -> None:
        check_queue(len(self.waiting), 1, self.max_waiting)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """The request is over or paused: its blocks are free at once."""
        if request.table is not None:
            self._stop(request)
        elif request in self.waiting:  # not so where it was paused before
            self.waiting.remove(request)

    def set_back(self, request: Request) -> None:
        """Take all that was computed from a running request, and queue it first."""
        self._stop(request)
        self.waiting.appendleft(request)

    def schedule(self) -> ScheduledStep:
        step = ScheduledStep()
        decoding = self._decoding(step)
        budget = self.chunk - len(decoding)
        for request in decoding:
            if request.drafts:
                self._cut_draft(request, budget)
                budget -= len(request.drafts)
            step.work.append((request, 1 + len(request.drafts)))
        for request in self.running:
            if not request.ready:
                budget -= self._prefill(request, budget, step)
        if not step.preempted:
            self._admit(budget, step)
        # Equal row counts side by side attend in one call; the sort is stable.
        step.work.sort(key=lambda item: item[1])
        return step

    def _decoding(self, step: ScheduledStep) -> list[Request]:
        """The ready requests that get a row, each with a block for it."""
        decoding: list[Request] = []
        for request in list(self.running):
            if request.table is None or not request.ready or request in self.late:
                continue  # preempted just now, in prefill, or sits out
            if len(decoding) == self.chunk:
                request.draft = NO_DRAFT
                continue
            while request.table is not None and not self.pool.grow(request.table, len(request.tokens)):
                self._preempt(self.running[-1], step)
            if request.table is not None:
                decoding.append(request)
        return decoding

    def _cut_draft(self, request: Request, budget: int) -> None:
        assert request.table is not None
        room = min(budget, self.pool.capacity(request.table) - len(request.tokens))
        alike = request.until_switch(request.num_computed)
        if alike is not None:
            room = min(room, alike - 1)
        request.draft = request.draft.cut(room)
        grown = self.pool.grow(request.table, len(request.tokens) + len(request.drafts))
        assert grown

    def _prefill(self, request: Request, budget: int, step: ScheduledStep) -> int:
        num = min(budget, len(request.tokens) - request.num_computed)
        alike = request.until_switch(request.num_computed)
        if alike is not None:
            num = min(num, alike)
        if num > 0:
            step.work.append((request, num))
        return num

    def _admit(self, budget: int, step: ScheduledStep) -> None:
        while self.admits and budget > 0:
            request = self.waiting[0]
            request.table = self.pool.open(self.root(request), request.tokens, shared=request.switch_at)
            if request.table is None:
                return
            self.waiting.popleft()
            self.running.append(request)
            request.num_computed = len(request.table.hashes) * self.pool.block_size
            step.admitted.append(request)
            budget -= self._prefill(request, budget, step)

    def _preempt(self, request: Request, step: ScheduledStep) -> None:
        self._stop(request)
        request.num_preempted += 1
        self.waiting.appendleft(request)
        step.preempted.append(request)

    def _stop(self, request: Request) -> None:
        assert request.table is not None
        self.running.remove(request)
        self.late.discard(request)
        self.pool.close(request.table)
        request.table, request.num_computed, request.draft = None, 0, NO_DRAFT
