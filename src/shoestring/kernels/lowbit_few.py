"""One to sixteen rows times weights of 2, 3 or 4 bits, with what stands around the product (_cuda/lowbit_few.cu).

    y = [norm] x W^T [+ bias] [swiglu] [+ residual]          the arguments are those of kernels/row_linear.py

At this size a product only reads W, and what is left to gain is waiting: for the block to start, for x, for the sum.
A plan (`Plan`) gives a block a whole multiprocessor, or half of one (`beside`): then the next kernel lies beside this
one and fetches its weights meanwhile. Two blocks of the same kernel on one multiprocessor would take twice as long,
while another has none, and the hardware does place them so. Therefore launches take turns between two shapes of which
no two of a kind fit: one with more than half of the shared memory, one with more than half of the registers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import json
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.lowbit_layout import CHUNK_ROWS, CHUNK_WIDTH, Layout
from shoestring.kernels.nvrtc import SOURCES, Kernel, compile_kernel, cuda_source

MOST_ROWS = 16
SHARED_LIMIT, SHARED_SM = 227 * 1024, 228 * 1024  # bytes for a block and for a multiprocessor of sm_90
MORE_THAN_HALF = 116 * 1024  # two blocks of so much shared memory do not fit (each also costs 1 KiB)
LESS_THAN_HALF = SHARED_SM - MORE_THAN_HALF - 2048
REGISTERS = 16384  # of each of the four parts of a multiprocessor
PLANS = SOURCES / "lowbit_few_plans.json"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# -- the definition ------------------------------------------------------------------------------------------
def around_ref(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual_1N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What the kernel computes, from the decoded weight: as row_linear_ref, for any number of rows."""
    wide = torch.promote_types(x_MK.dtype, torch.float32)
    x = x_MK.to(wide)
    if norm_K is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_K.to(wide)
    y = F.linear(x, weight_NK.to(wide), None if bias is None else bias.to(wide))
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual_1N is not None:
        y = y + residual_1N.to(wide)
    return y.to(out_dtype or x_MK.dtype)


