"""Products of few rows with the experts they chose: y[s] = x[s] W[expert of slot s]^T, [swiglu].

    dense    Triton: a program streams rows of one expert's weight. Each slot of a Routing (kernels/experts/route.py)
             multiplies all rows, and only those that chose its expert are read afterwards: the products wait for
             weights, so the other rows cost nothing.
    chunks   packed weights of 2, 3 or 4 bits, in the kernel of kernels/lowbit/few_rows.py. Decoding them is not free,
             so a slot multiplies the rows that chose its expert and no others.
    one row  of packed weights: two kernels, which choose the experts by the router's logits themselves. The second
             sums over the experts and fetches its weights while the first runs.

Empty slots end at once and leave y as it is.

Shapes: S slots, C places of a slot, R rows, E experts, N outputs of y, I inputs. Under swiglu an expert's weight has 2N
rows: gate, then up.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.hardware.device import device_limits
from shoestring.kernels.experts.route import Routing, choose_experts
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, ChunkLayout
from shoestring.kernels.lowbit.few_rows import (
    ExpertChoice,
    choose_expert_plan,
    few_rows_experts_cuda,
    row_experts_down_cuda,
    row_experts_up_cuda,
)
from shoestring.kernels.lowbit.lowbit_linear import chunks_usable, decode_chunks
from shoestring.kernels.runtime.operator import operator
from shoestring.kernels.runtime.pdl import pdl_options

MOST_EXPERTS = 1024  # of one row that chooses in the kernel


def expert_linear_ref(x: Tensor, weight_ENI: Tensor, experts_S: Tensor, swiglu: bool = False) -> Tensor:
    """x [R, I], the same for all slots, or [S, R, I]. Empty slots are zeros."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x_SRI = x.to(wide).expand(len(experts_S), *x.shape[-2:])
    weight_SNI = weight_ENI.to(wide).index_select(0, experts_S.clamp_min(0))
    y_SRN = torch.bmm(x_SRI, weight_SNI.mT) * (experts_S >= 0)[:, None, None]
    if swiglu:
        gate, up = y_SRN.chunk(2, dim=-1)
        y_SRN = F.silu(gate) * up
    return y_SRN.to(x.dtype)


