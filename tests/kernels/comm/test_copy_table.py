"""Many copies as one kernel: bit for bit what torch copies, and nothing beside the targets is touched."""

from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted
from torch import Tensor

from shoestring.kernels.comm.copy_table import CopyTable, rows_of


def make_pairs(device: str) -> tuple[list[tuple[Tensor, Tensor]], Tensor, int]:
    """(target, source) pairs of many forms, the memory that holds all targets, and how many go through torch."""
    memory = torch.zeros(200_000, dtype=torch.float16, device=device)
    at = 0

    def target(*shape: int) -> Tensor:
        nonlocal at
        num = int(torch.tensor(shape).prod())
        found = memory[at : at + num].view(shape)
        at += -(-num // 8) * 8
        return found

    def source(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float16, device=device)

    pairs = [
        (target(3000), source(3000)),  # longer than a tile, with a rest
        (target(40, 1096)[:, 8:], source(40, 2176)[:, 1088:]),  # columns, at both ends
        (target(40, 64), source(80, 64)[40:]),  # rows: one run
        (target(3, 5, 2, 32)[:, 1:, :, :16], source(3, 4, 2, 16)),  # runs of rows
        (target(1, 8), source(1, 8)),
        (target(0, 8), source(0, 8)),
    ]
    through_torch = [
        (target(30), source(30)),  # no whole units
        (target(16, 8), source(8, 16).T),
        (target(8, 8), source(8, 8).float()),
        (target(), source()),
    ]
    return pairs + through_torch, memory, len(through_torch)


def check_copies() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pairs, memory, num_plain = make_pairs(device)
    for t, s in pairs:
        t.copy_(s)
    want = memory.clone()
    memory.zero_()
    table = CopyTable(pairs)
    assert table.num_plain == num_plain
    table.run()
    assert torch.equal(memory, want)
    pairs[0][1].neg_()  # other values at the same addresses
    table.run()
    assert torch.equal(pairs[0][0], pairs[0][1])


def test_the_kernel_copies_what_torch_copies() -> None:
    run_interpreted("from test_copy_table import check_copies; check_copies()")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_on_a_gpu() -> None:
    check_copies()


def test_without_a_kernel_torch_copies() -> None:
    pairs, _, _ = make_pairs("cpu")
    table = CopyTable(pairs)
    table.run()
    assert table.num_plain == len(pairs) and all(torch.equal(t, s.to(t.dtype)) for t, s in pairs)


def test_rows_join_where_both_ends_allow_it() -> None:
    a, b = torch.zeros(6, 4, 8), torch.zeros(6, 4, 8)
    (one,) = rows_of(a, b) or []
    assert (one.num_rows, one.row_bytes) == (1, 6 * 4 * 8 * 4)
    (cut,) = rows_of(a, torch.zeros(6, 8, 8)[:, :4]) or []
    assert (cut.num_rows, cut.row_bytes, cut.source_pitch, cut.target_pitch) == (6, 128, 256, 128)
    assert rows_of(a[:, :, :3], b[:, :, :3]) is None
