"""The training loop: objective + two hook points + reducer.

The trainer names no method and no model; everything arrives as a built object. It is re-entrant (a block-wise
stage is one small call without a run folder), keeps no global state, and never waits for the GPU except when
it logs.

One step, in order: micro-batches summed and divided by the step's global count -> reducer -> clip ->
hooks.before_step -> optimizer -> hooks.after_step -> checkpointer.after_step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoestring.errors import Interrupted, UserError
from shoestring.mesh import Mesh
from shoestring.runlog import RunLog, read_config
from shoestring.state.checkpoint import latest
from shoestring.train.gradient_watch import GradientWatch
from shoestring.train.hooks import Hook
from shoestring.train.micro import Micro
from shoestring.train.optim import Schedule, clip_gradients, set_lr
from shoestring.train.reducers import SumReducer
from shoestring.train.step_graph import StepGraph


@dataclass
class Run:
    """What hooks and checkpointers may see."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    log: RunLog
    step: int = 0


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Data(Stateful, Protocol):
    def step(self, step: int) -> list[Micro]: ...


class Objective(Stateful, Protocol):
    def count(self, micro: Micro) -> int: ...
    def __call__(self, model: nn.Module, micro: Micro) -> Tensor: ...


class Reducer(Stateful, Protocol):
    def __call__(self, model: nn.Module) -> None: ...


class StepCheckpointer(Protocol):
    """What the trainer knows of checkpoints; levels and their policy live behind it."""

    def resume(self, run: Run, parts: dict[str, Any]) -> bool: ...
    def due(self, step: int) -> bool: ...
    def after_step(self, run: Run, parts: dict[str, Any]) -> None: ...
    def save(self, run: Run, parts: dict[str, Any]) -> Any: ...


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
    graph: bool | StepGraph = False,
) -> Run:
    """Run from run.step (or from the checkpointer's latest) to `steps`.

    `graph`: the passes of a step as one CUDA graph, where that is possible (step_graph.py); the objective must then
    stay as it is until the end. A StepGraph that the caller made serves several calls, and stays open.

    A line of metrics averages the steps since the line before it. So that this holds for a resumed run, and for times,
    there is one in front of every checkpoint and every evaluation, too, whatever log_every says.

    Ctrl-C finishes the step, saves, and raises Interrupted; a second Ctrl-C stops at once. A gradient that is NaN
    or infinite stops the run with its layer's name (gradient_watch.py).
    """
    if log_every < 1:
        raise UserError(f"log_every={log_every} is not possible; give 1 or more")
    reducer = reducer or SumReducer(run.mesh)
    parts = {"data": data, "objective": objective, "reducer": reducer}
    parts |= {f"hooks.{i}": hook for i, hook in enumerate(hooks)}
    if checkpointer is not None and checkpointer.resume(run, parts):
        run.log.truncate_after(run.step)
    meter = _Meter(run)
    watch = GradientWatch(run.model, world_size=run.mesh.world_size)
    run.model.train()
    passes = graph if isinstance(graph, StepGraph) else None
    if graph is True and StepGraph.fits(run.model, run.mesh.world_size, run.mesh.device):
        passes = StepGraph(run.model, objective)
    elif graph is True and run.mesh.device.type == "cuda" and run.mesh.world_size == 1:
        run.log.say("steps run without a CUDA graph: the model has forward hooks that cannot be captured")
    with _stop_on_interrupt() as interrupted, run.log.progress(steps, "train") as bar:
        bar.advance(run.step)
        while run.step < steps:
            loss, count, norm = _gradients(run, data.step(run.step), objective, reducer, clip, watch, passes)
            if norm.device.type == "cpu":
                watch.check(partial(_newest, checkpointer))
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
                # A hook that stumbles over a spoilt weight does not know whose gradient spoilt it, or when.
                watch.check(partial(_newest, checkpointer))
                raise
            meter.add(loss, count)
            bar.advance(1)
            last = run.step == steps
            evaluates = evaluate is not None and eval_every and (run.step % eval_every == 0 or last)
            saves = checkpointer is not None and checkpointer.due(run.step)
            logs_now = run.step % log_every == 0 or last or evaluates or saves
            if logs_now:
                watch.check(partial(_newest, checkpointer))
                bar.advance(0, **meter.flush(norm))
            if evaluate is not None and evaluates:
                run.log.log(run.step, **evaluate(run))
                run.model.train()
                meter.restart_clock()
            if checkpointer is not None:
                checkpointer.after_step(run, parts)
            # Ranks have to agree where to stop. One process looks after every step; several only when they
            # talk anyway.
            if (run.mesh.world_size == 1 or logs_now) and run.mesh.any(interrupted.is_set()):
                watch.check(partial(_newest, checkpointer))
                if not logs_now:
                    meter.flush(norm)
                _stop(run, parts, checkpointer, steps)
    if passes is not None and passes is not graph:
        passes.close()
    return run


