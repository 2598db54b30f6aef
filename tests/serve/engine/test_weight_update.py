"""Weights that change while requests run: every copy is written, nothing of before is found, no token is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from naive_decoding import LookupDrafter, naive

from shoestring.errors import UserError
from shoestring.formats import convert, keep_decoded, kernel_layout, pack, parse_format, use_kernels
from shoestring.formats.int8_activations import quantize_activations, refusal
from shoestring.model import Decoder
from shoestring.model.skip import SkipSet, Sublayer
from shoestring.model.spec import Experts
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.block_pool import RowSpan
from shoestring.serve.engine.request import Request
from shoestring.serve.engine.runner import Batch
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.serve.speculative.draft_model import DraftModel
from shoestring.serve.speculative.drafter_stack import DrafterStack
from shoestring.state.reshard.version import UnfitWeights, WeightsVersion
from tiny import QWEN2, random_model, tiny_decoder

PROMPT = [(7 * i + 3) % 29 for i in range(40)]  # two whole blocks of 16 and more
V1, V2 = WeightsVersion("run", 1, "aa"), WeightsVersion("run", 2, "bb")


def values_of(model: Decoder) -> dict[str, dict[str, torch.Tensor]]:
    """What a publisher would send: parts of packed layers, and all parameters."""
    target = WeightTarget(model)
    packed = {n: dict(layer.parts()) for n, layer in target._hosts.items()}
    return packed | {n: {"": p.detach().clone()} for n, p in model.named_parameters()}


def test_prefixes_of_the_old_weights_are_not_found() -> None:
    old, new = tiny_decoder(0), tiny_decoder(1)
    sampling = Sampling(max_tokens=6)
    want = naive(new, PROMPT, sampling)
    assert naive(old, PROMPT, sampling) != want

    engine = Engine(old)
    engine.generate([PROMPT], sampling)
    outputs = engine.update_weights(WeightTarget(old), values_of(new), V1)
    assert outputs == [] and engine.version == V1
    request = engine.add(PROMPT, sampling)
    while engine.busy:
        engine.step()
    assert request.num_cached == 0 and request.new_tokens == want and request.versions == [(V1, 0)]
    again = engine.add(PROMPT, sampling)
    while engine.busy:
        engine.step()
    assert again.num_cached == 32 and again.new_tokens == want  # prefixes of the new weights are found

    # Written behind the engine's back while a request runs, the old prefixes are found: the API is needed.
    engine = Engine(tiny_decoder(0))
    engine.generate([PROMPT], sampling)
    engine.add(PROMPT[:3], Sampling(max_tokens=20))
    engine.step()
    with torch.no_grad():
        for a, b in zip(engine.model.parameters(), new.parameters(), strict=True):
            a.data.copy_(b)
    stale = engine.add(PROMPT, sampling)
    while engine.busy:
        engine.step()
    assert stale.num_cached == 32


@pytest.mark.parametrize("graphs", [False, True])
def test_running_requests_keep_their_tokens_and_go_on_with_the_new_weights(graphs: bool) -> None:
    first, second, third = tiny_decoder(0), tiny_decoder(1), tiny_decoder(2)
    weights = [values_of(first), values_of(second), values_of(third)]
    sampling = Sampling(max_tokens=15, temperature=0.8, seed=5)
    engine = Engine(first, graphs=graphs or None, max_requests=2)
    requests = [engine.add(p, sampling) for p in (PROMPT, PROMPT[:5], PROMPT[:9])]
    target = WeightTarget(first)
    for version, values in ((V1, weights[1]), (V2, weights[2])):
        for _ in range(5):
            engine.step()
        engine.update_weights(target, values, version)
    while engine.busy:
        engine.step()
    versions = {None: weights[0], V1: weights[1], V2: weights[2]}
    for request in requests:
        assert request.finish_reason == "length" and len(request.new_tokens) == 15
        starts = [n for _, n in request.versions] + [15]
        for (version, start), stop in zip(request.versions, starts[1:], strict=True):
            model = tiny_decoder(0)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(versions[version][name][""])
            text = request.tokens[: request.num_prompt + start]
            # Sampled noise is keyed by position, so a fresh engine continues the text alike.
            part = Engine(model).generate([text], replace(sampling, max_tokens=stop - start))[0].token_ids
            assert part == request.new_tokens[start:stop], version
    assert [v for v, _ in requests[0].versions] == [None, V1, V2]


def test_an_update_is_not_the_first_admission() -> None:
    """What a request found in the prefix cache and when it began to run stay those of its arrival."""
    now = 0.0
    engine, new = Engine(tiny_decoder(0), chunk=13, block_size=4, clock=lambda: now), tiny_decoder(1)
    requests = [engine.add(PROMPT[:13], Sampling(max_tokens=9)) for _ in range(2)]  # each is alone in a step
    for _ in range(4):
        engine.step()
    told = [(r.num_cached, r.scheduled_at) for r in requests]
    now = 7.0
    engine.update_weights(WeightTarget(engine.model), values_of(new), V1)
    while engine.busy:
        engine.step()
    assert [(r.num_cached, r.scheduled_at) for r in requests] == told == [(0, 0.0), (12, 0.0)]


def test_a_text_that_was_paused_during_an_update_names_the_weights_that_continued_it() -> None:
    engine, new = Engine(tiny_decoder(0)), tiny_decoder(1)
    paused = engine.add(PROMPT[:5], Sampling(max_tokens=9))
    for _ in range(3):
        engine.step()
    engine.pause(paused)
    num_before = len(paused.new_tokens)
    engine.update_weights(WeightTarget(engine.model), values_of(new), V1)
    engine.resume(paused)
    while engine.busy:
        engine.step()
    assert 0 < num_before < 9 and paused.versions == [(None, 0), (V1, num_before)]
    rest = naive(new, paused.tokens[: 5 + num_before], Sampling(max_tokens=9 - num_before))
    assert paused.new_tokens[num_before:] == rest


def dense_tied(seed: int) -> Decoder:
    """A tied head that is served in another dtype than the embedding, biases, and joined matrices."""
    model = random_model(replace(QWEN2, tied=True), seed).eval()
    model.compute_dtype = torch.float16
    return model


def packed(seed: int) -> Decoder:
    model = random_model(QWEN2, seed).eval()
    convert(model, [("blocks.*", parse_format("int4:g32"))])
    pack(model)
    return model


def decoded(seed: int) -> Decoder:
    model = packed(seed)
    keep_decoded(model, dtype=torch.float32)
    return model


def in_kernel_order(seed: int) -> Decoder:
    model = packed(seed)
    assert use_kernels(model)
    return model


def eight_bit_inputs(seed: int) -> Decoder:
    """Embedding and tied head are one packed table, which the head reads in tiles where the machine does."""
    model = random_model(replace(QWEN2, model_type="llama", qkv_bias=False, tied=True), seed).eval()
    convert(model, [("embed", parse_format("int8:g0")), ("blocks.*", parse_format("int4:g32"))], skip=())
    pack(model)
    quantize_activations(model)
    return model


def trained_form(seed: int) -> Decoder:
    """Dense weights that a Format changes in every pass."""
    model = random_model(QWEN2, seed).eval()
    convert(model, [("blocks.*", parse_format("int8:sym:g0"))])
    return model


def mixture(seed: int) -> Decoder:
    """A router and a shared gate that are served in another dtype than they are kept in."""
    experts = Experts(num=4, top_k=2, d_ff=64, shared_d_ff=48)
    model = random_model(replace(QWEN2, model_type="qwen2_moe", experts=experts), seed).eval()
    model.compute_dtype = torch.float16
    return model


def packed_embedding(seed: int) -> Decoder:
    """Embedding and tied head are one packed table."""
    model = random_model(replace(QWEN2, tied=True), seed).eval()
    convert(model, [("embed", parse_format("int8:sym:g0")), ("blocks.*", parse_format("int4:g32"))], skip=())
    pack(model)
    return model


CASES: dict[str, tuple[Callable[[int], Decoder], bool | None]] = {
    "dense, fused, tied head in another dtype": (dense_tied, True),
    "a mixture of experts": (mixture, True),
    "a packed embedding": (packed_embedding, True),
    "packed, parts as stored": (packed, True),
    "decoded for a CPU": (decoded, None),
    "in the kernels' order": (in_kernel_order, True),
    "8-bit inputs": (eight_bit_inputs, None),
    "weights that a Format changes": (trained_form, True),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_after_an_update_are_those_of_a_fresh_load(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, graphs = CASES[case]
    if make is eight_bit_inputs and refusal() is not None:
        pytest.skip(str(refusal()))
    if make is in_kernel_order:
        monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    served, fresh = make(0), make(1)
    engine, reference = Engine(served, graphs=graphs), Engine(fresh, graphs=graphs)
    engine.generate([[1, 2, 3]], Sampling(max_tokens=2))
    held = [t.data_ptr() for t in (*served.parameters(), *served.buffers())]
    target = WeightTarget(served)
    engine.update_weights(target, values_of(make(2)), V1)  # from the host
    engine.update_weights(target, target.prepare(values_of(fresh), staged=True), V2)  # from the device's own memory
    assert [t.data_ptr() for t in (*served.parameters(), *served.buffers())] == held
    for rows in (1, 5):
        found = []
        for e in (engine, reference):
            batch = Batch([RowSpan(list(range(4)), 0, rows)], list(range(rows)), range(rows))
            e.cache.pool.num_touched = 4
            e.runner.refresh()
            found.append(e.runner.forward(batch))
        assert torch.equal(*found), rows


def on_gpu(seed: int, form: str) -> Decoder:
    """Sizes that the kernels take."""
    shape = {"num_layers": 2, "d_model": 256, "num_heads": 8, "num_kv_heads": 2, "head_dim": 32, "d_ff": 512}
    model = tiny_decoder(seed, **shape, max_positions=256, tied=False).to("cuda", torch.bfloat16)
    model.compute_dtype = torch.bfloat16
    if form != "bf16":
        convert(model, [("blocks.*", parse_format(form)), ("head", parse_format("int8:g0"))], skip=())
        pack(model, dtype=torch.bfloat16)
        use_kernels(model)
    return model


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("form", ["bf16", "int4:g64", "int4:g128", "int2:g64", "sparse24", "sparse24+int4:g64"])
def test_served_weights_change_on_a_gpu(form: str) -> None:
    """Captured programs compute with the new weights: texts and logits of a server that was started with them."""
    served, other, fresh = (on_gpu(seed, form) for seed in range(3))
    if form.startswith("int4"):
        assert any(layer.kernel_part_names for layer in WeightTarget(served)._hosts.values())
    sampling = Sampling(max_tokens=24, ignore_eos=True)
    engine, target = Engine(served), WeightTarget(served)
    seen = [[c.token_ids for c in engine.generate([PROMPT, PROMPT[:7]], sampling)]]
    held = [t.data_ptr() for t in (*served.parameters(), *served.buffers())]
    for model, staged, version in ((other, False, V1), (fresh, True, V2)):
        values = target.empty()
        for name, parts in values_of(model).items():
            for part, t in parts.items():
                values[name][part].copy_(t)
        running = engine.add(PROMPT[:11], sampling)
        for _ in range(4):
            engine.step()
        engine.update_weights(target, target.prepare(values, staged=staged), version)
        while engine.busy:
            engine.step()
        assert len(running.new_tokens) == 24
        texts = [c.token_ids for c in engine.generate([PROMPT, PROMPT[:7]], sampling)]
        assert texts == [c.token_ids for c in Engine(model).generate([PROMPT, PROMPT[:7]], sampling)]
        seen.append(texts)
    assert seen[0] != seen[1] != seen[2]
    assert [t.data_ptr() for t in (*served.parameters(), *served.buffers())] == held


@pytest.mark.parametrize("kind", ["lookup", "layer skip"])
def test_drafts_do_not_outlive_the_weights(kind: str) -> None:
    first, second = tiny_decoder(0), tiny_decoder(1)
    new = values_of(second)
    skip = SkipSet((Sublayer(1, "mlp"),)) if kind == "layer skip" else None
    engine = Engine(first, drafter=LookupDrafter() if kind == "lookup" else None, draft_skip=skip, num_drafts=3)
    request = engine.add(PROMPT, Sampling(max_tokens=20))
    for _ in range(3):
        engine.step()
    engine.update_weights(WeightTarget(first), new, V1)
    while engine.busy:
        engine.step()
    start = request.versions[-1][1]
    text = request.tokens[: request.num_prompt + start]
    assert request.new_tokens[start:] == naive(second, text, Sampling(max_tokens=20 - start))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_draft_model_takes_weights_of_its_own(graphs: bool) -> None:
    """The text stays the target's; with the target's weights every draft is accepted."""
    counts: list[tuple[int, int]] = []

    class Counting(DraftModel):
        def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
            counts.append((num_drafted, num_accepted))

    target, draft = tiny_decoder(0), tiny_decoder(1)
    stack = DrafterStack([Counting(draft, graphs=graphs or None)])
    engine = Engine(target, drafter=stack, num_drafts=3, graphs=graphs or None)
    request = engine.add(PROMPT, Sampling(max_tokens=30))
    while len(request.new_tokens) < 12:
        engine.step()
    assert any(accepted < drafted for drafted, accepted in counts)
    engine.update_weights(WeightTarget(draft), values_of(tiny_decoder(0)), V1)
    before = len(counts)
    while engine.busy:
        engine.step()
    assert request.new_tokens == naive(target, PROMPT, Sampling(max_tokens=30))
    assert len(counts) > before and all(accepted == drafted for drafted, accepted in counts[before:])
    assert engine.version is None and request.versions == [(None, 0)]
    again = engine.generate([PROMPT], Sampling(max_tokens=30))[0].token_ids  # its prefixes are the new weights'
    assert again == request.new_tokens and all(accepted == drafted for drafted, accepted in counts[before:])


def with_scale(values: dict[str, dict[str, torch.Tensor]], scale: float) -> dict[str, dict[str, torch.Tensor]]:
    name = "blocks.0.attn.q.weight"
    return {**values, name: {**values[name], "scale": torch.full_like(values[name]["scale"], scale)}}


def test_a_scale_whose_products_leave_fp16_is_refused() -> None:
    model, good = packed(0), values_of(packed(1))
    model.compute_dtype = torch.float16
    for scale, fits in ((100.0, True), (300.0, False)):
        with nullcontext() if fits else pytest.raises(UnfitWeights):
            WeightTarget(model).prepare(with_scale(good, scale))


def test_values_that_do_not_fit_change_nothing() -> None:
    model = packed(0)
    target, good = WeightTarget(model), values_of(packed(1))
    engine = Engine(model)
    before = values_of(model)
    some = {n: v for n, v in good.items() if n != "norm.weight"}
    for bad, line in (
        (some, "has no 'norm.weight'"),
        ({**good, "more": {"": torch.zeros(1)}}, "has 'more'"),
        ({**good, "norm.weight": {"": torch.zeros(3)}}, "needs"),
        ({**good, "blocks.0.attn.q.weight": {"": torch.zeros(64, 64)}}, "needs"),
        ({**good, "norm.weight": {"": torch.full((64,), math.nan)}}, "'norm.weight' holds NaN"),
        ({**good, "norm.weight": {"": torch.full((64,), 1e16)}}, "far too large"),
        (with_scale(good, math.inf), "'blocks.0.attn.q.weight scale' holds NaN, infinite"),
    ):
        with pytest.raises(UserError, match=line):
            engine.update_weights(target, bad, V1)
    after = values_of(model)
    assert all(torch.equal(after[n][p], t) for n, parts in before.items() for p, t in parts.items())
    assert engine.version is None
    training = random_model(QWEN2)
    convert(training, [("blocks.0.mlp.*", parse_format("int4:g32:learned"))])
    with pytest.raises(UserError, match="training form"):
        WeightTarget(training)
