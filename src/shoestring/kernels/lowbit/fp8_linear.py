"""A few rows times weights of 8-bit floats (E4M3): y = x (q * scale)^T [+ bias], activations as they are.

The scale is one per output row [N, 1], or one per block of 128 x 128 [ceil(N / 128), ceil(K / 128)]. Codes are read as
bytes and become floats exactly, subnormal numbers included. One row is multiplied by the ordinary units, more by the
tensor cores. Sums are in fp32; a block's sum is multiplied with its scale. Where the outputs are too few to fill the
GPU, the inputs are cut as well, and the parts are summed in a fixed order. Above MOST_ROWS decoding first costs little
beside the product.

Not here: products with activations in FP8, which are another function.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.hardware.device import device_limits
from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import next_power_of_2, triton_usable

MOST_ROWS = 64
BLOCK = 128  # of a scale
OUTS, WARPS, STAGES = 128, 8, 4  # outputs of a program
PROGRAMS_PER_SM, MOST_SPLITS = 2, 8
SUM_BLOCK = 1024  # outputs of a program that sums parts
DENSE_STEP = 2048  # weights of a program that decodes
ROW_OUTS, ROW_STEP, ROW_WARPS = 4, 512, 4  # outputs of a program and words at a time, of one row


def fp8_values(codes: Tensor) -> Tensor:
    """The numbers of E4M3 bits (uint8), fp32; sign, 4 bits of exponent, 3 of mantissa; 127 and 255 are not used."""
    bits = codes.to(torch.int32)
    size = bits & 127
    value = torch.where(size >= 8, ((size << 20) + (120 << 23)).view(torch.float32), size.float() * 2.0**-9)
    return (value.view(torch.int32) | ((bits & 128) << 24)).view(torch.float32)


def fp8_dense_ref(codes_NK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    scale = scale.to(wide)
    if scale.shape[1] > 1 or scale.shape[0] != codes_NK.shape[0]:
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        scale = scale[: codes_NK.shape[0], : codes_NK.shape[1]]
    return (fp8_values(codes_NK).to(wide) * scale).to(dtype)


def fp8_dense(codes_NK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The decoded weight: as fp8_dense_ref, bit for bit; chooses the kernel."""
    if dtype == torch.float64 or not triton_usable(scale):
        return fp8_dense_ref(codes_NK, scale, dtype)
    from shoestring.kernels.lowbit.fp8_linear_triton import _fp8_dense_kernel

    num_out, num_in = codes_NK.shape
    out_NK = torch.empty(num_out, num_in, device=codes_NK.device, dtype=dtype)
    _fp8_dense_kernel[(num_out, -(-num_in // DENSE_STEP))](
        codes_NK.contiguous(), scale.contiguous(), out_NK, num_in, scale.shape[1],
        STEP=DENSE_STEP, BLOCK=BLOCK, BY_ROW=tuple(scale.shape) == (num_out, 1),
        DECODE="cast" if converts(codes_NK.device) else "bits", num_warps=4,
    )  # fmt: skip
    return out_NK


def fp8_linear_ref(x_MK: Tensor, codes_NK: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x_MK, fp8_dense_ref(codes_NK, scale, x_MK.dtype), bias)


def fp8_linear_usable(x_MK: Tensor) -> bool:
    """Whether there is a kernel for rows like these."""
    if torch.is_grad_enabled() and x_MK.requires_grad:
        return False
    return 0 < x_MK.shape[0] <= MOST_ROWS and x_MK.dtype != torch.float64 and triton_usable(x_MK)


def fp8_linear(x_MK: Tensor, codes_NK: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As fp8_linear_ref, with the scales applied to sums instead of weights; chooses the kernel."""
    if not fp8_linear_usable(x_MK):
        return F.linear(x_MK, fp8_dense(codes_NK, scale, x_MK.dtype), bias)
    (num_rows, num_in), num_out = x_MK.shape, codes_NK.shape[0]
    assert codes_NK.shape[1] == num_in and codes_NK.dtype == torch.uint8 and codes_NK.is_contiguous()
    x_MK, scale = x_MK.contiguous(), scale.contiguous()
    if num_rows == 1 and num_in % 16 == 0:
        return _one_row(x_MK, codes_NK, scale, bias)
    from shoestring.kernels.lowbit import fp8_linear_triton as kernels

    splits = num_splits(num_out, num_in, x_MK.device)
    out_SMN = x_MK.new_empty(splits, num_rows, num_out, dtype=x_MK.dtype if splits == 1 else torch.float32)
    sizes = {"ROWS": max(16, next_power_of_2(num_rows)), "OUTS": OUTS, "BLOCK": BLOCK, "SPLITS": splits}
    sizes |= {"BY_ROW": tuple(scale.shape) == (num_out, 1), "num_warps": WARPS, "num_stages": STAGES}
    grid, pdl = (-(-num_out // OUTS), splits), pdl_options(x_MK)
    if x_MK.dtype == torch.bfloat16 and num_in % 16 == 0 and converts(x_MK.device):
        x_M4J = x_MK.unflatten(1, (-1, 4)).mT.contiguous()
        words, numbers = codes_NK.view(torch.int32), (num_rows, num_out, num_in // 4, scale.shape[1])
        kernels._fp8_planes_kernel[grid](x_M4J, words, scale, bias, out_SMN, *numbers, **sizes, **pdl)
    else:
        numbers = num_rows, num_out, num_in, scale.shape[1]
        bf16 = x_MK.dtype == torch.bfloat16
        kernels._fp8_linear_kernel[grid](x_MK, codes_NK, scale, bias, out_SMN, *numbers, BF16=bf16, **sizes)
    if splits == 1:
        return out_SMN[0]
    y_MN = torch.empty_like(out_SMN[0], dtype=x_MK.dtype)
    grid = (-(-y_MN.numel() // SUM_BLOCK), 1)
    kernels._sum_parts_kernel[grid](out_SMN, y_MN, y_MN.numel(), SPLITS=splits, BLOCK=SUM_BLOCK, **pdl)
    return y_MN


def _one_row(x_1K: Tensor, codes_NK: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    from shoestring.kernels.lowbit.fp8_linear_triton import _fp8_row_kernel

    num_out, num_in = codes_NK.shape
    y_1N = torch.empty(1, num_out, device=x_1K.device, dtype=x_1K.dtype)
    _fp8_row_kernel[(-(-num_out // ROW_OUTS),)](
        x_1K, codes_NK.view(torch.int32), scale, bias, y_1N, num_out, scale.shape[1],
        WORDS=num_in // 4, OUTS=ROW_OUTS, STEP=min(ROW_STEP, next_power_of_2(num_in // 4)), BLOCK=BLOCK,
        BY_ROW=tuple(scale.shape) == (num_out, 1), CAST=converts(x_1K.device),
        **pdl_options(x_1K), num_warps=ROW_WARPS,
    )  # fmt: skip
    return y_1N


def converts(device: torch.device) -> bool:
    """Whether the GPU has instructions for E4M3."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


def num_splits(num_out: int, num_in: int, device: torch.device) -> int:
    """Parts of the inputs, so that the programs fill the GPU."""
    if device.type != "cuda":
        return 2 if num_in > 2 * BLOCK else 1  # in the interpreter
    programs, blocks = -(-num_out // OUTS), -(-num_in // BLOCK)
    wanted = PROGRAMS_PER_SM * device_limits().num_sms // programs
    return max(1, min(wanted, MOST_SPLITS, blocks // 8))
