"""Work that ends in time, on a GPU that is shared.

`TimeBudget`  a training that ends after given seconds. Learning rates follow the clock where it is ahead of the steps,
              so that a run that is cut short also ends with small rates. The result line states how many tokens it saw.
`Limits`      a call that ends by a signal or a deadline without losing what is nearly done.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from shoestring.errors import Interrupted
from shoestring.train.step import Hook, Run

SIGNALS = signal.SIGINT, signal.SIGTERM


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


class Limits:
    """When a call has to end. The first signal sets `asked`, after which the caller starts nothing more; the second has
    its usual effect. What is done `patiently` is completed. Anything else ends with Interrupted: a training after its
    step, because the trainer handles signals itself."""

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.asked, self._patient = clock, False, False
        self.ends = clock() + seconds
        self._before = {s: signal.getsignal(s) for s in SIGNALS}

    @property
    def left(self) -> float:
        return self.ends - self.clock()

    @property
    def over(self) -> bool:
        return self.asked or self.left <= 0

    def ask(self) -> None:
        """Stop, as a signal that a training has handled asked for."""
        if not self.over:  # else a signal would be the first
            self._restore()
        self.asked = True

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles signals inside."""

        def stop(number: int, frame: FrameType | None) -> None:
            self.asked = True
            self._restore()
            if not self._patient:
                raise Interrupted("asked to stop; what is complete was recorded")

        self._before = {s: signal.getsignal(s) for s in SIGNALS}
        for number in SIGNALS:
            signal.signal(number, stop)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def patiently(self) -> Iterator[None]:
        before, self._patient = self._patient, True
        try:
            yield
        finally:
            self._patient = before

    @contextmanager
    def training(self, spare: float) -> Iterator[None]:
        """Stops a training inside, so many seconds before the end."""
        if math.isinf(self.left):
            yield
            return
        caller, deciding, ended = threading.get_ident(), threading.Lock(), False

        def stop() -> None:
            with deciding:
                if not ended:
                    self.ends = min(self.ends, self.clock())  # the rest is for what was trained
                    signal.pthread_kill(caller, signal.SIGINT)

        timer = threading.Timer(max(0.0, self.left - spare), stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()  # does not stop one whose time is over: it may be on its way to `stop`, or in it
            with deciding:
                ended = True
