"""The four collectives of tensor parallelism, as functions with gradients.

Every rank of a tensor-parallel group computes the same loss from the same rows, so a gradient flowing into a replicated
tensor is already whole, and one flowing out of a sharded product is partial and has to be summed exactly once:

    copy_to(x)      forward: x            backward: sum over the group     (before a column-parallel linear)
    sum_over(x)     forward: sum          backward: identity               (after a row-parallel linear)
    gather_last(x)  forward: concatenate  backward: this rank's slice      (vocabulary-parallel logits)
    max_over(x)     no gradient

They go through functional collectives, which torch.compile can trace.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import ProcessGroup

# Its name before torch 2.13, and since.
_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor


def all_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, "sum", group))


def max_over(x: Tensor, group: ProcessGroup) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, "max", group))


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_sum(grads[0].contiguous(), ctx.group), None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_sum(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.width = group.rank(), x.shape[-1]
        return funcol.wait_tensor(_all_gather(x.contiguous(), x.dim() - 1, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.rank * ctx.width, ctx.width), None


def copy_to(x: Tensor, group: ProcessGroup) -> Tensor:
    return _CopyTo.apply(x, group)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    return _SumOver.apply(x, group)


def gather_last(x: Tensor, group: ProcessGroup) -> Tensor:
    return _GatherLast.apply(x, group)
