"""When the next save is due: what saves have cost, the plan that follows from it, and the steps that it leads to.

Everything here follows from numbers that the ranks have agreed on, and is the same on every rank; policy.py has the
arithmetic. The plan is written beside the checkpoints for `shoestring ckpt plan`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shoestring.state.levels.policy import LEVELS, Cost, IntervalPlan, Mean, Rate, make_plan

MEASURE_S = 0.5  # seconds after the first saves, when the ranks look what they cost
NUM_MEASURED = 2
RETRY_STEPS = 4  # a skipped save is tried again after this part of an interval
LOOK_S = 1.0  # seconds between looks whether a copy to peers is over, where the next one is due already


class Pace:
    """The steps of saves at measured intervals."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.rates: dict[str, Rate] = {}
        self.costs = {level: [Mean(), Mean()] for level in LEVELS}  # stall, seconds until durable
        self.step_s = Mean()
        self.plan: IntervalPlan | None = None
        self.saves = 0  # finished or under way
        self.skipped = 0
        self.last_of: dict[str, int] = {}  # the step of the last save of each level
        self.next_step: int | None = None  # at which the ranks meet
        self.commit_by: int | None = None  # the step that waits for the save under way
        self.asked: tuple[str, ...] | None = None  # levels of the next save, whatever the plan says
        self._promised = 0  # the step before which the next version is to be in memory on every rank
        self._began: float | None = None  # when the first step of this life ended
        self._last_step_at: float | None = None

    # -- time ------------------------------------------------------------------------------------------------

    def step_ended(self) -> None:
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        if self._last_step_at is not None:
            self.step_s = self.step_s.after(now - self._last_step_at)

    def step_begins(self) -> None:
        self._last_step_at = time.perf_counter()

    def elapsed(self, now: float) -> float:
        assert self._began is not None
        return now - self._began

    # -- costs and the plan ------------------------------------------------------------------------------------

    def note(self, level: str, stall: float, drain: float) -> None:
        means = self.costs[level]
        if stall > 0:
            means[0] = means[0].after(stall)
        if drain > 0:
            means[1] = means[1].after(drain)

    def note_memory(self, stall: float, commit_s: float) -> None:
        if self.saves == 2:  # the first one was slower: new pages, and the agent started beside it
            self.costs["memory"] = [Mean(), Mean()]
        self.note("memory", stall, commit_s)

    def replan(self, elapsed_s: float, spare_slot: bool) -> bool:
        """True where the interval has changed. Without a spare slot every second save needs the slot that is going to
        disk."""
        memory = self.costs["memory"]
        stall = max(memory[0].value, 1e-3)
        costs = {"memory": Cost(stall, max(memory[1].value, stall))}
        # A save to disk costs training what memory bandwidth and processors the agent takes: a part of its time.
        for level, share in (("peer", 0.02), ("disk", 0.02), ("remote", 0.02)):
            if level in self.rates:
                drain = self.costs[level][1].value or 10 * costs["memory"].drain_s
                costs[level] = Cost(max(share * drain, stall), drain)
        rates = {level: self.rates[level].per_s for level in costs}
        before = self.plan
        reading = 0.0 if spare_slot else 0.5 * costs["disk"].drain_s
        self.plan = make_plan(costs, rates, max(self.step_s.value, 1e-6), self.budget, reading, elapsed_s)
        return before is None or before.steps != self.plan.steps

    def write_plan(self, folder: Path, peer: str) -> None:
        assert self.plan is not None
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / ".plan.json.partial"
            counts = {"saves": self.saves, "skipped": self.skipped, "peer": peer}
            partial.write_text(json.dumps({**asdict(self.plan), **counts}))
            partial.replace(folder / ".plan.json")

    # -- steps -------------------------------------------------------------------------------------------------

    def ask(self, levels: Sequence[str]) -> None:
        self.next_step, self.asked = 0, tuple(levels)

    def meets_at(self, step: int) -> bool:
        return self.next_step is None or step >= self.next_step

    def must_be_committed(self, step: int) -> bool:
        """Whether this step waits for the save under way; once."""
        if self.commit_by is None or step < self.commit_by:
            return False
        self.commit_by = None
        return True

    def skip(self, step: int) -> None:
        """The save of this step cannot begin."""
        self.skipped += 1
        wait = max(1, (self.plan.steps if self.plan else RETRY_STEPS) // RETRY_STEPS)
        self.next_step = step + (1 if self.asked is not None else wait)

    def only_looks(self, step: int) -> bool:
        """The first saves are within the budget, too: their costs are known now, and the next one is due later."""
        assert self.plan is not None
        due = self.last_of.get("memory", 0) + self.plan.period
        if self.asked is not None or self.saves > NUM_MEASURED or step >= due:
            return False
        self.next_step = due
        return True

    def levels_at(self, step: int, peers_idle: bool) -> tuple[str, ...]:
        """The levels that a save of this step goes to. A copy to peers that cannot start yet stays due."""
        assert self.plan is not None
        self.saves += 1
        levels, self.asked = self.asked, None
        if levels is None:
            levels = self.plan.levels_due({level: step - self.last_of.setdefault(level, step) for level in LEVELS})
            if self.saves == 1 and "disk" not in levels:
                levels = (*levels, "disk")  # nothing of this life is on disk yet
        self.last_of |= {level: step for level in levels if level != "peer" or peers_idle}
        return levels

    def saved(self, step: int) -> None:
        """A save of this step is under way: when the next one begins, and when this one is to be committed."""
        assert self.plan is not None
        steps = self.plan.period
        if self.saves <= NUM_MEASURED:
            steps = min(steps, max(self.plan.margin, round(MEASURE_S / self.plan.step_s)))
        self.next_step = step + steps
        # No more steps than the interval at the last save are lost: this one is committed by then.
        self.commit_by = max(self._promised, step + self.plan.margin) if self.saves > 1 else None
        self._promised = step + self.plan.steps

    def look_steps(self) -> int:
        """Between looks whether the copy to peers is over."""
        assert self.plan is not None
        return max(1, min(self.plan.period // RETRY_STEPS, round(LOOK_S / self.plan.step_s)))

    def go_back(self, step: int) -> None:
        """The run goes on from this step, without a new process."""
        self.next_step = self.commit_by = None
        self._promised = 0
        self.last_of = {level: min(saved, step) for level, saved in self.last_of.items()}
