"""Weights of 2, 3 or 4 bits times activations: y = x w^T + b, without a dense weight in memory.

    integers    w = (q - zero) * scale           tables    w = T[q] * (scale of T[q]'s sign)

Three paths to the same result within the rounding of x's dtype (tests and benchmarks allow each twice the error of
`F.linear` on the decoded weight):

    chunks   CUDA C++ through NVRTC (sm_90 and later), weights in the order of kernels/lowbit/chunk_layout.py. Up to
             16 rows: kernels/lowbit/few_rows.py, fused with the operations around it (`lowbit_row_linear`). On sm_90
             from 9 rows on, unfused: kernels/lowbit/many_rows.py. More than 16 on later GPUs: the weight is decoded
             into a scratch tensor, bit for bit the Format's own decode, and multiplied by cuBLAS.
    parts    Triton, from the stored parts: where NVRTC is missing or the GPU is older. Up to MOST_ROWS rows.
    plain    decode and F.linear: everything else, and the definition.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.hardware.device import device_limits
from shoestring.kernels.gemv.row_linear import row_linear_ref
from shoestring.kernels.lowbit import few_rows, many_rows
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, DENSE, ChunkLayout, ceil_div, unpack_chunks
from shoestring.kernels.runtime.nvrtc import (
    NvrtcError,
    compile_kernel,
    cuda_source,
    driver_library,
    nvrtc_library,
    pointer,
)
from shoestring.kernels.runtime.operator import registered
from shoestring.kernels.runtime.triton_backend import fall_back, interpreting, next_power_of_2, triton_usable

MOST_ROWS = 64  # of the Triton kernel


# -- the definition ------------------------------------------------------------------------------------------
def decode_chunks_ref(chunks: Tensor, table: Tensor | None, layout: ChunkLayout, width: int) -> Tensor:
    """fp32 weight [out, width] that `chunks` stand for, in plain torch."""
    codes, low, high = unpack_chunks(chunks, layout, (chunks.shape[0] * CHUNK_ROWS, width))
    as_scale = torch.bfloat16 if layout.bf16_scale else torch.float16
    up = low.contiguous().view(as_scale).float().unsqueeze(-1)
    codes = codes.unflatten(-1, (-1, layout.group))
    if table is None:
        return ((codes.float() - high.float().unsqueeze(-1)) * up).flatten(-2)
    down = high.contiguous().view(as_scale).float().unsqueeze(-1)
    level = table.index_select(0, codes.flatten().int()).view(codes.shape)
    return (level * torch.where(level > 0, up, down)).flatten(-2)


# -- choosing ------------------------------------------------------------------------------------------------
def chip_refusal(device: int) -> str | None:
    """Why the CUDA C++ kernels (low-bit, packed 2:4, one-row attention) are not for this GPU, or None."""
    if torch.version.hip:
        return "for NVIDIA GPUs"
    if (capability := torch.cuda.get_device_capability(device)) < (9, 0):
        return f"for compute capability 9.0 and later, this GPU has {capability[0]}.{capability[1]}"
    if (shared := device_limits(device).shared_per_sm) < 200 * 1024:  # plans are made for 228 KiB
        return f"for 200 KiB of shared memory on a multiprocessor, this GPU has {shared // 1024}"
    return None


def library_refusal() -> str | None:
    """Why what they are compiled and launched with cannot be used, or None."""
    try:
        nvrtc_library(), driver_library()
    except NvrtcError as error:
        return str(error)
    return None


@functools.cache
def _cuda_usable(device: int) -> bool:
    if chip_refusal(device) is not None:
        return False  # such GPUs have the Triton kernels
    reason = library_refusal()
    return reason is None or fall_back(reason)


def chunks_usable(t: Tensor) -> bool:
    """Whether the CUDA kernels run on t's device, so that weights should be laid out in chunks."""
    return t.is_cuda and _cuda_usable(t.device.index or 0)


MOST_DENSE_ROWS = 4


def dense_rows_usable(rows: int, weight: Tensor) -> bool:
    """Whether few_rows_cuda takes so many rows of a dense weight: where it was measured to be faster than cuBLAS."""
    if not 1 < rows <= MOST_DENSE_ROWS or not chunks_usable(weight) or not weight.is_contiguous():
        return False
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    out, width = weight.shape
    of = few_rows.Product(DENSE, rows, out, width, residual=True, limits=device_limits(weight.device.index))
    plan = few_rows.PLANS.find(of.key, of.limits.name)
    return plan is not None and plan.holds(of)


# -- decoding ------------------------------------------------------------------------------------------------
def decode_chunks_cuda(
    chunks: Tensor, table: Tensor | None, layout: ChunkLayout, width: int, dtype: torch.dtype
) -> Tensor:
    """The dense weight in bf16 or fp16, bit for bit what decode_chunks_ref rounds to."""
    tiles, per_row = chunks.shape[:2]
    dense = torch.empty(tiles * CHUNK_ROWS, width, dtype=dtype, device=chunks.device)
    text = cuda_source("lowbit/decode", "lowbit/decode_dense")
    kernel = compile_kernel(text, "lowbit_dense", layout.macros(dtype), chunks.device.index)
    total = tiles * per_row
    blocks = min(ceil_div(total, 8), 6 * device_limits(chunks.device.index).num_sms)
    args = (*map(pointer, (chunks, dense, table)), *map(ctypes.c_int, (width, 0, per_row, total)))
    kernel.launch((blocks, 1, 1), 256, 0, args, dependent=False)
    return dense


