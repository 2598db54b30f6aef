"""The pipeline: steps are launched, some of them ahead, and their tokens collected.

    launch      a step that needs no logits on the host: the device chooses the tokens (`LaunchedStep`); otherwise one
                that is computed and verified when it is collected (`LogitsStep`)
    run_ahead   the steps after it, before its tokens are known on the host
    collect     wait for a step's tokens; what each request gained, drafts verified

`take` gives the next step that was launched ahead. Requests that end meanwhile waste a row. No text depends on any of
this.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.model.skip import SkipSet
from shoestring.serve.engine.block_pool import BlockPool, BlockTable, RowSpan
from shoestring.serve.engine.graphs import GROUPED_REQUESTS, DeviceDraft, PendingTokens
from shoestring.serve.engine.request import NO_DRAFT, Draft, Request, Stats
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.engine.scheduler import Scheduler
from shoestring.serve.engine.skip_policy import FfnSimilarity, SkipSets, Work
from shoestring.serve.speculative.drafting import Drafting
from shoestring.serve.speculative.verify import Check, Verifier, accept

LATE_WAIT_S = 0.005  # that a step waits for what its verification lacks before it leaves a request out
IDLE_WAIT_S = 0.02  # that a step waits where every request lacks something
HOLD_FROM, HOLD_STEPS = 64, 4  # texts that run; steps for which others are held back, to read their prompts together
ENDING_SHARE = 16  # texts of a step launched ahead of which one may be known to end before it


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device is computing: its requests as they were, and where their tokens will be."""

    requests: list[Request]
    tables: list[BlockTable | None]
    checks: list[Check] | None  # None: launched ahead, before the tokens of the step before it were known; no drafts
    skip: SkipSet | None
    pending: PendingTokens
    began: float
    prefills: bool = False  # its time says nothing about a decode step
    num_together: int = 1  # steps of the same launch

    @property
    def alive(self) -> list[bool]:
        """Which of the requests still run and have not been preempted since."""
        return [r.finish_reason is None and r.table is t for r, t in zip(self.requests, self.tables, strict=True)]


@dataclass(frozen=True)
class LogitsStep:
    """A step that needs logits on the host, or that verifies nothing; nothing is computed yet."""

    work: Work
    began: float
    prefills: bool


class Collected(NamedTuple):
    gains: list[tuple[Request, list[int]]]  # the tokens that requests gained
    failed: Sequence[tuple[Request, UserError]] = ()  # requests that cannot go on


