"""Where the rows of a step outside of graphs go: positions, slots, block tables and attention tiles, on the host.

Shapes: T rows of the step, N spans, L tables, W blocks per table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from shoestring.kernels.attention.paged_attention import prefill_rows, splits_for
from shoestring.serve.engine.block_pool import RowSpan
from shoestring.serve.engine.fused_decoder import AttentionTiles, RowPlacement
from shoestring.serve.engine.graphs import ROWS_EACH
from shoestring.serve.engine.prefill_graph import tiles_of

EAGER_SPLITS = 8  # ranges of keys for few requests outside of graphs; 1 for many
WIDTH = 16  # block tables are padded to a multiple of this
LAUNCH_ROWS = 512  # rows of whole prompts of one length that pay for an attention launch of their own
# Rows by table are padded to powers of two up to FINE, to multiples of FINE up to MANY and of COARSE up to MOST.
FINE, MANY, COARSE, MOST = 64, 512, 256, 2048


def few_sizes(num: int) -> int:
    """The number that so many rows are padded to; beyond MOST a pass takes so long that padding gains nothing."""
    if num <= FINE:
        return 1 << max(0, num - 1).bit_length()
    if num > MOST:
        return num
    step = FINE if num <= MANY else COARSE
    return -(-num // step) * step


def row_sizes(most: int) -> list[int]:
    """The sizes that 2 to `most` rows are padded to; of those above MOST only one."""
    sizes = [2]
    while sizes[-1] < min(most, MOST):
        sizes.append(few_sizes(sizes[-1] + 1))
    return [*sizes, 2 * MOST] if most >= 2 * MOST else sizes


def place_rows(
    spans: Sequence[RowSpan], size: int, num_heads: int, num_groups: int, *, by_table: bool = False
) -> RowPlacement:
    """Positions, slots, block tables and attention tiles of a step's rows, as tensors on the host.

    Kernels are compiled for rows of a tile, ranges of keys and whether a table's width is a multiple of 16, so each has
    few values here, which `Runner.prepare` meets. Matrix products choose a kernel by the number of rows and
    load it on first use, which can take longer than ten steps: rows that attend by table are padded to few numbers.
    `by_table`: whole prompts, too."""
    start_N, num_N = np.array([(s.start, s.num) for s in spans]).T
    first_N = num_N.cumsum() - num_N  # each span's first row
    num_pages = [-(-s.stop // size) for s in spans]
    width = -(-max(num_pages) // WIDTH) * WIDTH
    tables_LW = np.zeros((len(spans), width), dtype=np.int32)
    for row_W, span, num in zip(tables_LW, spans, num_pages, strict=True):
        row_W[:num] = span.blocks[:num]
    of_T = np.arange(len(spans)).repeat(num_N)
    at_T = np.arange(len(of_T)) + (start_N - first_N)[of_T]
    slots_T = tables_LW[of_T, at_T // size].astype(np.int64) * size + at_T % size
    tiles, each = [], prefill_rows(num_heads, num_groups)
    few, many = np.flatnonzero(num_N <= ROWS_EACH[-1]), np.flatnonzero(num_N > ROWS_EACH[-1])
    if len(few):
        most = 1 if num_N[few].max() == 1 else ROWS_EACH[-1]
        splits = EAGER_SPLITS if splits_for(len(few), num_groups) >= EAGER_SPLITS else 1
        tiles.append(AttentionTiles(_tiles(few, first_N[few], start_N[few], num_N[few]), most, splits))
    if len(many):
        tiles.append(AttentionTiles(_tiles(*tiles_of(many, first_N, start_N, num_N, each)), each, 1))
    prompts = None
    if not by_table and not start_N.any():
        found, row = [], 0
        for num, group in groupby(spans, key=lambda s: s.num):
            count = len(list(group))
            found.append((row, count, num))
            row += count * num
        if len(found) == 1 or row >= LAUNCH_ROWS * len(found):
            prompts = tuple(found)
    padded = prompts is None and num_N.max() > 1
    if padded:
        padding = (0, few_sizes(len(at_T)) - len(at_T))
        at_T, slots_T = np.pad(at_T, padding), np.pad(slots_T, padding, constant_values=-1)
    at, slots, tables = (torch.from_numpy(numbers) for numbers in (at_T, slots_T, tables_LW))
    return RowPlacement(at, slots, tables, tuple(tiles), prompts, padded)


def _tiles(*columns: np.ndarray) -> Tensor:
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.int32))