# -- operators -----------------------------------------------------------------------------------------------
def lowbit_linear(x: Tensor, chunks: Tensor, table: Tensor | None, bias: Tensor | None, layout: ChunkLayout) -> Tensor:
    """x [..., in] times the weight in `chunks` (as pack_chunks lays it out); out is a multiple of 16."""
    if torch.is_grad_enabled() and x.requires_grad:
        weight = decode_chunks(chunks, table, layout, x.shape[-1], x.dtype)
        return F.linear(x, weight, bias)
    settings = layout.bits, layout.group, layout.scales, layout.bf16_scale
    return _lowbit_linear(x, chunks, table, bias, *settings)


def lowbit_row_linear(
    x_MK: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    layout: ChunkLayout,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual_1N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Few rows, fused as gemv/row_linear.py is for dense weights: RMSNorm of x, SwiGLU (the rows of W are gate rows,
    then up rows), a residual added in fp32."""
    around: dict[str, Any] = {
        "norm_K": norm_K,
        "eps": eps,
        "swiglu": swiglu,
        "residual_1N": residual_1N,
        "out_dtype": out_dtype,
    }
    kernel = chunks_usable(x_MK) and x_MK.dtype in (torch.bfloat16, torch.float16)
    if kernel and 0 < x_MK.shape[0] <= few_rows.MOST_ROWS:
        return few_rows.few_rows_cuda(x_MK, chunks, table, bias, layout, **around)
    weight = decode_chunks(chunks, table, layout, x_MK.shape[-1], x_MK.dtype)
    return row_linear_ref(x_MK, weight, bias, **around)


def decode_chunks(chunks: Tensor, table: Tensor | None, layout: ChunkLayout, width: int, dtype: torch.dtype) -> Tensor:
    """The dense weight [out, width], rounded once to `dtype`."""
    return _decode_chunks(chunks, table, layout.bits, layout.group, layout.scales, layout.bf16_scale, width, dtype)


def _dense_of(chunks: Tensor, table: Tensor | None, *rest: Any) -> Tensor:
    *_, width, dtype = rest
    return chunks.new_empty(chunks.shape[0] * CHUNK_ROWS, width, dtype=dtype)


@registered("lowbit_decode", _dense_of)
def _decode_chunks(
    chunks: Tensor,
    table: Tensor | None,
    bits: int,
    group: int,
    scales: int,
    bf16_scale: bool,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    layout = ChunkLayout(bits, group, table is not None, scales, bf16_scale)
    if chunks_usable(chunks) and dtype in (torch.bfloat16, torch.float16):
        return decode_chunks_cuda(chunks, table, layout, width, dtype)
    return decode_chunks_ref(chunks, table, layout, width).to(dtype)


@registered("lowbit_linear", lambda x, chunks, *rest: x.new_empty(*x.shape[:-1], chunks.shape[0] * CHUNK_ROWS))
def _lowbit_linear(
    x: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    scales: int,
    bf16_scale: bool,
) -> Tensor:
    layout = ChunkLayout(bits, group, table is not None, scales, bf16_scale)
    x_MK = x.reshape(-1, x.shape[-1])
    shape = (*x.shape[:-1], chunks.shape[0] * CHUNK_ROWS)
    kernel = chunks_usable(x) and x.dtype in (torch.bfloat16, torch.float16)
    if kernel and many_rows.prefers_many_rows(x_MK):
        return many_rows.many_rows_cuda(x_MK, chunks, table, bias, layout).view(shape)
    if kernel and 0 < x_MK.shape[0] <= few_rows.MOST_ROWS:
        return few_rows.few_rows_cuda(x_MK, chunks, table, bias, layout).view(shape)
    weight = decode_chunks(chunks, table, layout, x.shape[-1], x.dtype)
    return F.linear(x_MK, weight, bias).view(shape)


def parts_usable(x: Tensor) -> bool:
    """Whether `lowbit_parts_linear` takes x: few rows, on a GPU (or in Triton's interpreter)."""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    if not 0 < rows <= MOST_ROWS or (torch.is_grad_enabled() and x.requires_grad):
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) and not (interpreting() and x.dtype == torch.float32):
        return False
    return triton_usable(x)


@registered("lowbit_parts_linear", lambda x, codes, *rest: x.new_empty(*x.shape[:-1], codes.shape[0]))
def lowbit_parts_linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, table: Tensor | None, bias: Tensor | None, bits: int
) -> Tensor:
    """x [..., in] times the weight of stored parts: codes [out, in*bits/8], scale [out, groups(, scales)], and a zero
    point [out, groups] or a table."""
    from shoestring.kernels.lowbit.lowbit_linear_triton import _lowbit_parts_kernel

    assert (zero is None) != (table is None)
    x_MK = x.reshape(-1, x.shape[-1])
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    (rows, width), out, groups = x_MK.shape, codes.shape[0], scale.shape[1]
    y = torch.empty(rows, out, dtype=x.dtype, device=x.device)
    other = codes if zero is None else zero.contiguous()
    block = 16 if out <= 8192 else 32
    _lowbit_parts_kernel[(ceil_div(out, block),)](
        x_MK, codes.contiguous(), scale.contiguous(), other, other if table is None else table,
        x_MK if bias is None else bias, y, rows, out, width, groups, x_MK.stride(0), codes.shape[1],
        GROUP=width // groups, BITS=bits, TABLE=table is not None, SCALES=1 if scale.ndim == 2 else scale.shape[2],
        BIAS=bias is not None, BM=max(16, next_power_of_2(rows)), BN=block, BR=16 if width < 1024 else 32,
        num_warps=4,
    )  # fmt: skip
    return y.view(*x.shape[:-1], out)
