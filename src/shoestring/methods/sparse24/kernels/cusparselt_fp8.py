"""FP8 (E4M3) operands and products for the sparse tensor cores: cusparselt.py at eight bits.

The operand of a 2:4 matrix A [m, k]: the kept bytes row-major [m, k/2], then the metadata, in another order than at
16 bits (found in the same way: cuSPARSELt 0.8.0, sm_90): blocks of 64 rows x 128 columns, 64-bit
words inside, each with eight groups of two rows (`nibble_order_fp8`). B must be column-major. The library takes no
E5M2 through torch, so a gradient that becomes an operand is E4M3 too.

    pack_fp8        a 2:4 matrix of E4M3 values
    pack_mvue_fp8   a gradient -> the operand of MVUE(dZ^T) times a factor, drawn, rounded and packed in one pass
    product_fp8     C = A B or its transpose, without scales: the caller multiplies (by powers of two, exactly)
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.lowbit.fp8_products import E4M3
from shoestring.methods.sparse24.kernels.mvue import in_words

META_ROWS, META_COLS = 64, 128  # of a block of the metadata
BLOCK_ROWS, BLOCK_GROUPS = 16, 32  # of one program


def supports_fp8(m: int, k: int, n: int) -> bool:
    """Whether the library takes the product of a 2:4 [m, k] with a dense [k, n]."""
    return m % META_ROWS == 0 and k % META_COLS == 0 and n % 16 == 0


def nibble_order_fp8(m: int, k: int) -> Tensor:
    """[m, k / 4]: the place of the nibble of (row, group) in the metadata."""
    row, group = torch.arange(m)[:, None], torch.arange(k // 4)[None, :]

    def bit(value: Tensor, number: int) -> Tensor:
        return (value >> number) & 1

    inside = bit(group, 0) | (bit(row, 3) << 1) | (bit(group, 3) << 2) | (bit(group, 1) << 3)
    word = bit(group, 2) | ((row & 7) << 1) | (bit(row, 4) << 4) | (bit(row, 5) << 5) | (bit(group, 4) << 6)
    block = (row >> 6) * (k // META_COLS) + (group >> 5)
    return (block * 128 + word) * 16 + inside


def _empty_operand(m: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """An empty operand, its values as 16-bit pairs and its metadata as 64-bit words."""
    packed = torch.empty(m, k * 10 // 16, dtype=torch.uint8, device=device)
    flat = packed.view(-1)
    return packed.view(E4M3), flat[: m * k // 2].view(torch.int16), flat[m * k // 2 :].view(torch.int64)


@torch.library.custom_op("shoestring::pack24_fp8", mutates_args=())
def pack_fp8(a_MK: Tensor) -> Tensor:
    from shoestring.methods.sparse24.kernels.cusparselt_fp8_triton import _pack_fp8_kernel

    m, k = a_MK.shape
    assert a_MK.is_contiguous() and a_MK.dtype == E4M3
    packed, values, meta = _empty_operand(m, k, a_MK.device)
    _pack_fp8_kernel[(-(-m // BLOCK_ROWS), -(-k // (4 * BLOCK_GROUPS)))](
        a_MK.view(torch.int32), values, meta, m, k, ROWS=BLOCK_ROWS, GROUPS=BLOCK_GROUPS, num_warps=2
    )
    return packed


@pack_fp8.register_fake
def _(a_MK: Tensor) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], a_MK.shape[1] * 10 // 16)


@torch.library.custom_op("shoestring::pack24_fp8_mvue", mutates_args=())
def pack_mvue_fp8(dz_NO: Tensor, row_numbers: Tensor, clocks: Tensor, inverse: Tensor) -> Tensor:
    """The operand of MVUE(dZ^T) * inverse [out, tokens]: rounded to dZ's dtype first, then to E4M3."""
    from shoestring.methods.sparse24.kernels.cusparselt_fp8_triton import _mvue_fp8_kernel

    num_tokens, rows = dz_NO.shape
    packed, values, meta = _empty_operand(rows, num_tokens, dz_NO.device)
    _mvue_fp8_kernel[(-(-rows // BLOCK_ROWS), -(-num_tokens // (4 * BLOCK_GROUPS)))](
        dz_NO, values, meta, row_numbers, clocks, inverse, num_tokens, rows, dz_NO.stride(0), dz_NO.stride(1),
        WORDS=in_words(dz_NO.t()), ROWS=BLOCK_ROWS, GROUPS=BLOCK_GROUPS, num_warps=2,
    )  # fmt: skip
    return packed


@pack_mvue_fp8.register_fake
def _(dz_NO: Tensor, row_numbers: Tensor, clocks: Tensor, inverse: Tensor) -> Tensor:
    return dz_NO.new_empty(dz_NO.shape[1], dz_NO.shape[0] * 10 // 16, dtype=E4M3)


@torch.library.custom_op("shoestring::product24_fp8", mutates_args=())
def product_fp8(packed: Tensor, b_KN: Tensor, algorithms: list[int], transpose: bool, dtype: torch.dtype) -> Tensor:
    """A B in `dtype`, fp32 sums; B by columns. [m, n], or its transpose [n, m]."""
    algorithm = algorithms[2 if transpose else 0]
    return torch._cslt_sparse_mm(packed, b_KN, alg_id=algorithm, transpose_result=transpose, out_dtype=dtype)


@product_fp8.register_fake
def _(packed: Tensor, b_KN: Tensor, algorithms: list[int], transpose: bool, dtype: torch.dtype) -> Tensor:
    m, n = packed.shape[0], b_KN.shape[1]
    return b_KN.new_empty((n, m) if transpose else (m, n), dtype=dtype)
