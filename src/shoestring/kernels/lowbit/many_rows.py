"""Weights of 2, 3 or 4 bits times tens to thousands of rows on sm_90: `wgmma` with the weights from registers.

The kernel is kernels/lowbit/many_rows.cu, compiled behind kernels/lowbit/decode.cu. This file generates the instruction
for a number of columns, encodes the tensor map of the activations (TMA), and chooses a plan. Same chunks and, within
rounding, same result as the other paths of kernels/lowbit/lowbit_linear.py; one plan always gives the same bits.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.hardware.device import H200, DeviceLimits, device_limits
from shoestring.hardware.plan_table import PlanTable
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, CHUNK_WIDTH, ChunkLayout, aligned, ceil_div
from shoestring.kernels.runtime.nvrtc import (
    SOURCES,
    Kernel,
    NvrtcError,
    compile_kernel,
    cuda_source,
    driver_library,
    pointer,
)

GROUP_ROWS = 64  # outputs of a warpgroup
BOX_WIDTH = 64  # inputs of a stage
BOX_UPPER = 1 << 30 | 1024 >> 4  # upper word of a matrix descriptor: 128-byte swizzle, 8 rows are 1024 bytes
MAP_BYTES, MAP_ALIGN = 128, 64
FEWEST_ROWS = 9  # the kernel for few rows was faster below
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
        *(f'"{",".join(f"%{i}" for i in range(n, n + 4))}{"," if n + 4 < sums else ""}"' for n in range(0, sums, 4)),
        f'"}}, {{{a}}}, box, {int(add)}, 1, 1, 0;}}" :',
        ", ".join(f'"+f"(c[{i}])' for i in range(sums)),
        ': "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b) : "memory"); }',
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def many_rows_source(columns: int, half: bool) -> str:
    products = (wgmma_function(columns, half, name, add) for name, add in (("wgmma", True), ("wgmma_new", False)))
    return cuda_source("lowbit/decode") + "".join(products) + (SOURCES / "lowbit" / "many_rows.cu").read_text()


# -- plans ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ManyRowsPlan:
    tile: int  # rows of activations of a block
    groups: int  # warpgroups of a block, 64 outputs each
    split: int = 1  # split-K over the blocks of a cluster
    stages: int = 4  # of 64 inputs in the ring of activations; an even number, because a chunk is two stages
    depth: int = 4  # chunks in a warp's ring of weights
    steps: int = 4  # x 16 inputs are decoded together

    @property
    def threads(self) -> int:
        return self.groups * 128 + 128

    def more_registers(self, limits: DeviceLimits = H200) -> int:
        """Registers of a multiplying thread when the fetching warpgroup keeps only 24; 0: no gain."""
        each = min(255, limits.registers_per_sm // self.threads) // 8 * 8
        more = min(240, (each * (self.groups + 1) - 24) // self.groups // 8 * 8)
        return more if more > each else 0

    def sizes(self, layout: ChunkLayout) -> tuple[int, int, int]:
        """Bytes of shared memory: table and barriers, rings, sums from the other blocks of a cluster."""
        lut = layout.pair_table_bytes
        rings = self.stages * self.tile * 2 * BOX_WIDTH + self.groups * 4 * self.depth * layout.chunk_bytes
        sums = (self.split - 1) * ceil_div(self.tile // 8, self.split) * self.groups * 128 * 16
        return lut + 1024, rings, sums

    def overlay(self, layout: ChunkLayout, limits: DeviceLimits = H200) -> bool:
        """Whether the sums have to reuse the memory of the rings."""
        return sum(self.sizes(layout)) > limits.shared_per_block

    def shared_bytes(self, layout: ChunkLayout, limits: DeviceLimits = H200) -> int:
        first, rings, sums = self.sizes(layout)
        return first + (max(rings, sums) if self.overlay(layout, limits) else rings + sums)

    def scales_sums(self, layout: ChunkLayout) -> bool:
        """Whether sums are scaled instead of weights: tile / 2 instructions per chunk instead of 32."""
        fewer = self.tile <= (64 if self.groups <= 2 else 32)
        return fewer and layout.group == CHUNK_WIDTH and layout.scales == 1

    def fits(self, layout: ChunkLayout, limits: DeviceLimits = H200) -> bool:
        if self.stages % 2 or self.depth < 2:
            return False
        return self.shared_bytes(layout, limits) <= limits.shared_per_block

    def items(self, rows: int, out: int) -> int:
        """The number of tiles."""
        return ceil_div(out, self.groups * GROUP_ROWS) * ceil_div(rows, self.tile)

    def grid(self, rows: int, out: int, num_sms: int = H200.num_sms) -> tuple[int, int, int]:
        """Without a split the kernel is persistent: one block per SM, which loops over tiles."""
        items = self.items(rows, out)
        return self.split, items if self.split > 1 else min(items, num_sms), 1


# Measured by `python -m benchmarks.lowbit_gemm --tune`; `tile` is that of the most rows of the key.
PLANS = PlanTable("many_rows", ManyRowsPlan, shipped=SOURCES / "lowbit" / "many_rows_plans.json")


def tile_rows(rows: int) -> int:
    """Rows of a tile: all rows of x, or the fewest equal parts of at most 256."""
    parts = ceil_div(rows, TILES[-1])
    return next(tile for tile in TILES if tile * parts >= rows)


# By blocks per cluster: clusters that run at once on an H200, as measured. A cluster stays inside one of the chip's
# eight GPCs, so large ones leave SMs idle.
CLUSTERS = {1: H200.num_sms, 2: 66, 3: 42, 4: 30, 5: 22, 6: 18, 7: 14, 8: 14}


def most_blocks(split: int, num_sms: int) -> int:
    """Blocks in clusters of `split` that run at once, one per SM."""
    return CLUSTERS[split] * num_sms // H200.num_sms * split


def estimate(
    plan: ManyRowsPlan, layout: ChunkLayout, rows: int, out: int, width: int, num_sms: int = H200.num_sms
) -> float:
    """Microseconds that a plan takes on an H200, fitted to forty timings at 16 to 512 rows: most within a tenth."""
    chunks = ceil_div(ceil_div(width, CHUNK_WIDTH), plan.split)
    blocks = plan.items(rows, out) * plan.split
    together = max(1, min(blocks, most_blocks(plan.split, num_sms)))
    decoding = 0.11 if layout.table else 0.08
    work = 0.12 + plan.groups * (decoding + 0.0019 * plan.tile)  # and products
    weights = plan.groups * 4 * layout.chunk_bytes * together / 4.0e6  # from memory
    inputs = plan.tile * 2 * CHUNK_WIDTH * together / 13e6  # from the cache
    waves = ceil_div(blocks, together)
    ends = (5 if plan.groups > 3 else 4) + 0.15 * plan.split + (waves - 1) * (0.5 if plan.split == 1 else 3)
    return waves * chunks * max(work, weights, inputs, 0.36) + ends


def candidate_plans(
    layout: ChunkLayout, rows: int, out: int, width: int, limits: DeviceLimits = H200
) -> list[ManyRowsPlan]:
    """Plans worth trying, the most promising first."""
    tile, chunks = tile_rows(rows), ceil_div(width, CHUNK_WIDTH)
    found = []
    for groups, split in itertools.product((1, 2, 3, 4), range(1, 9)):
        if tile > 128 and groups > 2:
            continue
        blocks = split * ceil_div(out, groups * GROUP_ROWS) * ceil_div(rows, tile)
        if split > 1 and rows > tile and blocks > most_blocks(split, limits.num_sms):
            continue
        if ceil_div(chunks, split) * (split - 1) >= chunks:  # every block of a cluster has work
            continue
        steps = 2 if tile > 64 and groups == 4 else 4
        long = (8, 3 if tile <= 64 else 4)  # at 16 and 64 rows three chunks were faster than four
        for stages, depth in (long, (6, 4), (4, 4), (4, 3), (2, 3)):
            plan = ManyRowsPlan(tile, groups, split, stages, depth, steps)
            if plan.fits(layout, limits):
                found.append(plan)
                break
    found.sort(key=lambda plan: estimate(plan, layout, rows, out, width, limits.num_sms))
    return found


MEASURED = (16, 32, 64, 128, 256, 512)  # rows that plans are measured for; those between take the next


def plan_key(layout: ChunkLayout, rows: int, out: int, width: int) -> str:
    most = next((n for n in MEASURED if rows <= n), "any")
    return f"{layout.label} rows<={most} {out}x{width}"


@PLANS.cached
def choose_plan(layout: ChunkLayout, rows: int, out: int, width: int, limits: DeviceLimits = H200) -> ManyRowsPlan:
    """Measured for this shape, else measured for 4-bit integers of this shape, else the best by estimate."""
    for similar in (layout, ChunkLayout(4, 128, False, 1, layout.bf16_scale)):
        found = PLANS.find(plan_key(similar, rows, out, width), limits.name)
        if found is not None:
            plan = dataclasses.replace(found, tile=tile_rows(rows))
            if plan.fits(layout, limits):
                return plan
    return candidate_plans(layout, rows, out, width, limits)[0]


def many_rows_macros(
    layout: ChunkLayout, dtype: torch.dtype, plan: ManyRowsPlan, limits: DeviceLimits = H200
) -> dict[str, int]:
    return {
        **layout.macros(dtype),
        "TN": plan.tile,
        "WGS": plan.groups,
        "SPLIT": plan.split,
        "STAGES": plan.stages,
        "DEPTH": plan.depth,
        "STEPS": plan.steps,
        "MORE": plan.more_registers(limits),
        "OVERLAY": int(plan.overlay(layout, limits)),
        "LATE": int(plan.scales_sums(layout)),
    }


@functools.cache
def _has_wgmma(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)  # later chips have tcgen05 instead


def prefers_many_rows(x_MK: Tensor) -> bool:
    """Whether this kernel runs on x's device and was measured to be the fastest path for so many rows."""
    return x_MK.shape[0] >= FEWEST_ROWS and _has_wgmma(x_MK.device.index or 0)


