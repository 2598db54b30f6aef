"""Nothing that a controller may choose is made while requests run: a fake clock, on which graphs are dear to make."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.backends.cuda import cudnn_sdp_enabled

from shoestring.serve import DraftModel, Engine, Sampling
from shoestring.serve.engine import engine as engine_module
from shoestring.serve.engine import fused_decoder as fused_module
from shoestring.serve.engine import graphs
from shoestring.serve.engine.block_pool import BlockPool
from shoestring.serve.engine.draft_chain_graph import max_chain_rows
from shoestring.serve.engine.fused_decoder import FusedDecoder
from shoestring.serve.engine.graphs import REQUESTS, REQUESTS_DRAFTED, ROWS_EACH, CapturedStep, DecodeGraph, sizes_up_to
from shoestring.serve.engine.runner import Runner
from shoestring.serve.engine.step_kinds import StepLimits
from shoestring.serve.speculative.draft_length import SETTINGS, Decision, DraftLengthController, Prospects
from tiny import near_copy, tiny_decoder

PRICE = 50.0  # seconds that a graph takes to make, on the fake clock; a step takes one


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.making = 0.0
        made, clock = CapturedStep.__init__, self

        def make(graph: CapturedStep, *args: Any, **options: Any) -> None:
            clock.now += PRICE
            clock.making += PRICE
            made(graph, *args, **options)

        monkeypatch.setattr(CapturedStep, "__init__", make)
        monkeypatch.setattr(engine_module.time, "perf_counter", self.read)

    def read(self) -> float:
        self.now += 0.5
        return self.now


def any_length(draw: random.Random, prospects: Prospects, needed: float) -> Decision:
    most = prospects.max_length or 0
    lengths = [g for g in (0, *SETTINGS.lengths) if g <= most]
    return Decision(draw.choice(lengths), max(lengths), 1.0, needed)


def requests(num: int, seed: int) -> tuple[list[list[int]], list[Sampling]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(29) for _ in range(draw.randint(17, 24))] for _ in range(num)]
    samplings = [
        Sampling(max_tokens=draw.randint(8, 30), temperature=draw.choice((0.0, 0.8)), seed=i) for i in range(num)
    ]
    return prompts, samplings


@pytest.mark.parametrize("max_requests", [1, 3, 6])
@pytest.mark.few(2)
def test_no_request_waits_for_a_graph(max_requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_decoder(0)
    asked = requests(6, max_requests)
    want = [c.token_ids for c in Engine(target).generate(*asked)]
    clock, draw = Clock(monkeypatch), random.Random(1)
    drafter = DraftModel(near_copy(target, 0.03), graphs=True)
    engine = Engine(target, max_requests=max_requests, max_context=64, graphs=True, drafter=drafter, prefix_cache=False)
    assert engine.draft_controller is not None
    engine.warm_up()
    assert clock.making > 0
    before = clock.making
    # Whatever it chooses, and however often it changes its mind.
    monkeypatch.setattr(DraftLengthController, "_pick", lambda self, num, prospects: any_length(draw, prospects, 0.1))
    monkeypatch.setattr(DraftLengthController, "would_draft", lambda self, num, *rest: draw.random() >= 0.3)
    assert [c.token_ids for c in engine.generate(*asked)] == want
    assert engine.stats.num_accepted > 10
    assert clock.making == before, "a graph was made while requests were running"
    moved = engine.cache.num_moves, drafter.cache.num_moves
    assert [c.token_ids for c in engine.generate(*asked)] == want
    assert (engine.cache.num_moves, drafter.cache.num_moves) == moved and clock.making == before


@pytest.mark.parametrize("max_requests", [1, 5, 9])
@pytest.mark.few(2)
def test_nor_without_a_drafter(max_requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody prepared the engine, as a server does; else graphs are made when first needed."""
    target = tiny_decoder(0)
    prompts, samplings = requests(12, max_requests)
    want = [c.token_ids for c in Engine(target).generate(prompts, samplings)]
    clock = Clock(monkeypatch)
    engine = Engine(target, max_requests=max_requests, max_context=64, chunk=60, graphs=True)
    assert [c.token_ids for c in engine.generate(prompts[:1], samplings[:1])] == want[:1]
    assert 0 < clock.making < 4 * PRICE, "a few, of those that one request needs"
    engine.warm_up()
    before, moved = clock.making, engine.cache.num_moves
    assert [c.token_ids for c in engine.generate(prompts, samplings)] == want
    assert clock.making == before and engine.cache.num_moves == moved


