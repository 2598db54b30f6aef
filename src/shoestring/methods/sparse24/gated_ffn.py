"""A gated layer of three Sparse24 linears as one function, feature-major inside.

    Z = W~gu X^T    H = act(Zg) * Zu    Y^T = W~d H              gate and up are one product
    dH = W~d^T dY^T    dZ from Z, dH    dX^T = W~gu^T dZ         and the input gradient needs no sum of two
    dWd = MVUE(dY^T) H^T    dWgu = MVUE(dZ) X

The result equals that of the three separate layers up to rounding. It is faster because nothing is transposed or copied
between sparse products, weights are pruned and packed from the master in one pass, and the gradient of the gate is
drawn and packed in the kernel that computes it.

`ffn` returns None where it does not apply (other formats, biases, hooks around a layer, no GPU, no sparse product in
the table of this GPU), and the caller computes layer by layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.formats.linear import FormatLinear, compute_dtype, local
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.kernels import cusparselt
from shoestring.methods.sparse24.kernels import ffn as kernels
from shoestring.methods.sparse24.kernels.mvue import CLOCKS, mvue_transposed
from shoestring.methods.sparse24.products import ProductPlan


class FfnProductPlan(NamedTuple):
    """Of gate and up as one weight [2F, D], and of down [D, F]."""

    up: ProductPlan
    down: ProductPlan


def ffn(x: Tensor, gate: FormatLinear, up: FormatLinear, down: FormatLinear, act: str = "swiglu") -> Tensor | None:
    """down(act(gate(x)) * up(x)), or None; `act` is a name of kernels/activation/glu.py."""
    if not torch.is_grad_enabled() or not x.is_cuda or not fusable(gate, up, down):
        return None
    dtype = compute_dtype(x)
    plan = ffn_product_plan(gate.format, x.numel() // x.shape[-1], local(gate.weight), dtype)  # type: ignore[arg-type]
    if plan is None:
        return None
    return run(x.to(dtype), [gate, up, down], plan, act)


def fusable(*linears: FormatLinear, dense_phase: bool = False) -> bool:
    """Whether these layers may be computed as one: equal 2:4 formats, without biases or hooks. `dense_phase`: judge
    layers in a dense phase by the Format they return to."""
    formats = [(dense_phase and linear.suspended) or linear.format for linear in linears]
    first = formats[0]
    return (
        isinstance(first, Sparse24)
        and first.precision == "full"
        and all(
            format == first
            and not linear.packed
            and linear.bias is None
            and linear.adapter is None
            and linear.decoded is None
            and not linear._forward_hooks
            and not linear._forward_pre_hooks
            for linear, format in zip(linears, formats, strict=True)
        )
    )


def ffn_shapes(gate_shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """[out, in] of the two weights of the products, given that of the gate."""
    inner, outer = gate_shape
    return (2 * inner, outer), (outer, inner)


def ffn_product_plan(format: Sparse24, num_tokens: int, gate: Tensor, dtype: torch.dtype) -> FfnProductPlan | None:
    if not cusparselt.usable_as(gate, dtype) or num_tokens % 64:
        return None
    if gate.shape[0] % kernels.TILE or gate.shape[1] % kernels.TILE or not gate.is_contiguous():
        return None
    wide, narrow = ffn_shapes((gate.shape[0], gate.shape[1]))
    plan = FfnProductPlan(format.product_plan(num_tokens, wide, dtype), format.product_plan(num_tokens, narrow, dtype))
    return plan if plan.up.any_sparse() or plan.down.any_sparse() else None


def run(x: Tensor, linears: list[FormatLinear], plan: FfnProductPlan, act: str = "swiglu") -> Tensor:
    """`linears`: gate, up, down; see fusable."""
    format = linears[0].format
    assert isinstance(format, Sparse24)
    weights = [local(linear.weight) for linear in linears]
    states = [linear.format_state() for linear in linears]
    soft = format.select == "soft"
    if soft:
        pruning = [state["beta"] for state in states]
    elif format.hold_mask:
        pruning = [state["mask"] for state in states]
    else:
        pruning = [format.choose(w.detach().to(x.dtype)) for w in weights]
    drawing = []
    if format.weight_grad == "mvue":
        drawing = [state["row"].flatten() for state in states]
        # A copy: the clocks may advance before the backward of this forward.
        drawing += [torch.stack([state[name] for name in CLOCKS]) for state in states]
    return _Ffn.apply(x, *weights, plan, soft, act, *pruning, *drawing)


class _Ffn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        plan: FfnProductPlan,
        soft: bool,
        act: str,
        *state: Tensor,
    ) -> Tensor:
        """`state`: a beta (soft) or mask for each weight, then row numbers and clocks, where dW is drawn."""
        pruning, drawing = list(state[:3]), state[3:]
        masks, betas = ([], pruning) if soft else (pruning, [])
        dtype = x.dtype
        x_ND = x.flatten(0, -2)
        wide = _prune_and_pack([gate, up], masks[:2], betas[:2], dtype, plan.up)
        narrow = _prune_and_pack([down], masks[2:], betas[2:], dtype, plan.down)
        if plan.up.forward is None:
            z_2FN = wide[2] @ x_ND.t()
        else:
            z_2FN = cusparselt.product(wide[0], x_ND.t(), list(plan.up.forward))
        h_FN = kernels.glu(z_2FN, act)
        if plan.down.forward is None:
            y_ND = h_FN.t() @ narrow[2].t()
        else:
            y_ND = cusparselt.product(narrow[0], h_FN, list(plan.down.forward), True)
        ctx.plan, ctx.act, ctx.dtypes = plan, act, (gate.dtype, up.dtype, down.dtype)
        back = [w[2] if p.input_grad is None else w[1] for w, p in ((wide, plan.up), (narrow, plan.down))]
        ctx.save_for_backward(x_ND, z_2FN, h_FN, *back, *drawing)
        return y_ND.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, z_2FN, h_FN, wide, narrow, *drawing = ctx.saved_tensors
        rows, clocks = drawing[:3], drawing[3:]
        plan: FfnProductPlan = ctx.plan
        dy_ND = grads[0].flatten(0, -2).contiguous()
        if plan.down.input_grad is None:
            dh_FN = narrow.t() @ dy_ND.t()
        else:
            dh_FN = cusparselt.product(narrow, dy_ND.t(), list(plan.down.input_grad))
        sparse_up = plan.up.weight_grad is not None
        drawn = (rows[:2], clocks[:2]) if sparse_up else ([], [])
        dz_2FN, packed = kernels.glu_grad(z_2FN, dh_FN, *drawn, ctx.act)
        if plan.up.input_grad is None:
            dx_ND = dz_2FN.t() @ wide
        else:
            dx_ND = cusparselt.product(wide, dz_2FN, list(plan.up.input_grad), True)
        if plan.up.weight_grad is not None:
            dw_2FD = cusparselt.product(packed, x_ND, list(plan.up.weight_grad))
        else:
            dw_2FD = _dense_weight_grad(dz_2FN, x_ND, rows[:2], clocks[:2])
        if plan.down.weight_grad is not None:
            drawn_dy = cusparselt.pack_mvue(dy_ND, rows[2], clocks[2])
            dw_DF = cusparselt.product(drawn_dy, h_FN.t(), list(plan.down.weight_grad))
        else:
            dw_DF = _dense_weight_grad(dy_ND.t(), h_FN.t(), rows[2:], clocks[2:])
        gate_type, up_type, down_type = ctx.dtypes
        dgate, dup = dw_2FD.chunk(2)
        dx = dx_ND.unflatten(0, grads[0].shape[:-1])
        none = [None] * (6 + len(drawing))
        return dx, dgate.to(gate_type), dup.to(up_type), dw_DF.to(down_type), *none


def _prune_and_pack(
    weights: list[Tensor], masks: list[Tensor], betas: list[Tensor], dtype: torch.dtype, plan: ProductPlan
) -> tuple[Tensor, Tensor, Tensor]:
    dense = plan.forward is None or plan.input_grad is None
    return kernels.prune_and_pack(
        weights, masks, betas, dtype, plan.forward is not None, plan.input_grad is not None, dense
    )


def _dense_weight_grad(dz_ON: Tensor, x_NI: Tensor, rows: list[Tensor], clocks: list[Tensor]) -> Tensor:
    """dZ^T X, or with `rows` (one tensor for each part of dz's rows) MVUE(dZ^T) X."""
    if not rows:
        return dz_ON @ x_NI
    parts = zip(dz_ON.chunk(len(rows)), rows, clocks, strict=True)
    return torch.cat([mvue_transposed(dz.t(), r, c) for dz, r, c in parts]) @ x_NI
