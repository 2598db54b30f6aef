"""The product with a weight that is not trained, and the branch beside it: y = x W^T + bias + s (x A^T) B^T.

Autograd would keep every decoded weight for the backward pass, several times the memory of the parts. Here the parts
are kept: the forward is the Format's own `linear`, the one that serves, and the backward decodes the weight again, one
layer at a time. The branch is added inside of both products, so that no sum of activations is read or written twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.formats.base import Format, Parts


class Branch(NamedTuple):
    """A [r, in] and B [out, r] in the dtype of the product; `scale` is a 0-dim tensor: numbers would be compiled in."""

    a_RI: Tensor
    b_OR: Tensor
    scale: Tensor


def frozen_product(
    x: Tensor, format: Format, operands: Parts, bias: Tensor | None = None, branch: Branch | None = None
) -> Tensor:
    """x [..., in] times the weight that `operands` (as `format.linear` takes them) stand for."""
    a, b, scale = branch or (None, None, None)
    return _FrozenProduct.apply(x, bias, a, b, scale, format, tuple(operands), *operands.values())


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        a_RI: Tensor | None,
        b_OR: Tensor | None,
        scale: Tensor | None,
        format: Format,
        names: tuple[str, ...],
        *held: Tensor,
    ) -> Tensor:
        # Detached: a compiler traces this with gradients on, and kernels step aside where they are wanted.
        y = format.linear(x.detach(), dict(zip(names, held, strict=True)), bias)
        h_NR = None
        if a_RI is not None and b_OR is not None and scale is not None:
            h_NR = (x.reshape(-1, x.shape[-1]) @ a_RI.t()) * scale.to(x.dtype)
            y = y.reshape(-1, y.shape[-1]).addmm_(h_NR, b_OR.t()).view(y.shape)
        ctx.save_for_backward(None if a_RI is None else x, h_NR, a_RI, b_OR, scale, *held)
        ctx.format, ctx.names, ctx.width = format, names, x.shape[-1]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, h_NR, a_RI, b_OR, scale, *held = ctx.saved_tensors
        dy = grads[0]
        dy_NO = dy.reshape(-1, dy.shape[-1])
        da = db = dh_NR = dx = dbias = None
        if a_RI is not None:
            db = dy_NO.t() @ h_NR
            dh_NR = (dy_NO @ b_OR) * scale.to(dy.dtype)
            da = dh_NR.t() @ x.reshape(-1, ctx.width)
        if ctx.needs_input_grad[0]:
            shape = (dy.shape[-1], ctx.width)
            weight_OI = ctx.format.decode_operands(dict(zip(ctx.names, held, strict=True)), shape, dy.dtype)
            dx_NI = dy_NO @ weight_OI
            dx_NI = dx_NI if dh_NR is None else dx_NI.addmm_(dh_NR, a_RI)
            dx = dx_NI.view(*dy.shape[:-1], ctx.width)
        if ctx.needs_input_grad[1]:
            dbias = dy_NO.sum(0)
        return dx, dbias, da, db, None, None, None, *[None] * len(held)
