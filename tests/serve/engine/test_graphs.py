"""Steps with fixed addresses: fused forward, static buffers, tokens that stay on the device, steps that run
ahead. Without a GPU the same program runs uncaptured; `gpu` tests capture it."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from naive_decoding import LookupDrafter, naive, naive_texts
from torch import Tensor

from shoestring.formats import convert, pack, parse_format
from shoestring.kernels.attention.decode_attention import decode_attention_ref_
from shoestring.kernels.attention.paged_attention import paged_attention
from shoestring.kernels.runtime.compile_ahead import rehearsal
from shoestring.kernels.runtime.host_ring import to_device
from shoestring.kernels.sampling.sample_tokens import sample_tokens_ref_
from shoestring.model import Decoder
from shoestring.model.skip import SkipSet, StandIn, Sublayer
from shoestring.serve import DraftModel, Engine, Sampling
from shoestring.serve.engine import fused_decoder, graphs
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.engine import Request
from shoestring.serve.engine.fused_decoder import FusedDecoder, unusable
from shoestring.serve.engine.graphs import DecodeGraph, DecodeShape, GraphCache
from shoestring.serve.engine.kv_cache import cache_root, modules_of
from shoestring.serve.engine.logit_rules import LogitRules, SamplingWithRules, VerifyWithRules
from shoestring.serve.engine.merged_linear import merge_linears
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.engine.step_kinds import StepLimits
from shoestring.serve.speculative.draft_model import trim_head
from shoestring.serve.speculative.verify import verify
from tiny import near_copy, tiny_decoder

SHAPES = {
    "llama": {},
    "qwen3": {"qk_norm": True, "tied": False, "qkv_bias": True},
    "gpt2": {
        "norm": "layer",
        "act": "gelu_tanh",
        "positions": "learned",
        "num_kv_heads": 4,
        "mlp_bias": True,
        "out_bias": True,
        "qkv_bias": True,
    },
    "window": {"sliding_window": 5, "full_layers": (0,)},
    "geglu": {"act": "geglu"},
    "geglu_tanh": {"act": "geglu_tanh", "mlp_bias": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_fused_forward_is_the_models(shape: str) -> None:
    """Whole prompts, chunks behind others, drafts and single rows: fused and as a graph, against the full forward."""
    model = tiny_decoder(**SHAPES[shape])
    tokens = torch.randint(0, 29, (2, 40), generator=torch.Generator().manual_seed(0))
    want = model(tokens)
    runner = Runner(model, BlockPool(30, 4), graphs=True)
    blocks = [list(range(11, 0, -1)), list(range(12, 23))]
    done = [0, 0]
    for nums in [(7, 7), (1, 1), (20, 0), (3, 20), (1, 2), (1, 1)]:
        part = [i for i in (0, 1) if nums[i]]
        spans = [RowSpan(blocks[i], done[i], nums[i]) for i in part]
        ids = [t for i in part for t in tokens[i, done[i] : done[i] + nums[i]].tolist()]
        got = runner.forward(Batch(spans, ids, range(len(ids))))
        expect = torch.cat([want[i, done[i] : done[i] + nums[i]] for i in part])
        torch.testing.assert_close(got, expect, rtol=1e-4, atol=1e-4)  # norms are fp32 in the model
        done = [d + n for d, n in zip(done, nums, strict=True)]


def packed_decoder(format: str) -> Decoder:
    model = tiny_decoder().float()
    model.compute_dtype = torch.float32
    convert(model, [("blocks.*", parse_format(format))])
    pack(model)
    return model


def attention_ways(monkeypatch: pytest.MonkeyPatch, short_context: int) -> list[str]:
    """How each attention of single rows is computed from now on: by the definition of the one kernel, which does not
    run here, or by the three."""
    ways: list[str] = []

    def one(*args: Any, **options: Any) -> Tensor:
        ways.append("one")
        return decode_attention_ref_(*args, **options)

    def three(*args: Any, **options: Any) -> Tensor:
        if options["rows_per_tile"] == 1:
            ways.append("three")
        return paged_attention(*args, **options)

    monkeypatch.setattr(fused_decoder, "SHORT_CONTEXT", short_context)
    monkeypatch.setattr(fused_decoder, "decode_attention_usable", lambda *sizes: True)
    monkeypatch.setattr(fused_decoder, "decode_attention_", one)
    monkeypatch.setattr(fused_decoder, "paged_attention", three)
    return ways


@pytest.mark.parametrize(("page", "several"), [(16, "one"), (4, "three")])
def test_several_requests_attend_in_one_kernel_behind_dense_products(
    page: int, several: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the matrix units take heads and blocks, and there are enough of them."""
    model, ways, logits = tiny_decoder(head_dim=64), attention_ways(monkeypatch, 10), []
    monkeypatch.setattr("shoestring.serve.engine.fused_decoder.PAIRS_IN_ONE", 2 * model.spec.num_kv_heads)
    for num in (1, 2):  # a second request changes nothing for the first
        runner = Runner(model, BlockPool(8, page), graphs=True)
        spans = [RowSpan([2 * n, 2 * n + 1], 0, 1) for n in range(num)]
        logits.append(runner.forward(Batch(spans, [3, 4][:num], list(range(num))))[0])
    assert ways == ["three", "three", several, several]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("skip", [None, SkipSet([Sublayer(1, "attn")])])
