"""Steps that read prompts beside requests that write, as one program with fixed addresses."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_decoding import naive, naive_texts

from shoestring.formats import convert, pack, parse_format
from shoestring.methods.skipping.policies import ByContext
from shoestring.model.skip import SkipSet, Sublayer
from shoestring.serve import DraftModel, Engine, Sampling
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.graphs import REQUESTS, PendingTokens
from shoestring.serve.engine.logit_rules import LogitRules, SamplingWithRules, VerifyWithRules
from shoestring.serve.engine.prefill_graph import (
    FEW_ROWS,
    FEW_TILES,
    PREFILL_REQUESTS,
    PREFILL_ROWS,
    PrefillGraph,
    holds_prefill,
    split_by_num_rows,
    tiles_of,
)
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.engine.step_kinds import StepLimits
from shoestring.serve.speculative.verify import verify
from tiny import near_copy, tiny_decoder

SAMPLINGS = {
    "greedy": Sampling(max_tokens=1),
    "drawn": Sampling(max_tokens=1, temperature=0.8, seed=3),
    "cut": Sampling(max_tokens=1, temperature=0.8, top_k=4, seed=3),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How every step was computed."""
    names: list[str] = []
    monkeypatch.setattr(Runner, "on_launch", lambda runner, kind, *sizes: names.append(kind))
    return names


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_the_token_behind_every_span_is_the_models(window: int | None, kind: Any) -> None:
    """Whole prompts, few rows behind many, pieces of some tiles, single rows, each in one step with the others."""
    model = tiny_decoder(max_positions=256, sliding_window=window, full_layers=(0,))
    texts = torch.randint(0, 29, (4, 220), generator=torch.Generator().manual_seed(1))
    runner = Runner(model, BlockPool(300, 4), graphs=True)
    runner.prepare(["prefill"], StepLimits(4, [kind], max_rows=512))
    made = runner.num_graphs
    blocks = [list(range(60 * i + 59, 60 * i - 1, -1)) for i in range(4)]
    done = [0] * 4
    for nums in [(3, 0, 90, 0), (1, 7, 100, 0), (1, 1, 1, 150), (1, 70, 2, 1), (1, 1, 9, 16), (70, 1, 1, 40)]:
        part = [i for i in range(4) if nums[i]]
        spans = [RowSpan(blocks[i], done[i], nums[i]) for i in part]
        tokens = [t for i in part for t in texts[i, done[i] : done[i] + nums[i]].tolist()]
        flight = runner.launch_prefill(Batch(spans, tokens, ()), [SAMPLINGS[kind]] * len(part))
        assert flight is not None
        done = [d + n for d, n in zip(done, nums, strict=True)]
        assert flight.tokens() == naive_texts(
            model, [texts[i, : done[i]].tolist() for i in part], [SAMPLINGS[kind]] * len(part)
        )
    assert runner.num_graphs == made > 0


def test_rows_that_fill_a_program_touch_nothing() -> None:
    """They have no slot, and write their block's number behind the tables."""
    runner = Runner(tiny_decoder(), BlockPool(8, 4), graphs=True)
    runner.cache.pool.num_touched = 8
    runner.prepare(["prefill"], StepLimits(1, max_rows=32))
    assert runner.launch_prefill(Batch([RowSpan([1, 2], 0, 5)], [1, 2, 3, 4, 5], ()), [Sampling()]) is not None
    for layer in range(2):
        for stored in runner.cache.stored(layer):
            assert stored[[1]].any() and stored[[2], :1].any()
            assert not stored[[0, 3, 4, 5, 6, 7]].any() and not stored[2, 1:].any()
    assert runner._graphs is not None
    tables = runner._graphs.tables(PREFILL_REQUESTS[0])
    assert tables[0, :2].tolist() == [1, 2] and not tables[1:].any()