@operator(expert_linear_ref)
def expert_linear(x: Tensor, weight_ENI: Tensor, experts_S: Tensor, swiglu: bool) -> Tensor:
    """Empty slots are not written."""
    rows, num_in = x.shape[-2:]
    num_out = weight_ENI.shape[1] // (2 if swiglu else 1)
    assert x.is_contiguous() and weight_ENI.is_contiguous()
    y_SRN = torch.empty(len(experts_S), rows, num_out, dtype=x.dtype, device=x.device)
    x_pitch = rows * num_in if x.ndim == 3 else 0
    if rows == 1:
        from shoestring.kernels.experts.expert_linear_triton import _expert_row_kernel

        tile = 4 if num_in <= 1024 or swiglu else 8
        _expert_row_kernel[(-(-num_out // tile), len(experts_S))](
            x, weight_ENI, experts_S, y_SRN, x_pitch, num_out,
            WIDTH=num_in, ROWS=tile, BLOCK=min(1024, 1 << (num_in - 1).bit_length()), SWIGLU=swiglu,
            **pdl_options(x), num_warps=4,
        )  # fmt: skip
        return y_SRN
    from shoestring.kernels.experts.expert_linear_triton import _expert_rows_kernel

    tile = 32 if swiglu else 64
    _expert_rows_kernel[(-(-num_out // tile), len(experts_S))](
        x, weight_ENI, experts_S, y_SRN, x_pitch, rows, num_out,
        WIDTH=num_in, M=16, TILE=tile, BLOCK=128, SWIGLU=swiglu, **pdl_options(x), num_warps=4, num_stages=4,
    )  # fmt: skip
    return y_SRN


def lowbit_expert_linear_ref(
    x: Tensor,
    weight_ENI: Tensor,
    routing: Routing,
    swiglu: bool = False,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """y [S, C, N]; x [R, I], or [S, C, I]."""
    assert routing.members_SC is not None
    if norm_I is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        x = F.rms_norm(x.to(wide), x.shape[-1:], norm_I.to(wide), eps).to(x.dtype)
    x_SCI = x if x.ndim == 3 else x[routing.members_SC.long()]
    return expert_linear_ref(x_SCI, weight_ENI, routing.experts_S, swiglu)


def lowbit_expert_linear(
    x: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    layout: ChunkLayout,
    num_experts: int,
    routing: Routing,
    swiglu: bool = False,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """As lowbit_expert_linear_ref with packed weights, `chunks` of all experts, one after the other; chooses the
    kernel, which leaves places without a row as they are. The routing has slots of SLOT_ROWS places."""
    if kernel_usable(x):
        assert routing.counts_S is not None
        members = routing.members_SC if x.ndim == 2 else None
        return few_rows_experts_cuda(
            x, chunks, table, layout, num_experts, routing.experts_S, routing.counts_S, members,
            swiglu=swiglu, norm_K=norm_I, eps=eps,
        )  # fmt: skip
    return lowbit_expert_linear_ref(x, _decode(x, chunks, table, layout, num_experts), routing, swiglu, norm_I, eps)


def kernel_usable(x: Tensor) -> bool:
    return chunks_usable(x) and x.dtype in (torch.bfloat16, torch.float16)


def _decode(x: Tensor, chunks: Tensor, table: Tensor | None, layout: ChunkLayout, num_experts: int) -> Tensor:
    weight = decode_chunks(chunks, table, layout, x.shape[-1], x.dtype)
    assert len(chunks) * CHUNK_ROWS == len(weight)
    return weight.unflatten(0, (num_experts, -1))


# -- one row ---------------------------------------------------------------------------------------------------
PackedExperts = tuple[Tensor, Tensor | None, ChunkLayout]  # chunks of all experts, table, layout


def row_experts_ref(
    x_1D: Tensor,
    logits_1E: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    top_k: int,
    renormalize: bool,
    norm_D: Tensor | None = None,
    eps: float = 0.0,
    residual_1D: Tensor | None = None,
) -> Tensor:
    """residual + the sum over the chosen experts of share * down(swiglu(up(norm(x)))); the residual is x by default."""
    wide = torch.promote_types(x_1D.dtype, torch.float32)
    residual_1D = x_1D if residual_1D is None else residual_1D
    x = x_1D.to(wide)
    if norm_D is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_D.to(wide)
    share_1K, chosen_1K = choose_experts(logits_1E, top_k, renormalize)
    inner_K1F = expert_linear_ref(x, up_EFD, chosen_1K[0], swiglu=True) * share_1K[0, :, None, None]
    part_K1D = expert_linear_ref(inner_K1F.to(x_1D.dtype), down_EDF, chosen_1K[0])
    return (residual_1D.to(wide) + part_K1D.to(wide).sum(0)).to(x_1D.dtype)


def row_experts_usable(x_1D: Tensor, up: PackedExperts, down: PackedExperts, num: int, top_k: int, d_ff: int) -> bool:
    """Whether `row_experts` has kernels for these."""
    if len(x_1D) != 1 or not kernel_usable(x_1D) or num > MOST_EXPERTS or top_k > 32:
        return False
    limits, out = device_limits(x_1D.device.index), len(down[0]) // num * CHUNK_ROWS
    choice = ExpertChoice(top_k, num, False, sum=True)
    return choose_expert_plan(down[2], out, d_ff, 1, False, choice, limits) is not None


def row_experts(
    x_1D: Tensor,
    logits_1E: Tensor,
    up: PackedExperts,
    down: PackedExperts,
    top_k: int,
    renormalize: bool,
    norm_D: Tensor | None = None,
    eps: float = 0.0,
    residual_1D: Tensor | None = None,
) -> Tensor:
    """As row_experts_ref, with packed weights."""
    choice = ExpertChoice(top_k, logits_1E.shape[1], renormalize)
    inner_KF = row_experts_up_cuda(x_1D, *up, logits_1E, choice, norm_K=norm_D, eps=eps)
    residual_1D = x_1D if residual_1D is None else residual_1D
    return row_experts_down_cuda(inner_KF, *down, logits_1E, dataclasses.replace(choice, sum=True), residual_1D)
