"""Transposable masks: 2:4 along rows and along columns at once, exactly optimal per 4x4 tile.

A weight whose mask keeps two of four in every row *and* every column of each 4x4 tile is 2:4 for the forward
product and, transposed, for the input gradient (FST, section 5.1). There are 90 such patterns; the tile's
mask is

    argmax over the 90 patterns P of sum(P * |w|)         equal sums: the first pattern

with the patterns in falling lexicographic order, so that a tile of zeros gets 1100 1100 0011 0011.

Sums are added in one fixed order, ((row 0 + row 1) + (row 2 + row 3)) with each row the sum of its two kept
values, so that every device and every cut of the weight chooses the same pattern; a matrix product would not.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from shoestring.kernels.runtime.triton_backend import triton_usable

TILE = 4
# The two kept columns of a row, in falling order of the row read as a binary number: 1100, 1010, 1001, ...
PAIRS: tuple[tuple[int, int], ...] = tuple(itertools.combinations(range(TILE), 2))
# Scores of all patterns exist for this many tiles at a time: 90 * 4 bytes each.
TILES_AT_ONCE = 1 << 16


@functools.cache
def pattern_rows() -> tuple[tuple[int, int, int, int], ...]:
    """The patterns as four indices into PAIRS, one per row."""
    found = []
    for rows in itertools.product(range(len(PAIRS)), repeat=TILE):
        kept_per_column = [sum(column in PAIRS[r] for r in rows) for column in range(TILE)]
        if kept_per_column == [2] * TILE:
            found.append(rows)
    return tuple(found)  # type: ignore[arg-type]


def patterns() -> Tensor:
    """bool [90, 4, 4]."""
    out = torch.zeros(len(pattern_rows()), TILE, TILE, dtype=torch.bool)
    for p, rows in enumerate(pattern_rows()):
        for r, pair in enumerate(rows):
            out[p, r, list(PAIRS[pair])] = True
    return out


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The patterns, and their rows as indices into PAIRS, made once per device."""
    return patterns().to(device), torch.tensor(pattern_rows(), device=device)


def transposable_mask_ref(w: Tensor) -> Tensor:
    """bool mask of a [rows, cols] weight, both multiples of 4."""
    rows, cols = w.shape
    assert rows % TILE == 0 and cols % TILE == 0, f"{rows} x {cols} does not divide into 4x4 tiles"
    tiles = w.float().abs().unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2).flatten(0, 1)
    table, index = _tables(w.device)
    if tiles.shape[0] <= TILES_AT_ONCE:
        best = _best_pattern(tiles, index)
    else:
        best = torch.cat([_best_pattern(piece, index) for piece in tiles.split(TILES_AT_ONCE)])
    chosen = table[best].unflatten(0, (rows // TILE, cols // TILE))
    return chosen.transpose(1, 2).reshape(rows, cols)


def _best_pattern(tiles: Tensor, index: Tensor) -> Tensor:
    """[tiles, 4, 4] magnitudes -> the number of the best pattern, the lowest of equals."""
    first, second = zip(*PAIRS, strict=True)
    pairs = tiles[..., list(first)] + tiles[..., list(second)]  # [tiles, 4 rows, 6 pairs]
    row = [pairs[:, r].index_select(1, index[:, r]) for r in range(TILE)]  # each [tiles, 90]
    score = (row[0] + row[1]) + (row[2] + row[3])
    # Not argmax, which may return any of several equal maxima.
    number = torch.arange(score.shape[1], device=score.device)
    at_best = score == score.amax(-1, keepdim=True)
    return torch.where(at_best, number, score.shape[1] - 1).amin(-1)


# A custom operator, because compiling 90 sums fused into their neighbours takes minutes.
@torch.library.custom_op("shoestring::transposable_mask", mutates_args=())
def transposable_mask(w: Tensor) -> Tensor:
    """As transposable_mask_ref; on a GPU one lane per tile, with all 90 sums in registers."""
    if not triton_usable(w) or w.stride(1) != 1:
        return transposable_mask_ref(w)
    from shoestring.methods.sparse24.kernels.masks_triton import _tile_mask_kernel

    rows, cols = w.shape
    mask = torch.empty(rows, cols, dtype=torch.uint8, device=w.device)
    block = 128
    _tile_mask_kernel[(rows // TILE, -(-cols // (TILE * block)))](
        w, mask, cols, w.stride(0), ROWS_OF=_pattern_codes(), BLOCK=block, num_warps=4
    )
    return mask.view(torch.bool)


@functools.cache
def _pattern_codes() -> tuple[int, ...]:
    """The patterns' rows as digits of a number in base 8, lowest row first."""
    return tuple(sum(pair << (3 * r) for r, pair in enumerate(rows)) for rows in pattern_rows())


@transposable_mask.register_fake
def _(w: Tensor) -> Tensor:
    return torch.empty_like(w, dtype=torch.bool, memory_format=torch.contiguous_format)
