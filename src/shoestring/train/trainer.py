"""The training loop: objective + two hook points + reducer.

The trainer names no method and no model; everything is passed in as a built object (step.py). It is re-entrant (a
block-wise stage is one small call without a run folder), has no global state, and waits for the GPU only when it logs.

One step, in order: micro-batches summed and divided by the step's global count -> reducer -> clip ->
hooks.before_step -> optimizer -> hooks.after_step -> checkpointer.after_step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import Interrupted, UserError
from shoestring.mesh import Mesh
from shoestring.model.stages import copies
from shoestring.runlog import read_config
from shoestring.train.gradients import GradientWatch, clip_gradients
from shoestring.train.optim import Schedule, set_lr
from shoestring.train.reducers.plain import SumReducer
from shoestring.train.rollback import SKIPPED, BadStepError, LossWatch, RollbackMode, SkippedSteps
from shoestring.train.step import (
    Data,
    ForwardBackward,
    Hook,
    Micro,
    Objective,
    PlainForwardBackward,
    Reducer,
    Run,
    StepCheckpointer,
)

VOTE_STEPS = 4  # between votes of several processes on whether to stop


def train(
    run: Run,
    data: Data,
    objective: Objective,
    *,
    steps: int,
    schedule: Schedule | None = None,
    hooks: Sequence[Hook] = (),
    reducer: Reducer | None = None,
    clip: float = 1.0,
    checkpointer: StepCheckpointer | None = None,
    log_every: int = 10,
    evaluate: Callable[[Run], dict[str, float]] | None = None,
    eval_every: int = 0,
    forward_backward: ForwardBackward | None = None,
    rollback: RollbackMode = "off",
) -> Run:
    """Run from run.step (or from the checkpointer's latest) to `steps`.

    `forward_backward`: how gradients are computed (step.py); plain passes by default. Several calls may share one.

    A line of metrics averages the steps since the previous line. There is also one before every checkpoint and every
    evaluation, so that the averages and times of a resumed run are right.

    Ctrl-C finishes the step, saves, and raises Interrupted; a second Ctrl-C stops at once. A gradient that is NaN
    or infinite stops the run with its layer's name (gradients.py). With `rollback`, a loss spike stops it too;
    "auto" goes back to the newest version before the bad step and leaves out the data in between (rollback.py).
    """
    skipped = SkippedSteps()
    while True:
        try:
            return _train(
                run,
                data,
                objective,
                steps,
                schedule,
                hooks,
                reducer or SumReducer(run.mesh),
                clip,
                checkpointer,
                log_every,
                evaluate,
                eval_every,
                forward_backward or PlainForwardBackward(),
                skipped,
                LossWatch() if rollback != "off" else None,
            )
        except BadStepError as bad:
            if checkpointer is None:
                raise
            checkpointer.discard(run, bad.step)
            if rollback == "ask":
                raise UserError(f"{bad}; a resumed run goes on from the newest version before step {bad.step}") from bad
            if rollback == "off":
                raise
            run.log.say(f"{bad}; going back")
            run.optimizer.zero_grad()  # the bad ones would be added to
            skipped.go_back(bad)


def _train(
    run: Run,
    data: Data,
    objective: Objective,
    steps: int,
    schedule: Schedule | None,
    hooks: Sequence[Hook],
    reducer: Reducer,
    clip: float,
    checkpointer: StepCheckpointer | None,
    log_every: int,
    evaluate: Callable[[Run], dict[str, float]] | None,
    eval_every: int,
    forward_backward: ForwardBackward,
    skipped: SkippedSteps,
    losses: LossWatch | None,
) -> Run:
    """To `steps`, or to the first bad one."""
    if log_every < 1:
        raise UserError(f"log_every={log_every} is not possible; give 1 or more")
    parts: dict[str, Any] = {"data": data, "objective": objective, "reducer": reducer, SKIPPED: skipped}
    parts |= {f"hooks.{i}": hook for i, hook in enumerate(hooks)}
    if checkpointer is not None and checkpointer.resume(run, parts):
        run.log.truncate_after(run.step)
    elif skipped.bad is not None:
        raise UserError(f"there is no version from before step {skipped.bad} to go back to; start a new run")
    elif checkpointer is not None and any(row["step"] > run.step for row in run.log.history):
        run.log.truncate_after(run.step)  # of a start that ended before its first checkpoint
    skipped.begin(run.step)
    newest = checkpointer.newest if checkpointer is not None else lambda: None
    meter, vote = _Meter(run), _StopVote(run.mesh)
    watch = GradientWatch(run.model, run.mesh)
    copied = copies(run.model)
    run.model.train()
    reducer.begin(run)
    forward_backward.begin(run)
    with _stop_on_interrupt() as interrupted, run.log.progress(steps, "train") as bar:
        bar.advance(run.step)
        while run.step < steps and not run.ended:
            micros = [m.to(run.mesh.device) for m in data.step(skipped.data_step(run.step))]
            count = _global_count(run.mesh, objective, micros)
            reducer.expect(len(micros))
            loss = forward_backward(run.model, objective, micros, count)
            reducer.observe(loss / count)
            reducer(run.model)
            norm = clip_gradients(
                run.model.parameters(),
                0.0 if reducer.clips else clip,
                partial(watch.see, run.step + 1),
                mesh=run.mesh,
                copies=copied,
            )
            if norm.device.type == "cpu":
                watch.check(newest)
            if schedule is not None:
                set_lr(run.optimizer, schedule(run.step))
            for hook in hooks:
                hook.before_step(run)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.step += 1
            try:
                for hook in hooks:
                    hook.after_step(run)
            except UserError:
                # A hook that fails on a bad weight does not know the gradient and the step that caused it.
                watch.check(newest)
                raise
            meter.add(loss, count)
            bar.advance(1)
            last = run.step == steps
            evaluates = evaluate is not None and eval_every and (run.step % eval_every == 0 or last)
            saves = checkpointer is not None and checkpointer.due(run.step)
            logs_now = run.step % log_every == 0 or last or evaluates or saves
            if logs_now:
                watch.check(newest)
                scalars = meter.flush(norm, reducer.scalars())
                bar.advance(0, **scalars)
                if losses is not None:
                    losses.see(run.step, scalars["loss"])
            if evaluate is not None and evaluates:
                run.log.log(run.step, **evaluate(run))
                run.model.train()
                meter.began = time.perf_counter()
            if checkpointer is not None:
                checkpointer.after_step(run, parts)
            if vote.stops(run.step, interrupted.is_set(), waits=logs_now):
                watch.check(newest)
                if not logs_now:
                    meter.flush(norm, reducer.scalars())
                _stop(run, parts, checkpointer, steps)
    return run


def _global_count(mesh: Mesh, objective: Objective, micros: list[Micro]) -> Tensor | float:
    """Counted targets of the step over all ranks; at least 1, so that a step without any has zero gradients."""
    count = float(sum(objective.count(m) for m in micros))
    if mesh.dp_size == 1:
        return max(count, 1.0)
    # Stays on the device. fp32 counts exactly to 16M tokens a step.
    return mesh.sum(torch.tensor(count, device=mesh.device, dtype=torch.float32)).clamp(min=1.0)


class _StopVote:
    """Ranks must stop at the same step. They ask each other when they wait for each other anyway, and every VOTE_STEPS
    steps begin a vote whose result they read at the next one: nobody waits, and a signal to any rank stops all within
    2 * VOTE_STEPS steps, however rare the lines of metrics are."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._result: Callable[[], bool] | None = None  # of the last vote

    def stops(self, step: int, asked: bool, *, waits: bool) -> bool:
        """After every step, on every rank. `waits`: the ranks have just waited for each other."""
        if self.mesh.world_size == 1 or waits:
            return self.mesh.any(asked)
        if step % VOTE_STEPS:
            return False
        result, self._result = self._result, self.mesh.begin_any(asked)
        return result is not None and result()


class _Meter:
    """Sums losses on the device and reads them back in flush()."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.loss: Tensor | None = None
        self.count: Tensor | float = 0.0
        self.began = time.perf_counter()

    def add(self, loss: Tensor, count: Tensor | float) -> None:
        self.loss = loss if self.loss is None else self.loss + loss
        self.count = self.count + count

    def flush(self, norm: Tensor, of_reducer: dict[str, float]) -> dict[str, float]:
        assert self.loss is not None
        loss, count = float(self.run.mesh.sum(self.loss.double())), float(self.count)
        seconds = time.perf_counter() - self.began
        scalars = {
            "loss": loss / count,
            "lr": float(self.run.optimizer.param_groups[0]["lr"]),
            "grad_norm": float(norm),
            "tokens_per_s": count / seconds,
        }
        self.run.log.log(self.run.step, **scalars, **of_reducer)
        self.loss, self.count = None, 0.0
        self.began = time.perf_counter()
        return scalars


def _stop(run: Run, parts: dict[str, Any], checkpointer: StepCheckpointer | None, steps: int) -> None:
    if checkpointer is None:
        raise Interrupted(f"stopped at step {run.step} of {steps}; nothing was saved because no checkpointer was given")
    checkpointer.save(run, parts)
    folder = run.log.folder
    recipe = read_config(folder).get("recipe", "RECIPE") if folder is not None else "RECIPE"
    raise Interrupted(
        f"stopped at step {run.step} of {steps} and saved; continue with `shoestring run {recipe} resume={folder}`"
    )


@contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """The first SIGINT or SIGTERM sets the event, for a stop after the step; the second has its usual effect."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop.set()
        for s, handler in previous.items():
            signal.signal(s, handler)

    for s in previous:
        signal.signal(s, request_stop)
    try:
        yield stop
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)
