"""Many copies between tensors as one kernel.

A model that is cut another way, or replaced by new weights, is thousands of copies of boxes. Launched one by one they
are too short to fill a GPU, and boxes of columns go through torch's strided copy at a fraction of the memory rate.
Here every copy becomes tiles of at most 16 rows x 2 KiB in one table, and one launch moves all of them, 16 bytes at a
time. The table is made once; it is valid while the tensors keep their addresses, so it may be captured in a graph.

Copies that change the dtype or do not lie on 16-byte boundaries go through torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoestring.kernels.runtime.triton_backend import interpreting, triton_refusal

UNIT = 16  # bytes
TILE_ROWS, TILE_UNITS = 16, 128
NUM_WARPS = 4
MOST_RUNS = 4096  # of rows, of one copy


class Rows(NamedTuple):
    """Rows of the same length at equal distances: addresses, then bytes."""

    source: int
    target: int
    num_rows: int
    row_bytes: int
    source_pitch: int
    target_pitch: int


class CopyTable:
    """`pairs` of (target, source) with equal shapes, all on one device; no two targets overlap."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._kept: list[Tensor] = []  # whose addresses are in the table
        self._plain: list[tuple[Tensor, Tensor]] = []
        tiles: list[np.ndarray] = []
        device = None
        for target, source in pairs:
            assert target.shape == source.shape, (target.shape, source.shape)
            rows = rows_of(target, source) if usable(target, source) else None
            if rows is None:
                self._plain.append((target, source))
                continue
            device = target.device
            self._kept += [target, source]
            tiles += [tiles_of(r) for r in rows]
        self._tiles_T6 = torch.from_numpy(np.concatenate(tiles)).to(device) if tiles else None

    @property
    def num_plain(self) -> int:
        """Copies that torch makes."""
        return len(self._plain)

    @torch.no_grad()
    def run(self) -> None:
        for target, source in self._plain:
            target.copy_(source, non_blocking=True)
        if self._tiles_T6 is not None:
            from shoestring.kernels.comm.copy_table_triton import _copy_tiles_kernel

            _copy_tiles_kernel[(len(self._tiles_T6),)](
                self._tiles_T6, ROWS=TILE_ROWS, UNITS=TILE_UNITS, num_warps=NUM_WARPS
            )


def usable(target: Tensor, source: Tensor) -> bool:
    if target.dtype != source.dtype or target.device != source.device:
        return False
    return triton_refusal() is None and (target.is_cuda or interpreting())


def rows_of(target: Tensor, source: Tensor) -> list[Rows] | None:
    """The copy as rows; None where it is not made of whole units."""
    size = target.element_size()
    merged: list[tuple[int, int, int]] = []  # (length, stride of the source, of the target), innermost first
    for length, a, b in reversed(list(zip(target.shape, source.stride(), target.stride(), strict=True))):
        if length == 1:
            continue
        num, *inner = merged[-1] if merged else (0, 0, 0)
        if merged and [a, b] == [num * stride for stride in inner]:
            merged[-1] = (num * length, inner[0], inner[1])
        else:
            merged.append((length, a, b))
    if math.prod(target.shape) == 0:
        return []
    if not merged or merged[0][1:] != (1, 1) or math.prod(m[0] for m in merged[2:]) > MOST_RUNS:
        return None
    (num, _, _), (num_rows, a, b), *outer = [*merged, (1, 0, 0)][: max(2, len(merged))]
    found = []
    for place in itertools.product(*(range(m[0]) for m in outer)):
        at = [sum(i * m[side] for i, m in zip(place, outer, strict=True)) * size for side in (1, 2)]
        found.append(
            Rows(source.data_ptr() + at[0], target.data_ptr() + at[1], num_rows, num * size, a * size, b * size)
        )
    whole = all(value % UNIT == 0 for r in found for value in (*r[:2], *r[3:]))
    return found if whole else None


def tiles_of(r: Rows) -> np.ndarray:
    """One line a tile: addresses of source and target, rows, and in units: a row, the two pitches."""
    if r.num_rows == 1:  # one long row: as many short ones, and the rest
        short = TILE_UNITS * UNIT
        many, rest = divmod(r.row_bytes, short)
        parts = [Rows(r.source, r.target, many, short, short, short)] if many else []
        if rest:
            parts.append(Rows(r.source + many * short, r.target + many * short, 1, rest, rest, rest))
    else:
        parts = [r]
    return np.concatenate([_tiles(p) for p in parts])


def _tiles(r: Rows) -> np.ndarray:
    rows = np.arange(0, r.num_rows, TILE_ROWS, dtype=np.int64)
    units = np.arange(0, r.row_bytes // UNIT, TILE_UNITS, dtype=np.int64)
    row, unit = np.repeat(rows, len(units)), np.tile(units, len(rows))
    tiles = np.empty((len(row), 6), np.int64)
    tiles[:, 0] = r.source + row * r.source_pitch + unit * UNIT
    tiles[:, 1] = r.target + row * r.target_pitch + unit * UNIT
    tiles[:, 2] = np.minimum(TILE_ROWS, r.num_rows - row)
    tiles[:, 3] = np.minimum(TILE_UNITS, r.row_bytes // UNIT - unit)
    tiles[:, 4:] = r.source_pitch // UNIT, r.target_pitch // UNIT
    return tiles
