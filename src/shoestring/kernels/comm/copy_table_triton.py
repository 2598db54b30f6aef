# mypy: disallow-untyped-defs=False
"""The kernel of kernels/comm/copy_table.py: a program copies one tile."""

import triton
import triton.language as tl


@triton.jit
def _copy_tiles_kernel(tiles, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Per tile: addresses of source and target, rows, and units of 16 bytes: of a row, from row to row at both ends."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 6
    source = tl.multiple_of(tl.load(tile).to(tl.pointer_type(tl.int64)), 16)
    target = tl.multiple_of(tl.load(tile + 1).to(tl.pointer_type(tl.int64)), 16)
    num_rows = tl.load(tile + 2)
    num_words = tl.load(tile + 3) * 2
    source_pitch = tl.load(tile + 4) * 2
    target_pitch = tl.load(tile + 5) * 2
    row = tl.arange(0, ROWS)[:, None].to(tl.int64)
    word = tl.arange(0, 2 * UNITS)[None, :]
    wanted = (row < num_rows) & (word < num_words)
    values = tl.load(source + row * source_pitch + word, mask=wanted, other=0)
    tl.store(target + row * target_pitch + word, values, mask=wanted)