class Variants:
    """Kernels of passes that are no graphs, as often as they would be compiled: what their compilation depends on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.met: set[tuple[object, ...]] = set()
        self._eager, met = False, self.met
        run, attend, store = Runner._run_fused, fused_module.paged_attention, fused_module.rope_store_

        def ran(runner: Runner, *args: Any) -> Any:
            self._eager = True
            try:
                return run(runner, *args)
            finally:
                self._eager = False

        def attended(q: Any, keys: Any, values: Any, tables: Any, *rest: Any, **options: Any) -> Any:
            if self._eager:
                width = tables.stride(0)
                rows = 1 << (options["rows_per_tile"] - 1).bit_length()
                met.add(("attention", rows, options["num_splits"], width == 1, width % 16 == 0))
            return attend(q, keys, values, tables, *rest, **options)

        def stored(qkv: Any, *rest: Any) -> Any:
            if self._eager:
                met.add(("store", len(qkv) < 256))
            return store(qkv, *rest)

        hidden, logits = FusedDecoder.hidden, FusedDecoder.logits

        def passed(fused: FusedDecoder, tokens: Any, rows: Any, *rest: Any) -> Any:
            if self._eager and rows.prompts is None and not rows.single:
                met.add(("products", fused.spec.num_layers, len(tokens)))  # which choose kernels by rows
            return hidden(fused, tokens, rows, *rest)

        def ended(fused: FusedDecoder, x: Any) -> Any:
            if self._eager:
                met.add(("head", fused.spec.num_layers, len(x)))
            return logits(fused, x)

        monkeypatch.setattr(FusedDecoder, "hidden", passed)
        monkeypatch.setattr(FusedDecoder, "logits", ended)
        whole = F.scaled_dot_product_attention

        def whole_attended(q: Any, *rest: Any, **options: Any) -> Any:
            if self._eager:  # cuDNN makes a plan for every shape, torch's own kernels are there
                met.add(("whole texts", (q.shape, q.stride()) if cudnn_sdp_enabled() else "any"))
            return whole(q, *rest, **options)

        monkeypatch.setattr(F, "scaled_dot_product_attention", whole_attended)
        monkeypatch.setattr(Runner, "_run_fused", ran)
        monkeypatch.setattr(fused_module, "paged_attention", attended)
        monkeypatch.setattr(fused_module, "rope_store_", stored)


def test_nothing_is_compiled_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces, drafters that pause and read, steps in which a few have drafts: all kernels are there."""
    target, draw = tiny_decoder(0), random.Random(2)
    variants = Variants(monkeypatch)
    engine = Engine(
        target,
        max_requests=12,
        max_context=64,
        chunk=300,
        graphs=True,
        drafter=DraftModel(near_copy(target, 0.03), graphs=True),
        prefix_cache=False,
    )
    engine.warm_up()
    known = set(variants.met)
    assert len(known) > 4
    monkeypatch.setattr(DraftLengthController, "_pick", lambda self, num, prospects: any_length(draw, prospects, 0.0))
    monkeypatch.setattr(DraftLengthController, "would_draft", lambda self, num, *rest: draw.random() >= 0.8)
    monkeypatch.setattr(
        DraftLengthController,
        "drafted_requests",
        lambda self, requests: draw.sample(requests, draw.randint(1, min(len(requests), 3))),
    )
    for _ in range(4):
        prompts = [[draw.randrange(29) for _ in range(draw.randint(1, 40))] for _ in range(draw.randint(1, 14))]
        engine.generate(prompts, [Sampling(max_tokens=draw.randint(1, 24), seed=i) for i in range(len(prompts))])
    assert engine.stats.num_drafted > 100 and variants.met == known


