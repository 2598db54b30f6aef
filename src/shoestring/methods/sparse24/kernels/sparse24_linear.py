"""Packed 2:4 weights times activations: y = x w^T + b, without a dense weight in memory.

    values    w = the kept values, bf16 or fp16 as the activations: 9/16 of the dense bytes
    codes     w = (q - zero) * scale for the kept values, 4 bits each: 3.25 bits per weight at group 64

Up to MOST_ROWS rows one CUDA C++ kernel (through NVRTC, sm_90 and later) streams the weights, in the order of
kernels/chunk_layout24.py, through the sparse tensor cores (kernels/sparse24_linear.cu). Above that
the weight is decoded into a scratch tensor, bit for bit the Format's own decode, and multiplied by cuBLAS. Elsewhere:
decode in plain torch and F.linear, which is the definition. Tests and benchmarks allow the kernel twice the error of
`F.linear`, against fp64.

A plan (warps, tiles, splits) comes from a table by number of rows and shape (`choose_plan`);
SHOESTRING_SPARSE24_PLAN='{"k_warps": 8, ...}' overrides it. Plans differ only in the order of summation; one plan
always gives the same bits.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.hardware.device import BLOCK_RESERVED, H200, DeviceLimits, device_limits
from shoestring.hardware.plan_table import PlanTable, overridden
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, aligned, ceil_div
from shoestring.kernels.lowbit.lowbit_linear import chunks_usable
from shoestring.kernels.runtime.nvrtc import Kernel, compile_kernel, cuda_source, pointer
from shoestring.kernels.runtime.operator import registered
from shoestring.methods.sparse24.kernels.chunk_layout24 import CHUNK_WIDTH, ChunkLayout24, decode_chunks24_ref

HERE = Path(__file__).parent
MOST_ROWS = 64
ROW_CLASSES = (8, 16, 32, 64)
ENOUGH_BYTES = 72 * 1024  # of weights in flight to one SM
DTYPES = (torch.bfloat16, torch.float16)


# -- plans ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sparse24LinearPlan:
    row_warps: int  # x k_warps: the warps of a block
    k_warps: int
    tiles: int = 1  # row tiles of a warp
    split: int = 1  # split-K over the blocks of a cluster
    depth: int = 3  # stages in the ring
    ahead: int = 0  # stages prefetched into L2 while x may not be read yet
    wide: int = 1  # chunks of every warp and tile in a stage

    @property
    def warps(self) -> int:
        return self.row_warps * self.k_warps

    @property
    def block_tiles(self) -> int:
        return self.row_warps * self.tiles

    def grid(self, out: int) -> tuple[int, int, int]:
        return (self.split, ceil_div(ceil_div(out, CHUNK_ROWS), self.block_tiles), 1)

    def shared_bytes(self, layout: ChunkLayout24, rows: int, limits: DeviceLimits = H200) -> int:
        """The ring, and later the partial sums in its place; at least so much that an SM holds one block."""
        weights = self.warps * self.tiles * self.wide * layout.chunk_bytes
        stage = weights + rows * (self.k_warps * self.wide * 2 * CHUNK_WIDTH + 16)
        part = self.k_warps * rows * (self.block_tiles * CHUNK_ROWS + 4) * 4
        # With PDL a kernel starts while its predecessor runs. Without this limit its first blocks would all go to the
        # few idle SMs, which would then have twice the work of the others.
        one_per_sm = limits.shared_per_sm // 2 - BLOCK_RESERVED + 16
        return max(self.depth * stage, part, one_per_sm)

    def fits(self, layout: ChunkLayout24, rows: int, limits: DeviceLimits = H200) -> bool:
        registers = registers_of(layout, rows, self.tiles) * self.warps * 32
        return (
            self.shared_bytes(layout, rows, limits) <= limits.shared_per_block
            and registers <= limits.registers_per_sm
            and self.warps <= 32
            and self.depth >= 2
            and self.wide in (1, 2)
        )


# Measured by `python -m benchmarks.decode_sparse24 --tune`.
PLANS = PlanTable("sparse24_linear", Sparse24LinearPlan, shipped=HERE / "sparse24_linear_plans.json")


def row_tiles(rows: int) -> int:
    """Tiles of 8 activation rows that the kernel is compiled for."""
    return next(n for n in (1, 2, 4, 8) if rows <= 8 * n)


def row_class(rows: int) -> int:
    return next(n for n in ROW_CLASSES if rows <= n)


def registers_of(layout: ChunkLayout24, rows: int, tiles: int) -> int:
    """Registers of a thread with which the compiler does not spill."""
    used = {
        (1, 1): 56, (1, 2): 72, (1, 4): 104, (2, 1): 72, (2, 2): 96, (2, 4): 136, (4, 1): 96, (4, 2): 120, (4, 4): 200,
        (8, 1): 128,
    }  # fmt: skip
    if layout.bits == 16:
        used |= {(4, 4): 168, (8, 2): 128}
    return used.get((row_tiles(rows), tiles), 255)


def estimate(
    plan: Sparse24LinearPlan, layout: ChunkLayout24, rows: int, out: int, width: int, num_sms: int = H200.num_sms
) -> float:
    """Microseconds on an H200: fitted to 662 timings, with a mean error of 9%. Over those shapes the plan with the
    least estimate is 5% slower than the best in the mean, 30% at worst."""
    share = ceil_div(ceil_div(width, CHUNK_WIDTH), plan.split)  # chunks of a block along the inputs
    blocks = ceil_div(math.prod(plan.grid(out)), num_sms)  # of the SM that has most
    chunks = blocks * plan.block_tiles * share
    stages = blocks * ceil_div(share, plan.k_warps * plan.wide)
    eights = row_tiles(rows)
    return (
        2.2
        + 0.0158e-3 * chunks * layout.chunk_bytes
        + 0.0074e-3 * blocks * rows * share * CHUNK_WIDTH * 2  # x
        + 0.58e-3 * 4 * chunks * (4 * eights / plan.tiles + 4)  # reading shared memory
        + 0.11 * stages
        + 0.10 * stages / (plan.depth - 1)  # what a short ring waits
        + 7.5e-3 * 4 * stages * plan.wide * plan.tiles * (1 + 0.5 * eights)  # what one warp does after the other
        + 0.79 * (plan.split - 1)
        + 1.7e-4 * plan.k_warps * rows * plan.block_tiles * CHUNK_ROWS  # adding up
    )


def candidate_plans(
    layout: ChunkLayout24, rows: int, out: int, width: int, limits: DeviceLimits = H200
) -> list[Sparse24LinearPlan]:
    """Plans worth trying, the most promising first."""
    tiles, chunks = ceil_div(out, CHUNK_ROWS), ceil_div(width, CHUNK_WIDTH)
    found = []
    for row_warps, k_warps, each, split, wide in itertools.product(
        (1, 2, 3, 4, 6, 7, 8, 12, 14, 16), (1, 2, 4, 8), (1, 2), (1, 2), (1, 2)
    ):
        plan = Sparse24LinearPlan(row_warps, k_warps, each, split, wide=wide)
        if plan.warps > 16 or plan.block_tiles > tiles or split * k_warps * wide > chunks:
            continue
        stage = plan.warps * each * wide * layout.chunk_bytes
        # As many stages as put enough bytes in flight, as there are, or as there is room for.
        most = 1 + ceil_div(ceil_div(chunks, split), k_warps * wide)
        depths = range(min(8, most, max(2, 1 + ceil_div(ENOUGH_BYTES, stage))), 1, -1)
        deep = (dataclasses.replace(plan, depth=d) for d in depths)
        fitting = next((p for p in deep if p.fits(layout, rows, limits)), None)
        if fitting is not None:
            found.append((estimate(fitting, layout, rows, out, width, limits.num_sms), fitting))
    found.sort(key=lambda f: f[0])
    return [plan for _, plan in found] or [Sparse24LinearPlan(1, 1, depth=2)]


def plan_key(layout: ChunkLayout24, rows: int, out: int, width: int) -> str:
    return f"{layout.label} rows<={row_class(rows)} {out}x{width}"


@PLANS.cached
def choose_plan(
    layout: ChunkLayout24, rows: int, out: int, width: int, limits: DeviceLimits = H200
) -> Sparse24LinearPlan:
    """The plan for x [rows, width] and a weight [out, width]: measured, else the best by estimate;
    SHOESTRING_SPARSE24_PLAN overrides fields."""
    rows = row_class(rows)  # a plan serves a class of rows, so that few kernels are compiled
    plan = PLANS.find(plan_key(layout, rows, out, width), limits.name)
    if plan is None or not plan.fits(layout, rows, limits):
        plan = candidate_plans(layout, rows, out, width, limits)[0]
    return overridden(
        plan,
        "SHOESTRING_SPARSE24_PLAN",
        lambda given: given.fits(layout, rows, limits),
        "needs more than a multiprocessor has",
    )


# -- the CUDA kernels ----------------------------------------------------------------------------------------
def sparse24_macros(layout: ChunkLayout24, dtype: torch.dtype, rows: int, plan: Sparse24LinearPlan) -> dict[str, int]:
    return {
        "BITS": layout.bits,
        "HALF": int(dtype == torch.float16),
        "GROUP": layout.group,
        "SBF16": int(layout.bf16_scale),
        "EACH": int(row_tiles(rows) >= 4),  # the sums of a group would take too many registers
        "MT": row_tiles(rows),
        "ROW_WARPS": plan.row_warps,
        "K_WARPS": plan.k_warps,
        "R": plan.tiles,
        "SPLIT": plan.split,
        "WIDE": plan.wide,
        "DEPTH": plan.depth,
        "AHEAD": plan.ahead,
    }


def source() -> str:
    return cuda_source("sparse24_linear", folder=HERE)


@functools.cache
def _kernel(
    name: str, layout: ChunkLayout24, dtype: torch.dtype, size: int, plan: Sparse24LinearPlan, device: int
) -> Kernel:
    defines = sparse24_macros(layout, dtype, 8 * size, plan)
    return compile_kernel(source(), name, defines, device)


def sparse24_rows_cuda(
    x_MK: Tensor, chunks: Tensor, bias: Tensor | None, layout: ChunkLayout24, plan: Sparse24LinearPlan | None = None
) -> Tensor:
    """Up to MOST_ROWS rows; x bf16 or fp16."""
    x_MK = aligned(x_MK)
    (rows, width), (tiles, per_row) = x_MK.shape, chunks.shape[:2]
    out = tiles * CHUNK_ROWS
    y = torch.empty(rows, out, dtype=x_MK.dtype, device=x_MK.device)
    limits = device_limits(x_MK.device.index)
    plan = plan or choose_plan(layout, rows, out, width, limits)
    kernel = _kernel("sparse24_rows", layout, x_MK.dtype, row_tiles(rows), plan, x_MK.device.index)
    numbers = (out, width, rows, x_MK.stride(0), tiles, per_row)
    kernel.launch(
        plan.grid(out),
        plan.warps * 32,
        plan.shared_bytes(layout, rows, limits),
        (*map(pointer, (chunks, x_MK, y, bias)), *map(ctypes.c_int, numbers)),
        cluster=plan.split,
    )
    return y


def decode_cuda(chunks: Tensor, layout: ChunkLayout24, width: int, dtype: torch.dtype) -> Tensor:
    """The dense weight in bf16 or fp16, bit for bit what decode_chunks24_ref rounds to; values have `dtype` already."""
    tiles, per_row = chunks.shape[:2]
    dense = torch.empty(tiles * CHUNK_ROWS, width, dtype=dtype, device=chunks.device)
    kernel = _kernel("sparse24_dense", layout, dtype, 1, Sparse24LinearPlan(1, 1, depth=2), chunks.device.index)
    total = tiles * per_row
    blocks = min(ceil_div(total, 8), 6 * device_limits(chunks.device.index).num_sms)
    args = (*map(pointer, (chunks, dense)), *map(ctypes.c_int, (width, per_row, total)))
    kernel.launch((blocks, 1, 1), 256, 0, args, dependent=False)
    return dense


# -- operators -----------------------------------------------------------------------------------------------
def sparse24_linear(x: Tensor, chunks: Tensor, bias: Tensor | None, layout: ChunkLayout24) -> Tensor:
    """x [..., in] times the weight in `chunks` (in the order of chunk_layout24.py); out is a multiple of 16."""
    if torch.is_grad_enabled() and x.requires_grad:
        return F.linear(x, decode(chunks, layout, x.shape[-1], x.dtype), bias)
    settings = layout.bits, layout.group, layout.bf16_scale
    return _sparse24_linear(x, chunks, bias, *settings)


def decode(chunks: Tensor, layout: ChunkLayout24, width: int, dtype: torch.dtype) -> Tensor:
    """The dense weight [out, width], rounded once to `dtype`."""
    if chunks_usable(chunks) and dtype in DTYPES:
        stored = dtype if layout.bits == 4 else chunks.dtype
        return decode_cuda(chunks, layout, width, stored).to(dtype)
    return decode_chunks24_ref(chunks, layout, width).to(dtype)


@registered("sparse24_linear", lambda x, chunks, *rest: x.new_empty(*x.shape[:-1], chunks.shape[0] * CHUNK_ROWS))
def _sparse24_linear(x: Tensor, chunks: Tensor, bias: Tensor | None, bits: int, group: int, bf16_scale: bool) -> Tensor:
    layout = ChunkLayout24(bits, group, bf16_scale)
    x_MK = x.reshape(-1, x.shape[-1])
    shape = (*x.shape[:-1], chunks.shape[0] * CHUNK_ROWS)
    kernel = chunks_usable(x) and x.dtype in DTYPES and (bits == 4 or chunks.dtype == x.dtype)
    if kernel and 0 < x_MK.shape[0] <= MOST_ROWS:
        return sparse24_rows_cuda(x_MK, chunks, bias, layout).view(shape)
    return F.linear(x_MK, decode(chunks, layout, x.shape[-1], x.dtype), bias).view(shape)
