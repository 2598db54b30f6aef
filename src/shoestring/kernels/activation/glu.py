"""The gated activation between the products of a feed-forward layer: act(gate) * up; kernels in fp32, rounded once.

    glu          gate and up side by side in one tensor, as in a decoding step; no gradient
    glu_pair     gate and up as two tensors, with gradients: one kernel forward, one backward

Gates: gates.py. Feature-major tensors: methods/sparse24/kernels/ffn.py. Shapes: T rows, F inner width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoestring.kernels.activation.gates import GATES, activated
from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import triton_usable

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAIR_BLOCK, PAIR_GRAD_BLOCK, PAIR_WARPS = 4096, 2048, 8  # values and warps of one program of `glu_pair`


def glu_ref(gate: Tensor, up: Tensor, act: str) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (activated(gate.to(wide), act) * up.to(wide)).to(gate.dtype)


def glu(both_T2F: Tensor, act: str = "swiglu") -> Tensor:
    """[gate, up] -> act(gate) * up."""
    if not triton_usable(both_T2F):
        gate_TF, up_TF = both_T2F.chunk(2, dim=-1)
        return glu_ref(gate_TF, up_TF, act)
    from shoestring.kernels.activation.glu_triton import _glu_kernel

    assert both_T2F.is_contiguous()
    num_rows, width = both_T2F.shape[0], both_T2F.shape[1] // 2
    out_TF = torch.empty(num_rows, width, device=both_T2F.device, dtype=both_T2F.dtype)
    if num_rows:
        block = 256 if num_rows == 1 else 1024
        _glu_kernel[(num_rows, -(-width // block))](
            both_T2F, out_TF, WIDTH=width, BLOCK=block, ACT=GATES[act], num_warps=block // 256,
            **pdl_options(both_T2F),
        )  # fmt: skip
    return out_TF


def glu_pair(gate_TF: Tensor, up_TF: Tensor, act: str) -> Tensor:
    """act(gate) * up with gradients of both; any number of dims. Plain torch where no kernel fits, and under
    torch.compile, which fuses the expression itself."""
    alike = gate_TF.shape == up_TF.shape and gate_TF.dtype == up_TF.dtype and gate_TF.dtype in KERNEL_DTYPES
    contiguous = gate_TF.is_contiguous() and up_TF.is_contiguous()
    if torch.compiler.is_compiling() or not alike or not contiguous or not triton_usable(gate_TF):
        return activated(gate_TF, act) * up_TF
    return _GluPair.apply(gate_TF, up_TF, GATES[act])


class _GluPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor, number: int) -> Tensor:
        from shoestring.kernels.activation.glu_triton import _glu_pair_kernel

        ctx.number = number
        ctx.save_for_backward(gate_TF, up_TF)
        out_TF = torch.empty_like(gate_TF)
        size = out_TF.numel()
        if size:
            _glu_pair_kernel[(-(-size // PAIR_BLOCK),)](
                gate_TF, up_TF, out_TF, size, ACT=number, BLOCK=PAIR_BLOCK, num_warps=PAIR_WARPS
            )
        return out_TF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TF: Tensor) -> tuple[Tensor, Tensor, None]:
        from shoestring.kernels.activation.glu_triton import _glu_pair_grad_kernel

        gate_TF, up_TF = ctx.saved_tensors
        dgate_TF, dup_TF = torch.empty_like(gate_TF), torch.empty_like(up_TF)
        size = gate_TF.numel()
        if size:
            _glu_pair_grad_kernel[(-(-size // PAIR_GRAD_BLOCK),)](
                gate_TF, up_TF, dout_TF.contiguous(), dgate_TF, dup_TF, size,
                ACT=ctx.number, BLOCK=PAIR_GRAD_BLOCK, num_warps=PAIR_WARPS,
            )  # fmt: skip
        return dgate_TF, dup_TF, None
