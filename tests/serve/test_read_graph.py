"""Steps that read prompts beside requests that write, as one program with fixed addresses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_serve import naive, near_copy, tiny_decoder

from shoestring.serve import DraftModel, Engine, Sampling
from shoestring.serve.blocks import BlockPool
from shoestring.serve.cuda_graphs import REQUESTS
from shoestring.serve.kv_cache import Span
from shoestring.serve.read_graph import READ_REQUESTS, READ_ROWS, cut, read_fits
from shoestring.serve.runner import Batch, Runner

ALL = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=0.8, top_k=4, seed=3)]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sampling", ALL, ids=["greedy", "drawn", "cut"])
def test_the_token_behind_every_span_is_the_models(window: int | None, sampling: Sampling) -> None:
    """Whole prompts, pieces of some tiles, single rows; then a step without pieces finds all keys and values."""
    model = tiny_decoder(max_positions=256, sliding_window=window, first_window_layer=1)
    texts = torch.randint(0, 29, (4, 200), generator=torch.Generator().manual_seed(1))
    runner = Runner(model, BlockPool(300, 4), graphs=True)
    blocks = [list(range(50 * i + 49, 50 * i - 1, -1)) for i in range(4)]
    done = [0] * 4
    for nums in [(3, 0, 90, 0), (1, 7, 100, 0), (1, 1, 1, 150), (1, 70, 2, 1), (1, 1, 1, 1), (70, 1, 1, 40)]:
        part = [i for i in range(4) if nums[i]]
        spans = [Span(blocks[i], done[i], nums[i]) for i in part]
        tokens = [t for i in part for t in texts[i, done[i] : done[i] + nums[i]].tolist()]
        flight = runner.read(Batch(spans, tokens, ()), [sampling] * len(part))
        assert flight is not None
        done = [d + n for d, n in zip(done, nums, strict=True)]
        want = [naive(model, texts[i, : done[i]].tolist(), Sampling(**_one(sampling))) for i in part]
        assert flight.tokens() == want


def _one(sampling: Sampling) -> dict[str, Any]:
    return {k: getattr(sampling, k) for k in ("temperature", "top_k", "seed")} | {"max_tokens": 1}


def test_rows_that_fill_a_program_touch_nothing() -> None:
    """They have no slot, and write their block's number behind the tables."""
    runner = Runner(tiny_decoder(), BlockPool(8, 4), graphs=True)
    runner.cache.pool.num_touched = 8
    assert runner.ready() and runner._graphs is not None
    runner.read(Batch([Span([1, 2], 0, 5)], [1, 2, 3, 4, 5], ()), [Sampling()])
    for layer in range(2):
        for stored in runner.cache.stored(layer):
            assert stored[[1]].any() and stored[[2], :1].any()
            assert not stored[[0, 3, 4, 5, 6, 7]].any() and not stored[2, 1:].any()
    tables = runner._graphs.tables(READ_REQUESTS[0])
    assert tables[0, :2].tolist() == [1, 2] and not tables[1:].any()


def test_prompts_are_read_on_the_device_and_the_next_step_runs_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_decoder()
    launched: list[str] = []

    def note(name: str, method: Callable[..., Any]) -> None:
        def noted(runner: Runner, *args: Any) -> Any:
            found = method(runner, *args)
            if found is not None:
                launched.append(name)
            return found

        monkeypatch.setattr(Runner, name, noted)

    for name in ("read", "choose", "choose_next", "_run_fused"):
        note(name, getattr(Runner, name))
    engine = Engine(model, graphs=True, max_requests=3, chunk=8)
    sampling = Sampling(max_tokens=9, temperature=0.7, seed=5)
    first = engine.add([1, 2, 3], sampling)
    for _ in range(2):
        engine.step()
    assert launched == ["read", "choose_next", "choose_next"]
    launched.clear()
    prompt = [4 + i % 9 for i in range(17)]  # 7 rows beside the first one's, 7 more, and the last 3
    late = engine.add(prompt, sampling)
    while not late.new_tokens:
        before = len(first.new_tokens)
        engine.step()
        assert len(first.new_tokens) == before + 1, "those who write go on"
    # First the step that was on its way; one runs ahead behind the last that reads.
    assert launched == ["read", "read", "read", "choose_next"]
    while engine.busy:
        engine.step()
    assert [first.new_tokens, late.new_tokens] == [naive(model, p, sampling) for p in ([1, 2, 3], prompt)]
    assert "_run_fused" not in launched and engine.cache.num_used == 0


def test_a_step_that_reads_is_no_measure_and_the_one_behind_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_decoder(0)
    drafter = DraftModel(near_copy(target, 0.0), graphs=True)
    engine = Engine(target, max_requests=2, max_context=64, graphs=True, drafter=drafter)
    goodput = engine.goodput
    assert goodput is not None
    monkeypatch.setattr(goodput, "abstains", lambda *_: True)
    monkeypatch.setattr(goodput, "choose", lambda *_: 0)
    told: list[object] = []
    monkeypatch.setattr(goodput, "stepped", lambda rows, *_, ahead: told.append((rows, ahead)))
    monkeypatch.setattr(goodput, "spoiled", lambda: told.append("spoiled"))
    engine.generate([[1, 2, 3], [4, 5]], Sampling(max_tokens=4, ignore_eos=True))
    assert told == ["spoiled", (2, True), (2, True), (2, True)]


def test_what_is_too_much_for_a_program() -> None:
    few = Span([0] * 99, 0, 2)
    assert read_fits([few] * 256) and not read_fits([few] * 257)
    assert read_fits([Span([0] * 99, 0, READ_ROWS[-1])]) and not read_fits(
        [Span([0] * 99, 0, READ_ROWS[-1] + 1)]
    )
    # Else a table that a step needs would end the graphs that hold a smaller one.
    assert set(READ_REQUESTS) <= set(REQUESTS) and READ_REQUESTS[-1] == REQUESTS[-1]
    model = tiny_decoder(max_positions=700)
    engine = Engine(model, graphs=True, chunk=600)
    prompt = [random.Random(0).randrange(29) for _ in range(550)]
    assert engine.generate([prompt], Sampling(max_tokens=3))[0].token_ids == naive(
        model, prompt, Sampling(max_tokens=3)
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 16), st.data())
def test_tiles_hold_every_row_once(nums: list[int], each: int, data: st.DataObject) -> None:
    num_N = np.array(nums)
    start_N = np.array([data.draw(st.integers(0, 50)) for _ in nums])
    first_N = num_N.cumsum() - num_N
    which = np.flatnonzero(num_N > data.draw(st.integers(0, 3)))
    tiles = np.stack(cut(which, first_N, start_N, num_N, each), axis=1).tolist()
    assert len(tiles) <= sum(nums) // each + len(nums)
    rows = [
        (table, first + i, position + i)
        for table, first, position, num in tiles
        for i in range(num)
        if num <= each
    ]
    want = [(n, first_N[n] + i, start_N[n] + i) for n in which for i in range(nums[n])]
    assert sorted(rows) == want