# -- launching -----------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=1024)
def _tensor_map(
    pointer: int, rows: int, width: int, stride: int, half: bool, box_rows: int, device: int
) -> ctypes.Array[ctypes.c_char]:
    """The tensor map by which TMA reads boxes of BOX_WIDTH x box_rows from x [rows, width]; outside it reads zeros."""
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
        raise NvrtcError(f"CUDA error {code} while describing activations [{rows}, {width}] to the copy engine")
    return found


@functools.cache
def _kernel(layout: ChunkLayout, dtype: torch.dtype, plan: ManyRowsPlan, device: int) -> Kernel:
    text = many_rows_source(plan.tile, dtype == torch.float16)
    macros = many_rows_macros(layout, dtype, plan, device_limits(device))
    return compile_kernel(text, "lowbit_many_rows", macros, device)


def many_rows_cuda(
    x_MK: Tensor,
    chunks: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    layout: ChunkLayout,
    plan: ManyRowsPlan | None = None,
) -> Tensor:
    """x bf16 or fp16, any number of rows above 0."""
    if bias is not None:
        bias = bias.to(x_MK.dtype).contiguous()
    x_MK = aligned(x_MK)
    (rows, width), (tiles, per_row) = x_MK.shape, chunks.shape[:2]
    out, device = tiles * CHUNK_ROWS, x_MK.device.index
    y = torch.empty(rows, out, dtype=x_MK.dtype, device=x_MK.device)
    limits = device_limits(device)
    plan = plan or choose_plan(layout, rows, out, width, limits)
    kernel = _kernel(layout, x_MK.dtype, plan, device)
    half = x_MK.dtype == torch.float16
    box = _tensor_map(x_MK.data_ptr(), rows, width, x_MK.stride(0), half, plan.tile, device)
    numbers, pointers = (out, rows, tiles, per_row), (y, table, bias)
    kernel.launch(
        plan.grid(rows, out, limits.num_sms),
        plan.threads,
        plan.shared_bytes(layout, limits),
        (pointer(chunks), box, *map(pointer, pointers), *map(ctypes.c_int, numbers)),
        cluster=plan.split,
    )
    return y
