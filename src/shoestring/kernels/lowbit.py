"""Weights of 2, 3 or 4 bits times activations: y = x w^T + b, without a dense weight in memory.

    integers    w = (q - zero) * scale           tables    w = T[q] * (scale of T[q]'s sign)

Three ways to the same result (within the rounding of x's dtype; tests and bench hold each to twice the error of
`F.linear` on the decoded weight):

    chunks   CUDA C++ through NVRTC (sm_90 and later), weights in the order of kernels/lowbit_layout.py. Up to
             16 rows: kernels/lowbit_few.py, with what stands around the product (`lowbit_row_linear`). More, on sm_90:
             kernels/lowbit_wgmma.py. On later chips, up to MOST_ROWS rows: _cuda/lowbit.cu; above that the weight is
             decoded into a scratch tensor, bit for bit the Format's own decode, and multiplied by cuBLAS.
    parts    Triton, from the stored parts as they are: where NVRTC or the GPU is not up to it. Up to MOST_ROWS rows.
    plain    decode and F.linear: everything else, and the definition.

Which warps, tiles and splits the CUDA kernel runs with is a table by number of rows and shape (`choose_plan`), and
SHOESTRING_LOWBIT_PLAN='{"k_warps": 8, ...}' overrides it. A plan never changes what is computed beyond the order of
summation; for one plan the result is the same bit for bit at every run.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels import lowbit_few, lowbit_wgmma
from shoestring.kernels.backend import fall_back, interpreting, triton_usable
from shoestring.kernels.lowbit_layout import CHUNK_ROWS, CHUNK_WIDTH, Layout, unpack_chunks
from shoestring.kernels.nvrtc import Kernel, NvrtcError, compile_kernel, driver_library, nvrtc_library

MOST_ROWS = 64
ROW_CLASSES = (1, 4, 8, 16, 32, 64)
SHARED_LIMIT, SHARED_SM = 227 * 1024, 228 * 1024  # bytes for a block and for a multiprocessor of sm_90
SOURCE = Path(__file__).parent / "_cuda" / "lowbit.cu"
PLANS = Path(__file__).parent / "_cuda" / "lowbit_plans.json"


# -- the definition ------------------------------------------------------------------------------------------
def decode_chunks_ref(chunks: Tensor, table: Tensor | None, layout: Layout, width: int) -> Tensor:
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


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# -- choosing ------------------------------------------------------------------------------------------------
@functools.cache
def _cuda_usable(device: int) -> bool:
    if torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    if torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor < 200 * 1024:
        return False  # consumer chips after sm_90 have 100 KiB; plans are made for 228
    try:
        nvrtc_library(), driver_library()
    except NvrtcError as error:
        return fall_back(str(error))
    return True


def chunks_usable(t: Tensor) -> bool:
    """Whether weights on t's device are worth laying out in chunks."""
    return t.is_cuda and _cuda_usable(t.device.index or 0)


