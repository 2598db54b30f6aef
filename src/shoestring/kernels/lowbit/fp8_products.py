"""Products of operands that are rounded to FP8 for training: one power of two is the scale of a tensor.

    scale_of       that power of two, so that the largest value fits
    fp8_operands   a tensor / scale in FP8, and its transpose, in one pass: products need their summed dim innermost
    scaled_mm      a b^T times both scales, on FP8 tensor cores; elsewhere the same operands in a wider dtype

A power of two multiplies exactly: rounding to FP8 then depends on the scale only below the normal numbers of FP8, and
a rounded tensor is exact in bfloat16, too. E4M3 has 3 bits of mantissa and 2^-9 to 448, E5M2 has 2 and 2^-16 to 57344.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.runtime.triton_backend import of_the_machine, triton_usable

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2.0**-100
MULTIPLE = 16  # of both dims of an operand
LEAST_CAPABILITY = (8, 9)
TILE, WARPS = 128, 8  # of a program of `fp8_operands`


def scale_of(t: Tensor, dtype: torch.dtype, times: float = 1.0) -> Tensor:
    """The power of two s, fp32 0-dim, for which `times` the largest |t| / s still fits into `dtype`; NaN where t has
    one, and infinite where t is."""
    t = t.detach()
    # Row by row, which a compiler does in the pass that makes t.
    top = t.abs().amax(-1).amax() if torch.compiler.is_compiling() else torch.linalg.vector_norm(t, torch.inf)
    top = (top.float() * (times / torch.finfo(dtype).max)).clamp(min=SMALLEST)
    power = ((top.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
    return torch.where(top.isnan(), top, power)


def to_fp8(t: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (t.float() * scale.reciprocal()).to(dtype)


@torch.library.custom_op("shoestring::fp8_operands", mutates_args=())
def fp8_operands(t_MN: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """t / scale in `dtype` [M, N], and its transpose [N, M]; both contiguous."""
    if t_MN.dtype == torch.float64 or not triton_usable(t_MN):
        rounded = to_fp8(t_MN, scale, dtype).contiguous()
        return rounded, rounded.view(torch.uint8).t().contiguous().view(dtype)
    from shoestring.kernels.lowbit.fp8_products_triton import _fp8_operands_kernel

    m, n = t_MN.shape
    t_MN = t_MN.contiguous()
    out, turned = (torch.empty(shape, dtype=torch.uint8, device=t_MN.device) for shape in ((m, n), (n, m)))
    if t_MN.numel():
        _fp8_operands_kernel[(-(-m // TILE), -(-n // TILE))](
            t_MN, scale, out, turned, m, n, E5M2=dtype == E5M2, TILE=TILE, num_warps=WARPS
        )
    return out.view(dtype), turned.view(dtype)


@fp8_operands.register_fake
def _(t_MN: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    m, n = t_MN.shape
    return t_MN.new_empty(m, n, dtype=dtype), t_MN.new_empty(n, m, dtype=dtype)


@of_the_machine
def _has_fp8(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def fp8_refusal(device: torch.device) -> str | None:
    """Why a GPU has no FP8 products; None on those that have, and on a CPU, which computes their values."""
    if device.type != "cuda" or _has_fp8(device.index or 0):
        return None
    has, needs = (".".join(map(str, c)) for c in (torch.cuda.get_device_capability(device), LEAST_CAPABILITY))
    name = torch.cuda.get_device_name(device)
    return f"{name} (compute capability {has}) has no FP8 tensor cores, which came with {needs}"


def scaled_mm(
    a_MK: Tensor, b_NK: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """a b^T * scales, [m, n]; both operands FP8 and contiguous, at most one of them E5M2. `fast`: sums stay in the
    tensor cores' accumulators, of some 14 bits, all along K."""
    if a_MK.is_cuda and _has_fp8(a_MK.device.index or 0) and not (a_MK.shape[1] % MULTIPLE or b_NK.shape[0] % MULTIPLE):
        return torch._scaled_mm(a_MK, b_NK.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
    wide = torch.bfloat16 if a_MK.is_cuda else torch.float32  # both hold FP8 values exactly
    return ((a_MK.to(wide) @ b_NK.to(wide).t()) * (scale_a * scale_b)).to(dtype)
