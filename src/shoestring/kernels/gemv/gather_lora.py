"""Rows of different adapters in one product: y_t += B_s (A_s [norm] x_t), where s is the adapter of row t, or none.

    slot      of each row, on the device: the index of its adapter, or -1. One program serves every mix of adapters.
    parts     layers side by side in one product (q, k, v) have an A each: A has the rows of all of them, padded to one
              rank, and `ends` says where the rows of y end that belong to each part. B holds the adapter's scale.
    norm      RMSNorm of x, where the product beside it takes x before the norm.
    swiglu    y holds gate rows, then up rows; the result is silu(gate) * up, with both changed first.

Two kernels: one program for each row and a few rows of A (shrink), one for each row and a range of outputs (expand).
What is read of A and B does not depend on the kernel before, so it is loaded before that has ended (runtime/pdl.py).

Left out: tiles of rows that share an adapter. Long prompts read A and B again for every row, from the cache.

Shapes: T rows, K inputs, N outputs, S adapters, R rank of one part (16, 32 or 64), Q ranks of all parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.kernels.runtime.operator import operator
from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import next_power_of_2

OUTPUTS = 256  # of an expanding program
COLUMNS = 2048  # of A in one load


def gather_lora_ref_(
    y_TN: Tensor,
    x_TK: Tensor,
    a_SQK: Tensor,
    b_SNR: Tensor,
    slot_T: Tensor,
    ends: tuple[int, ...],
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
) -> Tensor:
    wide, rank = torch.promote_types(x_TK.dtype, torch.float32), b_SNR.shape[2]
    x_TK, sum_TN = x_TK.to(wide), y_TN.to(wide)
    if norm_K is not None:
        x_TK = x_TK * torch.rsqrt(x_TK.square().mean(-1, keepdim=True) + eps) * norm_K.to(wide)
    for slot in slot_T.unique().tolist():
        if slot < 0:
            continue
        rows = (slot_T == slot).nonzero()[:, 0]
        h_tQ, start = F.linear(x_TK[rows], a_SQK[slot].to(wide)), 0
        for part, end in enumerate(ends):
            h_tR, b_nR = h_tQ[:, part * rank : (part + 1) * rank], b_SNR[slot, start:end].to(wide)
            sum_TN[rows, start:end] += F.linear(h_tR, b_nR)
            start = end
    if not swiglu:
        return y_TN.copy_(sum_TN)
    gate, up = sum_TN.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(y_TN.dtype)


@operator(gather_lora_ref_)
def gather_lora_(
    y_TN: Tensor,
    x_TK: Tensor,
    a_SQK: Tensor,
    b_SNR: Tensor,
    slot_T: Tensor,
    ends: tuple[int, ...],
    *,
    norm_K: Tensor | None,
    eps: float,
    swiglu: bool,
) -> Tensor:
    """y, changed in place; with `swiglu` a new tensor of half the width."""
    from shoestring.kernels.gemv.gather_lora_triton import _expand_kernel, _shrink_kernel

    (num_rows, width), num_out = x_TK.shape, y_TN.shape[1]
    num_slots, num_ranks, _ = a_SQK.shape
    rank = b_SNR.shape[2]
    assert a_SQK.shape[2] == width and b_SNR.shape[:2] == (num_slots, num_out) and slot_T.dtype == torch.int32
    assert num_ranks == len(ends) * rank and ends[-1] == num_out and slot_T.shape == (num_rows,)
    assert len(ends) <= 3 and all(t.is_contiguous() for t in (a_SQK, b_SNR, y_TN)) and x_TK.stride(1) == 1
    out_TN = y_TN.new_empty(num_rows, num_out // 2) if swiglu else y_TN
    if not num_rows:
        return out_TN
    h_TQ = torch.empty(num_rows, num_ranks, dtype=torch.float32, device=x_TK.device)
    columns, options = min(next_power_of_2(width), COLUMNS), pdl_options(x_TK)
    each = ranks_each(num_rows * num_ranks)
    _shrink_kernel[(num_rows, num_ranks // each)](
        x_TK, a_SQK, slot_T, x_TK if norm_K is None else norm_K, h_TQ, eps, x_TK.stride(0),
        K=width, RANKS=num_ranks, EACH=each, BLOCK=columns, NORM=norm_K is not None, num_warps=8, **options,
    )  # fmt: skip
    outputs = min(next_power_of_2(out_TN.shape[1]), OUTPUTS)
    _expand_kernel[(num_rows, -(-out_TN.shape[1] // outputs))](
        y_TN, out_TN, h_TQ, b_SNR, slot_T, out_TN.shape[1],
        N=num_out, R=rank, RANKS=num_ranks, END0=ends[0], END1=ends[min(1, len(ends) - 1)], BLOCK=outputs,
        SWIGLU=swiglu, num_warps=4, **options,
    )  # fmt: skip
    return out_TN


def ranks_each(num: int) -> int:
    """Rows of A that a program reads, of so many in all: enough programs for the memory of a large GPU."""
    return 1 if num <= 256 else 2 if num <= 1024 else 4
