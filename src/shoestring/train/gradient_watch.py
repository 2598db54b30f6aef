"""Stops a run whose gradients are NaN or infinite, and says whose they were.

The norm of every gradient is computed for the clip anyway. On a CPU it is looked at in every step, before the
optimizer moves a weight. On a GPU nobody waits for it: the first bad step and its tensors are remembered on the
device, and looked at when the trainer reads numbers back anyway and before a checkpoint is saved, so that the newest
checkpoint is always a good one.

A layer that breaks in the backward pass spoils its own gradient and those of all layers before it; so the last bad
one is named. When all are bad, the loss was bad already.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoestring.errors import UserError


class GradientWatch:
    def __init__(self, model: nn.Module, *, world_size: int = 1) -> None:
        self.names = {id(p): n for n, p in model.named_parameters()}
        self.world_size = world_size
        self._params: list[nn.Parameter] = []
        self._step: Tensor | None = None  # the first bad step, -1 while there is none
        self._bad: Tensor | None = None  # whose gradients they were

    def see(self, step: int, norm: Tensor, params: list[nn.Parameter], norms: Tensor) -> None:
        """`norm` over all ranks and gradients; `norms` of this rank's part of each gradient, in the order of
        `params`."""
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
        """Raise when a gradient was bad; all ranks come to the same answer."""
        if self._step is None or float(self._step) < 0:
            return
        assert self._bad is not None
        bad = self._bad.float()
        if self.world_size > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        found = [self.names[id(p)] for p, b in zip(self._params, bad.tolist(), strict=True) if b]
        order = list(self.names.values())
        found.sort(key=order.index)
        if len(found) in (0, len(self._params)):
            whose = "the loss and with it every gradient"
        else:
            others = f" (and {len(found) - 1} before it)" if len(found) > 1 else ""
            whose = f"the gradient of {found[-1]}{others}"
        checkpoint = last_good()
        good = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        raise UserError(
            f"step {int(self._step)}: {whose} is NaN or infinite, the run stops here; {good}; go on with a lower lr "
            "or other data"
        )

    def _remember(self, step: Tensor, params: list[nn.Parameter], bad: Tensor) -> None:
        self._step, self._params, self._bad = step, params, bad
