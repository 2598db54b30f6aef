"""Weights of 2, 3 or 4 bits times tens to thousands of rows on sm_90: `wgmma` with the weights from registers.

The kernel is _cuda/lowbit_wgmma.cu, behind the decoding part of _cuda/lowbit.cu; here are the instruction written out
for a number of columns, the map that the copy engine fetches activations by, and the choice of a plan. Same chunks,
same result within rounding as the other ways of kernels/lowbit.py, and the same bit for bit at every run.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.kernels.lowbit_few import HERE, SHARED_LIMIT, SHARED_SM, ceil_div
from shoestring.kernels.lowbit_layout import CHUNK_ROWS, CHUNK_WIDTH, Layout
from shoestring.kernels.nvrtc import Kernel, NvrtcError, compile_kernel, driver_library

SOURCES = HERE / "lowbit_decode.cu", HERE / "lowbit_wgmma.cu"
GROUP_ROWS = 64  # outputs of a warpgroup
BOX_WIDTH = 64  # inputs of a stage
MAP_BYTES, MAP_ALIGN = 128, 64
TILES = (16, 24, 32, 48, 64, 96, 128, 192, 256)


# -- source --------------------------------------------------------------------------------------------------
def wgmma_function(columns: int, half: bool) -> str:
    """`wgmma(acc, a, b)`: acc[64, columns] += a[64, 16] (registers) b[columns, 16]^T (descriptor)."""
    sums = columns // 2
    kind = "f16" if half else "bf16"
    a = ",".join(f"%{sums + i}" for i in range(4))
    lines = [
        "__device__ __forceinline__ void wgmma(float* c, const unsigned int* a, unsigned long long b) {",
        f'asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{"',
        *(
            f'"{",".join(f"%{i}" for i in range(n, n + 4))}{"," if n + 4 < sums else ""}"'
            for n in range(0, sums, 4)
        ),
        f'"}}, {{{a}}}, %{sums + 4}, 1, 1, 1, 0;" :',
        ", ".join(f'"+f"(c[{i}])' for i in range(sums)),
        ': "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory"); }',
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def source(columns: int, half: bool) -> str:
    decode, wide = (path.read_text() for path in SOURCES)
    return decode + wgmma_function(columns, half) + wide


# -- plans ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WidePlan:
    """Blocks of `groups` warpgroups (64 outputs each) x `tile` rows of activations; K over `split` blocks of a
    cluster; `cast` neighbours share the fetching of activations; rings of `stages` x 64 inputs and `depth` chunks;
    `steps` of 16 inputs are decoded together; `blocks` on a multiprocessor at once."""

    tile: int
    groups: int
    split: int = 1
    cast: int = 1
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

    def memory(self, layout: Layout) -> int:
        """Bytes of shared memory."""
        lut = 128 << (2 * layout.bits) if layout.table else 0
        rings = self.stages * self.tile * 2 * BOX_WIDTH + self.groups * 4 * self.depth * layout.chunk_bytes
        sums = self.tile * (self.groups * GROUP_ROWS + 4) * 4 if self.split > 1 else 0
        return lut + 1024 + max(rings, sums)

    def fits(self, layout: Layout) -> bool:
        used = self.memory(layout)
        return used <= SHARED_LIMIT and self.blocks * (used + 1024) <= SHARED_SM

    def items(self, rows: int, out: int) -> int:
        """Tiles in all, those of `cast` neighbours counted as one."""
        across = ceil_div(out, self.groups * GROUP_ROWS)
        return ceil_div(across, self.cast) * ceil_div(rows, self.tile)

    def grid(self, rows: int, out: int, sms: int = 132) -> tuple[int, int, int]:
        """Without a split, no more blocks than run at once: each goes on to the next tile."""
        size, items = self.split * self.cast, self.items(rows, out)
        return size, items if self.split > 1 else min(items, sms * self.blocks // size), 1


def tile_rows(rows: int) -> int:
    """Rows of a tile for x with so many rows: all of them, or the least equal parts of at most 256."""
    parts = ceil_div(rows, TILES[-1])
    return next(tile for tile in TILES if tile * parts >= rows)


def estimate(plan: WidePlan, layout: Layout, rows: int, out: int, width: int, sms: int = 132) -> float:
    """Clocks that a plan takes, as far as rates tell: tensor cores, issue slots, memory, whatever is slowest."""
    chunks = ceil_div(ceil_div(width, CHUNK_WIDTH), plan.split)
    blocks = plan.items(rows, out) * plan.split * plan.cast
    together = min(blocks, sms // (plan.split * plan.cast) * plan.split * plan.cast * plan.blocks)
    here = ceil_div(together, sms)  # blocks on a multiprocessor
    tensor = plan.groups * 8 * max(plan.tile / 2, 16)
    issue = plan.groups * (210 if layout.table else {4: 140, 3: 160, 2: 130}[layout.bits])
    weights = plan.groups * 4 * layout.chunk_bytes / (2400 / together)  # bytes a clock, of all together
    inputs = plan.tile * 2 * CHUNK_WIDTH / plan.cast / 36
    each = max(here * tensor, here * issue, weights, here * inputs + weights / 3) * 1.1
    last = plan.tile * plan.groups * (4 if plan.split > 1 else 1) + 400 * plan.split
    return ceil_div(blocks, together) * (chunks * each + here * last) + 3000


def plans(layout: Layout, rows: int, out: int, width: int, sms: int = 132) -> list[WidePlan]:
    """Plans worth trying, the most promising first."""
    tile = tile_rows(rows)
    found = []
    for groups, split, cast in itertools.product((1, 2, 3, 4), (1, 2, 4, 8), (1, 2)):
        if split * cast > 8 or split > ceil_div(width, CHUNK_WIDTH) or tile % (8 * cast):
            continue
        if (tile > 128 and groups > 2) or (split > 1 and rows > tile):
            continue
        for blocks in (1, 2) if groups == 2 and tile <= 64 else (1,):
            steps = 2 if tile > 64 and groups == 4 else 4
            for stages, depth in ((8, 4), (6, 4), (5, 4), (4, 4), (4, 3), (3, 3)):
                plan = WidePlan(tile, groups, split, cast, stages, depth, steps, blocks)
                if plan.fits(layout):
                    found.append(plan)
                    break
    found.sort(key=lambda plan: estimate(plan, layout, rows, out, width, sms))
    return found


@functools.cache
def choose_plan(layout: Layout, rows: int, out: int, width: int, sms: int = 132) -> WidePlan:
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
        "CAST": plan.cast,
        "STAGES": plan.stages,
        "DEPTH": plan.depth,
        "STEPS": plan.steps,
        "BLOCKS": plan.blocks,
        "MORE": plan.more_registers,
    }


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
    if x_MK.stride(1) != 1 or x_MK.stride(0) % 8 or x_MK.data_ptr() % 16:
        x_MK = x_MK.contiguous()
    (rows, width), (tiles, per_row) = x_MK.shape, chunks.shape[:2]
    out, device = tiles * CHUNK_ROWS, x_MK.device.index
    y = torch.empty(rows, out, dtype=x_MK.dtype, device=x_MK.device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    plan = plan or choose_plan(layout, rows, out, width, sms)
    kernel = _wide_kernel(layout, x_MK.dtype, plan, device)
    half = x_MK.dtype == torch.float16
    box = _tensor_map(x_MK.data_ptr(), rows, width, x_MK.stride(0), half, plan.tile // plan.cast, device)
    numbers, pointers = (out, rows, tiles, per_row), (y, table, bias)
    kernel.launch(
        plan.grid(rows, out, sms),
        plan.threads,
        plan.memory(layout),
        (_pointer(chunks), box, *map(_pointer, pointers), *map(ctypes.c_int, numbers)),
        cluster=plan.split * plan.cast,
    )
    return y
