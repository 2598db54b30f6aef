"""The three products of a 2:4 linear, each dense over operands with zeros or on the sparse tensor cores.

    forward           Z  = X W~^T
    input gradient    dX = dZ W~
    weight gradient   dW = dZ^T X, or MVUE(dZ^T) X

`ProductPlan` tells which of them run sparse. `Products` computes in the dtype of the activations. `Fp8Products`
(`Sparse24(precision="fp8")`) rounds every operand to FP8 with one scale per tensor, the smallest power of two that fits
its largest value:

    forward           Z  = Q(X) Q(W~)^T                E4M3
    input gradient    dX = Q5(dZ) Q(W~)                E5M2 for the gradient, which has the wider range
    weight gradient   dW = Q5(dZ)^T Q(X)               exact
                      dW = Q(MVUE(dZ^T)) Q(X)          E4M3, because sparse products take no E5M2

Powers of two multiply exactly, so a scale may be applied inside a product or after it. Dense FP8 products are those of
kernels/lowbit/fp8_products.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.kernels.lowbit.fp8_products import E4M3, E5M2, fp8_operands, scale_of, scaled_mm, to_fp8
from shoestring.methods.sparse24.kernels import cusparselt
from shoestring.methods.sparse24.kernels.cusparselt import Algorithms
from shoestring.methods.sparse24.kernels.cusparselt_fp8 import pack_fp8, pack_mvue_fp8, product_fp8
from shoestring.methods.sparse24.kernels.mvue import mvue_transposed


class ProductPlan(NamedTuple):
    """For each product cuSPARSELt's algorithms (kernels/cusparselt_table.py), or None: dense."""

    forward: Algorithms | None = None
    input_grad: Algorithms | None = None
    weight_grad: Algorithms | None = None

    def any_sparse(self) -> bool:
        return self.forward is not None or self.input_grad is not None or self.weight_grad is not None


ALL_DENSE = ProductPlan()


class Products(torch.autograd.Function):
    """The three products by `plan`. Without `rows` the weight gradient is exact."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        clocks: Tensor | None,
        plan: ProductPlan,
    ) -> Tensor:
        ctx.plan = plan
        # W^T is packed while the weight is in the GPU's cache; the backward reads 9/16 of the bytes.
        w_t = w if plan.input_grad is None else cusparselt.pack(w.t())
        ctx.save_for_backward(x, w_t, rows, clocks)
        if plan.forward is None:
            return F.linear(x, w, bias)
        out = _sparse_product(cusparselt.pack(w), x, plan.forward)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w_t, rows, clocks = ctx.saved_tensors
        dz, plan = grads[0], ctx.plan
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dz @ w_t if plan.input_grad is None else _sparse_product(w_t, dz, plan.input_grad)
        dz_NO, x_NI = dz.flatten(0, -2), x.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            if rows is None:
                dw = dz_NO.t() @ x_NI
            elif plan.weight_grad is None:
                pruned = mvue_transposed(dz_NO, rows, clocks)
                short = pruned.shape[1] - x_NI.shape[0]
                dw = pruned @ (F.pad(x_NI, (0, 0, 0, short)) if short else x_NI)  # F.pad always copies
            else:
                packed = cusparselt.pack_mvue(dz_NO, rows, clocks)
                dw = cusparselt.product(packed, x_NI, list(plan.weight_grad))
        if ctx.needs_input_grad[2]:
            db = dz_NO.sum(0)
        return dx, dw, db, None, None, None


def _sparse_product(packed_OI: Tensor, x: Tensor, algorithms: Algorithms) -> Tensor:
    """x W^T with a packed W: [..., out], contiguous."""
    x_NI = x.flatten(0, -2)
    return cusparselt.product(packed_OI, x_NI.t(), list(algorithms), True).unflatten(0, x.shape[:-1])


# -- FP8 -----------------------------------------------------------------------------------------------------
class Fp8Products(torch.autograd.Function):
    """As Products, with operands rounded to FP8."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        clocks: Tensor | None,
        plan: ProductPlan,
    ) -> Tensor:
        ctx.plan = plan
        x_NI = x.flatten(0, -2).contiguous()
        scale_x, scale_w = scale_of(x_NI, E4M3), scale_of(w, E4M3)
        (x8, x8_IN), (w8, w8_IO) = fp8_operands(x_NI, scale_x, E4M3), fp8_operands(w, scale_w, E4M3)
        if plan.forward is None:
            out = scaled_mm(x8, w8, scale_x, scale_w, x.dtype)
        else:
            out = product_fp8(pack_fp8(w8), x8.t(), list(plan.forward), True, x.dtype)
            out = (out * (scale_x * scale_w)).to(x.dtype)
        ctx.save_for_backward(x8_IN, w8_IO, scale_x, scale_w, rows, clocks)
        out = out.unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x8_IN, w8_IO, scale_x, scale_w, rows, clocks = ctx.saved_tensors
        dz, plan = grads[0], ctx.plan
        dz_NO = dz.flatten(0, -2).contiguous()
        dx = dw = db = None
        scale_5 = scale_of(dz_NO, E5M2)
        dz5, dz5_ON = fp8_operands(dz_NO, scale_5, E5M2)
        if ctx.needs_input_grad[0]:
            dx = scaled_mm(dz5, w8_IO, scale_5, scale_w, dz.dtype).unflatten(0, dz.shape[:-1])
        if ctx.needs_input_grad[1]:
            if rows is None:
                dw = scaled_mm(dz5_ON, x8_IN, scale_5, scale_x, dz.dtype)
            else:
                dw = _drawn_weight_grad(dz_NO, x8_IN, scale_x, rows, clocks, plan)
        if ctx.needs_input_grad[2]:
            db = dz_NO.sum(0)
        return dx, dw, db, None, None, None


def _drawn_weight_grad(
    dz_NO: Tensor, x8_IN: Tensor, scale_x: Tensor, rows: Tensor, clocks: Tensor, plan: ProductPlan
) -> Tensor:
    """Q(MVUE(dZ^T)) Q(X), [out, in]."""
    scale = scale_of(dz_NO, E4M3, 2.0)  # a kept value is at most half the sum of four
    if plan.weight_grad is None:
        drawn8 = to_fp8(mvue_transposed(dz_NO, rows, clocks), scale, E4M3)
        short = drawn8.shape[1] - x8_IN.shape[1]
        if short:
            x8_IN = F.pad(x8_IN.view(torch.uint8), (0, short)).view(E4M3)
        return scaled_mm(drawn8, x8_IN, scale, scale_x, dz_NO.dtype)
    packed = pack_mvue_fp8(dz_NO, rows, clocks, scale.reciprocal())
    out = product_fp8(packed, x8_IN.t(), list(plan.weight_grad), False, dz_NO.dtype)
    return (out * (scale * scale_x)).to(dz_NO.dtype)
