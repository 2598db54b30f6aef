"""Work by the clock: rates that fall with the time, and an end in time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from experiments.time_budget import SIGNALS, Limits, OutOfTime, TimeBudget
from shoestring.errors import Interrupted
from shoestring.mesh import open_mesh
from shoestring.runlog import RunLog
from shoestring.shrink.qat import FallingRates
from shoestring.train.step import Run


def make_run() -> Run:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": list(layer.parameters()), "lr": 1.0, "full_lr": 1.0}])
    return Run(layer, optimizer, open_mesh(), RunLog(None, quiet=True))


def test_the_clock_counts_where_it_is_ahead_of_the_steps() -> None:
    run, now, falling = make_run(), [100.0], FallingRates(11, floor=0.0)
    hook = TimeBudget(11, 10.0, falling.at, now=True, clock=lambda: now[0])

    def rate(step: int, at: float) -> float:
        run.step, now[0] = step, at
        hook.before_step(run)
        return run.optimizer.param_groups[0]["lr"]

    assert rate(5, 101.0) == pytest.approx(0.5)  # half of the steps, a tenth of the time
    assert rate(5, 107.5) == pytest.approx(0.5 * (1 - 0.5**0.5))  # cos(3/4 pi)
    run.step = 6
    hook.after_step(run)
    now[0] = 110.5
    with pytest.raises(OutOfTime):
        hook.after_step(run)
    run.step = 11  # finished: nothing to give up
    hook.after_step(run)


def test_the_seconds_begin_with_the_first_step_unless_told() -> None:
    run, now = make_run(), [5.0]
    seen: list[float] = []
    hook = TimeBudget(3, 10.0, lambda run, spent: seen.append(spent), clock=lambda: now[0])
    now[0] = 50.0
    hook.before_step(run)
    now[0] = 55.0
    hook.before_step(run)
    assert seen == [0.0, 0.5]
    late = TimeBudget(3, -1.0, lambda run, spent: seen.append(spent), clock=lambda: now[0])
    late.before_step(run)
    assert seen[-1] == 1.0
    with pytest.raises(OutOfTime):
        late.after_step(run)


def test_a_signal_lets_what_is_patient_be_completed_and_ends_the_rest() -> None:
    before = {s: signal.getsignal(s) for s in SIGNALS}
    for number in SIGNALS:
        limits, done = Limits(), []
        with limits.handled():
            with limits.patiently():
                signal.raise_signal(number)
                done.append("measured")
            assert limits.over and done == ["measured"]
            assert signal.getsignal(number) is before[number], "the second has its usual effect"
        limits = Limits()
        with pytest.raises(Interrupted), limits.handled():
            signal.raise_signal(number)
        assert limits.over and {s: signal.getsignal(s) for s in SIGNALS} == before


def test_a_training_is_stopped_in_time_for_what_follows() -> None:
    limits, began = Limits(60.0), time.monotonic()
    with limits.handled():
        with pytest.raises(Interrupted), limits.training(spare=59.9):
            time.sleep(30)
        assert time.monotonic() - began < 20 and limits.over
    limits = Limits(60.0)
    with limits.handled():
        with limits.training(spare=59.5):
            pass
        time.sleep(0.7)  # it ended before: nothing comes later
        assert not limits.over and 50 < limits.left < 60
        limits.ask()  # the trainer had the signal
        assert limits.over
    with Limits().training(spare=5.0):
        pass


def test_a_timer_that_comes_too_late_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time was over just before the training ended, so that it could not be cancelled any more."""
    timers: list[LateTimer] = []

    class LateTimer:
        def __init__(self, seconds: float, function: Callable[[], None]) -> None:
            self.function, self.daemon = function, False
            timers.append(self)

        def start(self) -> None:
            pass

        cancel = start

    monkeypatch.setattr(threading, "Timer", LateTimer)
    limits = Limits(60.0)
    with limits.handled():
        with limits.training(spare=0.0):
            pass
        timers[0].function()
        assert not limits.over and limits.left > 30
        with pytest.raises(Interrupted), limits.training(spare=0.0):
            timers[1].function()
        assert limits.over
