"""The forward and backward passes of a step as one CUDA graph, for small models whose GPU waits for Python.

A quantized layer of a 135M model is some hundred small kernels a step; started one by one they take several times as
long as they run. Captured once, a step's passes start as one thing, and nothing about them changes: same kernels, same
order, same gradients. Optimizer, clipping and hooks stay outside, so learning rates and masks may change at every
step; weights, masks and scales must change in place, and they do.

What is captured must not depend on numbers that Python holds: a model with forward hooks is left alone unless these
can `rewind` (the clocks of random numbers: what they count begins anew with the passes of a step, so the numbers are
the same in every step), and so are several processes. Where layers change their Format, to rest or to wake, the next
step is captured anew.

The first step runs as usual twice, and the captured one must give its loss and gradient norm; where it does not, or
where capturing fails, training goes on without (`Replay.reason`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoestring.formats import Format
from shoestring.formats.convert import format_linears
from shoestring.kernels.side_stream import beside
from shoestring.train.micro import Micro

TOLERANCE = 1e-2  # relative, of the gradient norm: sums in another order, in 16 bits


class Replay:
    """`passes()` (forward and backward; returns the loss) as a graph. Calling it leaves gradients in `params`."""

    def __init__(self, passes: Callable[[], Tensor], params: Sequence[nn.Parameter]) -> None:
        self.passes, self.params = passes, list(params)
        self.reason = ""  # why there is no graph
        self.graph: Any = None
        self.grads: list[tuple[nn.Parameter, Tensor]] = []
        self.loss: Tensor | None = None
        try:
            self._capture()
        except RuntimeError as error:
            self._refuse(str(error).split("\n")[0])

    def __call__(self) -> Tensor:
        if self.graph is None:
            return self.passes()
        self.graph.replay()
        for param, grad in self.grads:
            param.grad = grad
        assert self.loss is not None
        return self.loss.clone()

    def _capture(self) -> None:
        with beside():
            for _ in range(2):  # compiles, tunes and reserves
                self._forget()
                loss = self.passes()
            want = torch.stack([loss.float(), self._norm()])
            self._forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = self.passes()
        self.grads = [(p, p.grad) for p in self.params if p.grad is not None]
        graph.replay()
        got = torch.stack([self.loss.float(), self._norm()])
        if not torch.allclose(got, want, rtol=TOLERANCE, atol=0.0):
            self._refuse(f"the graph's loss and gradient norm are {got.tolist()}, not {want.tolist()}")
            return
        self.graph = graph

    def _norm(self) -> Tensor:
        grads = [p.grad for p in self.params if p.grad is not None]
        return torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)).norm()

    def _forget(self) -> None:
        for param in self.params:
            param.grad = None

    def _refuse(self, reason: str) -> None:
        self.reason, self.graph, self.grads, self.loss = reason, None, [], None
        self._forget()
        warnings.warn(f"steps run without a CUDA graph: {reason}", stacklevel=4)


class Clock(Protocol):
    """Owner of a forward hook that counts the passes of a step."""

    def rewind(self) -> None:
        """The next forward pass is the first of its step."""


class StepGraph:
    """The passes of a training step over micro-batches that always have the same shapes."""

    def __init__(self, model: nn.Module, objective: Callable[[nn.Module, Micro], Tensor]) -> None:
        self.model, self.objective = model, objective
        clocks = forward_clocks(model)
        if clocks is None:
            raise ValueError(
                "the model has forward hooks that cannot rewind: what they count would be captured once"
            )
        self.clocks = clocks
        self.linears = [linear for _, linear in format_linears(model)]
        self.formats: list[Format] = []
        self.held: list[Micro] = []
        self.total: Tensor | None = None
        self.replay: Replay | None = None

    @staticmethod
    def fits(model: nn.Module, world_size: int, device: torch.device) -> bool:
        return device.type == "cuda" and world_size == 1 and forward_clocks(model) is not None

    def __call__(self, micros: list[Micro], total: float) -> Tensor:
        """The summed loss; gradients are those of the loss divided by `total`."""
        formats = [linear.format for linear in self.linears]
        if self.replay is not None and any(a is not b for a, b in zip(formats, self.formats, strict=True)):
            self.close()
        if self.replay is None:
            self.formats = formats
            self.held = [replace(m, **{n: getattr(m, n).clone() for n in FIELDS}) for m in micros]
            self.total = torch.full((), total, device=micros[0].tokens_BT.device)
            self.replay = Replay(self._passes, [p for p in self.model.parameters() if p.requires_grad])
        for held, micro in zip(self.held, micros, strict=True):
            for name in FIELDS:
                getattr(held, name).copy_(getattr(micro, name))
        assert self.total is not None
        self.total.fill_(total)
        return self.replay()

    def close(self) -> None:
        """Give the memory back; the graph and what it replays hold each other."""
        self.replay, self.held = None, []

    def _passes(self) -> Tensor:
        assert self.total is not None
        for clock in self.clocks:
            clock.rewind()
        loss = torch.zeros((), device=self.total.device)
        for micro in self.held:
            summed = self.objective(self.model, micro)
            (summed / self.total).backward()
            loss += summed.detach()
        return loss


def forward_clocks(model: nn.Module) -> list[Clock] | None:
    """Owners of the model's forward hooks, each once; None where one cannot rewind."""
    found: dict[int, Clock] = {}
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            owner: Any = getattr(hook, "__self__", None)
            if not hasattr(owner, "rewind"):
                return None
            found[id(owner)] = owner
    return list(found.values())


FIELDS = ("tokens_BT", "targets_BT", "index_BT")
