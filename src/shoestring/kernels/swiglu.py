"""SwiGLU on the product of gate and up laid side by side: [g, u] -> silu(g) * u, in fp32, rounded once.

Shapes: T rows, F inner width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.kernels.backend import triton_usable
from shoestring.kernels.overlap import overlap_options


def swiglu_ref(both_T2F: Tensor) -> Tensor:
    wide = both_T2F.to(torch.promote_types(both_T2F.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(both_T2F.dtype)


def swiglu(both_T2F: Tensor) -> Tensor:
    if not triton_usable(both_T2F):
        return swiglu_ref(both_T2F)
    from shoestring.kernels._triton.swiglu import _swiglu_kernel

    assert both_T2F.is_contiguous()
    num_rows, width = both_T2F.shape[0], both_T2F.shape[1] // 2
    out_TF = torch.empty(num_rows, width, device=both_T2F.device, dtype=both_T2F.dtype)
    if num_rows:
        block = 256 if num_rows == 1 else 1024
        _swiglu_kernel[(num_rows, -(-width // block))](
            both_T2F, out_TF, WIDTH=width, BLOCK=block, num_warps=block // 256, **overlap_options(both_T2F)
        )
    return out_TF
