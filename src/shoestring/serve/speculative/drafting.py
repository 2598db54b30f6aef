"""Drafting in an engine: what the drafter proposes for the next step, and what steps take.

`Drafting` owns the drafter and the controller that chooses how much is drafted (draft_length.py). Drafts may still be
on the device when the step that verifies them is launched; `Proposal` keeps them until they are known. The controller
learns from the times of steps, each from the end of the step before to its own; whatever is no decode step interrupts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from shoestring.serve.engine.request import Draft, PendingDrafts, Request
from shoestring.serve.engine.runner import Runner
from shoestring.serve.engine.scheduler import Scheduler
from shoestring.serve.engine.skip_policy import SkipSets
from shoestring.serve.speculative.draft_length import DraftLengthController, Prospects
from shoestring.serve.speculative.drafter import Drafter

FIXED_DRAFTS = 4  # per request and step, where lengths cannot be chosen by measured time


class Drafting:
    def __init__(self, runner: Runner, scheduler: Scheduler, skip_sets: SkipSets, *, timed: bool) -> None:
        """`timed`: whether the number of drafts may be chosen by measured speed."""
        self._runner, self._scheduler, self._skip_sets, self._timed = runner, scheduler, skip_sets, timed
        self.drafter: Drafter | None = None
        self.controller: DraftLengthController | None = None
        self.num_drafts = FIXED_DRAFTS
        self._proposal = Proposal()  # drafts of the next step
        self._num_graphs = 0  # when the last step ended
        self._ended: float | None = None  # when the last step ended; None: no decode step follows it at once

    def use(self, drafter: Drafter | None, num_drafts: int | None, controller: DraftLengthController | None) -> None:
        """From now on, while no request runs."""
        assert not self._scheduler.running, "requests are running with the drafter they began with"
        if drafter is not None:
            drafter.check(self._runner.model)
        self.drafter, self.controller = drafter, None
        self.num_drafts = FIXED_DRAFTS if num_drafts is None else num_drafts
        if num_drafts is None and drafter is not None and self._timed:
            self.controller = controller or DraftLengthController(
                self.profile, known_acceptance=drafter.known_acceptance
            )

    def runners(self) -> Sequence[Runner]:
        """Those of the drafter."""
        return () if self.drafter is None else self.drafter.runners()

    def release(self, *requests: Request) -> None:
        """Their drafts end here: what the drafter keeps of them is free, and computed again if they go on."""
        if self.drafter is not None:
            for request in requests:
                self.drafter.release(request)

    @property
    def _stepping(self) -> list[Request]:
        """The running requests that do not sit out."""
        late, running = self._scheduler.late, self._scheduler.running
        return [r for r in running if r not in late] if late else running

    # -- drafts ---------------------------------------------------------------------------------------------
    def propose(self) -> None:
        if self.drafter is None or not self.num_drafts or not self._scheduler.running:
            return
        n = self.num_drafts
        if self.controller is not None:
            calm = not self._scheduler.admits and all(r.ready for r in self._scheduler.running)
            n = self.controller.choose(len(self._stepping), self.prospects) if calm else 0
        ready = [r for r in self._stepping if r.ready and r.room > 1] if n else []
        if not ready:
            return
        asked = ready if self.controller is None else self.controller.drafted_requests(ready)
        began = time.perf_counter()
        drafts = self.drafter.propose(asked, n)
        usual = self.num_graphs == self._num_graphs and not self.drafter.caught_up
        self._proposal = Proposal(drafts, n, time.perf_counter() - began, usual)
        if not self._proposal.pending:
            self._proposal.settle(self.controller)
        for request, draft in zip(asked, drafts, strict=True):
            # Of the tokens that still fit, the last is always the target's own.
            request.draft = draft.cut(min(n, request.room - 1))
            vocab = self._runner.model.spec.vocab_size
            known = draft.pending is None  # those of a device come later
            assert not known or all(0 <= t < vocab for t in request.drafts), "draft outside the vocabulary"
            if self.controller is not None:
                self.controller.record_offer(min(n, request.room - 1), len(request.drafts))

    def settle(self) -> None:
        """Drafts of the next step that are not known yet: wait for them."""
        self._proposal.settle(self.controller)

    @property
    def pending(self) -> bool:
        return bool(self._proposal.pending)

    def drafts_next(self) -> bool:
        """Whether the next step of the running requests would have drafts."""
        if self.drafter is None or not self.num_drafts:
            return False
        return self.controller is None or self.controller.would_draft(len(self._stepping), self.prospects)

    def prospects(self) -> Prospects:
        """For the draft-length controller, about the running requests that may gain more than one token: drafts that
        the row budget and a text have room for, tokens that a text may still gain on average, and whether the drafter
        has to read texts first."""
        rooms = {r: num for r in self._stepping if (num := r.room) > 1}
        if not rooms:
            return Prospects(0, 0.0)
        limit = max(0, min(self._scheduler.chunk // len(self._stepping), max(rooms.values())) - 1)
        found = Prospects(limit, sum(rooms.values()) / len(rooms))
        if self.drafter is None:
            return found
        return found._replace(is_behind=partial(self.drafter.is_behind, list(rooms)))

    # -- times ----------------------------------------------------------------------------------------------
    @property
    def num_graphs(self) -> int:
        """Graphs made so far, the drafter's included. A step in which this changes is no measure of time."""
        return self._runner.num_graphs + (0 if self.drafter is None else self.drafter.num_graphs)

    def warmed_up(self) -> None:
        self._num_graphs = self.num_graphs

    def interrupt(self) -> None:
        """What follows is not the time of a decode step."""
        self._ended = None

    def profile(self, rows: int) -> float:
        """Seconds of a target pass over this many rows; the requests' cache is not touched."""
        self.interrupt()  # measuring is not part of a step
        return self._runner.measure_seconds(rows, self._skip_sets.usual)

    def record_time(
        self, num_rows: int, began: float, num_gained: int, *, ahead: bool = False, prefills: bool = False
    ) -> None:
        """Report the time of a step to the controller: from the end of the step before to its own, without drafting."""
        assert self.controller is not None
        now, num_graphs = time.perf_counter(), self.num_graphs
        if self._ended is not None:  # also if the step was launched before that end
            began = self._ended + self.controller.step.draft_seconds
        usual = num_graphs == self._num_graphs and not prefills
        # Before the controller may measure a pass, which resets `_ended` (`profile`).
        self._ended, self._num_graphs = now, num_graphs
        if usual:
            self.controller.record_step(num_rows, max(now - began, 1e-9), num_gained, ahead=ahead)
        else:
            self.controller.discard_step()


class Proposal:
    """The drafts of a step, and which of them are still on the device."""

    def __init__(
        self, drafts: Sequence[Draft] = (), num_each: int = 0, seconds: float = 0.0, usual: bool = True
    ) -> None:
        """`seconds` that `propose` took; not `usual`: they say nothing about the next time."""
        self._usual = usual
        self._num, self._each, self._seconds = len(drafts), num_each, seconds
        found = {id(d.pending): d.pending for d in drafts if d.pending is not None}
        self.pending: list[PendingDrafts] = list(found.values())

    def settle(self, controller: DraftLengthController | None) -> None:
        """Wait for the drafts, and report once to the controller how long they took."""
        pending, self.pending = self.pending, []
        for drafts in pending:
            drafts.resolve()
        if controller is not None and self._each:
            took = max(self._seconds, sum(d.seconds for d in pending))
            controller.record_drafting(self._num, self._each, took, caught_up=not self._usual)
        self._each = 0
