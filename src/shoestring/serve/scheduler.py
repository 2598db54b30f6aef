"""Who computes how many rows in a step: continuous batching over a pool of blocks.

`running` is in order of arrival. Each step, within a budget of rows:

1. Requests about to gain a token get one row each, oldest first. If one needs a block and there is none, the
   *newest* running request is preempted: its blocks go back and it returns to the head of the queue, to be
   recomputed (mostly from the prefix cache) when there is room. The text of a request does not depend on it.
2. Then their drafts, as far as rows and blocks go; nobody is preempted for a guess.
3. Then prompts that are being read, oldest first.
4. Then the queue, in order, each with all the blocks of its text at once, unless somebody was preempted.

So a long prompt never stalls those who are writing, and nobody starves: the oldest request always gets its
row (it may take every other block, and one that can never fit is refused on arrival), so it ends, and then
another is the oldest.

Pure bookkeeping: no tensors, no clock. Left out: priorities, fairness between users.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shoestring.errors import UserError
from shoestring.serve.blocks import BlockPool
from shoestring.serve.request import NO_DRAFT, Request


class QueueFull(UserError):
    """The waiting queue is at its limit; a server answers 429."""


@dataclass
class Plan:
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

    @property
    def admits(self) -> bool:
        """Whether somebody waits and there is a place."""
        return bool(self.waiting) and len(self.running) < self.max_requests

    def add(self, request: Request) -> None:
        if self.max_waiting is not None and len(self.waiting) >= self.max_waiting:
            raise QueueFull(
                f"{len(self.waiting)} requests are waiting already, as many as max_waiting allows; "
                "try again later or raise max_waiting"
            )
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """The request is over: its blocks are free at once."""
        if request.table is not None:
            self._stop(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> Plan:
        plan = Plan()
        writers = self._writers(plan)
        budget = self.chunk - len(writers)
        for request in writers:
            if request.drafts:
                self._cut_draft(request, budget)
                budget -= len(request.drafts)
            plan.work.append((request, 1 + len(request.drafts)))
        for request in self.running:
            if not request.ready:
                budget -= self._read(request, budget, plan)
        if not plan.preempted:
            self._admit(budget, plan)
        # Equal row counts side by side attend in one call; the sort is stable.
        plan.work.sort(key=lambda item: item[1])
        return plan

    def _writers(self, plan: Plan) -> list[Request]:
        """The ready requests that get a row, each with a block for it."""
        writers: list[Request] = []
        for request in list(self.running):
            if request.table is None or not request.ready:
                continue  # preempted a moment ago, or still reading
            if len(writers) == self.chunk:
                request.draft = NO_DRAFT
                continue
            while request.table is not None and not self.pool.grow(request.table, len(request.tokens)):
                self._preempt(self.running[-1], plan)
            if request.table is not None:
                writers.append(request)
        return writers

    def _cut_draft(self, request: Request, budget: int) -> None:
        assert request.table is not None
        room = min(budget, self.pool.capacity(request.table) - len(request.tokens))
        alike = request.until_switch(request.num_computed)
        if alike is not None:
            room = min(room, alike - 1)
        request.draft = request.draft.cut(room)
        grown = self.pool.grow(request.table, len(request.tokens) + len(request.drafts))
        assert grown

    def _read(self, request: Request, budget: int, plan: Plan) -> int:
        num = min(budget, len(request.tokens) - request.num_computed)
        alike = request.until_switch(request.num_computed)
        if alike is not None:
            num = min(num, alike)
        if num > 0:
            plan.work.append((request, num))
        return num

    def _admit(self, budget: int, plan: Plan) -> None:
        while self.admits and budget > 0:
            request = self.waiting[0]
            request.table = self.pool.open(self.root(request), request.tokens, shared=request.switch_at)
            if request.table is None:
                return
            self.waiting.popleft()
            self.running.append(request)
            request.num_computed = len(request.table.hashes) * self.pool.block_size
            plan.admitted.append(request)
            budget -= self._read(request, budget, plan)

    def _preempt(self, request: Request, plan: Plan) -> None:
        self._stop(request)
        request.num_preempted += 1
        self.waiting.appendleft(request)
        plan.preempted.append(request)

    def _stop(self, request: Request) -> None:
        assert request.table is not None
        self.running.remove(request)
        self.pool.close(request.table)
        request.table, request.num_computed, request.draft = None, 0, NO_DRAFT
