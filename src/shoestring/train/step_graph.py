"""The forward and backward passes of a step as one CUDA graph, for small models whose GPU waits for Python.

A quantized layer of a 135M model is some hundred small kernels a step; started one by one they take several times as
long as they run. Captured once, a step's passes start as one thing, and nothing about them changes: same kernels, same
order, same gradients. Optimizer, clipping and hooks stay outside, so learning rates and masks may change at every
step; weights, masks and scales must change in place, and they do.

What is captured must not depend on numbers that Python holds: a model with forward hooks (clocks of random numbers)
is left alone, and so are several processes. The first step runs as usual twice, and the captured one must give its
loss and gradient norm; where it does not, or where capturing fails, training goes on without (`Replay.reason`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

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


class StepGraph:
    """The passes of a training step over micro-batches that always have the same shapes."""

    def __init__(self, model: nn.Module, objective: Callable[[nn.Module, Micro], Tensor]) -> None:
        self.model, self.objective = model, objective
        self.held: list[Micro] = []
        self.total: Tensor | None = None
        self.replay: Replay | None = None

    @staticmethod
    def fits(model: nn.Module, world_size: int, device: torch.device) -> bool:
        hooked = any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        return device.type == "cuda" and world_size == 1 and not hooked

    def __call__(self, micros: list[Micro], total: float) -> Tensor:
        """The summed loss; gradients are those of the loss divided by `total`."""
        if self.replay is None:
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
        loss = torch.zeros((), device=self.total.device)
        for micro in self.held:
            summed = self.objective(self.model, micro)
            (summed / self.total).backward()
            loss += summed.detach()
        return loss


FIELDS = ("tokens_BT", "targets_BT", "index_BT")
