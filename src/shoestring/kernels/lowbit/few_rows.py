"""One to sixteen rows times weights of 2, 3 or 4 bits, fused with the operations around the product (few_rows.cu). Two
to four rows times a dense weight, too.

    y = [norm] x W^T [+ bias] [swiglu] [+ residual]          arguments and definition: kernels/gemv/row_linear.py

At this size a product only has to read W; the rest is latency: starting blocks, loading x, summing. A plan
(`FewRowsPlan`) gives a block a whole SM, or half of one (`half_sm`), so that a block of the next kernel shares the SM
and fetches its weights meanwhile. The hardware may place two blocks of the same kernel on one SM and leave another
idle, which doubles the time. Launches therefore alternate between two shapes, of which no two alike fit on an SM: one
with more than half of the shared memory, one with more than half of the registers.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shoestring.hardware.device import BLOCK_RESERVED, H200, DeviceLimits, device_limits
from shoestring.hardware.plan_table import PlanTable, overridden
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, CHUNK_WIDTH, ChunkLayout, aligned, ceil_div
from shoestring.kernels.runtime.nvrtc import SOURCES, Kernel, compile_kernel, cuda_source, pointer

MOST_ROWS = 16
SLOT_ROWS = 4  # rows of a slot (kernels/experts/route.py): as many as one column tile of the integer tensor cores takes


@dataclass(frozen=True)
class ExpertChoice:
    """What a kernel over experts is compiled for. Without `top_k` the slots of a Routing are given."""

    top_k: int = 0  # one row: the kernel chooses by the router's logits
    num: int = 0  # of experts
    renormalize: bool = False
    sum: bool = False  # one product with the weights of all chosen experts

    @property
    def shared_bytes(self) -> int:
        return ceil_div(8 * self.num + 4 * self.top_k, 16) * 16 if self.top_k else 0

    def macros(self) -> dict[str, int]:
        return {
            "EXPERTS": 2 if self.sum else 1,
            "CHOOSE": self.top_k,
            "NUM_EXPERTS": self.num,
            "RENORMALIZE": int(self.renormalize),
        }


# -- plans ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Product:
    """What a plan is for: x [rows, width] times a weight [out, width], the operations around it, and the device."""

    layout: ChunkLayout
    rows: int
    out: int
    width: int
    norm: bool = False
    swiglu: bool = False
    residual: bool = False
    limits: DeviceLimits = H200

    @property
    def in_step(self) -> bool:
        """Inside a decoding step, beside other kernels."""
        return self.norm or self.swiglu or self.residual

    @property
    def key(self) -> str:
        """In the table of plans."""
        at = f"{self.layout.label} rows<={row_class(self.rows)} {self.out}x{self.width}"
        return f"{at} step" if self.in_step else at

    @property
    def row_tiles(self) -> int:
        """Row tiles of a block with which every SM has one."""
        return max(1, min(14, ceil_div(ceil_div(self.out, CHUNK_ROWS), self.limits.num_sms)))

    @property
    def chunks(self) -> int:
        """Along a row."""
        return ceil_div(self.width, CHUNK_WIDTH)


@dataclass(frozen=True)
class FewRowsPlan:
    row_warps: int  # x k_warps: the warps of a block
    k_warps: int
    tiles: int = 1  # row tiles of a warp
    depth: int = 3  # chunks in a warp's ring
    split: int = 1  # split-K over the blocks of a cluster
    panel: int = 0  # chunks of x in shared memory at once, by bulk copies; 0: all of x, through registers
    int8_mma: int = 0  # 1: integer tensor cores, with x split into two 8-bit digits (all of x; levels of 3 and 4 bits)
    half_sm: int = 0  # 1: a block takes half of an SM (no clusters)
    early: int = 0  # chunks fetched before x, the others after it; 0: as many as the ring takes
    pause: int = 0  # nanoseconds before the first chunk is fetched

    @property
    def warps(self) -> int:
        return self.row_warps * self.k_warps

    def grid(self, out: int) -> tuple[int, int, int]:
        return self.split, ceil_div(ceil_div(out, CHUNK_ROWS), self.row_warps * self.tiles), 1

    def panel_chunks(self, width: int) -> int:
        """Chunks of x in shared memory at once."""
        share = ceil_div(ceil_div(width, CHUNK_WIDTH), self.split)
        return min(self.panel, ceil_div(share, self.k_warps) * self.k_warps) if self.panel else share

    def column_tiles(self, rows: int) -> int:
        """Tiles of 8 columns of the matrix instruction: a row of x is one column, or two if it is split in digits."""
        return 1 if row_class(rows) * (2 if self.int8_mma else 1) <= 8 else 2

    def shared_bytes(self, layout: ChunkLayout, rows: int, width: int, norm: bool = False) -> int:
        panel = self.panel_chunks(width)
        x_bytes = rows * (panel * 256 + 16)
        share = ceil_div(ceil_div(width, CHUNK_WIDTH), self.split)
        if self.panel:
            x_bytes *= 1 if panel >= share else 2
        else:
            x_bytes += panel * (32 if self.int8_mma else 64)
        if not self.panel and (self.int8_mma or not layout.table):
            numbers = 8 * self.column_tiles(rows) * (2 if self.int8_mma else 1)
            x_bytes += share * (CHUNK_WIDTH // layout.group) * numbers * 4
        if norm:
            x_bytes += rows * share * 4
        rings = self.warps * self.depth * self.tiles * layout.chunk_bytes
        barriers = 16  # one for each panel of x
        return (0 if self.int8_mma else layout.pair_table_bytes) + rings + barriers + x_bytes

    def fits(self, layout: ChunkLayout, rows: int, width: int, norm: bool = False, limits: DeviceLimits = H200) -> bool:
        if self.int8_mma and (self.panel or rows > 8 or (layout.table and layout.bits == 2)):
            return False
        if layout.dense and (self.int8_mma or self.panel or width % CHUNK_WIDTH):
            return False
        if self.half_sm and (self.split > 1 or self.warps > 16):
            return False
        chunks = ceil_div(width, CHUNK_WIDTH)
        if self.depth < 3 or ceil_div(chunks, self.split) * (self.split - 1) >= chunks:
            return False  # the rings must hold the partial sums; every block of a cluster must have work
        limit = less_than_half(limits) if self.half_sm else limits.shared_per_block
        return self.shared_bytes(layout, rows, width, norm) <= limit

    def holds(self, of: Product) -> bool:
        """`fits`, for a product."""
        return self.fits(of.layout, of.rows, of.width, of.norm, of.limits)

    def runs(self, of: Product) -> bool:
        """Whether the kernel can run with this plan, with a norm before or SwiGLU behind the product."""
        if self.panel % self.k_warps or (of.norm and (self.panel or self.split > 1)):
            return False
        if of.swiglu and self.row_warps * self.tiles % 2:
            return False
        return self.holds(of)


# Plans that `python -m experiments.few_rows_plans` and `python -m experiments.decode_plans` measured.
PLANS = PlanTable("few_rows", FewRowsPlan, shipped=SOURCES / "lowbit" / "few_rows_plans.json")
ROW_CLASSES = (1, 2, 4, 8, 16)


def row_class(rows: int) -> int:
    return next(n for n in ROW_CLASSES if rows <= n)


def rule(of: Product, level_bytes: bool = True) -> FewRowsPlan:
    """One block per SM where possible, short rings, two row tiles per warp for few rows, and all of x at once where it
    is small. int8_mma where it saves more than splitting x into digits costs every block.

    Up to four rows of tables of 3 and 4 bits always take int8_mma, unless `level_bytes` is false: fewer instructions
    are faster at every shape that was timed (five shapes, 1 to 4 rows), so shapes that were not are treated alike. The
    levels of 4 bits are then 0.3% off (`digits_of_levels`), so a request alone and the same among five or more differ
    by that, within twice the error of bf16."""
    layout, rows, width = of.layout, of.rows, of.width
    wanted = of.row_tiles
    int8_mma = int(rows <= 4 and 8 * rows <= 15 * wanted)
    if layout.table:
        int8_mma = int(rows <= 4 and layout.bits > 2 and level_bytes)
    whole = of.norm or rows * width <= (64 if layout.table and int8_mma else 32) * 1024
    pair = 2 if of.swiglu or (wanted % 2 == 0 and rows <= 4 and whole and not layout.table) else 1
    row_warps = ceil_div(wanted, pair)
    many = row_warps >= 7 if pair == 1 or rows <= 4 else False
    most = 28 if many or (pair == 1 and rows <= 4 and row_warps > 2) else 16
    k_warps = even_k_warps(most // row_warps, of.chunks)
    while k_warps:
        for panel in (0,) if of.norm else (0, 2 * k_warps, k_warps) if whole else (2 * k_warps, k_warps):
            plan = FewRowsPlan(row_warps, k_warps, pair, panel=panel, int8_mma=int8_mma * int(not panel))
            if plan.holds(of):
                return plan
        k_warps //= 2
    return FewRowsPlan(1, 1, 2 if of.swiglu else 1, panel=int(not of.norm))


def dense_rule(of: Product) -> FewRowsPlan | None:
    """One block per SM, all of x at once, where that is large in clusters; None: x does not fit."""
    for split in (1,) if of.norm else (1, 2, 4):
        wanted = replace(of, out=of.out * split).row_tiles
        wanted += wanted % 2 if of.swiglu else 0
        for depth, most in itertools.product((4, 3), (16, 14, 12, 8)):
            k_warps = even_k_warps(max(1, most // wanted), ceil_div(of.chunks, split))
            plan = FewRowsPlan(wanted, k_warps, 1, depth, split)
            if of.rows * of.width // split <= 40 * 1024 and plan.holds(of):
                return plan
    return None


def half_sm_rule(of: Product) -> FewRowsPlan | None:
    """Half of an SM, with up to 16 warps: the fastest between the kernels of a decoder, for integer formats."""
    wanted = of.row_tiles
    pair = 2 if of.swiglu or wanted > 7 else 1
    row_warps = ceil_div(wanted, pair)
    k_warps = even_k_warps(16 // row_warps, of.chunks)
    if row_warps * pair > 7 and of.layout.bits > 2:
        k_warps = 1  # a long ring gains more than a second warp
    for depth in (6, 5, 4, 3) if k_warps == 1 else (5, 4, 3):
        plan = FewRowsPlan(row_warps, k_warps, pair, depth, int8_mma=1, half_sm=1)
        if plan.holds(of):
            return plan
    return None


def even_k_warps(most: int, chunks: int) -> int:
    """At most so many warps along K, at least half of them, that share the chunks most evenly."""
    most = max(1, min(most, ceil_div(chunks, 2)))
    return min(range(most, most // 2, -1), key=lambda k: ceil_div(chunks, k) * k)


@PLANS.cached
def choose_plan(of: Product) -> FewRowsPlan:
    """Measured, else by rule; SHOESTRING_LOWBIT_PLAN overrides fields."""
    of = replace(of, rows=row_class(of.rows))  # a plan serves a class of rows, so that few kernels are compiled
    layout = of.layout
    plan = (dense_rule(of) if layout.dense else None) or rule(of)
    if of.in_step and of.rows <= 2 and not layout.table and not layout.dense:
        plan = half_sm_rule(of) or plan
    measured = PLANS.find(of.key, of.limits.name)
    if measured is not None and measured.runs(of):
        plan = measured
    refusal = f"cannot run with {of.rows} rows of {of.out}x{of.width}"
    return overridden(plan, "SHOESTRING_LOWBIT_PLAN", lambda given: given.runs(of), refusal)


def exact_enough(plan: FewRowsPlan, dtype: torch.dtype, of: Product) -> FewRowsPlan:
    """The plan, or for fp16 one without 4-bit levels as bytes: integers up to 127 are as exact as bf16 needs."""
    if dtype == torch.float16 and plan.int8_mma and of.layout.table and of.layout.bits == 4:
        return rule(replace(of, rows=row_class(of.rows)), level_bytes=False)
    return plan


# -- blocks of two kernels on one SM ---------------------------------------------------------------------------
# An SM has four partitions with a fourth of its registers each; the warps of a block go to them in turn.
def more_than_half(limits: DeviceLimits = H200) -> int:
    """Bytes of shared memory with which two blocks do not fit on an SM."""
    return limits.shared_per_sm // 2 + 2 * BLOCK_RESERVED


def less_than_half(limits: DeviceLimits = H200) -> int:
    """Bytes of shared memory of a block that still fits beside one with `more_than_half`."""
    return limits.shared_per_sm - more_than_half(limits) - 2 * BLOCK_RESERVED


def half_sm_registers(warps: int, limits: DeviceLimits = H200) -> int:
    """Registers per thread with which one block of each shape fits: see half_sm_warps."""
    return limits.registers_per_sm // 4 // (2 * ceil_div(warps, 4) + 1) // 32 // 8 * 8


def half_sm_warps(registers: int, limits: DeviceLimits = H200) -> tuple[int, int]:
    """Warps of the shape with more shared memory and of the one with more registers: one of each fits, two of the
    second do not."""
    places = limits.registers_per_sm // 4 // (ceil_div(registers, 8) * 8 * 32)
    many = places // 2 + 1
    return 4 * (places - many), 4 * many


_turns = itertools.cycle((False, True))


def restart_turns() -> None:
    """Start again with the first of the two shapes, so that captured graphs are alike."""
    global _turns
    _turns = itertools.cycle((False, True))


def half_sm_launch(registers: int, plan: FewRowsPlan, shared: int, limits: DeviceLimits = H200) -> tuple[int, int]:
    """(warps, bytes of shared memory) of the next launch; a whole SM where the kernel does not fit in half of one."""
    few, many = half_sm_warps(registers, limits)
    if plan.warps > few or many > 32 or shared > less_than_half(limits):
        return plan.warps, max(shared, limits.shared_per_sm // 2)
    return (many, shared) if next(_turns) else (few, more_than_half(limits))


# -- the kernel ----------------------------------------------------------------------------------------------
def few_rows_source() -> str:
    return cuda_source("lowbit/decode", "lowbit/digits", "lowbit/few_rows_x", "lowbit/few_rows")


def few_rows_macros(
    layout: ChunkLayout,
    dtype: torch.dtype,
    rows: int,
    plan: FewRowsPlan,
    norm: torch.dtype | None = None,
    swiglu: bool = False,
    out32: bool = False,
    experts: ExpertChoice | None = None,
    limits: DeviceLimits = H200,
) -> dict[str, int]:
    return {
        **layout.macros(dtype),
        "ONE": int(plan.int8_mma == 1 == rows),
        "MT": plan.column_tiles(rows),
        "R": plan.tiles,
        "WARPS": plan.warps,
        "KW": plan.k_warps,
        "DEPTH": plan.depth,
        "EARLY": min(plan.early or plan.depth - 1, plan.depth - 1),
        "PAUSE": plan.pause,
        "INT8_MMA": plan.int8_mma,
        "HALF_SM_REGS": half_sm_registers(plan.warps, limits) if plan.half_sm else 0,
        "XREG": int(plan.panel == 0),
        "NORM": 0 if norm is None else 2 if norm == torch.float32 else 1,
        "SWIGLU": int(swiglu),
        "OUT32": int(out32),
        "SLOT_ROWS": SLOT_ROWS,
        **(experts.macros() if experts else {"EXPERTS": 0, "CHOOSE": 0}),
    }


def digits_of_levels(table: Tensor) -> Tensor:
    """The levels of a table as the integer kernel reads them, int32 [8]: eight bytes for the codes below zero and eight
    for those above, then as fp32 what one of the former and of the latter is worth. The worth is searched: with 4 bits
    levels are integers up to 127, 0.3% off (bf16 0.14%); with 3 bits up to 255, 0.02% off (0.16%)."""
    levels, half = table.detach().double().cpu(), len(table) // 2
    most = 127 if half == 8 else 255
    packed = torch.zeros(2, 8, dtype=torch.uint8)
    worth = torch.zeros(4)
    for n, part in enumerate(levels.abs().split(half)):
        top = part.max().clamp(min=1e-30)
        tried_S = torch.linspace(0.6 * most, most, 8001, dtype=torch.float64) / top
        whole_SL = (part * tried_S[:, None]).round()
        best = (whole_SL / tried_S[:, None] - part).square().sum(dim=1).argmin()
        whole = whole_SL[best]
        packed[n, n * half if half == 4 else 0 :][:half] = whole.to(torch.uint8)
        worth[n] = (part @ whole) / (whole @ whole).clamp(min=1)  # least squares
    return torch.cat([packed.flatten().view(torch.int32), worth.view(torch.int32)]).to(table.device)


_digits = WeakTensorKeyDictionary()  # table -> [its version, its digits]


def level_digits(table: Tensor) -> Tensor:
    """digits_of_levels, made once: it waits for the device. Those of a table that was written again are written to the
    same place, where captured graphs read them."""
    version = 0 if table.is_inference() else table._version
    made = _digits.get(table)
    if made is None or made[0] != version:
        with torch.inference_mode(False):  # so that they can be written later
            digits = digits_of_levels(table)
            _digits[table] = made = [version, digits if made is None else made[1].copy_(digits)]
    return made[1]


NO_EXPERTS = (pointer(None), pointer(None), pointer(None), ctypes.c_int(0))


@functools.cache
def _kernel(device: int, *key: object) -> Kernel:
    macros = few_rows_macros(*key, limits=device_limits(device))  # type: ignore[arg-type, misc]
    return compile_kernel(few_rows_source(), "lowbit_few_rows", macros, device)


def few_rows_cuda(
    x_MK: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    layout: ChunkLayout,
    plan: FewRowsPlan | None = None,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual_1N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Up to MOST_ROWS rows; x bf16 or fp16, y the same or fp32. A dense weight [out, in] stands in place of chunks."""
    x_MK = aligned(x_MK)
    limits = device_limits(x_MK.device.index)
    bias, residual_1N = (t if t is None else t.to(x_MK.dtype).contiguous() for t in (bias, residual_1N))
    rows, width = x_MK.shape
    tiles, per_row = (len(chunks) // CHUNK_ROWS, width // CHUNK_WIDTH) if layout.dense else chunks.shape[:2]
    out = tiles * CHUNK_ROWS // (2 if swiglu else 1)
    out32 = out_dtype == torch.float32
    y = torch.empty(rows, out, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    of = Product(layout, rows, tiles * CHUNK_ROWS, width, norm_K is not None, swiglu, residual_1N is not None, limits)
    plan = exact_enough(plan or choose_plan(of), x_MK.dtype, of)
    if norm_K is not None and not plan.holds(of):  # many rows of great width
        x_MK = F.rms_norm(x_MK.float(), (width,), norm_K.float(), eps).to(x_MK.dtype)
        norm_K, of = None, replace(of, norm=False)
        plan = exact_enough(choose_plan(of), x_MK.dtype, of)
    norm_K = _readable_norm(norm_K, x_MK)
    norm_dtype = None if norm_K is None else norm_K.dtype
    kernel = _kernel(x_MK.device.index, layout, x_MK.dtype, row_class(rows), plan, norm_dtype, swiglu, out32)
    numbers = (width, rows, x_MK.stride(0), tiles, per_row, plan.panel_chunks(width))
    levels = table if table is None or not plan.int8_mma else level_digits(table)
    pointers = (chunks, x_MK, y, levels, bias, norm_K, residual_1N)
    shared = plan.shared_bytes(layout, rows, width, norm_K is not None)
    warps = plan.warps
    if plan.half_sm:
        warps, shared = half_sm_launch(kernel.registers, plan, shared, limits)
    else:  # at least half of the shared memory, so that no two blocks run on one SM
        shared = max(shared, limits.shared_per_sm // 2)
    kernel.launch(
        plan.grid(tiles * CHUNK_ROWS),
        warps * 32,
        shared,
        (*map(pointer, pointers), ctypes.c_float(eps), *map(ctypes.c_int, numbers), *NO_EXPERTS),
        cluster=plan.split,
    )
    return y


# -- experts ---------------------------------------------------------------------------------------------------
@functools.cache
def choose_expert_plan(
    layout: ChunkLayout,
    out: int,
    width: int,
    slots: int,
    swiglu: bool,
    choice: ExpertChoice,
    limits: DeviceLimits = H200,
) -> FewRowsPlan | None:
    """The plan for experts with weights [out, width]: half of an SM for a block, because the blocks of many experts
    follow each other on an SM; for one row as many row tiles as give every SM one block. None: a sum that does not fit.
    Found by `python -m experiments.expert_plans`."""
    tiles, chunks, int8_mma = ceil_div(out, CHUNK_ROWS), ceil_div(width, CHUNK_WIDTH), int(not layout.table)
    rows, wide = 1 if choice.top_k else SLOT_ROWS, width
    if choice.sum:
        wide = width * choice.top_k
        wanted = min(ceil_div(tiles, limits.num_sms), max(1, 16 // choice.top_k))
        k_warps = choice.top_k * max(1, 8 // (choice.top_k * wanted))
        depth = min(8, max(3, ceil_div(chunks * choice.top_k, k_warps) + 1))  # all of a warp's chunks at once
        plans = [FewRowsPlan(wanted, k_warps, 1, d, int8_mma=int8_mma, half_sm=1) for d in range(depth, 2, -1)]
    elif choice.top_k:
        wanted = min(12, ceil_div(ceil_div(slots * tiles, limits.num_sms), 2) * 2)
        pair = 1 if wanted <= 6 else 2
        plans = [FewRowsPlan(wanted // pair, 2, pair, d, int8_mma=int8_mma, half_sm=1) for d in (6, 5, 4, 3)]
    else:
        plans = [FewRowsPlan(6, 2 if width >= 2048 else 1, 2, int8_mma=int8_mma, half_sm=1)]

    all_slots = Product(layout, rows, out * slots, width, swiglu=swiglu, limits=limits)

    def runs(plan: FewRowsPlan) -> bool:
        if choice.sum and (plan.k_warps % choice.top_k or width % CHUNK_WIDTH):
            return False
        if plan.int8_mma and layout.table:  # experts are launched with levels, not with their digits
            return False
        shared = plan.shared_bytes(layout, rows, wide, norm=swiglu) + choice.shared_bytes
        return plan.runs(replace(all_slots, width=wide)) and shared <= less_than_half(limits)

    plan = next(filter(runs, plans), None)
    if plan is None:
        if choice.sum:
            return None
        plan = rule(all_slots, level_bytes=False)
    one_row = "SHOESTRING_LOWBIT_EXPERT_SUM_PLAN" if choice.sum else "SHOESTRING_LOWBIT_EXPERT_ROW_PLAN"
    variable = one_row if choice.top_k else "SHOESTRING_LOWBIT_EXPERT_SLOT_PLAN"
    return overridden(plan, variable, runs, f"cannot run with {slots} experts of {out}x{width}")


def _readable_norm(norm_K: Tensor | None, x: Tensor) -> Tensor | None:
    """As the kernels read it: in the dtype of x or in fp32, on a multiple of 16 bytes."""
    if norm_K is None:
        return None
    norm_K = norm_K if norm_K.dtype == x.dtype else norm_K.float()
    return norm_K.clone() if norm_K.data_ptr() % 16 else norm_K


def few_rows_experts_cuda(
    x: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    layout: ChunkLayout,
    num_experts: int,
    experts_S: Tensor,
    counts_S: Tensor,
    members_SC: Tensor | None,
    plan: FewRowsPlan | None = None,
    *,
    swiglu: bool = False,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """y [S, SLOT_ROWS, out]: [norm of] the first `counts` rows of each slot times the weight of its expert. They are
    those of x [rows, in] that `members` names, or x is [S, SLOT_ROWS, in]. `chunks` holds the weights of all experts,
    one after the other. What a slot does not have is not written."""
    slots, tiles = len(experts_S), len(chunks) // num_experts
    choice, out = ExpertChoice(), tiles * CHUNK_ROWS
    limits = device_limits(x.device.index)
    assert (members_SC is None) == (x.ndim == 3) and experts_S.dtype == counts_S.dtype == torch.int32
    plan = plan or choose_expert_plan(layout, out, x.shape[-1], slots, swiglu, choice, limits)
    assert plan is not None
    if norm_K is not None and (plan.panel or plan.split > 1):
        x, norm_K = F.rms_norm(x.float(), x.shape[-1:], norm_K.float(), eps).to(x.dtype), None
    y = torch.empty(slots, SLOT_ROWS, out // (2 if swiglu else 1), dtype=x.dtype, device=x.device)
    given, grid = (experts_S, counts_S, members_SC), (*plan.grid(out)[:2], slots)
    _launch_experts(x, chunks, table, layout, tiles, plan, choice, given, y, SLOT_ROWS, grid, swiglu, norm_K, eps)
    return y


def row_experts_up_cuda(
    x_1K: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    layout: ChunkLayout,
    logits_1E: Tensor,
    choice: ExpertChoice,
    plan: FewRowsPlan | None = None,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """y [top_k, out]: [norm] x through gate and up of each chosen expert, with SwiGLU, times the expert's share."""
    tiles, limits = len(chunks) // choice.num, device_limits(x_1K.device.index)
    out = tiles * CHUNK_ROWS
    plan = plan or choose_expert_plan(layout, out, x_1K.shape[1], choice.top_k, True, choice, limits)
    assert plan is not None and logits_1E.dtype == torch.float32 and logits_1E.is_contiguous()
    y = torch.empty(choice.top_k, out // 2, dtype=x_1K.dtype, device=x_1K.device)
    given, grid = (logits_1E, None, None), (*plan.grid(out)[:2], choice.top_k)
    _launch_experts(x_1K, chunks, table, layout, tiles, plan, choice, given, y, 1, grid, True, norm_K, eps)
    return y


def row_experts_down_cuda(
    x_SF: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    layout: ChunkLayout,
    logits_1E: Tensor,
    choice: ExpertChoice,
    residual_1N: Tensor,
    plan: FewRowsPlan | None = None,
) -> Tensor:
    """residual + the sum over the chosen experts of their inputs times their weights, [1, out]. The kernel launched
    before must be `row_experts_up_cuda` with the same logits: weights are fetched while it runs."""
    tiles, limits = len(chunks) // choice.num, device_limits(x_SF.device.index)
    out = tiles * CHUNK_ROWS
    plan = plan or choose_expert_plan(layout, out, x_SF.shape[1], 1, False, choice, limits)
    assert plan is not None and choice.sum
    y = torch.empty(1, out, dtype=x_SF.dtype, device=x_SF.device)
    given, grid = (logits_1E, None, None), plan.grid(out)
    _launch_experts(
        x_SF.view(1, -1), chunks, table, layout, tiles, plan, choice, given, y, 1, grid, False, residual_1N=residual_1N
    )
    return y


def _launch_experts(
    x: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    layout: ChunkLayout,
    tiles: int,
    plan: FewRowsPlan,
    choice: ExpertChoice,
    given: tuple[Tensor, Tensor | None, Tensor | None],
    y: Tensor,
    rows: int,
    grid: tuple[int, int, int],
    swiglu: bool,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_1N: Tensor | None = None,
) -> None:
    width, limits = x.shape[-1], device_limits(x.device.index)
    assert x.is_contiguous() and width % 8 == 0 and x.data_ptr() % 16 == 0
    norm_K = _readable_norm(norm_K, x)
    norm = None if norm_K is None else norm_K.dtype
    kernel = _kernel(x.device.index, layout, x.dtype, row_class(rows), plan, norm, swiglu, False, choice)
    pointers = (chunks, x, y, table, None, norm_K, residual_1N)
    per_row = chunks.shape[1] * (choice.top_k if choice.sum else 1)
    numbers = (width, rows, width, tiles, per_row, plan.panel_chunks(width))
    shared = plan.shared_bytes(layout, rows, width, norm is not None) + choice.shared_bytes
    split, blocks, slots = grid
    if not choice.sum and split * blocks * slots <= limits.num_sms:  # one block for each SM
        shared = max(shared, limits.shared_per_sm // 2)
    numbers_of = (*map(ctypes.c_int, numbers), *map(pointer, given))
    pitch = ctypes.c_int(rows * width if x.ndim == 3 else 0)
    arguments = (*map(pointer, pointers), ctypes.c_float(eps), *numbers_of, pitch)
    kernel.launch(grid, plan.warps * 32, shared, arguments, cluster=split)