class Pipeline:
    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        skip_sets: SkipSets,
        drafting: Drafting,
        stats: Stats,
        verify: Verifier,
        max_context: int,
    ) -> None:
        self._runner, self._scheduler, self._skip_sets = runner, scheduler, skip_sets
        self._drafting, self._stats, self.verify, self._max_context = drafting, stats, verify, max_context
        self._pool = runner.cache.pool
        self._ahead: deque[LaunchedStep] = deque()  # the next steps, launched before the last one was completed
        self._num_held = 0  # steps launched ahead although requests wait, since the last admission

    @property
    def num_ahead(self) -> int:
        return len(self._ahead)

    def take(self) -> LaunchedStep | None:
        """The next of the steps launched ahead; None where there is none, or none of its requests still runs."""
        launched = self._ahead.popleft() if self._ahead else None
        if launched is None or not any(launched.alive):
            self._ahead.clear()  # all of the same requests
            return None
        return launched

    def drain(self) -> Iterator[LaunchedStep]:
        """All steps that were launched ahead: nothing is in flight afterwards."""
        while self._ahead:
            yield self._ahead.popleft()

    def launch(self, work: Work, prefills: bool) -> LaunchedStep | LogitsStep:
        """`prefills`: the time of the step says nothing about a decode step."""
        self._num_held = 0
        if prefills:
            self._drafting.interrupt()
        began = time.perf_counter()
        launched = self._launch(work, began, prefills)
        if launched is None:
            self._drafting.settle()
            return LogitsStep(work, began, prefills)
        return launched

    def collect(self, step: LaunchedStep | LogitsStep) -> Collected:
        """What the requests of a step gained; waits for it."""
        return self._verify_on_host(step) if isinstance(step, LogitsStep) else self._wait(step)

    # -- steps whose tokens are chosen on the device --------------------------------------------------------
    def _launch(self, work: Work, began: float, prefills: bool) -> LaunchedStep | None:
        """Launch a step that needs no logits on the host: the device chooses a token after every text that is complete
        by then. None where that is not possible."""
        complete, others = split_by_completion(work)
        requests = [r for r, _ in complete]
        checks = [check_for(r) for r in requests]
        groups = self._skip_sets.groups([*complete, *others])
        if self.verify.needs_logits(checks) or self._skip_sets.similarity_for(work) or len(groups) > 1:
            return None
        ((skip, ordered),) = groups
        batch, samplings = build_batch(ordered)[0], [r.sampling for r in requests]
        pending = self._runner.launch_decode(batch, samplings, skip)
        if pending is None and not any(r.drafts for r in requests):
            pending = self._runner.launch_prefill(batch, samplings, skip)
        if pending is None:
            return None
        advance_prefills(self._pool, others)
        return LaunchedStep(requests, [r.table for r in requests], checks, skip, pending, began, prefills=prefills)

    def run_ahead(self, launched: LaunchedStep | LogitsStep) -> None:
        """Launch the next steps before the tokens of `launched` are known on the host, if only those tokens could
        change them: they read them on the device. A row of a request that turns out to have ended is wasted. Where few
        do, so is that of one that is known to end with a pending token, and the place of one that has ended stays
        empty. Short steps are launched several at a time, as soon as those before them have begun."""
        if isinstance(launched, LogitsStep) or len(self._ahead) >= launched.num_together:
            return
        requests, alive = launched.requests, launched.alive
        num_alive = sum(alive)
        late, running = self._scheduler.late, self._scheduler.running
        num_stepping = sum(r not in late for r in running) if late else len(running)
        if num_alive != num_stepping or not self._may_hold(num_alive):
            return
        if any(r.draft is not NO_DRAFT for r in requests):
            return
        if self._drafting.drafter is not None and self._drafting.drafts_next():
            return
        num_coming = 1 + len(self._ahead)  # tokens that a request gains before the first of the new steps
        places = list(zip(requests, launched.tables, alive, strict=True))
        rooms = [r.room - num_coming for r, _, lives in places if lives]
        spans, samplings = next_spans(places, num_coming), [r.sampling for r in requests]
        num_steps = 1
        if self._drafting.controller is None and len(requests) <= GROUPED_REQUESTS:
            num_steps = self._runner.graphs.steps_per_launch(spans, samplings, launched.skip)
        for num in sorted({num_steps, 1}, reverse=True):
            num_wasted = len(requests) - num_alive + sum(room < num for room in rooms)
            if num_wasted <= len(requests) // ENDING_SHARE and self._make_room(places, num_coming + num):
                began = time.perf_counter()
                for pending in self._runner.launch_next(spans, samplings, launched.skip, num):
                    step = LaunchedStep(
                        requests, launched.tables, None, launched.skip, pending, began, num_together=num
                    )
                    self._ahead.append(step)
                self._stats.num_steps += num
                self._stats.num_rows += num * num_alive
                return

    def _make_room(self, places: Sequence[tuple[Request, BlockTable | None, bool]], num: int) -> bool:
        """Blocks for so many more tokens of each request but the last; False also where its skip set may change."""
        for request, table, lives in places:
            if lives:
                assert table is not None
                known = len(request.tokens)
                if known + num - 1 > self._max_context or request.until_switch(known - 1) is not None:
                    return False
                if not self._pool.grow(table, known + num - 1):
                    return False
        return True

    def _may_hold(self, num_running: int) -> bool:
        """Whether nobody waits to be admitted, or may wait for a few steps more. A step that reads prompts is not
        launched ahead: the device idles meanwhile. Among many texts one ends and another comes in almost every step,
        so prompts are read together, as many as fill a step, at least every HOLD_STEPS (counted here)."""
        if not self._scheduler.admits:
            return True
        self._num_held += 1
        if num_running < HOLD_FROM or self._num_held > HOLD_STEPS:
            return False
        room, rows = self._scheduler.chunk - num_running, 0
        for request in itertools.islice(self._scheduler.waiting, room):
            rows += len(request.tokens)
            if rows >= room:
                return False
        return True

    def _wait(self, launched: LaunchedStep) -> Collected:
        """The tokens of a launched step, for the requests that still run."""
        if not launched.requests:
            return Collected([])  # a chunk of a prompt: nothing to wait for
        targets, alive, checks = launched.pending.tokens(), launched.alive, launched.checks
        if checks is None:
            return self._wait_ahead(launched, targets, alive)
        if self._drafting.pending:
            self._drafting.settle()  # the drafts are known only now
            pairs = zip(launched.requests, alive, checks, strict=True)
            checks = [check_for(r) if lives else check for r, lives, check in pairs]
        gains = [
            (request, check, accept(check.drafts, found) if check.drafts else found)
            for request, check, found, lives in zip(launched.requests, checks, targets, alive, strict=True)
            if lives
        ]
        if self._drafting.controller is not None and gains:
            num_gained = sum(len(new) for _, _, new in gains)
            self._drafting.record_time(sum(map(len, targets)), launched.began, num_gained, prefills=launched.prefills)
        self.verify.note_gained([check for _, check, _ in gains], [new for _, _, new in gains])
        return Collected([(request, new) for request, _, new in gains])

    def _wait_ahead(self, launched: LaunchedStep, targets: list[list[int]], alive: list[bool]) -> Collected:
        """`_wait` of a step that was launched ahead, thus without drafts."""
        gains = [(r, new) for r, new, lives in zip(launched.requests, targets, alive, strict=True) if lives]
        if self._drafting.controller is not None and gains:
            self._drafting.record_time(sum(map(len, targets)), launched.began, len(gains), ahead=True)
        if self.verify.notes_gains:
            self.verify.note_gained([check_for(r) for r, _ in gains], [new for _, new in gains])
        return Collected(gains)

    # -- steps that need logits on the host -----------------------------------------------------------------
    def _verify_on_host(self, step: LogitsStep) -> Collected:
        """A step that needs logits on the host, or that verifies nothing."""
        work = step.work
        self.verify.prepare([check_for(r) for r, _ in split_by_completion(work)[0]])
        logits_RV, reached, similarities = self._forward(work)
        logits_RV, checked, failed = self._leave_out_late(logits_RV, reached)
        gained: list[list[int]] = []
        if checked:
            gained = self.verify(logits_RV, [check_for(r) for r in checked])
        if self._drafting.controller is not None and checked:
            num_rows = sum(num for _, num in work)
            self._drafting.record_time(num_rows, step.began, sum(map(len, gained)), prefills=step.prefills)
        for similarity in similarities:
            num_gained = {r.id: len(new) for r, new in zip(checked, gained, strict=True)}
            similarity.count({r.id: num_gained.get(r.id, 0) for r in reached})
        return Collected(list(zip(checked, gained, strict=True)), failed)

    def _forward(self, work: Work) -> tuple[Tensor, list[Request], list[FfnSimilarity]]:
        """Logits of the rows to verify, the requests they belong to, and similarities that a skip policy wants; one
        pass for each skip set. Moves num_computed of the other requests."""
        logits, checked, similarities = [], [], []
        for skip, part in self._skip_sets.groups(work):
            batch, requests = build_batch(part)
            similarity = self._skip_sets.similarity_for(part)
            watch = None if similarity is None else similarity.watch
            logits.append(self._runner.forward(batch, skip, watch))
            checked += requests
            similarities += [] if similarity is None else [similarity]
        advance_prefills(self._pool, work)
        return logits[0] if len(logits) == 1 else torch.cat(logits), checked, similarities

    def _leave_out_late(
        self, logits_RV: Tensor, reached: list[Request]
    ) -> tuple[Tensor, list[Request], list[tuple[Request, UserError]]]:
        """The rows that can be verified now, their requests, and the requests that cannot go on. Of the others, drafts
        are cut, or the request sits out: its last row will be computed again. Nothing of that changes a text."""
        ready = self.verify.ready_rows([check_for(r) for r in reached], LATE_WAIT_S)
        if ready == [1 + len(r.drafts) for r in reached]:
            return logits_RV, reached, []
        rows: list[int] = []
        checked: list[Request] = []
        failed: list[tuple[Request, UserError]] = []
        first = 0
        for request, num in zip(reached, ready, strict=True):
            num_rows, draft = 1 + len(request.drafts), request.draft
            if isinstance(num, UserError):
                failed.append((request, num))
            elif num == 0:
                self._scheduler.late.add(request)
                request.draft, request.num_computed = NO_DRAFT, len(request.tokens) - 1
            else:
                checked.append(request)
                rows += range(first, first + num)
                if num < num_rows:
                    probs_GV = None if draft.probs_GV is None else draft.probs_GV[: num - 1]
                    request.draft = Draft(draft.tokens[: num - 1], probs_GV)
            first += num_rows
        return logits_RV[torch.tensor(rows, device=logits_RV.device, dtype=torch.int64)], checked, failed

    def rejoin(self, wait_s: float = 0.0) -> None:
        """Let those late requests compute again whose next token can be chosen, or that cannot go on."""
        late = [r for r in self._scheduler.running if r in self._scheduler.late]
        ready = self.verify.ready_rows([check_for(r) for r in late], wait_s)
        self._scheduler.late = {r for r, num in zip(late, ready, strict=True) if num == 0}