def test_a_chain_of_more_requests_than_any_step_before() -> None:
    """Chains are padded to other numbers of requests than steps with one row each: tables must hold those."""
    target = tiny_decoder(0)
    prompts = [[1 + i % 20] * 3 for i in range(20)]
    want = [c.token_ids for c in Engine(target, max_requests=20).generate(prompts, Sampling(max_tokens=6))]
    drafter = DraftModel(near_copy(target, 0.03), graphs=True)
    engine = Engine(target, max_requests=20, graphs=True, drafter=drafter, num_drafts=2)
    assert [c.token_ids for c in engine.generate(prompts, Sampling(max_tokens=6))] == want


def test_unprepared_steps_are_not_taken_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_decoder(0)
    clock = Clock(monkeypatch)
    drafter = DraftModel(near_copy(target, 0.0), graphs=True)
    engine = Engine(target, max_requests=2, max_context=64, graphs=True, drafter=drafter)
    assert engine.draft_controller is not None
    engine.draft_controller.costs.pass_seconds.__init__(lambda rows: 1.0)  # type: ignore[misc]
    engine.warmup.done = True  # skipped: everything is made when first needed
    prompts, _ = requests(10, 3)
    engine.generate(prompts, Sampling(max_tokens=25))
    assert clock.making > 2 * PRICE
    assert max(engine.draft_controller.costs.pass_seconds.known.values()) < PRICE / 2
    assert max(engine.draft_controller.costs.seconds_per_draft.values()) < PRICE / 8


def test_the_sizes_that_are_made_are_those_that_are_met() -> None:
    assert sizes_up_to(1, REQUESTS) == [1] and sizes_up_to(3, REQUESTS_DRAFTED) == [1, 2, 4]
    assert sizes_up_to(64, REQUESTS) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert {g + 1 for g in SETTINGS.lengths} <= set(ROWS_EACH)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 64, 512])
