"""Sparse products on the tensor cores through cuSPARSELt: operands and products at 16 bits.

cuSPARSELt multiplies a 2:4 matrix A [m, k] by a dense B [k, n] (row-major or transposed) into C [m, n]. A is one
buffer: the kept values row-major [m, k/2], then 4 bits of metadata for each group of four (`first | second << 2`). The
order of the metadata was found by compressing matrices whose groups encode their own number (library 0.8.0, sm_90):
64x64 blocks row by row, 64-bit words inside, each with eight groups of two rows (`nibble_order`).
torch._sparse_semi_structured_tile writes an older order, which this version misreads.

    pack          a matrix that is 2:4 along its rows, of any strides (so also W^T from W), in one pass
    pack_mvue     a gradient -> the operand of MVUE(dZ^T), drawn and packed in one pass (mvue.py)
    product       C = A B, or its transpose, by a given algorithm of the library

cusparselt_table.py measures which algorithm to use, and whether a sparse product is worth it. FP8 is in
cusparselt_fp8.py. Every function is a custom operator (torch.library), so that compiled models can call it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shoestring.kernels.runtime.triton_backend import of_the_machine
from shoestring.methods.sparse24.kernels.mvue import in_words, launch_mvue

META_ROWS, META_COLS = 64, 64  # of a block of the metadata
# Algorithms of the library for B by columns and by rows, then the same for a transposed result.
Algorithms = tuple[int, int, int, int]


def usable(t: Tensor) -> bool:
    return usable_as(t, t.dtype)


def usable_as(t: Tensor, dtype: torch.dtype) -> bool:
    """Whether products of `t` cast to `dtype` can be sparse."""
    return t.is_cuda and dtype in (torch.bfloat16, torch.float16) and _has_library()


@of_the_machine
def _has_library() -> bool:
    return _found_library()


@functools.cache
def _found_library() -> bool:
    return refusal() is None


def refusal() -> str | None:
    """Why there are no sparse products on the current GPU, or None."""
    if not torch.backends.cusparselt.is_available():
        return "this torch has no cuSPARSELt"
    if (capability := torch.cuda.get_device_capability()) < (8, 0):
        return f"for compute capability 8.0 and later, this GPU has {capability[0]}.{capability[1]}"
    return None


def supports(m: int, k: int, n: int) -> bool:
    """Whether the library takes the product of a 2:4 [m, k] with a dense [k, n]."""
    return m % META_ROWS == 0 and k % META_COLS == 0 and n % 8 == 0


# -- operands ------------------------------------------------------------------------------------------------
def nibble_order(m: int, k: int) -> Tensor:
    """[m, k / 4]: the place of the nibble of (row, group) in the metadata. What the kernels write; for tests."""
    row, group = torch.arange(m)[:, None], torch.arange(k // 4)[None, :]

    def bit(value: Tensor, number: int) -> Tensor:
        return (value >> number) & 1

    word = (row & 7) | (bit(row, 4) << 3) | (bit(row, 5) << 4) | (bit(group, 3) << 5)
    inside = bit(row, 3) | (bit(group, 2) << 1) | (bit(group, 0) << 2) | (bit(group, 1) << 3)
    block = (row >> 6) * (k // 64) + (group >> 4)
    return (block * 64 + word) * 16 + inside


def empty_operand(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(m, k * 9 // 16, dtype=dtype, device=device)


def operand_words(packed: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
    """The values of an operand as 32-bit pairs and its metadata as 64-bit words."""
    flat = packed.view(-1)
    return flat[: m * k // 2].view(torch.int32), flat[m * k // 2 :].view(torch.int64)


@torch.library.custom_op("shoestring::pack24", mutates_args=())
def pack(a_MK: Tensor) -> Tensor:
    """The operand of a matrix that is 2:4 along its rows; its strides do not matter. [m, 9/16 k]."""
    from shoestring.methods.sparse24.kernels.masks_triton import _pack_kernel

    m, k = a_MK.shape
    packed = empty_operand(m, k, a_MK.dtype, a_MK.device)
    values, meta = operand_words(packed, m, k)
    rows, groups = 32, 32
    _pack_kernel[(-(-m // rows), -(-k // (4 * groups)))](
        a_MK, values, meta, m, k, a_MK.stride(0), a_MK.stride(1), WORDS=in_words(a_MK), ROWS=rows, GROUPS=groups,
        num_warps=4,
    )  # fmt: skip
    return packed


@pack.register_fake
def _(a_MK: Tensor) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], a_MK.shape[1] * 9 // 16)


@torch.library.custom_op("shoestring::pack24_mvue", mutates_args=())
def pack_mvue(dz_NO: Tensor, row_numbers: Tensor, clocks: Tensor) -> Tensor:
    """The operand of MVUE(dZ^T) [out, tokens]; `dz_NO` may be token-major or feature-major."""
    num_tokens, rows = dz_NO.shape
    packed = empty_operand(rows, num_tokens, dz_NO.dtype, dz_NO.device)
    values, meta = operand_words(packed, rows, num_tokens)
    launch_mvue(dz_NO, values, meta, row_numbers, clocks, num_tokens, pack=True)
    return packed


@pack_mvue.register_fake
def _(dz_NO: Tensor, row_numbers: Tensor, clocks: Tensor) -> Tensor:
    return dz_NO.new_empty(dz_NO.shape[1], dz_NO.shape[0] * 9 // 16)


# -- products ------------------------------------------------------------------------------------------------
@torch.library.custom_op("shoestring::product24", mutates_args=())
def product(packed: Tensor, b_KN: Tensor, algorithms: list[int], transpose: bool = False) -> Tensor:
    """A B in the dtype of B, fp32 sums; [m, n] contiguous, or its transpose [n, m], at no cost."""
    by_columns = b_KN.stride(0) == 1
    if not by_columns and b_KN.stride(1) != 1:
        b_KN = b_KN.contiguous()
    algorithm = algorithms[(0 if by_columns else 1) + (2 if transpose else 0)]
    return torch._cslt_sparse_mm(packed, b_KN, alg_id=algorithm, transpose_result=transpose)


@product.register_fake
def _(packed: Tensor, b_KN: Tensor, algorithms: list[int], transpose: bool = False) -> Tensor:
    m, n = packed.shape[0], b_KN.shape[1]
    return b_KN.new_empty((n, m) if transpose else (m, n))
