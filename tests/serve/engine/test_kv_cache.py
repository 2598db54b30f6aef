from __future__ import annotations

import pytest
import torch

from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.kv_cache import MIN_POSITIONS, KVCache, cache_root
from tiny import tiny_decoder


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("blocks", [range(2, 7), [6, 0, 3, 1, 5]])
def test_token_by_token_equals_the_full_forward(window: int | None, blocks: list[int]) -> None:
    """Neighbouring blocks are read in place, scattered ones gathered."""
    model = tiny_decoder(sliding_window=window, full_layers=(0,))
    tokens = torch.randint(0, 29, (1, 20), generator=torch.Generator().manual_seed(0))
    want = model(tokens)[0]
    cache = KVCache(model.plan, BlockPool(8, 4))
    rows = []
    for start in range(20):
        attend = cache.plan([RowSpan(list(blocks), start, 1)], "cpu")
        rows.append(model(tokens[:, start : start + 1], torch.tensor([[start]]), attend=attend)[0])
    torch.testing.assert_close(torch.cat(rows), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_requests_of_mixed_lengths_share_a_forward(window: int | None, size: int) -> None:
    """Whole prompts, chunks and single rows in one batch, over a growing cache."""
    model = tiny_decoder(sliding_window=window)
    gen = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 29, (n,), generator=gen) for n in (7, 12, 3, 9)]
    want = [model(t[None])[0] for t in texts]
    pool = BlockPool(64, size, grows=True)
    cache = KVCache(model.plan, pool)
    tables = [pool.open(b"", t.tolist()) for t in texts]
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    # (text, rows) per step; equal row counts stand together.
    steps = [[(0, 3), (3, 3), (1, 4)], [(3, 1), (1, 1), (0, 2), (2, 3)], [(0, 2), (3, 2), (1, 7)], [(3, 3)]]
    done = [0] * 4
    for step in steps:
        spans = [RowSpan(tables[i].blocks, done[i], n) for i, n in step]  # type: ignore[union-attr]
        tokens = torch.cat([texts[i][done[i] : done[i] + n] for i, n in step])
        positions = torch.cat([torch.arange(done[i], done[i] + n) for i, n in step])
        out = model(tokens[None], positions[None], attend=cache.plan(spans, "cpu"))[0]
        for (i, n), part in zip(step, out.split([n for _, n in step]), strict=True):
            got[i].append(part)
            done[i] += n
    assert done == [7, 12, 3, 9]
    for parts, full in zip(got, want, strict=True):
        torch.testing.assert_close(torch.cat(parts), full, rtol=1e-6, atol=1e-6)


def test_memory_comes_with_need() -> None:
    model = tiny_decoder(max_positions=4096)
    pool = BlockPool(4096, 16, grows=True)
    cache = KVCache(model.plan, pool)
    assert cache.num_bytes == 0
    table = pool.open(b"", [0])
    assert table is not None
    row = torch.zeros(1, 1, dtype=torch.int64)
    model(row, attend=cache.plan([RowSpan(table.blocks, 0, 1)], "cpu"))
    per_position = 2 * 2 * 2 * 4 * 8  # layers x (k, v) x G x D x fp64
    assert cache.num_bytes == MIN_POSITIONS * per_position
    pool.grow(table, MIN_POSITIONS + 1)
    model(row, torch.tensor([[MIN_POSITIONS]]), attend=cache.plan([RowSpan(table.blocks, 64, 1)], "cpu"))
    assert cache.num_bytes == 2 * MIN_POSITIONS * per_position
    # A pool of a stated size takes it at once: tensors that never move.
    fixed = KVCache(model.plan, BlockPool(10, 16))
    model(row, attend=fixed.plan([RowSpan([3], 0, 1)], "cpu"))
    assert fixed.num_bytes == 160 * per_position


def test_the_root_changes_with_weights_dtype_and_skip_set() -> None:
    model = tiny_decoder()
    root = cache_root(model)
    assert cache_root(model) == root != cache_root(model, "attention 3")
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.add_(1e-3)
    moved = cache_root(model)
    assert moved != root
    model.load_state_dict(model.state_dict())
    assert cache_root(model) != moved
    loaded = cache_root(model)
    model.compute_dtype = torch.float32
    assert cache_root(model) != loaded