@pytest.mark.few(3)
def test_what_a_step_costs_is_measured_as_a_graph(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile that fell back to single launches would make long drafts look dear for ever."""
    made: list[tuple[int, int]] = []
    init = DecodeGraph.__init__

    def noted(graph: DecodeGraph, owner: Any, num: int, each: int, *rest: Any) -> None:
        made.append((num, each))
        init(graph, owner, num, each, *rest)

    monkeypatch.setattr(DecodeGraph, "__init__", noted)
    assert Runner(tiny_decoder(0), BlockPool(4, 16), graphs=True).measure_seconds(num_rows) > 0
    assert len(made) == 1
    num, each = made[0]
    assert num_rows <= num * each <= num_rows + 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_request_waits_for_a_graph_on_the_gpu() -> None:
    target = tiny_decoder(0).float().cuda()
    target.compute_dtype = torch.float32
    copy = near_copy(tiny_decoder(0), 0.03).float().cuda()
    copy.compute_dtype = torch.float32
    asked = requests(9, 5)
    want = [c.token_ids for c in Engine(target, max_requests=4).generate(*asked)]
    engine = Engine(target, max_requests=4, max_context=64, drafter=DraftModel(copy), prefix_cache=False)
    engine.warm_up()
    made = engine.num_graphs
    assert made > 0
    for _ in range(3):
        assert [c.token_ids for c in engine.generate(*asked)] == want
    assert engine.num_graphs == made


def test_nothing_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is gone leaves a cycle that holds a graph; destroyed in the middle of a capture it spoils it."""
    capturing, spoiled = [False], [False]

    class Doomed:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            spoiled[0] |= capturing[0]

    @contextmanager
    def capture(graph: object, **_: object) -> Iterator[None]:
        capturing[0] = True
        for _i in range(3):
            Doomed()
        yield
        [[i] for i in range(3000)]  # enough for the collector to wake up
        capturing[0] = False

    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr("shoestring.kernels.runtime.capture_stream.capture_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(graphs, "seconds_of", lambda replay: 1.0)
    runner = Runner(tiny_decoder(0), BlockPool(4, 16), graphs=True)
    runner.prepare(["decode"], StepLimits())
    assert runner._graphs is not None
    (step,) = runner._graphs._graphs.values()
    threshold = gc.get_threshold()
    gc.collect()
    gc.set_threshold(50, 1, 1)
    try:
        with capture(None):
            pass
        assert spoiled[0], "the test would not notice"
        gc.collect()
        spoiled[0] = False
        step._capture()
        assert step.replay is graph.replay and not spoiled[0] and gc.isenabled()
    finally:
        gc.set_threshold(*threshold)


def test_reading_a_prompt_is_no_measure_of_drafting() -> None:
    """A drafter's first proposals read whole prompts: paid for, and not taken for what every draft costs."""
    controller = DraftLengthController(lambda rows: 1.0)
    for _ in range(5):
        controller.record_drafting(64, 4, 80.0, caught_up=True)
        assert controller.step.draft_seconds == 80.0
    assert not controller.costs.seconds_per_draft
    target = tiny_decoder(0)
    drafter = DraftModel(near_copy(target, 0.0), graphs=True)
    engine = Engine(target, max_requests=2, max_context=64, graphs=True, drafter=drafter, prefix_cache=False)
    told: list[bool] = []
    assert engine.draft_controller is not None
    engine.draft_controller.record_drafting = lambda num, g, seconds, caught_up: told.append(not caught_up)  # type: ignore[method-assign]
    engine.draft_controller.budget.seconds = 100.0  # however slow the machine is now
    prompts, _ = requests(2, 3)
    engine.generate(prompts, Sampling(max_tokens=30))
    assert not told[0] and any(told[1:])


def test_a_chain_holds_what_fits() -> None:
    assert [max_chain_rows(n) for n in (1, 4, 33, 64, 65, 200, 257)] == [9, 9, 5, 5, 2, 2, 0]


def test_passes_for_nobody_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = tiny_decoder(0), []
    monkeypatch.setattr(Runner, "on_launch", lambda runner, kind, *sizes: passes.append(kind))
    runner = Runner(model, BlockPool(4, 16), graphs=True)
    runner.prepare(["eager"], StepLimits(max_rows=64))
    first = passes.count("fused")
    passes.clear()
    runner.prepare(["eager"], StepLimits(max_rows=64))
    assert first > 10 and not passes
    with torch.no_grad():
        model.embed.weight.mul_(2.0)
    runner.refresh()
    runner.prepare(["eager"], StepLimits(max_rows=64))
    assert passes.count("fused") == first, "other weights may have other kernels"


def test_drafts_are_for_as_many_rows_as_all_requests_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all but one are about to end, too: the cost of more rows than a step has would be measured while they
    wait."""
    target = tiny_decoder(0)
    drafter = DraftModel(near_copy(target, 0.0), graphs=True)
    engine = Engine(target, max_requests=8, max_context=64, chunk=32, drafter=drafter, graphs=True)
    assert engine.draft_controller is not None
    asked, decide = [], engine.draft_controller._decide

    def noted(num: int, prospects: Callable[[], Prospects]) -> Decision:
        asked.append((num, prospects()[0] or 0))
        return decide(num, prospects)

    monkeypatch.setattr(engine.draft_controller, "_decide", noted)
    samplings = [Sampling(max_tokens=20 if i == 0 else 2, ignore_eos=True) for i in range(8)]
    engine.generate([[i, 2, 3] for i in range(8)], samplings)
    assert asked[0] == (8, 3) and all(num * (1 + limit) <= 32 for num, limit in asked)


def test_costs_are_known_where_a_chunk_is_no_power_of_two() -> None:
    target = tiny_decoder(0)
    drafter = DraftModel(near_copy(target, 0.0), graphs=True)
    engine = Engine(target, max_requests=8, max_context=64, chunk=40, drafter=drafter, graphs=True)
    engine.warm_up()
    assert engine.draft_controller is not None
    known = set(engine.draft_controller.costs.pass_seconds.known)
    engine.generate([[i, 2, 3] for i in range(8)], Sampling(max_tokens=20, ignore_eos=True))
    assert set(engine.draft_controller.costs.pass_seconds.known) == known, "measured while requests waited"


def test_what_a_cpu_compiles_is_there_before_the_first_request() -> None:
    engine = Engine(tiny_decoder(0), graphs=False)
    engine.warm_up()
    assert engine.runner._weights is not None, "made with the weights as they are"
