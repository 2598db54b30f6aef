"""Products of few rows with the experts they chose: y[s] = x[s] W[expert of slot s]^T, [swiglu].

Each slot of a Routing (kernels/experts/route.py) multiplies all rows, and only those that chose its expert are read
afterwards: the products wait for weights, so the other rows cost nothing. Empty slots end at once and leave y as it is.

    dense    Triton: a program streams rows of one expert's weight
    chunks   packed weights of 2, 3 or 4 bits, in the kernel of kernels/lowbit/few_rows.py

Shapes: S slots, R rows, E experts, N outputs of y, I inputs. Under swiglu an expert's weight
has 2N rows: gate, then up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, ChunkLayout
from shoestring.kernels.lowbit.few_rows import few_rows_experts_cuda
from shoestring.kernels.lowbit.lowbit_linear import chunks_usable, decode_chunks
from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import triton_usable


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


def expert_linear(x: Tensor, weight_ENI: Tensor, experts_S: Tensor, swiglu: bool = False) -> Tensor:
    """As expert_linear_ref, but empty slots are not written; chooses the kernel."""
    if not triton_usable(x):
        return expert_linear_ref(x, weight_ENI, experts_S, swiglu)
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


def lowbit_expert_linear(
    x: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    layout: ChunkLayout,
    num_experts: int,
    experts_S: Tensor,
    swiglu: bool = False,
) -> Tensor:
    """The same with packed weights: `chunks` of all experts, one after the other."""
    if chunks_usable(x) and x.dtype in (torch.bfloat16, torch.float16):
        return few_rows_experts_cuda(x, chunks, table, layout, num_experts, experts_S, swiglu=swiglu)
    weight = decode_chunks(chunks, table, layout, x.shape[-1], x.dtype)
    assert len(chunks) * CHUNK_ROWS == len(weight)
    return expert_linear_ref(x, weight.unflatten(0, (num_experts, -1)), experts_S, swiglu)
