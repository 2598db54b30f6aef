"""Packed 2:4 weights times activations: y = x w^T + b, without a dense weight in memory.

    values    w = the kept values, bf16 or fp16 as the activations: 9/16 of the dense bytes
    codes     w = (q - zero) * scale for the kept values, 4 bits each: 3.25 bits per weight at group 64

Up to MOST_ROWS rows one CUDA C++ kernel (through NVRTC, sm_90 and later) streams the weights, in the order of
kernels/sparse24_layout.py, through the sparse tensor cores (_cuda/sparse24.cu). Above that the weight is decoded into a
scratch tensor, bit for bit the Format's own decode, and multiplied by cuBLAS. Elsewhere: decode in plain torch and
F.linear, which is the definition. Tests and bench hold the kernel to twice the error of `F.linear`, against fp64.

Which warps, tiles and splits the kernel runs with is a table by number of rows and shape (`choose_plan`), and
SHOESTRING_SPARSE24_PLAN='{"k_warps": 8, ...}' overrides it. A plan never changes what is computed beyond the order of
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

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.lowbit import chunks_usable
from shoestring.kernels.lowbit_layout import CHUNK_ROWS, aligned
from shoestring.kernels.nvrtc import SOURCES, Kernel, compile_kernel, cuda_source
from shoestring.kernels.sparse24_layout import CHUNK_WIDTH, SparseLayout, decode_ref

MOST_ROWS = 64
ROW_CLASSES = (8, 16, 32, 64)
SHARED_LIMIT, SHARED_SM = 227 * 1024, 228 * 1024  # bytes for a block and for a multiprocessor of sm_90
ENOUGH_BYTES = 72 * 1024  # on their way to one multiprocessor
PLANS = SOURCES / "sparse24_plans.json"
DTYPES = (torch.bfloat16, torch.float16)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# -- choosing ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """How the few-row kernel runs: `row_warps` x `k_warps` warps a block, each with `tiles` row tiles; K also split
    over a cluster of `split` blocks; `depth` stages in the ring, each with `wide` chunks for every warp and tile;
    `blocks` blocks on a multiprocessor at once; `ahead` stages asked into L2 while x may not be read yet."""

    row_warps: int
    k_warps: int
    tiles: int = 1
    split: int = 1
    depth: int = 3
    blocks: int = 1
    ahead: int = 0
    wide: int = 1

    @property
    def warps(self) -> int:
        return self.row_warps * self.k_warps

    @property
    def block_tiles(self) -> int:
        return self.row_warps * self.tiles

    def grid(self, out: int) -> tuple[int, int, int]:
        return (self.split, ceil_div(ceil_div(out, CHUNK_ROWS), self.block_tiles), 1)

    def memory(self, layout: SparseLayout, rows: int) -> int:
        """Bytes of shared memory: the ring, later the partial sums in its place; enough to have `blocks` at once."""
        weights = self.warps * self.tiles * self.wide * layout.chunk_bytes
        stage = weights + rows * (self.k_warps * self.wide * 2 * CHUNK_WIDTH + 16)
        part = self.k_warps * rows * (self.block_tiles * CHUNK_ROWS + 4) * 4
        # A kernel may begin while its predecessor runs. Left alone, its first blocks crowd on the few idle
        # multiprocessors, which then have twice the work of the others.
        no_more = SHARED_SM // (self.blocks + 1) - 1024 + 16
        return max(self.depth * stage, part, no_more)

    def fits(self, layout: SparseLayout, rows: int) -> bool:
        used = self.memory(layout, rows)
        registers = registers_of(layout, rows, self.tiles) * self.warps * 32 * self.blocks
        return (
            used <= SHARED_LIMIT
            and self.blocks * (used + 1024) <= SHARED_SM
            and registers <= 65536
            and self.warps <= 32
            and self.depth >= 2
            and self.wide in (1, 2)
        )


def row_tiles(rows: int) -> int:
    """Tiles of 8 activation rows that the kernel is compiled for."""
    return next(n for n in (1, 2, 4, 8) if rows <= 8 * n)


def row_class(rows: int) -> int:
    return next(n for n in ROW_CLASSES if rows <= n)


def registers_of(layout: SparseLayout, rows: int, tiles: int) -> int:
    """Registers of a thread with which the compiler need not spill."""
    used = {
        (1, 1): 56, (1, 2): 72, (1, 4): 104, (2, 1): 72, (2, 2): 96, (2, 4): 136, (4, 1): 96, (4, 2): 120, (4, 4): 200,
        (8, 1): 128,
    }  # fmt: skip
    if layout.bits == 16:
        used |= {(4, 4): 168, (8, 2): 128}
    return used.get((row_tiles(rows), tiles), 255)


def estimate(plan: Plan, layout: SparseLayout, rows: int, out: int, width: int, sms: int = 132) -> float:
    """Microseconds on an H200, about: fitted to 662 timings, off by 9% in the mean. Among them the plan it would take
    is 5% slower than the best in the mean, 30% at worst."""
    share = ceil_div(ceil_div(width, CHUNK_WIDTH), plan.split)  # chunks of a block along the inputs
    blocks = ceil_div(math.prod(plan.grid(out)), sms)  # of the multiprocessor that has most
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
        + 7.5e-3
        * 4
        * stages
        * plan.wide
        * plan.tiles
        * (1 + 0.5 * eights)  # what one warp does after the other
        + 0.79 * (plan.split - 1)
        + 1.7e-4 * plan.k_warps * rows * plan.block_tiles * CHUNK_ROWS  # adding up
    )


def plans(layout: SparseLayout, rows: int, out: int, width: int, sms: int = 132) -> list[Plan]:
    """Plans worth trying, the most promising first."""
    tiles, chunks = ceil_div(out, CHUNK_ROWS), ceil_div(width, CHUNK_WIDTH)
    found = []
    for row_warps, k_warps, each, split, wide in itertools.product(
        (1, 2, 3, 4, 6, 7, 8, 12, 14, 16), (1, 2, 4, 8), (1, 2), (1, 2), (1, 2)
    ):
        plan = Plan(row_warps, k_warps, each, split, wide=wide)
        if plan.warps > 16 or plan.block_tiles > tiles or split * k_warps * wide > chunks:
            continue
        stage = plan.warps * each * wide * layout.chunk_bytes
        # As many stages as it takes to have enough bytes on their way, as there are, or as there is room for.
        most = 1 + ceil_div(ceil_div(chunks, split), k_warps * wide)
        depths = range(min(8, most, max(2, 1 + ceil_div(ENOUGH_BYTES, stage))), 1, -1)
        deep = (dataclasses.replace(plan, depth=d) for d in depths)
        fitting = next((p for p in deep if p.fits(layout, rows)), None)
        if fitting is not None:
            found.append((estimate(fitting, layout, rows, out, width, sms), fitting))
    found.sort(key=lambda f: f[0])
    return [plan for _, plan in found] or [Plan(1, 1, depth=2)]


@functools.cache
def choose_plan(layout: SparseLayout, rows: int, out: int, width: int) -> Plan:
    """The plan for x [rows, width] and a weight [out, width]: measured for some shapes, else the best guess."""
    rows = row_class(rows)  # a plan serves a class of rows, so that few kernels are compiled
    key = plan_key(layout, rows, out, width)
    plan = Plan(**known_plans()[key]) if key in known_plans() else plans(layout, rows, out, width)[0]
    given = os.environ.get("SHOESTRING_SPARSE24_PLAN")
    if given:
        try:
            plan = dataclasses.replace(plan, **json.loads(given))
            fits = plan.fits(layout, rows)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"SHOESTRING_SPARSE24_PLAN={given!r} is not a plan ({error}): write some of "
                f"{', '.join(f.name for f in dataclasses.fields(Plan))} as JSON."
            ) from error
        if not fits:
            raise UserError(f"SHOESTRING_SPARSE24_PLAN={given!r} needs more than a multiprocessor has.")
    return plan


def plan_key(layout: SparseLayout, rows: int, out: int, width: int) -> str:
    kind = "values" if layout.bits == 16 else f"int{layout.bits} g{layout.group}"
    return f"{kind} rows<={row_class(rows)} {out}x{width}"


@functools.cache
def known_plans() -> dict[str, dict[str, int]]:
    """Measured on an H200 (`python -m shoestring.bench.decode_sparse24 --tune`); other GPUs start from them too."""
    return json.loads(PLANS.read_text()) if PLANS.exists() else {}


# -- the CUDA kernels ----------------------------------------------------------------------------------------
def macros(layout: SparseLayout, dtype: torch.dtype, rows: int, plan: Plan) -> dict[str, int]:
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
        "BLOCKS": plan.blocks,
        "AHEAD": plan.ahead,
    }


def _pointer(t: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if t is None else t.data_ptr())


@functools.cache
def _kernel(
    name: str, layout: SparseLayout, dtype: torch.dtype, size: int, plan: Plan, device: int
) -> Kernel:
    return compile_kernel(cuda_source("sparse24"), name, macros(layout, dtype, 8 * size, plan), device)


def few_rows_cuda(
    x_MK: Tensor, chunks: Tensor, bias: Tensor | None, layout: SparseLayout, plan: Plan | None = None
) -> Tensor:
    """Up to MOST_ROWS rows; x bf16 or fp16."""
    x_MK = aligned(x_MK)
    (rows, width), (tiles, per_row) = x_MK.shape, chunks.shape[:2]
    out = tiles * CHUNK_ROWS
    y = torch.empty(rows, out, dtype=x_MK.dtype, device=x_MK.device)
    plan = plan or choose_plan(layout, rows, out, width)
    kernel = _kernel("sparse24_rows", layout, x_MK.dtype, row_tiles(rows), plan, x_MK.device.index)
    numbers = (out, width, rows, x_MK.stride(0), tiles, per_row)
    kernel.launch(
        plan.grid(out),
        plan.warps * 32,
        plan.memory(layout, rows),
        (*map(_pointer, (chunks, x_MK, y, bias)), *map(ctypes.c_int, numbers)),
        cluster=plan.split,
    )
    return y


def decode_cuda(chunks: Tensor, layout: SparseLayout, width: int, dtype: torch.dtype) -> Tensor:
    """The dense weight in bf16 or fp16, bit for bit what decode_ref rounds to; values have `dtype` already."""
    tiles, per_row = chunks.shape[:2]
    dense = torch.empty(tiles * CHUNK_ROWS, width, dtype=dtype, device=chunks.device)
    kernel = _kernel("sparse24_dense", layout, dtype, 1, Plan(1, 1, depth=2), chunks.device.index)
    total = tiles * per_row
    sms = torch.cuda.get_device_properties(chunks.device).multi_processor_count
    args = (*map(_pointer, (chunks, dense)), *map(ctypes.c_int, (width, per_row, total)))
    kernel.launch((min(ceil_div(total, 8), 6 * sms), 1, 1), 256, 0, args, dependent=False)
    return dense


# -- operators -----------------------------------------------------------------------------------------------
def sparse24_linear(x: Tensor, chunks: Tensor, bias: Tensor | None, layout: SparseLayout) -> Tensor:
    """x [..., in] times the weight in `chunks` (as sparse24_layout lays it out); out is a multiple of 16."""
    if torch.is_grad_enabled() and x.requires_grad:
        return F.linear(x, decode(chunks, layout, x.shape[-1], x.dtype), bias)
    return torch.ops.shoestring.sparse24_linear(x, chunks, bias, layout.bits, layout.group, layout.bf16_scale)


def decode(chunks: Tensor, layout: SparseLayout, width: int, dtype: torch.dtype) -> Tensor:
    """The dense weight [out, width], rounded once to `dtype`."""
    if chunks_usable(chunks) and dtype in DTYPES:
        stored = dtype if layout.bits == 4 else chunks.dtype
        return decode_cuda(chunks, layout, width, stored).to(dtype)
    return decode_ref(chunks, layout, width).to(dtype)


@torch.library.custom_op("shoestring::sparse24_linear", mutates_args=())
def _sparse24_linear_op(
    x: Tensor, chunks: Tensor, bias: Tensor | None, bits: int, group: int, bf16_scale: bool
) -> Tensor:
    layout = SparseLayout(bits, group, bf16_scale)
    x_MK = x.reshape(-1, x.shape[-1])
    shape = (*x.shape[:-1], chunks.shape[0] * CHUNK_ROWS)
    kernel = chunks_usable(x) and x.dtype in DTYPES and (bits == 4 or chunks.dtype == x.dtype)
    if kernel and 0 < x_MK.shape[0] <= MOST_ROWS:
        return few_rows_cuda(x_MK, chunks, bias, layout).view(shape)
    return F.linear(x_MK, decode(chunks, layout, x.shape[-1], x.dtype), bias).view(shape)


@_sparse24_linear_op.register_fake
def _(x: Tensor, chunks: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], chunks.shape[0] * CHUNK_ROWS)
