"""Where the rows of a pass lie, against the definition row by row; and that all of it travels in one copy."""

from __future__ import annotations

import random

import pytest
import torch

from shoestring.kernels.attention.paged_attention import prefill_rows
from shoestring.kernels.runtime.host_ring import ALIGNED, to_device
from shoestring.serve.engine import place_rows as place_rows_module
from shoestring.serve.engine.block_pool import RowSpan
from shoestring.serve.engine.place_rows import (
    COARSE,
    FINE,
    LAUNCH_ROWS,
    MANY,
    MOST,
    WIDTH,
    few_sizes,
    place_rows,
    row_sizes,
)

HEADS, GROUPS = 48, 12


@pytest.mark.parametrize("seed", range(30))
def test_every_row_is_at_its_place(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, size = random.Random(seed), 4
    monkeypatch.setattr(place_rows_module, "LAUNCH_ROWS", draw.choice([1, 512]))
    spans = []
    whole = seed % 3 == 0
    for _ in range(draw.randint(1, 9)):
        start = 0 if whole else draw.choice([0, 0, draw.randint(1, 200)])
        num = draw.choice([1, draw.randint(1, 16), draw.randint(17, 90)])
        blocks = [draw.randrange(999) for _ in range(-(-(start + num) // size) + draw.randint(0, 3))]
        spans.append(RowSpan(blocks, start, num))
    by_table = seed % 2 == 0
    rows = place_rows(spans, size, HEADS, GROUPS, by_table=by_table)
    at = [(n, p) for n, s in enumerate(spans) for p in range(s.start, s.stop)]
    padding = 0
    if rows.prompts is None and any(s.num > 1 for s in spans):
        padding = few_sizes(len(at)) - len(at)
    assert rows.padded or not padding
    assert rows.positions_T.tolist() == [p for _, p in at] + [0] * padding
    slots = [spans[n].blocks[p // size] * size + p % size for n, p in at]
    assert rows.slots_T.tolist() == slots + [-1] * padding
    assert rows.tables_LW.shape[1] % WIDTH == 0
    for row, span in zip(rows.tables_LW.tolist(), spans, strict=True):
        num = -(-span.stop // size)
        assert row[:num] == span.blocks[:num] and not any(row[num:])
    covered = []
    for tiles in rows.tiles:
        most = max(spans[n].num for n, *_ in tiles.tiles_L4.tolist())
        assert tiles.rows_per_tile == (1 if most == 1 else 16 if most <= 16 else prefill_rows(HEADS, GROUPS))
        for n, first, position, num in tiles.tiles_L4.tolist():
            assert 0 < num <= tiles.rows_per_tile
            assert at[first : first + num] == [(n, position + i) for i in range(num)]
            covered += range(first, first + num)
    assert sorted(covered) == list(range(len(at)))
    if by_table:
        assert rows.prompts is None
    elif whole and place_rows_module.LAUNCH_ROWS == 1:
        assert rows.prompts is not None
    assert (rows.prompts is not None) <= all(s.start == 0 for s in spans)
    if rows.prompts is not None:
        texts = [(first + i * num, num) for first, count, num in rows.prompts for i in range(count)]
        firsts = [at.index((n, 0)) for n in range(len(spans))]
        assert texts == [(first, s.num) for first, s in zip(firsts, spans, strict=True)]


def test_texts_of_many_lengths_attend_in_one_launch() -> None:
    def prompts(*nums: int) -> object:
        return place_rows([RowSpan(range(200), 0, num) for num in nums], 16, HEADS, GROUPS).prompts

    assert prompts(40, 41, 42) is None
    assert prompts(40, 40, 40) == ((0, 3, 40),)
    assert prompts(40) == ((0, 1, 40),)
    assert prompts(LAUNCH_ROWS - 1, LAUNCH_ROWS) is None
    assert prompts(LAUNCH_ROWS, LAUNCH_ROWS + 1) == ((0, 1, LAUNCH_ROWS), (LAUNCH_ROWS, 1, LAUNCH_ROWS + 1))


def test_rows_come_in_few_numbers() -> None:
    sizes = [1, *row_sizes(MOST)]
    assert len(sizes) < 24 and sizes == sorted(set(sizes))
    for num in range(1, MOST + 1):
        size = few_sizes(num)
        assert size == min(s for s in sizes if s >= num)
        assert size - num < (num if num <= FINE else FINE if num <= MANY else COARSE)
    assert few_sizes(MOST + 1) == MOST + 1


def test_one_copy_for_all() -> None:
    here = [
        torch.arange(5),
        torch.arange(12, dtype=torch.int32).view(3, 4),
        torch.zeros(0, dtype=torch.int64),
        torch.arange(3, dtype=torch.int32),
        torch.arange(7),
    ]
    there = to_device(here, torch.device("cpu"))
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype and b.is_contiguous()
        assert b.data_ptr() % ALIGNED == 0  # as far as kernels are compiled for it, a tensor of its own
    assert len({t.untyped_storage().data_ptr() for t in there}) == 1
    with pytest.raises(AssertionError):
        to_device([here[1].T], torch.device("cpu"))  # its strides would be those of another order
