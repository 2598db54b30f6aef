"""A few rows times weights of 8 bits with one scale and one zero a row: y = x ((q - zero) * scale)^T [+ bias].

What a head of `int8:g0` costs with several requests, or with drafts to verify. Without a kernel the weight is decoded
at every product, which writes and reads four bytes for each one of it. Bytes less 128 are exact in 16 bits, so
products are those of whole numbers and sums are in fp32:

    y = (x (q - 128)^T - (zero - 128) sum(x)) * scale

One row has a kernel of its own, with the norm in front (kernels/row_linear.py).

Left out: groups along the inputs; more rows than MOST_ROWS, where decoding first costs little beside the product.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.kernels.backend import triton_usable
from shoestring.kernels.overlap import overlap_options

MOST_ROWS = 64
OUTS, BLOCK, WARPS = 128, 32, 8  # outputs of a program, words (of 4 inputs) at a time, warps


def byte_linear_ref(
    x_MK: Tensor,
    codes_NK: Tensor,
    scale_N: Tensor,
    zero_N: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    wide = torch.promote_types(x_MK.dtype, torch.float32)
    weight = (codes_NK.to(wide) - zero_N.to(wide)[:, None]) * scale_N.to(wide)[:, None]
    y = F.linear(x_MK.to(wide), weight, None if bias is None else bias.to(wide))
    return y.to(out_dtype or x_MK.dtype)


def byte_linear_usable(x_MK: Tensor) -> bool:
    """Whether there is a kernel for rows like these."""
    rows, width = x_MK.shape
    return 0 < rows <= MOST_ROWS and width % 4 == 0 and x_MK.dtype != torch.float64 and triton_usable(x_MK)


def byte_linear(
    x_MK: Tensor,
    codes_NK: Tensor,
    scale_N: Tensor,
    zero_N: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As byte_linear_ref; chooses the kernel."""
    if not byte_linear_usable(x_MK):
        return byte_linear_ref(x_MK, codes_NK, scale_N, zero_N, bias, out_dtype)
    from shoestring.kernels._triton.byte_linear import _byte_linear_kernel

    (num_rows, num_in), num_out = x_MK.shape, codes_NK.shape[0]
    x_M4J = x_MK.unflatten(1, (-1, 4)).mT.contiguous()  # beside byte i of each word lie the inputs 4j + i
    assert codes_NK.shape[1] == num_in and codes_NK.dtype == torch.uint8 and codes_NK.is_contiguous()
    out_MN = torch.empty(num_rows, num_out, device=x_MK.device, dtype=out_dtype or x_MK.dtype)
    _byte_linear_kernel[(-(-num_out // OUTS),)](
        x_M4J,
        codes_NK.view(torch.int32),
        scale_N,
        zero_N,
        x_M4J if bias is None else bias,
        out_MN,
        num_rows,
        num_out,
        WORDS=num_in // 4,
        ROWS=max(16, 1 << (num_rows - 1).bit_length()),
        OUTS=OUTS,
        BLOCK=BLOCK,
        BIAS=bias is not None,
        **overlap_options(x_MK),
        num_warps=WARPS,
        num_stages=4,
    )
    return out_MN
