"""The parts of a training step: Run, Micro, Hook, and the protocols of everything else that `train` takes.

A training method is a set of such objects; the trainer names none of them. Data gives the rows of a step, an Objective
turns rows into a summed loss, a ForwardBackward fills the gradients, a Reducer makes them equal over the mesh axis
`replica`, Hooks act before and after the optimizer, a StepCheckpointer saves and resumes.

`state_dict` of data, objective, reducer and hooks belongs to every checkpoint. This file imports nothing else of
train/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoestring.mesh import Mesh
from shoestring.runlog import RunLog

IGNORED = -100  # a target that is not counted


@dataclass(frozen=True)
class Micro:
    """The rows of one forward and backward pass: tokens_BT -> targets_BT (IGNORED where not counted), both int64.

    index_BT is each target's position in the corpus, by which arrays per token (a teacher's top-k, a reference loss)
    are joined. num_counted is computed before the rows move to a device, so that it needs no synchronisation.

    Rows may hold several samples. bounds_S are then the places in the B * T tokens where samples begin, and the end;
    none is longer than `longest`. Rows of pairs_P2 are two samples of which the first is preferred. weights_BT: what
    each target's loss counts.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    index_BT: Tensor
    num_counted: int = -1
    bounds_S: Tensor | None = None
    pairs_P2: Tensor | None = None
    weights_BT: Tensor | None = None
    longest: int = 0

    def __post_init__(self) -> None:
        if self.num_counted < 0:
            object.__setattr__(self, "num_counted", int((self.targets_BT != IGNORED).sum()))

    def map(self, change: Callable[[Tensor], Tensor]) -> Micro:
        """Apply `change` to every tensor; the count stays."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: change(t) for name, t in held.items() if isinstance(t, Tensor)}
        return replace(self, **changed)

    def to(self, device: torch.device) -> Micro:
        if device.type == "cpu":
            return self
        return self.map(lambda t: t.pin_memory().to(device, non_blocking=True))


@dataclass
class Run:
    """What hooks and checkpointers get."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    log: RunLog
    step: int = 0
    trained_only: bool = False  # checkpoints hold what gets gradients; the rest is read again from where it came from
    ended: bool = False  # set by a hook or an evaluation: no step follows


class Stateful(Protocol):
    """By default without state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class Hook(Stateful):
    """Override what is needed. Hooks run in list order."""

    def before_step(self, run: Run) -> None:
        """After gradients are summed and clipped, before the optimizer. Masked decay belongs here, because the clip
        would rescale it."""

    def after_step(self, run: Run) -> None:
        """After the optimizer: mask refresh, a Format switch, the outer step of local SGD."""


class PassCounter(ABC):
    """Owner of a forward hook that counts the passes of a step, from the same start in every step. Such hooks can be
    captured in a CUDA graph."""

    @abstractmethod
    def rewind(self) -> None:
        """The next forward pass is the first of its step."""


class Data(Stateful, Protocol):
    def step(self, step: int) -> list[Micro]:
        """This rank's rows: a pure function of the step."""
        ...


class Objective(Stateful, Protocol):
    def count(self, micro: Micro) -> int:
        """The number that the sum is divided by: that of the counted targets by default."""
        return micro.num_counted

    def __call__(self, model: nn.Module, micro: Micro) -> Tensor:
        """The loss summed over the counted targets."""
        ...


class ForwardBackward(Protocol):
    """Computes the gradients of a step: plainly, from a CUDA graph, or as a pipeline of stages.

    It has no state in a checkpoint: its result is a function of its arguments, and a run may be resumed with another
    one. It neither clips nor reduces over `replica`.
    """

    def begin(self, run: Run) -> None:
        """Called once before the first step of each `train`."""
        ...

    def __call__(self, model: nn.Module, objective: Objective, micros: list[Micro], total: Tensor | float) -> Tensor:
        """Leave the gradient of sum(objective) / total in every parameter's .grad, reduced once over `dp`.

        `micros` are this rank's, on its device; `total` is the count over all ranks (a tensor on the device where
        there are several). Returns this rank's summed loss, detached, on the device.
        """
        ...


class PlainForwardBackward:
    """One micro-batch after the other; FSDP2 reduces once, after the last."""

    def begin(self, run: Run) -> None: ...

    def __call__(self, model: nn.Module, objective: Objective, micros: list[Micro], total: Tensor | float) -> Tensor:
        loss = torch.zeros((), device=micros[0].tokens_BT.device)
        for i, micro in enumerate(micros):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(i == len(micros) - 1)
            summed = objective(model, micro)
            (summed / total).backward()
            loss += summed.detach()
        return loss


class Reducer(Stateful, Protocol):
    """Makes gradients equal over the mesh axis `replica`. FSDP2 has summed over `dp` already.

    `clips`: whether __call__ clips the gradients (error feedback must see clipped ones); the trainer then only measures
    their norm. Residuals of a compressed reducer belong in state_dict.
    """

    clips: bool

    def begin(self, run: Run) -> None:
        """Called once before the first step of each `train`, after a checkpoint was loaded."""
        return

    def expect(self, num_micros: int) -> None:
        """Called before the passes of a step: so many backward passes follow, the last of which completes gradients."""
        return

    def __call__(self, model: nn.Module) -> None: ...

    def observe(self, loss: Tensor) -> None:
        """This rank's part of the step's loss, before __call__; on the device."""
        return

    def scalars(self) -> dict[str, float]:
        """What goes into a line of metrics, over the steps since the last one."""
        return {}


class StepCheckpointer(Protocol):
    """The trainer's view of checkpoints; levels and policies belong to the checkpointer."""

    def resume(self, run: Run, parts: dict[str, Any]) -> bool: ...
    def due(self, step: int) -> bool: ...
    def after_step(self, run: Run, parts: dict[str, Any]) -> None: ...
    def save(self, run: Run, parts: dict[str, Any]) -> Any: ...
    def newest(self) -> Path | None: ...
    def discard(self, run: Run, step: int) -> None:
        """Versions of this step and later ones must not be resumed from; all ranks together."""
        ...