def test_a_long_context_has_a_graph_of_its_own(skip: SkipSet | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind packed products a step of one row attends in one kernel, beyond a context in three: another program. With
    a skip set, too, where other steps are one kernel. The two ways share the KV cache, and each is compared."""
    model = packed_decoder("int4:g8")
    tokens = torch.randint(0, 29, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    ways = attention_ways(monkeypatch, 10)
    logits = []
    for graphs_on in (False, True):
        runner = Runner(model, BlockPool(8, 4), graphs=graphs_on)
        steps = [Batch([RowSpan([5, 1, 2], n, 1)], [token], [0]) for n, token in enumerate(tokens)]
        logits.append(torch.cat([runner.forward(step, skip) for step in steps]))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    num_layers = 2 if skip is None else 1
    assert ways == ["one"] * 10 * num_layers + ["three"] * 2 * num_layers
    assert runner._graphs is not None
    before = runner._graphs.num_graphs
    runner._graphs.prepare(DecodeShape(1, 1, "logits", skip))
    assert runner._graphs.num_graphs == before
    in_one_kernel = property(lambda self: True)
    monkeypatch.setattr(FusedDecoder, "in_one_kernel", in_one_kernel)
    assert runner._graphs.long_differs(1, skip) == (skip is not None)


def test_a_step_in_one_kernel_lives_on_while_another_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addresses are in graphs that were captured; measuring, on a cache of its own, must not free them."""
    model = tiny_decoder()
    made: list[weakref.ref[Any]] = []

    class OneKernel:
        shape = SimpleNamespace(vocab=model.spec.vocab_size)

        def __call__(self, *args: Tensor) -> Tensor:
            return torch.zeros(1, self.shape.vocab)

    def make(self: FusedDecoder, cache: object) -> OneKernel:
        step = OneKernel()
        made.append(weakref.ref(step))
        return step

    monkeypatch.setattr(FusedDecoder, "_make_row_step", make)
    runner = Runner(model, BlockPool(8, 4, grows=True), graphs=True)
    row = Batch([RowSpan([5, 1, 2], 0, 1)], [3], [0])
    runner.forward(row)
    runner.measure_seconds(1)
    assert len(made) == 2
    gc.collect()
    assert made[0]() is not None and made[1]() is None, "the other one is gone with its cache"
    runner.forward(row)
    assert len(made) == 2
    runner.cache.num_moves += 1  # the addresses that it holds are void
    runner.forward(row)
    gc.collect()
    assert len(made) == 3 and made[0]() is None


def test_a_chain_of_drafts_with_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes after the first have one row: one kernel for attention, then three, and the same text."""
    target, drafter = tiny_decoder(), packed_decoder("int4:g8")
    sampling = Sampling(max_tokens=24, ignore_eos=True)
    plain = Engine(target, graphs=False)
    want = plain.generate([[1, 2, 3]], sampling)[0].token_ids
    ways = attention_ways(monkeypatch, 16)
    accepted = []
    for graphs_on in (False, True):
        engine = Engine(target, drafter=DraftModel(drafter, graphs=graphs_on), num_drafts=3, graphs=False)
        assert engine.generate([[1, 2, 3]], sampling)[0].token_ids == want
        accepted.append(engine.stats.num_accepted)
    assert accepted[0] == accepted[1] > 4
    num_short = ways.index("three")
    assert num_short >= 8 and ways == ["one"] * num_short + ["three"] * (len(ways) - num_short)
    assert len(ways) - num_short >= 8


def test_layers_side_by_side_hold_nothing_twice() -> None:
    model = tiny_decoder()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    FusedDecoder(model)
    attn = model.blocks[0].attn
    assert attn.k.weight.untyped_storage().data_ptr() == attn.q.weight.untyped_storage().data_ptr()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    where = [p.data_ptr() for p in model.parameters()]
    FusedDecoder(model)  # a second engine on the same model moves nothing
    assert [p.data_ptr() for p in model.parameters()] == where


@pytest.mark.parametrize("format", ["int4:g8", "nf4:g8"])
def test_packed_layers_are_stacked_part_by_part(format: str) -> None:
    model = packed_decoder(format)
    attn = model.blocks[0].attn
    x = torch.randn(3, 16)
    want = torch.cat([attn.q(x), attn.k(x), attn.v(x)], dim=-1)
    linear = merge_linears([attn.q, attn.k, attn.v], torch.float32)
    assert linear.format is not None and not linear.separate
    torch.testing.assert_close(linear(x), want)
    torch.testing.assert_close(torch.cat([attn.q(x), attn.k(x), attn.v(x)], dim=-1), want)
    text = Engine(model, graphs=True).generate([[1, 2, 3]], Sampling(max_tokens=8))[0]
    assert text.token_ids == naive(model, [1, 2, 3], Sampling(max_tokens=8))


def test_a_head_of_bytes() -> None:
    """Eight bits with a scale for each row: read as bytes by the step of one request, decoded by others."""
    model = tiny_decoder(tied=False).float()
    model.compute_dtype = torch.float32
    convert(model, [("head", parse_format("int8:g0"))], skip=())
    pack(model)
    engine = Engine(model, graphs=True)
    assert engine.runner.fast
    prompts = [[1, 2, 3], [4, 5]]
    want = [naive(model, p, Sampling(max_tokens=8)) for p in prompts]
    assert [engine.generate([p], Sampling(max_tokens=8))[0].token_ids for p in prompts] == want
    assert [c.token_ids for c in engine.generate(prompts, Sampling(max_tokens=8))] == want


def test_sharded_and_hooked_models_run_plain() -> None:
    model = tiny_decoder()
    assert unusable(model) is None
    model.blocks[0].mlp.register_forward_hook(lambda *_: None)
    assert unusable(model) is not None
    with pytest.raises(ValueError, match="hooks"):
        Engine(model, graphs=True)


@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_gives_the_text_of_the_naive_loop(seed: int) -> None:
    """Greedy and sampled requests that arrive over time, on pools too small for all, with and without drafts."""
    rng = random.Random(seed)
    model = tiny_decoder(seed, **(SHAPES["window"] if seed % 2 else {}))
    drafter = None
    if seed >= 2:
        drafter = LookupDrafter() if seed % 2 else DraftModel(near_copy(model, 0.02))
    engine = Engine(
        model,
        max_requests=rng.randint(2, 5),
        chunk=rng.choice([3, 8, 40]),
        block_size=rng.choice([1, 4, 16]),
        num_blocks=None if seed % 3 else 64 // rng.choice([1, 4]) + 20,
        max_context=None if seed % 3 else 20,
        drafter=drafter,
        num_drafts=rng.randint(1, 4),
        graphs=True,
    )
    todo = []
    for _ in range(9):
        prompt = [rng.randrange(29) for _ in range(rng.randint(1, 12))]
        heat = rng.choice([0.0, 0.0, 0.8])
        sampling = Sampling(
            temperature=heat,
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.01]),
            seed=rng.randrange(1000),
            max_tokens=rng.randint(1, 8),
        )
        todo.append((prompt, sampling))
    requests: list[tuple[Request, list[int]]] = []
    while todo or engine.busy:
        if todo and rng.random() < 0.5:
            prompt, sampling = todo.pop()
            want = naive(model, prompt, sampling)
            requests.append((engine.add(prompt, sampling), want))
        if rng.random() < 0.05 and engine.running:
            engine.abort(rng.choice(engine.running))
        engine.step()
    for request, want in requests:
        if request.finish_reason != "abort":
            assert request.new_tokens == want[: len(request.new_tokens)] and request.new_tokens
            assert len(request.new_tokens) == min(len(want), engine.max_context - request.num_prompt)
    assert engine.cache.pool.num_used == 0


def test_a_step_runs_ahead_and_its_tokens_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder()
    sent: list[object] = []
    launch = GraphCache.launch

    def spy(self: GraphCache, spans: Sequence[RowSpan], tokens: object, *rest: object) -> object:
        sent.append(tokens)
        return launch(self, spans, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(GraphCache, "launch", spy)
    engine = Engine(model, graphs=True)
    sampling = Sampling(max_tokens=9, temperature=0.7, seed=3)
    request = engine.add([1, 2, 3], sampling)
    lengths = []
    while engine.busy:
        engine.step()
        lengths.append(len(request.new_tokens))
    assert request.new_tokens == naive(model, [1, 2, 3], sampling)
    assert lengths == list(range(1, 10)), "one token a step, as ever"
    # A prompt of a new size is read launch by launch; then one launch with tokens, the rest without.
    assert sent[0] == [request.new_tokens[0]] and sent[1:] == [None] * 7


def test_a_request_that_ends_leaves_the_step_that_ran_ahead() -> None:
    """End-of-text and aborts are noticed one launch late: the others must not see it."""
    model = tiny_decoder()
    prompts = [[1, 2, 3], [4, 5], [6]]
    texts = naive_texts(model, prompts, [Sampling(max_tokens=20)] * 3)
    eos = texts[0][4]
    wants = [t[: t.index(eos) + 1] if eos in t else t for t in texts]
    engine = Engine(model, graphs=True, eos_ids=[eos])
    requests = [engine.add(p, Sampling(max_tokens=20)) for p in prompts]
    for _ in range(8):
        engine.step()
    engine.abort(requests[2])
    late = engine.add([1, 2, 3], Sampling(max_tokens=20))  # takes over freed blocks
    while engine.busy:
        engine.step()
    assert [r.new_tokens for r in requests[:2]] == wants[:2] and late.new_tokens == wants[0]
    assert requests[2].new_tokens == wants[2][: len(requests[2].new_tokens)]
    assert engine.cache.pool.num_used == 0


@pytest.mark.parametrize("num", [2, 4])
def test_several_steps_are_one_launch(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that come, end at any token and are aborted while groups of steps are on their way: those of the naive
    loop, a token a step, and no block is left over."""
    monkeypatch.setattr(DecodeGraph, "steps_per_launch", num)
    launched: list[int] = []
    monkeypatch.setattr(Runner, "on_launch", lambda runner, kind, rows, steps=1: launched.append(steps))
    model, rng, eos = tiny_decoder(max_positions=48), random.Random(num), 7
    engine = Engine(model, max_requests=3, block_size=2, num_blocks=60, graphs=True, eos_ids=[eos])
    requests: list[tuple[Request, list[int]]] = []
    while len(requests) < 8 or engine.busy:
        if len(requests) < 8 and rng.random() < 0.15:
            prompt = [rng.randrange(29) for _ in range(rng.randint(1, 9))]
            sampling = Sampling(temperature=rng.choice([0.0, 0.8]), seed=len(requests), max_tokens=rng.randint(1, 60))
            requests.append((engine.add(prompt, sampling), naive(model, prompt, sampling, frozenset([eos]))))
        if rng.random() < 0.01 and engine.running:
            engine.abort(rng.choice(engine.running))
        before = [len(r.tokens) for r, _ in requests]
        engine.step()
        assert all(len(r.tokens) - n <= 1 for (r, _), n in zip(requests, before, strict=True))
    for request, want in requests:
        whole = len(want) if request.finish_reason != "abort" else len(request.new_tokens)
        assert request.new_tokens == want[:whole]
    assert engine.cache.pool.num_used == 0 and set(launched) == {1, num} and launched.count(num) > 10


@pytest.mark.parametrize("drafter", ["none", "model", "skip"])
def test_launches_of_several_steps_are_prepared_where_they_happen(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of them a text has depends on the time of a step, which a rehearsal cannot tell: it meets all. With drafts
    steps are launched one at a time."""
    model, plain, made = tiny_decoder(), DecodeGraph.__init__, []

    def init(graph: DecodeGraph, *given: Any, **options: Any) -> None:
        plain(graph, *given, **options)
        graph._seconds = graphs.GROUP_SECONDS / 4
        made.append((type(graph).__name__, graph.rows_each, graph.num_steps))

    monkeypatch.setattr(DecodeGraph, "__init__", init)
    skip = SkipSet((Sublayer(1, "attn"),)) if drafter == "skip" else None
    guess = DraftModel(near_copy(model, 0.1), graphs=True) if drafter == "model" else None
    engine = Engine(model, max_requests=1, max_context=64, graphs=True, drafter=guess, draft_skip=skip)
    with rehearsal():
        limits = StepLimits(grouped=engine.drafter is None, rehearsed=[1])
        engine.runner.prepare(["decode"], limits, rehearse=True)
    assert sorted({steps for _, _, steps in made}) == ([1, 2, 4] if drafter == "none" else [1])
    made.clear()
    engine.warm_up()
    assert len(made) > 1 and sorted({steps for _, _, steps in made}) == ([1, 4] if drafter == "none" else [1])


def test_rules_and_log_probabilities_see_logits() -> None:
    model = tiny_decoder()
    plain, made = (
        Engine(model, verify=VerifyWithRules(verify)),
        Engine(model, verify=VerifyWithRules(verify), graphs=True),
    )

    def ask(engine: Engine) -> list[object]:
        samplings = [
            SamplingWithRules(max_tokens=6, rules=LogitRules(bias=((3, 2.0),), frequency=0.5)),
            SamplingWithRules(max_tokens=6, num_logprobs=2),
            SamplingWithRules(max_tokens=6, temperature=0.9, seed=5),
        ]
        return [
            (c.token_ids, s.history.tokens, [(t.token, [i for i, _ in t.top]) for t in s.history.logprobs])
            for c, s in zip(engine.generate([[1, 2]] * 3, samplings), samplings, strict=True)
        ]

    assert ask(plain) == ask(made)
    alone = SamplingWithRules(
        max_tokens=6
    )  # asks for nothing: chosen on the device, and its history filled all the same
    assert made.generate([[1, 2]], alone)[0].token_ids == alone.history.tokens


def test_skip_sets_have_graphs_of_their_own() -> None:
    model = tiny_decoder(num_layers=3)
    skip = SkipSet([Sublayer(1, "attn"), Sublayer(2, "mlp")])
    asked = ([[1, 2, 3], [5, 6]], Sampling(max_tokens=10))
    want = Engine(model, skip=skip).generate(*asked)
    engine = Engine(model, skip=skip, graphs=True)
    assert [c.token_ids for c in engine.generate(*asked)] == [c.token_ids for c in want]
    drafting = Engine(model, draft_skip=skip, num_drafts=3, graphs=True)
    whole = Engine(model).generate(*asked)
    assert [c.token_ids for c in drafting.generate(*asked)] == [c.token_ids for c in whole]
    assert drafting.stats.num_drafted


def test_stand_ins_are_part_of_the_product_before_them() -> None:
    """Single rows: runs of skipped sublayers, at the beginning, in the middle and at the end, scales alone, shifts
    alone, per channel and for the whole row, against the model's own forward; and more rows at once."""
    model, g = tiny_decoder(num_layers=5), torch.Generator().manual_seed(3)
    width = model.spec.d_model

    def stand(scale: int, shift: int) -> StandIn:
        made = [torch.rand(n, generator=g) + 0.5 if n else None for n in (scale, shift)]
        return StandIn(*made)

    skip = SkipSet(
        {
            Sublayer(0, "attn"): stand(1, width),
            Sublayer(1, "attn"): stand(1, width),
            Sublayer(2, "attn"): StandIn(),
            Sublayer(2, "mlp"): stand(width, 0),
            Sublayer(3, "attn"): stand(0, width),
            Sublayer(4, "mlp"): stand(1, 0),
        }
    )
    joined = skip.after(5, width, torch.device("cpu"))
    assert set(joined) == {Sublayer(0, "mlp"), Sublayer(1, "mlp"), Sublayer(4, "attn")}
    assert joined is skip.after(5, width, torch.device("cpu"))  # a graph may hold on to them
    assert SkipSet([Sublayer(1, "attn")]).after(5, width, torch.device("cpu")) == {Sublayer(0, "mlp"): None}
    tokens = torch.randint(0, 29, (1, 14), generator=g)
    want = model(tokens, skip=skip)[0]
    runner = Runner(model, BlockPool(9, 4), graphs=True)
    done, blocks = 0, list(range(8))
    for num in (3, 1, 1, 4, 1, 1, 3):
        ids = tokens[0, done : done + num].tolist()
        got = runner.forward(Batch([RowSpan(blocks, done, num)], ids, range(num)), skip)
        torch.testing.assert_close(got, want[done : done + num], rtol=1e-4, atol=1e-4)
        done += num
    assert not torch.allclose(model(tokens)[0], want, atol=0.1)


def test_changed_weights_are_noticed() -> None:
    model = tiny_decoder()
    engine = Engine(model, graphs=True)
    sampling = Sampling(max_tokens=6)
    before = engine.generate([[1, 2, 3]], sampling)[0].token_ids
    assert before == naive(model, [1, 2, 3], sampling)
    with torch.no_grad():
        model.blocks[0].attn.k.weight.normal_(0, 2)
        model.norm.weight.fill_(0.5)
    assert engine.generate([[1, 2, 3]], sampling)[0].token_ids == naive(model, [1, 2, 3], sampling)


# -- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_on_the_gpu_write_the_text_of_the_plain_path(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32: the plain path without kernels, the graph path with them, alone and in a batch, and with drafts."""
    spec = replace(tiny_decoder(**SHAPES[shape]).spec, d_model=64, head_dim=16, d_ff=96, max_positions=1400)
    model = tiny_decoder(**{k: getattr(spec, k) for k in spec.__dataclass_fields__}).float().cuda()
    model.compute_dtype = torch.float32
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(0.5)
    prompts = [[1, 2, 3], [4] * 300, list(range(29)) * 40, [7]]
    samplings = [Sampling(max_tokens=40), Sampling(max_tokens=40, temperature=0.7, seed=3)] * 2
    with monkeypatch.context() as plain:
        plain.setattr("shoestring.serve.engine.sampling.sample_tokens_", sample_tokens_ref_)
        want = Engine(model, graphs=False).generate(prompts, samplings)
    for drafter in (None, LookupDrafter(), DraftModel(near_copy(model, 0.02))):
        engine = Engine(model, drafter=drafter, num_drafts=3, chunk=256)
        assert engine.runner.fast
        got = engine.generate(prompts, samplings)
        assert [c.token_ids for c in got] == [c.token_ids for c in want]
        again = engine.generate(prompts, samplings)
        assert [c.token_ids for c in again] == [c.token_ids for c in want]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_measuring_does_not_free_what_a_captured_step_in_one_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOESTRING_ROW_STEP", "1")
    shape: dict[str, Any] = {"d_model": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "d_ff": 512}
    model = tiny_decoder(**shape, vocab_size=128).bfloat16().cuda()
    model.compute_dtype = torch.bfloat16
    runner = Runner(model, BlockPool(8, 16))
    row = Batch([RowSpan([5, 1, 2], 0, 1)], [3], [0])
    first = runner.forward(row)
    assert runner.in_one_kernel
    runner.measure_seconds(1)
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((n,), -1, dtype=torch.int64, device="cuda") for n in (2, 18, 1000, 10_000, 100_000)]
    assert torch.equal(runner.forward(row), first) and len(others) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_cannot_be_captured_is_launched_one_by_one() -> None:
    model = tiny_decoder(d_model=64, head_dim=16).float().cuda()
    model.compute_dtype = torch.float32
    want = Engine(model, graphs=False).generate([[1, 2, 3]], Sampling(max_tokens=20))[0].token_ids
    engine = Engine(model)
    engine.runner.refresh()
    fused = engine.runner._fused
    assert fused is not None
    logits = fused.logits

    def waits(x_TD: torch.Tensor) -> torch.Tensor:
        assert x_TD.sum().item() == x_TD.sum().item()  # a host sync: not allowed while capturing
        return logits(x_TD)

    fused.logits = waits  # type: ignore[method-assign]
    assert engine.generate([[1, 2, 3]], Sampling(max_tokens=20))[0].token_ids == want
    fused.logits = logits  # type: ignore[method-assign]
    # The device is as it was: the next graph can be captured.
    assert Engine(model).generate([[1, 2, 3]], Sampling(max_tokens=20))[0].token_ids == want


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_are_captured_again_after_all_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder(d_model=64, head_dim=16).float().cuda()
    model.compute_dtype = torch.float32
    engine = Engine(model, max_requests=20)
    sampling, dropped = Sampling(max_tokens=12), []
    drop = GraphCache._drop
    monkeypatch.setattr(GraphCache, "_drop", lambda self, *keys: (dropped.append(len(keys)), drop(self, *keys)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step that cannot be captured says so
        for num in (1, 9, 20):  # each needs larger tables, which ends all graphs that hold the old ones
            engine.generate([[1, 2, 3 + i] for i in range(num)], sampling)
    assert len([num for num in dropped if num]) >= 2


def _replace_head(model: Decoder) -> None:
    trim_head(model, range(model.spec.vocab_size))


def _replace_weight(model: Decoder) -> None:
    up = model.blocks[1].mlp.up
    up.weight = torch.nn.Parameter(up.weight.detach().clone())


def _change_in_place(model: Decoder) -> None:
    with torch.no_grad():
        model.blocks[1].mlp_norm.weight.mul_(1.5)


def _load(model: Decoder) -> None:
    model.load_state_dict(tiny_decoder(5).state_dict())


def _pack(model: Decoder) -> None:
    convert(model, [("blocks.1.*", parse_format("int4:g8"))])
    pack(model)


def _add_buffer(model: Decoder) -> None:
    model.blocks[0].attn.register_buffer("more", torch.zeros(1))


@pytest.mark.parametrize("change", [_replace_head, _replace_weight, _change_in_place, _load, _pack, _add_buffer])
@pytest.mark.parametrize("graphs", [True, False])
def test_refresh_notices_every_change_of_the_weights(change: Callable[[Decoder], None], graphs: bool) -> None:
    model = tiny_decoder()
    runner = Runner(model, BlockPool(4, 16), graphs=graphs)
    runner.refresh()
    root, fused = runner.cache_root(), runner._fused
    assert root == cache_root(model) and runner.cache_root("half") == cache_root(model, "half") != root
    runner.refresh()
    assert runner.cache_root() == root and runner._fused is fused and (fused is not None) == graphs
    change(model)
    runner.refresh()
    assert runner.cache_root() == cache_root(model) != root
    assert not graphs or runner._fused is not fused
    assert {id(m) for m in modules_of(model)} == {id(m) for m in model.modules()}
    dtype, model.compute_dtype = model.compute_dtype, torch.float32
    assert runner.cache_root() == cache_root(model)
    model.compute_dtype = dtype


def test_tables_that_change_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a request ends all behind it move up: one copy, and none where only positions change."""
    sent: list[list[int]] = []

    def noted(here: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        sent.append(here[0].tolist())
        return to_device(here, device)

    monkeypatch.setattr(graphs, "to_device", noted)
    runner = Runner(tiny_decoder(), BlockPool(40, 4), graphs=True)
    assert runner.ready() and runner._graphs is not None
    made = runner._graphs
    blocks = [list(range(5 * n, 5 * n + 3 + n % 3)) for n in range(6)]

    def launch(start: int, who: list[int]) -> None:
        spans = [RowSpan(blocks[n], start, 1) for n in who]
        made.launch(spans, [1] * len(who), [Sampling()] * len(who), None)
        for row, n in zip(made.tables(len(who)).tolist(), who, strict=True):
            pages = start // 4 + 1
            assert row[:pages] == blocks[n][:pages]

    launch(9, [0, 1, 2, 3, 4, 5])
    launch(10, [0, 1, 2, 3, 4, 5])
    assert sent == [[0, 1, 2, 3, 4, 5]]
    launch(11, [0, 2, 3, 4, 5])
    assert sent[1:] == [[1, 2, 3, 4]]
    blocks[0].append(39)  # a block more is noted by the step itself
    launch(12, [0])
    launch(13, [0])
    assert len(sent) == 2
    launch(8, [5, 0])
    assert sent[2:] == [[0, 1]]


def test_steps_run_ahead_while_texts_end_and_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that come and end one after the other, some drawn, some at the end of the context, some preempted, some in
    blocks of texts that ended: each is that of the naive loop, steps run ahead all the same, and nobody waits for more
    than HOLD_STEPS of them."""
    monkeypatch.setattr("shoestring.serve.engine.pipeline.HOLD_FROM", 16)
    monkeypatch.setattr("shoestring.serve.engine.pipeline.ENDING_SHARE", 4)
    model, draw = tiny_decoder(max_positions=24), random.Random(3)
    engine = Engine(model, max_requests=20, max_context=24, block_size=4, num_blocks=36, graphs=True)
    asked = [
        (
            draw.choice([[], [3, 1, 4, 1]]) + [draw.randrange(29) for _ in range(draw.randint(1, 6))],
            Sampling(temperature=draw.choice([0.0, 0.9]), seed=seed, max_tokens=draw.randint(1, 22)),
        )
        for seed in range(40)
    ]
    left, requests, num_ahead, held = list(asked), [], 0, 0
    while left or engine.busy:
        for prompt, sampling in [left.pop(0) for _ in range(min(len(left), draw.randint(0, 3)))]:
            requests.append(engine.add(prompt, sampling))
        waits = engine.scheduler.admits
        engine.step()
        held = held + 1 if waits and engine.scheduler.admits and bool(engine.pipeline.num_ahead) else 0
        assert held <= 4
        num_ahead += bool(engine.pipeline.num_ahead)
    assert [r.new_tokens for r in requests] == naive_texts(model, *zip(*asked, strict=True))
    assert num_ahead > 12 and engine.stats.num_preemptions > 0 and engine.cache.pool.num_used == 0
    assert engine.stats.num_prefix_hits > 0
