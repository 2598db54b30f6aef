"""Integers between host and program: every launch reads its own slot and answers into it, however far the host is
ahead."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from interpreted import run_interpreted

from shoestring.kernels.runtime.host_ring import SLOTS, HostRing, Receipt

INTERPRETED = "from test_host_ring import check_exchange\ncheck_exchange('cpu', {rows}, {own}, {steps})"


@torch.no_grad()
def check_exchange(device: str, rows: int, own: int, steps: int) -> None:
    """Launches of which the host reads the answers late, or never: each answers with the sum of what it was given."""
    draw, where = random.Random(rows), torch.device(device)
    size, places = steps * (5 * rows + own), 2 * steps * rows + 1
    ring = HostRing(size, rows, where)
    numbers = torch.zeros(size, dtype=torch.int64, device=where)
    tables = torch.zeros(places, dtype=torch.int32, device=where)
    chosen = torch.zeros(rows, dtype=torch.int64, device=where)

    def program() -> None:
        ring.take_(numbers, tables, rows, steps)
        torch.add(numbers[:rows], numbers.sum(), out=chosen)
        ring.give_(chosen)

    replay = program
    ring.restart(np.zeros(size, dtype=np.int64))
    if where.type == "cuda":
        program()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            program()
        graph.replay()
        ring.restart(np.zeros(size, dtype=np.int64))
        replay = graph.replay
    open_answers: list[tuple[Receipt, list[int]]] = []
    expected = np.zeros(places, dtype=np.int32)
    for _ in range(5 * SLOTS):
        given = ring.slot()
        given[:] = [draw.randrange(-(2**40), 2**40) for _ in given]
        at = draw.sample(range(places), steps * rows)
        blocks = [draw.randrange(2**31) for _ in at]
        by_step = given.reshape(steps, -1)
        by_step[:, 3 * rows : 4 * rows] = np.reshape(at, (steps, rows))
        by_step[:, 4 * rows : 5 * rows] = np.reshape(blocks, (steps, rows))
        expected[at] = blocks
        want = (given[:rows] + given.sum()).tolist()
        replay()
        open_answers.append((ring.launched(), want))
        while open_answers and draw.random() < 0.45:
            receipt, want = open_answers.pop(draw.randrange(len(open_answers)))
            assert receipt.values() == want
    for receipt, want in open_answers:
        receipt.wait()
        assert receipt.values() == receipt.values() == want
    assert tables.tolist() == expected.tolist()


def test_every_launch_has_its_own_slot() -> None:
    check_exchange("cpu", 3, 4, 2)


@pytest.mark.parametrize(("rows", "own", "steps"), [(1, 2, 4), (5, 0, 2), (16, 37, 1)])
def test_the_kernels_do_the_same(rows: int, own: int, steps: int) -> None:
    run_interpreted(INTERPRETED.format(rows=rows, own=own, steps=steps))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "own", "steps"), [(1, 2, 4), (512, 2100, 1)])
def test_a_graph_reads_and_answers_in_place(rows: int, own: int, steps: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    check_exchange("cuda", rows, own, steps)
