"""A dense linear layer on one row, fused with its neighbours: y = [norm] x W^T [+ bias] [swiglu] [+ residual] [after].

With one row the product only reads W: the kernel streams the weight at memory speed. As separate launches the small
operations around it would cost time; here they are free:

    norm      RMSNorm of x. y = (W (x * weight)) / rms(x), with the sum of squares taken in the same pass.
    swiglu    W holds gate rows, then up rows: y_i = silu(g_i) * u_i.
    residual  added in fp32, one rounding.
    after     a scale and a shift per output: the stand-in of a skipped sublayer.
    bytes     W may be 8-bit codes with a scale and a zero for each row, w = (q - zero) * scale: half the bytes of a
              large head. Without swiglu.

Several rows go to cuBLAS, which reaches memory speed too; packed weights have kernels of their own.

Shapes: K inputs, N outputs (of y; W has 2N rows under swiglu).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.hardware.device import device_limits
from shoestring.kernels.runtime.operator import operator
from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import next_power_of_2

MAX_BYTES = 8192  # inputs of a row of 8-bit codes at most: they are kept in registers
BYTE_ROWS, BYTE_PROGRAMS, BYTE_WARPS = 4, 4, 4  # rows of W at a time, programs per SM at most, warps


def row_linear_ref(
    x_1K: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual_1N: Tensor | None = None,
    after_2N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_N: Tensor | None = None,
    zero_N: Tensor | None = None,
) -> Tensor:
    wide = torch.promote_types(x_1K.dtype, torch.float32)
    x = x_1K.to(wide)
    if scale_N is not None and zero_N is not None:
        weight = (weight.to(wide) - zero_N.to(wide)[:, None]) * scale_N.to(wide)[:, None]
    if norm_K is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_K.to(wide)
    y = F.linear(x, weight.to(wide), None if bias is None else bias.to(wide))
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual_1N is not None:
        y = y + residual_1N.to(wide)
    if after_2N is not None:
        y = y * after_2N[0].to(wide) + after_2N[1].to(wide)
    return y.to(out_dtype or x_1K.dtype)


@operator(row_linear_ref)
def row_linear(
    x_1K: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm_K: Tensor | None,
    eps: float,
    swiglu: bool,
    residual_1N: Tensor | None,
    after_2N: Tensor | None,
    out_dtype: torch.dtype | None,
    scale_N: Tensor | None,
    zero_N: Tensor | None,
) -> Tensor:
    from shoestring.kernels.gemv.row_linear_triton import _row_linear_kernel

    num_out, num_in = weight.shape
    num_out //= 2 if swiglu else 1
    assert x_1K.shape == (1, num_in) and x_1K.is_contiguous() and weight.is_contiguous()
    out_1N = torch.empty(1, num_out, device=x_1K.device, dtype=out_dtype or x_1K.dtype)
    coded = scale_N is not None and zero_N is not None
    assert coded == (weight.dtype == torch.uint8) and not (coded and (swiglu or after_2N is not None))
    if coded and num_in % 4 == 0 and num_in <= MAX_BYTES:
        return _byte_rows(x_1K, weight, bias, norm_K, eps, residual_1N, scale_N, zero_N, out_1N)
    rows, columns, warps = tile_for(num_out, num_in, swiglu)
    if coded:
        columns *= 2  # as many bytes to a load
    _row_linear_kernel[(-(-num_out // rows),)](
        x_1K, weight, x_1K if bias is None else bias, x_1K if norm_K is None else norm_K,
        x_1K if residual_1N is None else residual_1N, x_1K if scale_N is None else scale_N,
        x_1K if zero_N is None else zero_N, x_1K if after_2N is None else after_2N[0],
        x_1K if after_2N is None else after_2N[1], out_1N, eps, num_out,
        K=num_in, ROWS=rows, BLOCK=columns, BIAS=bias is not None, NORM=norm_K is not None, SWIGLU=swiglu,
        RESIDUAL=residual_1N is not None, AFTER=after_2N is not None, BYTES=coded, **pdl_options(x_1K),
        num_warps=warps,
    )  # fmt: skip
    return out_1N


def _byte_rows(
    x_1K: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_K: Tensor | None,
    eps: float,
    residual_1N: Tensor | None,
    scale_N: Tensor | None,
    zero_N: Tensor | None,
    out_1N: Tensor,
) -> Tensor:
    """8-bit codes, four at a time: a program keeps x in registers for all of its rows."""
    from shoestring.kernels.gemv.row_linear_triton import _byte_rows_kernel

    num_out, num_in = weight.shape
    most = BYTE_PROGRAMS * device_limits(x_1K.device.index).num_sms
    _byte_rows_kernel[(min(-(-num_out // BYTE_ROWS), most),)](
        x_1K, weight.view(torch.int32), x_1K if bias is None else bias, x_1K if norm_K is None else norm_K,
        x_1K if residual_1N is None else residual_1N, scale_N, zero_N, out_1N, eps, num_out,
        K=num_in, WORDS_P=next_power_of_2(num_in // 4), ROWS=BYTE_ROWS, BIAS=bias is not None,
        NORM=norm_K is not None, RESIDUAL=residual_1N is not None, **pdl_options(x_1K), num_warps=BYTE_WARPS,
    )  # fmt: skip
    return out_1N


def tile_for(num_out: int, num_in: int, swiglu: bool) -> tuple[int, int, int]:
    """(rows of W per program, columns per load, warps): several programs per SM, each with several loads."""
    columns = next_power_of_2(num_in)
    if columns <= 2048:
        return (4 if columns <= 1024 or swiglu else 1), min(columns, 1024), 4
    if swiglu:
        return 1, 2048, 8
    return (2, 2048, 8) if num_out > 4096 else (8, 1024, 4)
