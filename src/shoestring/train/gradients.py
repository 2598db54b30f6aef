"""Gradients of a step: clipped by their global norm, and watched for NaN and infinity.

The clip computes the norm of every gradient anyway; GradientWatch uses them to stop a run whose gradients are NaN or
infinite, with the name of the layer. On a CPU it checks every step, before the optimizer moves a weight. On a GPU that
would wait for the device: the first bad step and its tensors are kept on the device, and read when the trainer reads
metrics and before a checkpoint is saved. So the newest checkpoint is always a good one.

A layer that fails in the backward pass spoils its own gradient and those of all layers before it, so the last bad one
is named. When all are bad, the loss was bad.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoestring.formats.linear import local
from shoestring.mesh import Mesh
from shoestring.state.agreement import everyone
from shoestring.train.rollback import BadStepError

Look = Callable[[Tensor, list[nn.Parameter], Tensor], None]


@torch.no_grad()
def clip_gradients(
    params: Iterable[nn.Parameter],
    max_norm: float,
    see: Look | None = None,
    *,
    mesh: Mesh | None = None,
    copies: Container[int] = (),
) -> Tensor:
    """Scale gradients so that their global norm is at most max_norm (0 = measure only); returns the norm.

    The norm of a sharded tensor is summed over exactly the mesh axes that cut it, and over the stages of `mesh`; the
    `copies` (ids) of another stage's parameters are scaled, not counted. Nothing waits for the GPU. `see` gets the
    norm, the parameters, and the norm of this rank's part of each gradient.
    """
    by_axes: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    owners: dict[tuple[Any, tuple[int, ...]], list[nn.Parameter]] = {}
    for param in params:
        if param.grad is not None:
            cut = cut_axes(param.grad)
            by_axes.setdefault(cut, []).append(local(param.grad))
            owners.setdefault(cut, []).append(param)
    if not by_axes:
        return torch.zeros(())  # of every stage at once: each has blocks
    square = None
    norms = []
    for cut, grads in by_axes.items():
        norms.append(torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)))
        counted = [i for i, p in enumerate(owners[cut]) if id(p) not in copies]
        part = (norms[-1] if len(counted) == len(grads) else norms[-1][counted]).square().sum()
        for axis in cut[1]:
            dist.all_reduce(part, group=cut[0].get_group(axis))
        square = part if square is None else square + part
    assert square is not None
    norm = (square if mesh is None else mesh.sum_over_stages(square)).sqrt()
    if see is not None:
        see(norm, [p for group in owners.values() for p in group], torch.cat(norms))
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grads in by_axes.values():
            torch._foreach_mul_(grads, scale)
    return norm


def cut_axes(t: Tensor) -> tuple[Any, tuple[int, ...]]:
    """The device mesh of a sharded tensor and its axes that cut it; none of a plain tensor."""
    if not isinstance(t, DTensor):
        return None, ()
    return t.device_mesh, tuple(i for i, p in enumerate(t.placements) if not p.is_replicate())


class GradientWatch:
    def __init__(self, model: nn.Module, mesh: Mesh | None = None) -> None:
        self.names = {id(p): n for n, p in model.named_parameters()}
        self.mesh = mesh
        self._params: list[nn.Parameter] = []
        self._step: Tensor | None = None  # the first bad step, -1 while there is none
        self._bad: Tensor | None = None  # which gradients were bad then

    def see(self, step: int, norm: Tensor, params: list[nn.Parameter], norms: Tensor) -> None:
        """`norm` over all ranks and gradients; `norms` of this rank's part of each gradient, as `params`."""
        if norm.device.type == "cpu":
            if not bool(norm.isfinite()):
                self._remember(torch.tensor(step), params, ~norms.isfinite())
            return
        bad, step_now = ~norms.isfinite(), torch.full_like(norm, float(step))
        if self._step is None or self._bad is None or len(self._params) != len(params):
            self._remember(torch.where(norm.isfinite(), -1.0, step_now), params, bad)
            return
        new = ~norm.isfinite() & (self._step < 0)
        self._bad = torch.where(new, bad, self._bad)
        self._step = torch.where(new, step_now, self._step)

    def check(self, last_good: Callable[[], Path | None]) -> None:
        """Raise on all ranks when a gradient was bad on one."""
        if self._step is None or float(self._step) < 0:
            return
        assert self._bad is not None
        order = list(self.names.values())
        found = [self.names[id(p)] for p, b in zip(self._params, self._bad.tolist(), strict=True) if b]
        watched = {self.names[id(p)] for p in self._params}
        if self.mesh is not None and self.mesh.world_size > 1:
            # Stages have other parameters, and ranks are ordered by stages.
            order = list(dict.fromkeys(everyone(self.mesh, order)))
            found, watched = everyone(self.mesh, found), set(everyone(self.mesh, sorted(watched)))
        found = sorted(set(found), key=order.index)
        if len(found) in (0, len(watched)):
            whose = "the loss and with it every gradient"
        else:
            others = f" (and {len(found) - 1} before it)" if len(found) > 1 else ""
            whose = f"the gradient of {found[-1]}{others}"
        checkpoint = last_good()
        good = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        raise BadStepError(
            f"step {int(self._step)}: {whose} is NaN or infinite, the run stops here; {good}; go on with a lower lr "
            "or other data",
            int(self._step),
        )

    def _remember(self, step: Tensor, params: list[nn.Parameter], bad: Tensor) -> None:
        self._step, self._params, self._bad = step, params, bad
