# mypy: disallow-untyped-defs=False
"""The kernels of kernels/runtime/host_ring.py. The host's memory is read past the caches, each number once: reads of
the same line would follow each other."""

import triton
import triton.language as tl


@triton.jit
def _take_numbers_kernel(
    ring, clock, numbers, tables, num, num_each, num_rows, all_rows,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    given = ring + tl.load(clock) % SLOTS * num
    for first in range(0, num, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(numbers + i, tl.load(given + i, mask=i < num, other=0, volatile=True), mask=i < num)
    tl.debug_barrier()  # the numbers of other threads are there
    row = tl.arange(0, ROWS)
    there = row < all_rows
    place = row // num_rows * num_each + row % num_rows + 3 * num_rows
    at = tl.load(numbers + place, mask=there, other=0)
    block = tl.load(numbers + place + num_rows, mask=there, other=0)
    tl.store(tables + at, block.to(tl.int32), mask=there)


@triton.jit
def _give_numbers_kernel(chosen, clock, ring, num, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    now = tl.load(clock)
    i = tl.arange(0, BLOCK)
    tl.store(ring + now % SLOTS * width + i, tl.load(chosen + i, mask=i < num, other=0), mask=i < num)
    tl.store(clock, now + 1)
