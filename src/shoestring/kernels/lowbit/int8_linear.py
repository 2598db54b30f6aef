"""A few rows times weights of 8 bits with one scale and one zero per row: y = x ((q - zero) * scale)^T [+ bias].

For a head of `int8:g0` with several requests, or with drafts to verify. Decoding the weight at every product would
write and read four bytes for each of its own. Bytes minus 128 are exact in 16 bits, so products are those of integers
and sums are in fp32:

    y = (x (q - 128)^T - (zero - 128) sum(x)) * scale

One row has its own kernel, with the norm fused (kernels/gemv/row_linear.py). Above MOST_ROWS decoding first costs
little beside the product.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.hardware.device import DeviceLimits, device_limits
from shoestring.kernels.gemv.row_linear import row_linear_ref
from shoestring.kernels.runtime.operator import operator
from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import next_power_of_2, triton_usable

MOST_ROWS = 64
# Outputs of a program, words (of 4 inputs) at a time, warps: for up to so many rows.
TILES = {16: (64, 64, 4), MOST_ROWS: (128, 32, 8)}
MOST_STAGES = 4


def num_stages(outs: int, words: int, rows: int, dtype: torch.dtype, limits: DeviceLimits) -> int:
    """As many as fit into shared memory: GPUs other than those of data centres have less than half as much."""
    weights, inputs = 4 * outs * words, 4 * rows * words * dtype.itemsize
    converted = weights if dtype == torch.float32 else 0  # on its way to the layout of a product

    def fits(stages: int) -> bool:
        return (stages - 1) * (weights + inputs) + converted <= limits.shared_per_block

    return next(filter(fits, range(MOST_STAGES, 1, -1)), 1)


def int8_linear_ref(
    x_MK: Tensor,
    codes_NK: Tensor,
    scale_N: Tensor,
    zero_N: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return row_linear_ref(x_MK, codes_NK, bias, out_dtype=out_dtype, scale_N=scale_N, zero_N=zero_N)


def int8_linear_usable(x_MK: Tensor) -> bool:
    """Whether there is a kernel for rows like these."""
    rows, width = x_MK.shape
    return 0 < rows <= MOST_ROWS and width % 4 == 0 and x_MK.dtype != torch.float64 and triton_usable(x_MK)


@operator(int8_linear_ref, usable=int8_linear_usable)
def int8_linear(
    x_MK: Tensor, codes_NK: Tensor, scale_N: Tensor, zero_N: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    from shoestring.kernels.lowbit.int8_linear_triton import _int8_linear_kernel

    (num_rows, num_in), num_out = x_MK.shape, codes_NK.shape[0]
    x_M4J = x_MK.unflatten(1, (-1, 4)).mT.contiguous()  # byte i of word j multiplies input 4j + i
    assert codes_NK.shape[1] == num_in and codes_NK.dtype == torch.uint8 and codes_NK.is_contiguous()
    out_MN = torch.empty(num_rows, num_out, device=x_MK.device, dtype=out_dtype or x_MK.dtype)
    outs, words, warps = next(tile for most, tile in TILES.items() if num_rows <= most)
    padded = max(16, next_power_of_2(num_rows))
    stages = num_stages(outs, words, padded, x_MK.dtype, device_limits(x_MK.device.index))
    _int8_linear_kernel[(-(-num_out // outs),)](
        x_M4J, codes_NK.view(torch.int32), scale_N, zero_N, x_M4J if bias is None else bias, out_MN, num_rows, num_out,
        WORDS=num_in // 4, ROWS=padded, OUTS=outs, BLOCK=words,
        BIAS=bias is not None, **pdl_options(x_MK), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_MN