@dataclass(frozen=True)
class Plan:
    """How the few-row kernel runs: `row_warps` x `k_warps` warps a block, each with `tiles` row tiles and `depth`
    chunks in its ring; K also split over a cluster of `split` blocks; `blocks` blocks on a multiprocessor at once;
    `mode` as in _cuda/lowbit.cu."""

    row_warps: int
    k_warps: int
    tiles: int
    split: int
    blocks: int
    mode: int
    depth: int = 3

    @property
    def warps(self) -> int:
        return self.row_warps * self.k_warps

    def grid(self, out: int) -> int:
        """Blocks in all."""
        return ceil_div(ceil_div(out, CHUNK_ROWS), self.row_warps * self.tiles) * self.split

    def memory(self, layout: Layout, rows: int, width: int) -> tuple[int, int]:
        """(chunks in a panel of x, bytes of shared memory); more than SHARED_LIMIT where it does not fit."""
        chunks = ceil_div(width, CHUNK_WIDTH)
        lut = 128 << (2 * layout.bits) if layout.table else 0
        fixed = lut + self.warps * self.depth * self.tiles * layout.chunk_bytes
        budget = min(SHARED_LIMIT, SHARED_SM // self.blocks - 1024) - fixed
        panel = ceil_div(ceil_div(chunks, self.split), self.k_warps) * self.k_warps
        x_bytes = rows * (panel * 256 + 16)
        if x_bytes > budget:  # two panels in turn, each long enough for the ring to turn
            least = max(1, self.depth - 1)
            panel = max(least, (budget // (2 * rows) - 16) // 256 // self.k_warps) * self.k_warps
            x_bytes = 2 * rows * (panel * 256 + 16)
        part = self.k_warps * rows * (self.row_warps * self.tiles * CHUNK_ROWS + 4) * 4
        return panel, fixed + max(x_bytes, part)

    def fits(self, layout: Layout, rows: int, width: int) -> bool:
        used = self.memory(layout, rows, width)[1]
        return used <= SHARED_LIMIT and self.blocks * (used + 1024) <= SHARED_SM


def row_tiles(rows: int) -> int:
    """Tiles of 8 activation rows that the kernel is compiled for."""
    return next(n for n in (1, 2, 4, 8) if rows <= 8 * n)


def most_warps(layout: Layout, rows: int, tiles: int) -> int:
    """Warps that a multiprocessor's registers hold (65536 of them)."""
    registers = {
        (1, 1): 64,
        (1, 2): 84,
        (2, 1): 80,
        (2, 2): 96,
        (4, 1): 88,
        (4, 2): 124,
        (8, 1): 120,
        (8, 2): 186,
    }
    more = 8 if layout.table and rows <= 16 else 0
    return 65536 // 32 // (registers[row_tiles(rows), tiles] + more)


def plans(layout: Layout, rows: int, out: int, width: int, sms: int = 132) -> list[Plan]:
    """Plans worth trying, the most promising first: all blocks at once on the multiprocessors, and many warps."""
    size = row_tiles(rows)
    if size >= 4:
        modes: tuple[int, ...] = (2,)
    elif layout.table:
        modes = (0, 2) if layout.scales == 2 else (0,)
    else:
        modes = (1, 0)
    found = []
    for row_warps, k_warps, tiles, split in itertools.product(
        (1, 2, 4, 7, 8, 16), (1, 2, 4, 8, 16), (1, 2), (1, 2, 4)
    ):
        warps, limit = row_warps * k_warps, most_warps(layout, rows, tiles)
        if not 4 <= warps <= min(limit, 32) or ceil_div(width, CHUNK_WIDTH) < split * k_warps:
            continue
        if row_warps * tiles > ceil_div(out, CHUNK_ROWS):
            continue
        grid = Plan(row_warps, k_warps, tiles, split, 1, 0).grid(out)
        blocks = max(1, min(ceil_div(grid, sms), limit // warps))
        plan = Plan(row_warps, k_warps, tiles, split, blocks, modes[0])
        if not plan.fits(layout, rows, width):
            continue
        # The weights of the rule are fitted to 291 timings on an H200. Longer rings were slower there, perhaps because
        # the next kernel's blocks then find no room to begin; so was a second wave of blocks, which waits for memory.
        waves = grid / (sms * blocks)
        busy = min(1.0, min(grid / sms, blocks) * warps / (0.75 * most_warps(layout, rows, 1)))
        x_share = 2 * rows / (row_warps * tiles * CHUNK_ROWS) / (layout.bits / 8)
        score = math.sqrt(waves / math.ceil(waves)) * busy / (1 + 0.3 * x_share)
        score /= {1: 1.0, 2: 1.1, 4: 3.0}[split] * math.ceil(waves)
        found += [(score / (1 + 0.02 * i), dataclasses.replace(plan, mode=m)) for i, m in enumerate(modes)]
    found.sort(key=lambda f: -f[0])
    return [plan for _, plan in found] or [Plan(1, 1, 1, 1, 1, modes[0])]


@functools.cache
def choose_plan(layout: Layout, rows: int, out: int, width: int) -> Plan:
    """The plan for x [rows, width] and a weight [out, width]: measured for some shapes, else the best guess."""
    rows = row_class(rows)  # a plan serves a class of rows, so that few kernels are compiled
    key = plan_key(layout, rows, out, width)
    plan = Plan(**known_plans()[key]) if key in known_plans() else plans(layout, rows, out, width)[0]
    given = os.environ.get("SHOESTRING_LOWBIT_PLAN")
    if given:
        try:
            plan = dataclasses.replace(plan, **json.loads(given))
            fits = plan.fits(layout, rows, width)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"SHOESTRING_LOWBIT_PLAN={given!r} is not a plan ({error}): write some of "
                f"{', '.join(f.name for f in dataclasses.fields(Plan))} as JSON."
            ) from error
        if not fits:
            raise UserError(f"SHOESTRING_LOWBIT_PLAN={given!r} needs more shared memory than a block has.")
        if layout.table and plan.mode == 1:
            raise UserError(
                f"SHOESTRING_LOWBIT_PLAN={given!r}: mode 1 is for integers; tables have modes 0 and 2."
            )
    return plan


def row_class(rows: int) -> int:
    return next(n for n in ROW_CLASSES if rows <= n)


def plan_key(layout: Layout, rows: int, out: int, width: int) -> str:
    kind = f"nf{layout.bits}:s{layout.scales}" if layout.table else f"int{layout.bits}"
    return f"{kind} g{layout.group} rows<={row_class(rows)} {out}x{width}"


@functools.cache
def known_plans() -> dict[str, dict[str, int]]:
    """Measured on an H200 (`python -m shoestring.bench.lowbit_gemm --tune`); other GPUs start from them too."""
    return json.loads(PLANS.read_text()) if PLANS.exists() else {}


# -- the CUDA kernels ----------------------------------------------------------------------------------------
@functools.cache
def source() -> str:
    return SOURCE.with_name("lowbit_decode.cu").read_text() + SOURCE.read_text()


def _macros(layout: Layout, dtype: torch.dtype, **more: int) -> dict[str, int]:
    base = {"MT": 1, "R": 1, "DEPTH": 3, "WARPS": 8, "MODE": 0, "BLOCKS": 1}
    return {
        "BITS": layout.bits,
        "TABLE": int(layout.table),
        "TWO": int(layout.scales == 2),
        "HALF": int(dtype == torch.float16),
        "SBF16": int(layout.bf16_scale),
        "GROUP": layout.group,
        **base,
        **more,
    }


def _pointer(t: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if t is None else t.data_ptr())


def rows_macros(layout: Layout, dtype: torch.dtype, rows: int, plan: Plan) -> dict[str, int]:
    return _macros(
        layout,
        dtype,
        MT=row_tiles(rows),
        R=plan.tiles,
        DEPTH=plan.depth,
        WARPS=plan.warps,
        MODE=plan.mode,
        BLOCKS=plan.blocks,
    )


@functools.cache
def _rows_kernel(layout: Layout, dtype: torch.dtype, size: int, plan: Plan, device: int) -> Kernel:
    return compile_kernel(source(), "lowbit_rows", rows_macros(layout, dtype, 8 * size, plan), device)


def few_rows_cuda(
    x_MK: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    plan: Plan | None = None,
) -> Tensor:
    """Up to MOST_ROWS rows; x bf16 or fp16."""
    if x_MK.stride(1) != 1 or x_MK.stride(0) % 8 or x_MK.data_ptr() % 16:
        x_MK = x_MK.contiguous()
    (rows, width), (tiles, per_row) = x_MK.shape, chunks.shape[:2]
    out = tiles * CHUNK_ROWS
    y = torch.empty(rows, out, dtype=x_MK.dtype, device=x_MK.device)
    plan = plan or choose_plan(layout, rows, out, width)
    kernel = _rows_kernel(layout, x_MK.dtype, row_tiles(rows), plan, x_MK.device.index)
    panel, shared_bytes = plan.memory(layout, rows, width)
    numbers = (out, width, rows, x_MK.stride(0), tiles, per_row, plan.k_warps, panel)
    kernel.launch(
        (plan.split, ceil_div(tiles, plan.row_warps * plan.tiles), 1),
        plan.warps * 32,
        shared_bytes,
        (*map(_pointer, (chunks, x_MK, y, table, bias)), *map(ctypes.c_int, numbers)),
        cluster=plan.split,
    )
    return y


def decode_chunks_cuda(
    chunks: Tensor, table: Tensor | None, layout: Layout, width: int, dtype: torch.dtype
) -> Tensor:
    """The dense weight in bf16 or fp16, bit for bit what decode_chunks_ref rounds to."""
    tiles, per_row = chunks.shape[:2]
    dense = torch.empty(tiles * CHUNK_ROWS, width, dtype=dtype, device=chunks.device)
    kernel = compile_kernel(source(), "lowbit_dense", _macros(layout, dtype), chunks.device.index)
    total = tiles * per_row
    blocks = min(
        ceil_div(total, 8), 6 * torch.cuda.get_device_properties(chunks.device).multi_processor_count
    )
    args = (
        *map(_pointer, (chunks, dense, table)),
        *map(ctypes.c_int, (width, 0, per_row, total)),
    )
    kernel.launch((blocks, 1, 1), 256, 0, args, dependent=False)
    return dense


# -- operators -----------------------------------------------------------------------------------------------
def lowbit_linear(
    x: Tensor, chunks: Tensor, table: Tensor | None, bias: Tensor | None, layout: Layout
) -> Tensor:
    """x [..., in] times the weight in `chunks` (as pack_chunks lays it out); out is a multiple of 16."""
    if torch.is_grad_enabled() and x.requires_grad:
        weight = decode_chunks(chunks, table, layout, x.shape[-1], x.dtype)
        return F.linear(x, weight, bias)
    return torch.ops.shoestring.lowbit_linear(
        x, chunks, table, bias, layout.bits, layout.group, layout.scales, layout.bf16_scale
    )


def lowbit_row_linear(
    x_MK: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual_1N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Few rows with what stands around the product, as kernels/row_linear.py has it for dense weights: RMSNorm of x in
    front, SwiGLU behind (the rows of W are gate rows, then up rows), a residual of y's shape added in fp32."""
    around: dict[str, Any] = {
        "norm_K": norm_K,
        "eps": eps,
        "swiglu": swiglu,
        "residual_1N": residual_1N,
        "out_dtype": out_dtype,
    }
    kernel = chunks_usable(x_MK) and x_MK.dtype in (torch.bfloat16, torch.float16)
    if kernel and 0 < x_MK.shape[0] <= lowbit_few.MOST_ROWS:
        return lowbit_few.few_rows_cuda(x_MK, chunks, table, bias, layout, **around)
    weight = decode_chunks(chunks, table, layout, x_MK.shape[-1], x_MK.dtype)
    return lowbit_few.around_ref(x_MK, weight, bias, **around)


def decode_chunks(
    chunks: Tensor, table: Tensor | None, layout: Layout, width: int, dtype: torch.dtype
) -> Tensor:
    """The dense weight [out, width], rounded once to `dtype`."""
    if chunks_usable(chunks) and dtype in (torch.bfloat16, torch.float16):
        return decode_chunks_cuda(chunks, table, layout, width, dtype)
    return decode_chunks_ref(chunks, table, layout, width).to(dtype)


@torch.library.custom_op("shoestring::lowbit_linear", mutates_args=())
def _lowbit_linear_op(
    x: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    scales: int,
    bf16_scale: bool,
) -> Tensor:
    layout = Layout(bits, group, table is not None, scales, bf16_scale)
    x_MK = x.reshape(-1, x.shape[-1])
    shape = (*x.shape[:-1], chunks.shape[0] * CHUNK_ROWS)
    kernel = chunks_usable(x) and x.dtype in (torch.bfloat16, torch.float16)
    if kernel and 0 < x_MK.shape[0] <= lowbit_few.MOST_ROWS:
        return lowbit_few.few_rows_cuda(x_MK, chunks, table, bias, layout).view(shape)
    if kernel and lowbit_wgmma.worth_it(x_MK, layout):
        return lowbit_wgmma.many_rows_cuda(x_MK, chunks, table, bias, layout).view(shape)
    if kernel and 0 < x_MK.shape[0] <= MOST_ROWS:
        return few_rows_cuda(x_MK, chunks, table, bias, layout).view(shape)
    weight = decode_chunks(chunks, table, layout, x.shape[-1], x.dtype)
    return F.linear(x_MK, weight, bias).view(shape)


@_lowbit_linear_op.register_fake
def _(
    x: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    scales: int,
    bf16_scale: bool,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], chunks.shape[0] * CHUNK_ROWS)


def parts_usable(x: Tensor) -> bool:
    """Whether `lowbit_parts_linear` takes x: few rows, on a GPU (or in Triton's interpreter)."""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    if not 0 < rows <= MOST_ROWS or (torch.is_grad_enabled() and x.requires_grad):
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) and not (interpreting() and x.dtype == torch.float32):
        return False
    return triton_usable(x)


@torch.library.custom_op("shoestring::lowbit_parts_linear", mutates_args=())
def lowbit_parts_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    bits: int,
) -> Tensor:
    """x [..., in] times the weight of stored parts: codes [out, in*bits/8], scale [out, groups(, scales)], and a zero
    point [out, groups] or a table."""
    from shoestring.kernels._triton.lowbit import _lowbit_parts_kernel

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
        BIAS=bias is not None, BM=max(16, 1 << (rows - 1).bit_length()), BN=block, BR=16 if width < 1024 else 32,
        num_warps=4,
    )  # fmt: skip
    return y.view(*x.shape[:-1], out)


@lowbit_parts_linear.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    bits: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])
