"""Weights of 2, 3 or 4 bits times tens to thousands of rows on sm_90: `wgmma` with the weights from registers.

The kernel is _cuda/lowbit_wgmma.cu, behind _cuda/lowbit_decode.cu; here are the instruction written out
for a number of columns, the map that the copy engine fetches activations by, and the choice of a plan. Same chunks,
same result within rounding as the other ways of kernels/lowbit.py, and the same bit for bit at every run.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.kernels.lowbit_few import SHARED_LIMIT, SHARED_SM, ceil_div
from shoestring.kernels.lowbit_layout import CHUNK_ROWS, CHUNK_WIDTH, Layout, aligned
from shoestring.kernels.nvrtc import SOURCES, Kernel, NvrtcError, compile_kernel, cuda_source, driver_library

PLANS = SOURCES / "lowbit_wgmma_plans.json"
GROUP_ROWS = 64  # outputs of a warpgroup
BOX_WIDTH = 64  # inputs of a stage
BOX_UPPER = 1 << 30 | 1024 >> 4  # upper word of a descriptor: 128-byte swizzle, 8 rows are 1024 bytes
MAP_BYTES, MAP_ALIGN = 128, 64
FEWEST_ROWS = 9  # below, the kernel for few rows was faster
TILES = (16, 24, 32, 48, 64, 96, 128, 192, 256)


# -- source --------------------------------------------------------------------------------------------------
def wgmma_function(columns: int, half: bool, name: str, add: bool) -> str:
    """`name(acc, a, b)`: acc[64, columns] += (or =) a[64, 16] b[columns, 16]^T; a in registers, b the lower word of a
    descriptor."""
    sums = columns // 2
    kind = "f16" if half else "bf16"
    a = ",".join(f"%{sums + i}" for i in range(4))
    lines = [
        f"__device__ __forceinline__ void {name}(float* c, const unsigned int* a, unsigned int b) {{",
        f'asm volatile("{{.reg .b64 box; mov.b64 box, {{%{sums + 4}, {BOX_UPPER}}};\\n"',
        f'"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{"',
        *(
            f'"{",".join(f"%{i}" for i in range(n, n + 4))}{"," if n + 4 < sums else ""}"'
            for n in range(0, sums, 4)
        ),
        f'"}}, {{{a}}}, box, {int(add)}, 1, 1, 0;}}" :',
        ", ".join(f'"+f"(c[{i}])' for i in range(sums)),
        ': "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b) : "memory"); }',
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def source(columns: int, half: bool) -> str:
    products = (
        wgmma_function(columns, half, name, add) for name, add in (("wgmma", True), ("wgmma_new", False))
    )
    return cuda_source("lowbit_decode") + "".join(products) + (SOURCES / "lowbit_wgmma.cu").read_text()


# -- plans ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WidePlan:
    """Blocks of `groups` warpgroups (64 outputs each) x `tile` rows of activations; K over the `split` blocks of a
    cluster; rings of `stages` x 64 inputs (an even number) and `depth` chunks; `steps` x 16 inputs are decoded
    together; `blocks` on a multiprocessor at once."""

    tile: int
    groups: int
    split: int = 1
    stages: int = 4
    depth: int = 4
    steps: int = 4
    blocks: int = 1

    @property
    def threads(self) -> int:
        return self.groups * 128 + 128

    @property
    def more_registers(self) -> int:
        """Registers of a thread that multiplies when the warpgroup that fetches keeps only 24; 0: no more."""
        each = min(255, 65536 // (self.threads * self.blocks)) // 8 * 8
        more = min(240, (each * (self.groups + 1) - 24) // self.groups // 8 * 8)
        return more if more > each else 0

    def sizes(self, layout: Layout) -> tuple[int, int, int]:
        """Bytes of shared memory: table and barriers, rings, sums that come from the rest of a cluster."""
        lut = layout.pair_table_bytes
        rings = self.stages * self.tile * 2 * BOX_WIDTH + self.groups * 4 * self.depth * layout.chunk_bytes
        sums = (self.split - 1) * ceil_div(self.tile // 8, self.split) * self.groups * 128 * 16
        return lut + 1024, rings, sums

    def overlay(self, layout: Layout) -> bool:
        """Whether the sums have to take the place of the rings."""
        return self.blocks * (sum(self.sizes(layout)) + 1024) > SHARED_SM

    def memory(self, layout: Layout) -> int:
        """Bytes of shared memory."""
        first, rings, sums = self.sizes(layout)
        return first + (max(rings, sums) if self.overlay(layout) else rings + sums)

    def late(self, layout: Layout) -> bool:
        """Whether sums are scaled instead of weights: that takes tile / 2 instructions a chunk instead of 32."""
        fewer = self.tile <= (64 if self.groups <= 2 else 32)
        return fewer and layout.group == CHUNK_WIDTH and layout.scales == 1

    def fits(self, layout: Layout) -> bool:
        used = self.memory(layout)
        if self.stages % 2 or self.depth < 2:  # a chunk is two stages
            return False
        return used <= SHARED_LIMIT and self.blocks * (used + 1024) <= SHARED_SM

    def items(self, rows: int, out: int) -> int:
        """Tiles in all."""
        return ceil_div(out, self.groups * GROUP_ROWS) * ceil_div(rows, self.tile)

    def grid(self, rows: int, out: int, sms: int = 132) -> tuple[int, int, int]:
        """Without a split, no more blocks than run at once: each goes on to the next tile."""
        items = self.items(rows, out)
        return self.split, items if self.split > 1 else min(items, sms * self.blocks), 1


def tile_rows(rows: int) -> int:
    """Rows of a tile for x with so many rows: all of them, or the least equal parts of at most 256."""
    parts = ceil_div(rows, TILES[-1])
    return next(tile for tile in TILES if tile * parts >= rows)


# Clusters of so many blocks that run at once on an H200. One stays inside one of the chip's eight parts, so that large
# ones leave multiprocessors idle: of 33 clusters of 4 30 were seen to run together, 22 of 5, not 43 of 3, not 16 of 7.
CLUSTERS = {1: 132, 2: 66, 3: 42, 4: 30, 5: 22, 6: 18, 7: 14, 8: 14}


def most_blocks(split: int, sms: int) -> int:
    """Blocks in clusters of `split` that run at once, one a multiprocessor."""
    return CLUSTERS[split] * sms // 132 * split


def estimate(plan: WidePlan, layout: Layout, rows: int, out: int, width: int, sms: int = 132) -> float:
    """Microseconds that a plan takes on an H200, fitted to forty timings at 16 to 512 rows: most within a tenth."""
    chunks = ceil_div(ceil_div(width, CHUNK_WIDTH), plan.split)
    blocks = plan.items(rows, out) * plan.split
    together = max(1, min(blocks, most_blocks(plan.split, sms)))
    decoding = 0.11 if layout.table else 0.08
    work = 0.12 + plan.groups * (decoding + 0.0019 * plan.tile)  # and products
    weights = plan.groups * 4 * layout.chunk_bytes * together / 4.0e6  # from memory
    inputs = plan.tile * 2 * CHUNK_WIDTH * together / 13e6  # from the cache
    waves = ceil_div(blocks, together)
    ends = (5 if plan.groups > 3 else 4) + 0.15 * plan.split + (waves - 1) * (0.5 if plan.split == 1 else 3)
    return waves * chunks * max(work, weights, inputs, 0.36) + ends


def plans(layout: Layout, rows: int, out: int, width: int, sms: int = 132) -> list[WidePlan]:
    """Plans worth trying, the most promising first."""
    tile, chunks = tile_rows(rows), ceil_div(width, CHUNK_WIDTH)
    found = []
    for groups, split in itertools.product((1, 2, 3, 4), range(1, 9)):
        if tile > 128 and groups > 2:
            continue
        blocks = split * ceil_div(out, groups * GROUP_ROWS) * ceil_div(rows, tile)
        if split > 1 and rows > tile and blocks > most_blocks(split, sms):
            continue
        if ceil_div(chunks, split) * (split - 1) >= chunks:  # every block of a cluster has work
            continue
        steps = 2 if tile > 64 and groups == 4 else 4
        long = (8, 3 if tile <= 64 else 4)  # at 16 and 64 rows three chunks were faster than four
        for stages, depth in (long, (6, 4), (4, 4), (4, 3), (2, 3)):
            plan = WidePlan(tile, groups, split, stages, depth, steps)
            if plan.fits(layout):
                found.append(plan)
                break
    found.sort(key=lambda plan: estimate(plan, layout, rows, out, width, sms))
    return found


MEASURED = (16, 32, 64, 128, 256, 512)  # rows that plans are measured for; those between take the next


def plan_key(layout: Layout, rows: int, out: int, width: int) -> str:
    kind = f"nf{layout.bits}:s{layout.scales}" if layout.table else f"int{layout.bits}"
    most = next((n for n in MEASURED if rows <= n), "any")
    return f"{kind} g{layout.group} rows<={most} {out}x{width}"


@functools.cache
def known_plans() -> dict[str, dict[str, int]]:
    """Measured on an H200 (`python -m shoestring.bench.lowbit_gemm --tune`)."""
    return json.loads(PLANS.read_text()) if PLANS.exists() else {}


@functools.cache
def choose_plan(layout: Layout, rows: int, out: int, width: int, sms: int = 132) -> WidePlan:
    """Measured for this shape, else measured for 4-bit integers of this shape, else the best guess."""
    for similar in (layout, Layout(4, 128, False, 1, layout.bf16_scale)):
        found = known_plans().get(plan_key(similar, rows, out, width))
        if found and (plan := WidePlan(**{**found, "tile": tile_rows(rows)})).fits(layout):
            return plan
    return plans(layout, rows, out, width, sms)[0]


def wide_macros(layout: Layout, dtype: torch.dtype, plan: WidePlan) -> dict[str, int]:
    return {
        "BITS": layout.bits,
        "TABLE": int(layout.table),
        "TWO": int(layout.scales == 2),
        "HALF": int(dtype == torch.float16),
        "SBF16": int(layout.bf16_scale),
        "GROUP": layout.group,
        "TN": plan.tile,
        "WGS": plan.groups,
        "SPLIT": plan.split,
        "STAGES": plan.stages,
        "DEPTH": plan.depth,
        "STEPS": plan.steps,
        "BLOCKS": plan.blocks,
        "MORE": plan.more_registers,
        "OVERLAY": int(plan.overlay(layout)),
        "LATE": int(plan.late(layout)),
    }


@functools.cache
def _usable(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)  # later chips have no wgmma


def worth_it(x_MK: Tensor, layout: Layout) -> bool:
    """Whether this kernel is there and the fastest way for so many rows, as far as was measured."""
    return x_MK.shape[0] >= FEWEST_ROWS and _usable(x_MK.device.index or 0)


# -- launching -----------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=1024)
def _tensor_map(
    pointer: int, rows: int, width: int, stride: int, half: bool, box_rows: int, device: int
) -> ctypes.Array[ctypes.c_char]:
    """How the copy engine reads boxes of BOX_WIDTH x box_rows from x [rows, width]; outside it reads zeros."""
    buffer = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGN)
    at = -ctypes.addressof(buffer) % MAP_ALIGN
    found = (ctypes.c_char * MAP_BYTES).from_buffer(buffer, at)
    code = driver_library().cuTensorMapEncodeTiled(
        ctypes.byref(found),
        6 if half else 9,  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, _BFLOAT16
        2,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 2)(width, rows),
        (ctypes.c_uint64 * 1)(stride * 2),
        (ctypes.c_uint32 * 2)(BOX_WIDTH, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,  # no interleave
        3,  # 128-byte swizzle
        3,  # 256 bytes into L2
        0,  # zeros outside
    )
    if code:
        raise NvrtcError(
            f"CUDA error {code} while describing activations [{rows}, {width}] to the copy engine"
        )
    return found


def _pointer(t: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if t is None else t.data_ptr())


@functools.cache
def _wide_kernel(layout: Layout, dtype: torch.dtype, plan: WidePlan, device: int) -> Kernel:
    text = source(plan.tile, dtype == torch.float16)
    return compile_kernel(text, "lowbit_wide", wide_macros(layout, dtype, plan), device)


def many_rows_cuda(
    x_MK: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    plan: WidePlan | None = None,
) -> Tensor:
    """x bf16 or fp16, any number of rows above 0."""
    if bias is not None:
        bias = bias.to(x_MK.dtype).contiguous()
    x_MK = aligned(x_MK)
    (rows, width), (tiles, per_row) = x_MK.shape, chunks.shape[:2]
    out, device = tiles * CHUNK_ROWS, x_MK.device.index
    y = torch.empty(rows, out, dtype=x_MK.dtype, device=x_MK.device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    plan = plan or choose_plan(layout, rows, out, width, sms)
    kernel = _wide_kernel(layout, x_MK.dtype, plan, device)
    half = x_MK.dtype == torch.float16
    box = _tensor_map(x_MK.data_ptr(), rows, width, x_MK.stride(0), half, plan.tile, device)
    numbers, pointers = (out, rows, tiles, per_row), (y, table, bias)
    kernel.launch(
        plan.grid(rows, out, sms),
        plan.threads,
        plan.memory(layout),
        (_pointer(chunks), box, *map(_pointer, pointers), *map(ctypes.c_int, numbers)),
        cluster=plan.split,
    )
    return y
