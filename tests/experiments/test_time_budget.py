"""Training by the clock: rates that fall with the time, and an end in time."""

from __future__ import annotations

import pytest
import torch

from experiments.time_budget import OutOfTime, TimeBudget
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
