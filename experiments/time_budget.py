"""Training that ends after given seconds, on a GPU that is shared.

Learning rates follow the clock where it is ahead of the steps, so that a run that is cut short also ends with small
rates. The result line states how many tokens the run saw.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from shoestring.train.step import Hook, Run


class OutOfTime(Exception):
    """The time of a training is over."""


class TimeBudget(Hook):
    """Calls `set_rates(run, part of the seconds)` before every step; raises OutOfTime after the step in which they end.

    The time starts now, or with the first step.
    """

    def __init__(
        self,
        steps: int,
        seconds: float,
        set_rates: Callable[[Run, float], None],
        *,
        now: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps, self.seconds, self.set_rates, self.clock = steps, seconds, set_rates, clock
        self.began = clock() if now else None

    def spent(self) -> float:
        """Part of the seconds, at most 1."""
        if self.began is None:
            self.began = self.clock()
        return min(1.0, (self.clock() - self.began) / self.seconds) if self.seconds > 0 else 1.0

    def before_step(self, run: Run) -> None:
        self.set_rates(run, self.spent())

    def after_step(self, run: Run) -> None:
        if math.isclose(self.spent(), 1.0) and run.step < self.steps:
            raise OutOfTime