# -- plans ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """`row_warps` x `k_warps` warps a block, each with `tiles` row tiles and `depth` chunks in its ring; K also split
    over a cluster of `split` blocks; x in panels of `panel` chunks, or whole (0), through registers; `digits`: the
    product is one of integers (x whole; no tables); `beside`: half of a multiprocessor (no clusters); `early`: chunks
    asked for before x, which comes behind them (0: as many as the ring takes); `bulk`: so many chunks in a copy by the
    copy engine (0: copies by all lanes; x whole); `pause`: nanoseconds before the first of them."""

    row_warps: int
    k_warps: int
    tiles: int = 1
    depth: int = 3
    split: int = 1
    panel: int = 0
    digits: int = 0
    beside: int = 0
    early: int = 0
    bulk: int = 0
    pause: int = 0

    @property
    def warps(self) -> int:
        return self.row_warps * self.k_warps

    def grid(self, out: int) -> tuple[int, int, int]:
        return self.split, ceil_div(ceil_div(out, CHUNK_ROWS), self.row_warps * self.tiles), 1

    def panel_chunks(self, width: int) -> int:
        """Chunks of x that lie in shared memory at once."""
        share = ceil_div(ceil_div(width, CHUNK_WIDTH), self.split)
        return min(self.panel, ceil_div(share, self.k_warps) * self.k_warps) if self.panel else share

    def column_tiles(self, rows: int) -> int:
        """Tiles of 8 columns of the matrix instruction: a row of x is one column, or two where it has two digits."""
        return 1 if row_class(rows) * (2 if self.digits else 1) <= 8 else 2

    def shared_bytes(self, layout: Layout, rows: int, width: int, norm: bool = False) -> int:
        panel = self.panel_chunks(width)
        x_bytes = rows * (panel * 256 + 16)
        share = ceil_div(ceil_div(width, CHUNK_WIDTH), self.split)
        if self.panel:
            x_bytes *= 1 if panel >= share else 2
        else:
            x_bytes += panel * (32 if self.digits else 64)
        if not self.panel and not layout.table:
            numbers = 8 * self.column_tiles(rows) * (2 if self.digits else 1)
            x_bytes += share * (CHUNK_WIDTH // layout.group) * numbers * 4
        if norm:
            x_bytes += rows * share * 4
        barriers = ceil_div(self.warps * (self.depth // self.bulk), 2) * 16 if self.bulk else 0
        rings = self.warps * self.depth * self.tiles * layout.chunk_bytes
        return layout.pair_table_bytes + rings + 16 + barriers + x_bytes

    def fits(self, layout: Layout, rows: int, width: int, norm: bool = False) -> bool:
        if self.digits and (layout.table or self.panel or rows > 8):
            return False
        if self.beside and (self.split > 1 or self.warps > 16):
            return False
        if self.bulk and (
            self.panel or self.split > 1 or self.depth % self.bulk or self.depth < 2 * self.bulk
        ):
            return False
        chunks = ceil_div(width, CHUNK_WIDTH)
        if self.depth < 3 or ceil_div(chunks, self.split) * (self.split - 1) >= chunks:
            return False  # sums meet in the rings, which must hold them; a block of a cluster without work is none
        limit = LESS_THAN_HALF if self.beside else SHARED_LIMIT
        return self.shared_bytes(layout, rows, width, norm) <= limit


ROW_CLASSES = (1, 2, 4, 8, 16)


def row_class(rows: int) -> int:
    return next(n for n in ROW_CLASSES if rows <= n)


def rule(
    layout: Layout, rows: int, out: int, width: int, norm: bool, swiglu: bool, multiprocessors: int = 132
) -> Plan:
    """One block a multiprocessor where the rows allow it, short rings, two row tiles a warp for few rows, and x whole
    where that is little. Digits where the shifts they save outweigh taking x apart, which every block does."""
    tiles, chunks = ceil_div(out, CHUNK_ROWS), ceil_div(width, CHUNK_WIDTH)
    wanted = max(1, min(14, ceil_div(tiles, multiprocessors)))
    digits = int(not layout.table and rows <= 4 and 8 * rows <= 15 * wanted)
    whole = norm or rows * width <= 32 * 1024
    pair = 2 if swiglu or (wanted % 2 == 0 and rows <= 4 and whole) else 1
    row_warps = ceil_div(wanted, pair)
    many = row_warps >= 7 if pair == 1 or rows <= 4 else False
    most = 28 if many or (pair == 1 and rows <= 4 and row_warps > 2) else 16
    most = max(1, min(most // row_warps, ceil_div(chunks, 2)))
    # Columns that come out even.
    k_warps = min(range(most, most // 2, -1), key=lambda k: ceil_div(chunks, k) * k)
    while k_warps:
        for panel in (0,) if norm else (0, 2 * k_warps, k_warps) if whole else (2 * k_warps, k_warps):
            plan = Plan(row_warps, k_warps, pair, panel=panel, digits=digits * int(not panel))
            if plan.fits(layout, rows, width, norm):
                return plan
        k_warps //= 2
    return Plan(1, 1, 2 if swiglu else 1, panel=int(not norm))


def rule_beside(
    layout: Layout, rows: int, out: int, width: int, norm: bool, swiglu: bool, multiprocessors: int = 132
) -> Plan | None:
    """Half of a multiprocessor, with up to 16 warps: what wins between the kernels of a decoder, for integers."""
    chunks = ceil_div(width, CHUNK_WIDTH)
    wanted = max(1, min(14, ceil_div(ceil_div(out, CHUNK_ROWS), multiprocessors)))
    pair = 2 if swiglu or wanted > 7 else 1
    row_warps = ceil_div(wanted, pair)
    most = max(1, min(16 // row_warps, ceil_div(chunks, 2)))
    k_warps = min(range(most, most // 2, -1), key=lambda k: ceil_div(chunks, k) * k)
    if row_warps * pair > 7 and layout.bits > 2:
        k_warps = 1  # much work for a warp: a long ring is worth more than a second warp
    for depth in (6, 5, 4, 3) if k_warps == 1 else (5, 4, 3):
        plan = Plan(row_warps, k_warps, pair, depth, digits=1, beside=1)
        if plan.fits(layout, rows, width, norm):
            return plan
    return None


def plan_key(layout: Layout, rows: int, out: int, width: int, step: bool = False) -> str:
    """`step`: between other kernels of a decoder, with what stands around the product."""
    kind = f"nf{layout.bits}:s{layout.scales}" if layout.table else f"int{layout.bits}"
    return f"{kind} g{layout.group} rows<={row_class(rows)} {out}x{width}{' step' if step else ''}"


@functools.cache
def known_plans() -> dict[str, dict[str, int]]:
    """What `python -m shoestring.bench.lowbit_few` found, where it was run."""
    return json.loads(PLANS.read_text()) if PLANS.exists() else {}


@functools.cache
def choose_plan(
    layout: Layout,
    rows: int,
    out: int,
    width: int,
    norm: bool = False,
    swiglu: bool = False,
    residual: bool = False,
) -> Plan:
    """The plan for x [rows, width] and a weight [out, width]: measured where there is one, else by rule, with what
    SHOESTRING_LOWBIT_PLAN says otherwise."""
    rows = row_class(rows)  # a plan serves a class of rows, so that few kernels are compiled
    step = norm or swiglu or residual
    plan = rule(layout, rows, out, width, norm, swiglu)
    if step and rows <= 2 and not layout.table:
        plan = rule_beside(layout, rows, out, width, norm, swiglu) or plan
    known = known_plans().get(plan_key(layout, rows, out, width, step))
    if known is not None:
        measured = Plan(**known)
        whole = not norm or (measured.panel == 0 and measured.split == 1)
        even = not swiglu or measured.row_warps * measured.tiles % 2 == 0
        if whole and even and measured.fits(layout, rows, width, norm):
            plan = measured
    given = os.environ.get("SHOESTRING_LOWBIT_PLAN")
    if not given:
        return plan
    try:
        plan = dataclasses.replace(plan, **json.loads(given))
        fits = plan.fits(layout, rows, width, norm) and plan.panel % plan.k_warps == 0
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"SHOESTRING_LOWBIT_PLAN={given!r} is not a plan ({error}): write some of "
            f"{', '.join(f.name for f in dataclasses.fields(Plan))} as JSON."
        ) from error
    if not fits or (norm and (plan.panel or plan.split > 1)) or (swiglu and plan.row_warps * plan.tiles % 2):
        raise UserError(
            f"SHOESTRING_LOWBIT_PLAN={given!r} cannot run with {rows} rows of {out}x{width}: {plan}."
        )
    return plan


# -- blocks of two kernels on one multiprocessor --------------------------------------------------------------
def registers_beside(warps: int) -> int:
    """Registers a thread may take so that blocks of both shapes fit: see warps_beside."""
    return REGISTERS // (2 * ceil_div(warps, 4) + 1) // 32 // 8 * 8


def warps_beside(registers: int) -> tuple[int, int]:
    """(warps of the shape that takes shared memory, of the one that takes registers) for so many registers a thread:
    one of each fits, two of the second do not. Warps come in fours, one for each part of a multiprocessor."""
    places = REGISTERS // (ceil_div(registers, 8) * 8 * 32)
    many = places // 2 + 1
    return 4 * (places - many), 4 * many


_turns = itertools.cycle((False, True))


def shape_beside(registers: int, plan: Plan, shared: int) -> tuple[int, int]:
    """(warps, bytes of shared memory) of the next launch; what takes a whole multiprocessor where it does not fit."""
    few, many = warps_beside(registers)
    if plan.warps > few or many > 32 or shared > LESS_THAN_HALF:
        return plan.warps, max(shared, SHARED_SM // 2)
    return (many, shared) if next(_turns) else (few, MORE_THAN_HALF)


# -- the kernel ----------------------------------------------------------------------------------------------
def few_source() -> str:
    return cuda_source("lowbit_decode", "lowbit_few_x", "lowbit_few")


def few_macros(
    layout: Layout,
    dtype: torch.dtype,
    rows: int,
    plan: Plan,
    norm: torch.dtype | None = None,
    swiglu: bool = False,
    out32: bool = False,
) -> dict[str, int]:
    return {
        "BITS": layout.bits,
        "TABLE": int(layout.table),
        "TWO": int(layout.scales == 2),
        "HALF": int(dtype == torch.float16),
        "SBF16": int(layout.bf16_scale),
        "GROUP": layout.group,
        "ONE": int(plan.digits == 1 == rows),
        "MT": plan.column_tiles(rows),
        "R": plan.tiles,
        "WARPS": plan.warps,
        "KW": plan.k_warps,
        "DEPTH": plan.depth,
        "EARLY": min(plan.early or plan.depth - 1, plan.depth - 1),
        "BULK": plan.bulk,
        "PAUSE": plan.pause,
        "DIGITS": plan.digits,
        "BESIDE": registers_beside(plan.warps) if plan.beside else 0,
        "XREG": int(plan.panel == 0),
        "NORM": 0 if norm is None else 2 if norm == torch.float32 else 1,
        "SWIGLU": int(swiglu),
        "OUT32": int(out32),
    }


@functools.cache
def _kernel(device: int, *key: object) -> Kernel:
    return compile_kernel(few_source(), "lowbit_few", few_macros(*key), device)  # type: ignore[arg-type]


def few_rows_cuda(
    x_MK: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    plan: Plan | None = None,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual_1N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Up to MOST_ROWS rows; x bf16 or fp16, y the same or fp32."""
    if x_MK.stride(1) != 1 or x_MK.stride(0) % 8 or x_MK.data_ptr() % 16:
        x_MK = x_MK.clone(memory_format=torch.contiguous_format)
    bias, residual_1N = (t if t is None else t.to(x_MK.dtype).contiguous() for t in (bias, residual_1N))
    (rows, width), (tiles, per_row) = x_MK.shape, chunks.shape[:2]
    out = tiles * CHUNK_ROWS // (2 if swiglu else 1)
    out32 = out_dtype == torch.float32
    y = torch.empty(rows, out, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    around = (norm_K is not None, swiglu, residual_1N is not None)
    plan = plan or choose_plan(layout, rows, tiles * CHUNK_ROWS, width, *around)
    if norm_K is not None and not plan.fits(layout, rows, width, norm=True):  # many rows of great width
        x_MK = F.rms_norm(x_MK.float(), (width,), norm_K.float(), eps).to(x_MK.dtype)
        norm_K, plan = None, choose_plan(layout, rows, tiles * CHUNK_ROWS, width, False, *around[1:])
    if norm_K is not None and norm_K.dtype != x_MK.dtype:
        norm_K = norm_K.float()
    if norm_K is not None and norm_K.data_ptr() % 16:
        norm_K = norm_K.clone()
    norm_dtype = None if norm_K is None else norm_K.dtype
    kernel = _kernel(x_MK.device.index, layout, x_MK.dtype, row_class(rows), plan, norm_dtype, swiglu, out32)
    panel = plan.panel_chunks(width)
    numbers = (width, rows, x_MK.stride(0), tiles, per_row, panel)
    pointers = (chunks, x_MK, y, table, bias, norm_K, residual_1N)
    shared = plan.shared_bytes(layout, rows, width, norm_K is not None)
    warps = plan.warps
    if plan.beside:
        warps, shared = shape_beside(kernel.registers, plan, shared)
    else:  # blocks must not gather on one multiprocessor, so one fills half of it
        shared = max(shared, SHARED_SM // 2)
    kernel.launch(
        plan.grid(tiles * CHUNK_ROWS),
        warps * 32,
        shared,
        (
            *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in pointers),
            ctypes.c_float(eps),
            *map(ctypes.c_int, numbers),
        ),
        cluster=plan.split,
    )
    return y