def _gradients(
    run: Run,
    micros: list[Micro],
    objective: Objective,
    reducer: Reducer,
    clip: float,
    watch: GradientWatch,
    passes: StepGraph | None = None,
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Backward over all micro-batches; returns this rank's summed loss, the step's global count and the
    gradient norm."""
    micros = [m.to(run.mesh.device) for m in micros]
    total: Tensor | float = float(sum(objective.count(m) for m in micros))
    if run.mesh.dp_size > 1:
        # Stays on the device. fp32 counts exactly to 16M tokens a step.
        total = run.mesh.sum(torch.tensor(total, device=run.mesh.device, dtype=torch.float32)).clamp(min=1.0)
    else:
        total = max(total, 1.0)  # a step whose every target is masked moves nothing
    if passes is not None and isinstance(total, float):
        loss = passes(micros, total)
    else:
        loss = torch.zeros((), device=run.mesh.device)
        for i, micro in enumerate(micros):
            _sync_gradients(run.model, last=i == len(micros) - 1)
            summed = objective(run.model, micro)
            (summed / total).backward()
            loss += summed.detach()
    reducer(run.model)
    norm = clip_gradients(run.model.parameters(), clip, partial(watch.see, run.step + 1))
    return loss, total, norm


def _newest(checkpointer: StepCheckpointer | None) -> Path | None:
    folder = getattr(checkpointer, "folder", None)
    return None if folder is None else latest(folder)


def _sync_gradients(model: nn.Module, *, last: bool) -> None:
    """FSDP2 reduces once per step, after the last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


class _Meter:
    """Sums losses on the device and reads them back only when asked."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.loss: Tensor | None = None
        self.count: Tensor | float = 0.0
        self.began = time.perf_counter()

    def add(self, loss: Tensor, count: Tensor | float) -> None:
        self.loss = loss if self.loss is None else self.loss + loss
        self.count = self.count + count

    def flush(self, norm: Tensor) -> dict[str, float]:
        assert self.loss is not None
        loss, count = float(self.run.mesh.sum(self.loss.double())), float(self.count)
        seconds = time.perf_counter() - self.began
        scalars = {
            "loss": loss / count,
            "lr": float(self.run.optimizer.param_groups[0]["lr"]),
            "grad_norm": float(norm),
            "tokens_per_s": count / seconds,
        }
        self.run.log.log(self.run.step, **scalars)
        self.loss, self.count = None, 0.0
        self.began = time.perf_counter()
        return scalars

    def restart_clock(self) -> None:
        self.began = time.perf_counter()


def _stop(run: Run, parts: dict[str, Any], checkpointer: StepCheckpointer | None, steps: int) -> None:
    if checkpointer is None:
        raise Interrupted(
            f"stopped at step {run.step} of {steps}; nothing was saved because no checkpointer was given"
        )
    checkpointer.save(run, parts)
    folder = run.log.folder
    recipe = read_config(folder).get("recipe", "RECIPE") if folder is not None else "RECIPE"
    raise Interrupted(
        f"stopped at step {run.step} of {steps} and saved; go on with `shoestring run {recipe} resume={folder}`"
    )


@contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """The first SIGINT or SIGTERM asks for a stop after the step; the second acts as usual."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals belong to the main thread
        return
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        for s, handler in previous.items():
            signal.signal(s, handler)

    for s in previous:
        signal.signal(s, ask)
    try:
        yield asked
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)