def test_prompts_are_read_on_the_device_and_the_next_step_runs_ahead(launched: list[str]) -> None:
    model = tiny_decoder()
    engine = Engine(model, graphs=True, max_requests=3, chunk=8)
    engine.warm_up()
    launched.clear()
    sampling = Sampling(max_tokens=9, temperature=0.7, seed=5)
    first = engine.add([1, 2, 3], sampling)
    for _ in range(2):
        engine.step()
    assert launched == ["prefill", "next", "next"]
    launched.clear()
    prompt = [4 + i % 9 for i in range(17)]  # 7 rows beside the first one's, 7 more, and the last 3
    late = engine.add(prompt, sampling)
    while not late.new_tokens:
        before = len(first.new_tokens)
        engine.step()
        assert len(first.new_tokens) == before + 1, "those who write go on"
    # First the step that was on its way; one runs ahead behind the last that reads.
    assert launched == ["prefill", "prefill", "prefill", "next"]
    while engine.busy:
        engine.step()
    assert [first.new_tokens, late.new_tokens] == naive_texts(model, [[1, 2, 3], prompt], [sampling] * 2)
    assert "fused" not in launched and engine.cache.pool.num_used == 0


def test_pieces_of_a_prompt_alone_are_not_waited_for(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those before the last two: whoever comes meanwhile does not wait for a whole long prompt."""
    model, prompt = tiny_decoder(), [4 + i % 9 for i in range(38)]
    engine = Engine(model, graphs=True, chunk=8)
    engine.warm_up()
    launched.clear()
    waited: list[PendingTokens] = []
    monkeypatch.setattr(PendingTokens, "wait", lambda self: waited.append(self))
    request, outputs, flights = engine.add(prompt, Sampling(max_tokens=3)), [], []
    for done in (8, 16, 24, 32):
        outputs += engine.step()
        assert request.num_computed == done and not outputs
        assert engine.runner._graphs is not None
        flights.append(engine.runner._graphs.prefills[-1])
        assert waited == flights[:-2]
    assert launched == ["prefill"] * 4
    while engine.busy:
        engine.step()
    assert request.new_tokens == naive(model, prompt, Sampling(max_tokens=3)) and "fused" not in launched


def test_a_piece_with_fewer_rows_than_a_prompt_that_ends(launched: list[str]) -> None:
    """The scheduler puts few rows first; tokens belong to those that reach their end, each with its own seed."""
    model = tiny_decoder()
    prompts = [[1 + i % 5 for i in range(num)] for num in (6, 12)]
    samplings = [Sampling(max_tokens=5, temperature=0.9, seed=s) for s in (11, 22)]
    engine = Engine(model, graphs=True, chunk=10)
    engine.warm_up()
    launched.clear()
    requests = [engine.add(p, s) for p, s in zip(prompts, samplings, strict=True)]
    engine.step()
    assert [len(r.new_tokens) for r in requests] == [1, 0] and requests[1].num_computed == 4
    while engine.busy:
        engine.step()
    assert [r.new_tokens for r in requests] == naive_texts(model, prompts, samplings)
    assert "fused" not in launched


def test_a_size_is_worth_a_graph_when_it_comes_again(launched: list[str]) -> None:
    model = tiny_decoder()
    engine = Engine(model, graphs=True)
    for turn, want in enumerate(["fused", "prefill", "prefill"]):
        launched.clear()
        engine.generate([[turn, *range(20)]], Sampling(max_tokens=4))
        assert launched[0] == want and ("fused" in launched) == (turn == 0)


def test_who_needs_logits_and_who_skips_other_layers_reads_the_other_way(launched: list[str]) -> None:
    model = tiny_decoder(num_layers=3)
    prompts = [[1, 2, 3], [4 + i % 9 for i in range(17)]]
    halves = ByContext(((3, SkipSet([Sublayer(1, "attn")])), (17, SkipSet([Sublayer(2, "mlp")]))))

    def ruled() -> list[Sampling]:  # which remember what they gained
        return [SamplingWithRules(max_tokens=9, rules=LogitRules(frequency=0.5)), SamplingWithRules(max_tokens=6)]

    def plain() -> list[Sampling]:
        return [Sampling(max_tokens=9), Sampling(max_tokens=6)]

    for options, make in (({"verify": VerifyWithRules(verify)}, ruled), ({"skip": halves}, plain)):
        texts = []
        for graphs in (False, True):
            engine = Engine(model, graphs=graphs, max_requests=2, chunk=8, **options)  # type: ignore[arg-type]
            if graphs:
                engine.warm_up()
                launched.clear()
            samplings = make()
            first = engine.add(prompts[0], samplings[0])
            for _ in range(2):
                engine.step()
            late = engine.add(prompts[1], samplings[1])
            while engine.busy:
                engine.step()
            texts.append([first.new_tokens, late.new_tokens])
        assert texts[0] == texts[1] and ("prefill" in launched) == ("skip" in options)


def test_tables_and_memory_grow_under_way() -> None:
    """More requests than any step before, keys and values that move, a step on its way: nobody's text changes."""
    model, draw = tiny_decoder(), random.Random(4)
    engine = Engine(model, graphs=True, max_requests=20, block_size=4, chunk=60)
    asked = []
    for i in range(40):
        prompt = [draw.randrange(29) for _ in range(draw.randint(1, 30))]
        asked.append((prompt, Sampling(max_tokens=draw.randint(3, 20), temperature=0.6, seed=i)))
    requests = []
    while len(requests) < len(asked) or engine.busy:
        # One by one at first, then all that are left.
        for prompt, sampling in asked[len(requests) :][: 1 if len(requests) < 12 else 28]:
            requests.append(engine.add(prompt, sampling))
        engine.step()
    assert engine.cache.num_moves > 2 * 2  # layers have keys and values
    assert [r.new_tokens for r in requests] == naive_texts(model, *zip(*asked, strict=True))


def test_a_step_that_reads_is_no_measure_and_the_one_behind_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_decoder(0)
    drafter = DraftModel(near_copy(target, 0.0), graphs=True)
    engine = Engine(target, max_requests=2, max_context=64, graphs=True, drafter=drafter)
    controller = engine.draft_controller
    assert controller is not None
    monkeypatch.setattr(controller, "would_draft", lambda *_: False)
    monkeypatch.setattr(controller, "choose", lambda *_: 0)
    told: list[object] = []
    monkeypatch.setattr(controller, "record_step", lambda rows, *_, ahead: told.append((rows, ahead)))
    monkeypatch.setattr(controller, "discard_step", lambda: told.append("spoiled"))
    engine.generate([[1, 2, 3], [4, 5]], Sampling(max_tokens=4, ignore_eos=True))
    assert told == ["spoiled", (2, True), (2, True), (2, True)]


def test_what_is_too_much_for_a_program(launched: list[str]) -> None:
    few = RowSpan([0] * 99, 0, 2)
    assert holds_prefill([few] * 256) and not holds_prefill([few] * 257)
    assert holds_prefill([RowSpan([0] * 99, 0, PREFILL_ROWS[-1])])
    assert not holds_prefill([RowSpan([0] * 99, 0, PREFILL_ROWS[-1] + 1)])
    # Else a table that the next step needs would end the graphs that hold a smaller one.
    assert set(PREFILL_REQUESTS) <= set(REQUESTS) and PREFILL_REQUESTS[-1] == REQUESTS[-1]
    model = tiny_decoder(max_positions=700)
    engine = Engine(model, graphs=True, chunk=600, max_requests=1)
    prompt = [random.Random(0).randrange(29) for _ in range(550)]
    for _ in range(2):
        launched.clear()
        (text,) = engine.generate([prompt], Sampling(max_tokens=3))
        engine.forget_prefixes()
        assert text.token_ids == naive(model, prompt, Sampling(max_tokens=3))
        assert launched[0] == "fused" and "prefill" not in launched


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 16), st.data())
def test_tiles_hold_every_row_once(nums: list[int], each: int, data: st.DataObject) -> None:
    num_N = np.array(nums)
    start_N = np.array([data.draw(st.integers(0, 50)) for _ in nums])
    first_N = num_N.cumsum() - num_N
    found = []
    one, few, rest = split_by_num_rows(num_N)
    assert len(few) <= FEW_TILES
    for which, rows in ((one, 1), (few, FEW_ROWS), (rest, each)):
        tiles = np.stack(tiles_of(which, first_N, start_N, num_N, rows), axis=1).tolist()
        most = len(which) if rows != each else sum(nums) // each + len(nums)
        assert len(tiles) <= most and all(1 <= num <= rows for *_, num in tiles)
        found += [(table, first + i, position + i) for table, first, position, num in tiles for i in range(num)]
    want = [(n, first_N[n] + i, start_N[n] + i) for n in range(len(nums)) for i in range(nums[n])]
    assert sorted(found) == want


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("format", ["dense", "int4:g32"])
def test_reading_steps_are_captured_on_the_gpu(format: str, launched: list[str]) -> None:
    """More requests than the smallest graph holds, prompts that come while others write, few rows behind long texts."""
    model = tiny_decoder(d_model=64, head_dim=16, d_ff=96, max_positions=900).float().cuda()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(0.5)
    model.compute_dtype = torch.float32
    if format != "dense":
        convert(model, [("blocks.*", parse_format(format))])
        pack(model)
    draw = random.Random(0)
    prompts = [[draw.randrange(29) for _ in range(draw.choice([3, 12, 70, 300, 800]))] for _ in range(30)]
    samplings = [Sampling(max_tokens=30, temperature=(i % 2) * 0.7, seed=i) for i in range(30)]
    want = [c.token_ids for c in Engine(model, graphs=False, max_requests=12).generate(prompts, samplings)]
    engine = Engine(model, max_requests=12, block_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step that cannot be captured says so
        engine.warm_up()
        launched.clear()
        for _ in range(2):  # the second time behind prefixes that are there
            assert [c.token_ids for c in engine.generate(prompts, samplings)] == want
    # With these prompts 19 of such steps were seen on a GPU; far fewer would mean that most prompts go the other way.
    assert launched.count("prefill") > 15 and "fused" not in launched
    assert engine.runner._graphs is not None
    made = [g for g in engine.runner._graphs._graphs.values() if isinstance(g, PrefillGraph)]
    assert made and all(g.replay != g._whole_program for g in made)


@contextmanager
def no_other_wait(device: str) -> Iterator[None]:
    """On a GPU everything that makes the host wait is an error in here, but for an event."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


MIXES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "drawn": [{"temperature": 0.8}],
    "cut": [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.1, "top_k": 5}],
    "all": [{}, {"temperature": 0.7}, {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02}],
}


@pytest.mark.parametrize(
    ("mix", "device"),
    [
        *(("cut", "cpu"), ("all", "cpu")),
        *(pytest.param(mix, "cpu", marks=pytest.mark.lab) for mix in ("greedy", "drawn")),
        *(pytest.param(mix, "cuda", marks=pytest.mark.gpu) for mix in MIXES),
    ],
)
def test_a_step_waits_for_the_device_once(
    mix: str, device: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that write and steps that read: for their tokens, where they have some, and for nothing else."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    monkeypatch.setattr("shoestring.serve.engine.graphs.STEPS_PER_LAUNCH", ())  # the wait for a launch is that for all
    model = tiny_decoder(d_model=64, head_dim=16, d_ff=96, max_positions=128).to(device, torch.float32)
    model.compute_dtype = torch.float32
    engine = Engine(model, graphs=True, max_requests=6, chunk=24, prefix_cache=False)
    engine.warm_up()
    kinds, waits = MIXES[mix], [0]
    steps: list[tuple[int, bool]] = []  # how often each waited, and whether anybody gained a token

    def serve() -> None:
        """Texts of many lengths, of which one comes after the other."""
        draw, left = random.Random(1), 9
        while left or engine.busy:
            if left and draw.random() < 0.4:
                left -= 1
                prompt = [draw.randrange(29) for _ in range(draw.choice([1, 5, 30, 60]))]
                options = {**kinds[left % len(kinds)], "seed": left, "max_tokens": draw.randint(4, 30)}
                engine.add(prompt, Sampling(**options, ignore_eos=True))
            before, outputs = waits[0], engine.step()
            steps.append((waits[0] - before, bool(outputs)))

    for _ in range(2):  # what is made when first needed may wait
        serve()
    made = engine.runner.num_graphs
    waiter, name = (torch.cuda.Event, "synchronize") if device == "cuda" else (PendingTokens, "tokens")
    wait = getattr(waiter, name)

    def counted(self: Any) -> Any:
        waits[0] += 1
        return wait(self)

    monkeypatch.setattr(waiter, name, counted)
    # The wait for the piece before the last two keeps the queue short (a test above); whether it finds the device that
    # far behind depends on the machine, and is no wait for tokens.
    monkeypatch.setattr(PendingTokens, "wait", lambda self: None)
    launched.clear()
    steps.clear()
    with no_other_wait(device):
        serve()
    assert engine.runner.num_graphs == made and "fused" not in launched
    assert launched.count("prefill") > 6 and launched.count("next") > 15
    assert len(steps) > 35 and all(num == gained for num, gained in steps)
