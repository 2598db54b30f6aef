"""The forward and backward passes of a step as one CUDA graph, for small models that are limited by launches.

A quantized layer of a 135M model is some hundred small kernels per step; launching them takes several times as long as
they run. A captured step is one launch of the same kernels in the same order, with the same gradients. Optimizer,
clipping and hooks stay outside, so learning rates and masks may change at every step; weights, masks and scales must
change in place.

A captured step must not depend on Python numbers. A model with forward hooks therefore runs plainly unless they belong
to PassCounters (the clocks of random numbers, which start equally in every step); so do several processes. When a layer
changes its Format, the next step is captured again.

Before the capture the step runs plainly twice, and the captured one must give the same loss and gradient norm. Where it
does not, or where the capture fails, passes run plainly (`reason` says why).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import Format, FormatHost
from shoestring.formats.convert import format_hosts
from shoestring.kernels.runtime.capture_stream import on_capture_stream
from shoestring.mesh import Mesh
from shoestring.train.step import Micro, Objective, PassCounter, PlainForwardBackward, Run

TOLERANCE = 1e-2  # relative: sums in another order, in 16 bits


class GraphedPasses:
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
        with on_capture_stream():
            for _ in range(2):  # compiles, tunes and allocates
                self._clear_gradients()
                loss = self.passes()
            want = torch.stack([loss.float(), self._norm()])
            self._clear_gradients()
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

    def _clear_gradients(self) -> None:
        for param in self.params:
            param.grad = None

    def _refuse(self, reason: str) -> None:
        self.reason, self.graph, self.grads, self.loss = reason, None, [], None
        self._clear_gradients()
        warnings.warn(f"steps run without a CUDA graph: {reason}", stacklevel=4)


class GraphedForwardBackward:
    """A ForwardBackward that replays one graph over micro-batches that always have the same shapes.

    The graph belongs to one model, objective and set of Formats, and is kept for their next `train`. The objective must
    not change while it is used.
    """

    def __init__(self) -> None:
        self._why_plain = ""
        self._graphed: GraphedPasses | None = None
        self._model: nn.Module | None = None
        self._objective: Objective | None = None
        self._linears: list[FormatHost] = []
        self._formats: list[Format] = []  # of the layers when they were captured
        self._held: list[Micro] = []
        self._total = torch.zeros(())

    @property
    def reason(self) -> str:
        """Why passes run plainly; empty where they do not."""
        return self._why_plain or ("" if self._graphed is None else self._graphed.reason)

    def begin(self, run: Run) -> None:
        self._why_plain = why_plain(run.model, run.mesh)
        if self._why_plain and run.mesh.device.type == "cuda" and run.mesh.world_size == 1:
            run.log.say(f"steps run without a CUDA graph: {self._why_plain}")

    def __call__(self, model: nn.Module, objective: Objective, micros: list[Micro], total: Tensor | float) -> Tensor:
        if self._why_plain:
            return PlainForwardBackward()(model, objective, micros, total)
        same = self._model is model and self._objective is objective
        layers = zip(self._linears, self._formats, strict=True)
        if not same or any(linear.format is not format for linear, format in layers):
            self._graphed = None  # frees its memory for the next graph
            self._capture(model, objective, micros, total)
        for held, micro in zip(self._held, micros, strict=True):
            held.tokens_BT.copy_(micro.tokens_BT)
            held.targets_BT.copy_(micro.targets_BT)
            held.index_BT.copy_(micro.index_BT)
        self._total.fill_(total)
        assert self._graphed is not None
        return self._graphed()

    def _capture(self, model: nn.Module, objective: Objective, micros: list[Micro], total: Tensor | float) -> None:
        self._model, self._objective = model, objective
        self._linears = [linear for _, linear in format_hosts(model)]
        self._formats = [linear.format for linear in self._linears]
        held = self._held = [micro.map(torch.clone) for micro in micros]
        divisor = self._total = torch.full((), float(total), device=micros[0].tokens_BT.device)
        plain, counters = PlainForwardBackward(), pass_counters(model) or []

        def passes() -> Tensor:  # without a reference to self: dropping self frees the graph's memory at once
            for counter in counters:
                counter.rewind()
            return plain(model, objective, held, divisor)

        self._graphed = GraphedPasses(passes, [p for p in model.parameters() if p.requires_grad])


def check_graph(mesh: Mesh) -> None:
    """For callers that check graph=true before long work."""
    if mesh.device.type != "cuda" or mesh.world_size > 1:
        raise UserError(
            f"graph=true needs one CUDA GPU, this run has {mesh.world_size} x {mesh.device.type}: leave it out"
        )


def why_plain(model: nn.Module, mesh: Mesh) -> str:
    """Why a step of this model cannot be captured; empty where it can."""
    if mesh.device.type != "cuda" or mesh.world_size > 1:
        return "a CUDA graph needs one process with a GPU"
    return "" if pass_counters(model) is not None else "the model has forward hooks that cannot be captured"


def pass_counters(model: nn.Module) -> list[PassCounter] | None:
    """Owners of the model's forward hooks, each once; None where one is not a PassCounter."""
    found: dict[int, PassCounter] = {}
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            owner = getattr(hook, "__self__", None)
            if not isinstance(owner, PassCounter):
                return None
            found[id(owner)] = owner
    return list(found.values())
