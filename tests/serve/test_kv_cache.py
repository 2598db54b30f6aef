from __future__ import annotations

import pytest
import torch
from tiny_serve import tiny_decoder

from shoestring.errors import UserError
from shoestring.serve.kv_cache import MIN_LENGTH, KVCache, Span


@pytest.mark.parametrize("window", [None, 5])
def test_token_by_token_equals_the_full_forward(window: int | None) -> None:
    model = tiny_decoder(sliding_window=window, first_window_layer=1)
    tokens = torch.randint(0, 29, (1, 20), generator=torch.Generator().manual_seed(0))
    want = model(tokens)[0]
    cache = KVCache(model.spec, slots=1, max_context=64)
    slot = cache.allocate()
    rows = []
    for start in range(20):
        attend = cache.plan([Span(slot, start, 1)], "cpu")
        rows.append(model(tokens[:, start : start + 1], torch.tensor([[start]]), attend=attend)[0])
    torch.testing.assert_close(torch.cat(rows), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_requests_of_mixed_lengths_share_a_forward(window: int | None) -> None:
    """Whole prompts, chunks, single rows and non-neighbouring slots in one batch, over a growing cache."""
    model = tiny_decoder(sliding_window=window)
    gen = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 29, (n,), generator=gen) for n in (7, 12, 3, 9)]
    want = [model(t[None])[0] for t in texts]
    cache = KVCache(model.spec, slots=4, max_context=64)
    slots = [cache.allocate() for _ in texts]
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    # (text, rows) per step; equal row counts stand together, once with slots 0 and 3, once with 3 before 1.
    steps = [
        [(0, 3), (3, 3), (1, 4)],
        [(3, 1), (1, 1), (0, 2), (2, 3)],
        [(0, 2), (3, 2), (1, 7)],
        [(3, 3)],
    ]
    done = [0] * 4
    for step in steps:
        spans = [Span(slots[i], done[i], n) for i, n in step]
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
    cache = KVCache(model.spec, slots=64, max_context=4096)
    assert cache.num_bytes == 0
    slot = cache.allocate()
    row = torch.zeros(1, 1, dtype=torch.int64)
    model(row, attend=cache.plan([Span(slot, 0, 1)], "cpu"))
    per_position = 2 * 2 * 2 * 4 * 8  # layers x (k, v) x G x D x fp64
    assert cache.num_bytes == MIN_LENGTH * per_position
    model(row, torch.tensor([[MIN_LENGTH]]), attend=cache.plan([Span(slot, MIN_LENGTH, 1)], "cpu"))
    assert cache.num_bytes == 2 * MIN_LENGTH * per_position


def test_slots_are_counted() -> None:
    cache = KVCache(tiny_decoder().spec, slots=3, max_context=8)
    slots = [cache.allocate() for _ in range(3)]
    assert sorted(slots) == [0, 1, 2] and (cache.num_free, cache.num_used) == (0, 3)
    cache.release(1)
    with pytest.raises(KeyError):
        cache.release(1)
    assert cache.allocate() == 1
    with pytest.raises(IndexError):
        cache.allocate()
    with pytest.raises(UserError, match="at least"):
        KVCache(tiny_decoder().spec, slots=0, max_context=8)