# -- the rows of a step -------------------------------------------------------------------------------------


def build_batch(work: Work) -> tuple[Batch, list[Request]]:
    """The rows of a step, and the requests that it verifies."""
    tokens: list[int] = []
    rows: list[int] = []
    spans: list[RowSpan] = []
    checked: list[Request] = []
    device_drafts: list[DeviceDraft] = []
    for request, num in work:
        assert request.table is not None
        drafts, pending = request.draft.tokens, request.draft.pending
        start, stop, last = request.num_computed, request.num_computed + num, len(request.tokens) - 1
        if stop > last:
            checked.append(request)
            first_row = len(tokens) + last - start
            rows.extend(range(first_row, first_row + 1 + len(drafts)))
        tokens += request.tokens[start:stop]
        tokens += drafts[: max(0, stop - last - 1)]
        if pending is not None and drafts and drafts[0] < 0:
            device_drafts.append((len(spans), pending.tokens_NG, request.draft.row, len(drafts)))
        spans.append(RowSpan(request.table.blocks, start, num, request.slot))
    return Batch(spans, tokens, rows, device_drafts), checked


def split_by_completion(work: Work) -> tuple[Work, Work]:
    """Requests whose rows reach the end of their text and thus gain a token, and the others."""
    parts: tuple[Work, Work] = [], []
    for request, num in work:
        parts[request.num_computed + num < len(request.tokens)].append((request, num))
    return parts


def check_for(request: Request) -> Check:
    draft, position = request.draft, len(request.tokens)
    return Check(tuple(draft.tokens), position, request.sampling, draft.probs_GV, request.rule)


def next_spans(places: Sequence[tuple[Request, BlockTable | None, bool]], num_coming: int) -> list[RowSpan]:
    """A row behind so many pending tokens of each request, with its table; none for those that have ended."""
    spans = []
    for request, table, lives in places:
        assert table is not None
        start = len(request.tokens) + num_coming - 1
        spans.append(RowSpan(table.blocks, start, 1, request.slot) if lives else RowSpan(table.blocks, 0, 0))
    return spans


def seal(pool: BlockPool, request: Request) -> None:
    if request.table is not None:
        alike = request.num_computed if request.switch_at is None else request.switch_at
        pool.seal(request.table, request.tokens, min(request.num_computed, alike))


def advance_prefills(pool: BlockPool, work: Work) -> None:
    """The rows of a step were computed: those of prompts only move num_computed."""
    for request, num in work:
        if not request.ready:  # for the others `Commit.commit` does both
            request.num_computed = min(request.num_computed + num, len(request.tokens) - 1)
            seal(pool, request)
