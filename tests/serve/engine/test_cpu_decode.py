"""Few rows in one step: logits, keys and values of the plain forward; when the engine takes it; the C++ on any number
of threads, and what happens where it cannot be had."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoestring.formats import convert, int8_activations, pack, parse_format
from shoestring.formats.int8_activations import Int8Host, format_of, quantize_activations
from shoestring.kernels.lowbit import tiled_linear
from shoestring.kernels.lowbit.tiled_linear import TILES, rounded
from shoestring.kernels.runtime import cpp
from shoestring.kernels.runtime.triton_backend import fall_back
from shoestring.model import Decoder, ModelSpec
from shoestring.model.layer_plan import plan_decoder
from shoestring.model.transformer import untie_head
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine import cpu_decode, runner
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.cpu_decode import CompiledDecodeStep, executor_of
from shoestring.serve.engine.kv_cache import KVCache
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.speculative.draft_model import DraftModel, trim_head
from shoestring.serve.speculative.ngram_drafter import NgramDrafter

pytestmark = pytest.mark.skipif(int8_activations.refusal() is not None, reason=str(int8_activations.refusal()))
SPEC = ModelSpec(90, 64, 2, 4, 2, 16, 160, 64, bos_id=1, eos_id=2)
SPECS = {
    "llama": SPEC,
    "qwen2": replace(SPEC, model_type="qwen2", qkv_bias=True),
    "qwen3": replace(SPEC, model_type="qwen3", qk_norm=True),
    "one group": replace(SPEC, num_kv_heads=1, mlp_bias=True, out_bias=True),
    "heads of 48": replace(SPEC, num_heads=2, num_kv_heads=2, head_dim=48),
}
FURTHER = {
    "gemma2": replace(
        SPEC, model_type="gemma2", norm="rms_offset", norm_placement="both", act="geglu_tanh", scaled_embeddings=True,
        sliding_window=5, full_layers=(1,), attn_scale=0.3, attn_softcap=4.0, logit_softcap=20.0,
    ),
    "gemma3": replace(
        SPEC, model_type="gemma3_text", norm="rms_offset", norm_placement="both", act="geglu_tanh", qk_norm=True,
        scaled_embeddings=True, sliding_window=5, full_layers=(1,), window_rope_theta=50.0,
    ),
    "olmo2": replace(SPEC, model_type="olmo2", norm_placement="post", qk_norm=True, qk_norm_over="width"),
    "smollm3": replace(SPEC, model_type="smollm3", no_rope_layers=(1,), act="geglu"),
}  # fmt: skip
HEAD = "int8:sym:g0"
WITHOUT = "#undef __ARM_FEATURE_DOTPROD\n#undef __AVX2__\n"


def served(
    spec: ModelSpec = SPEC, label: str = "int4:g32", head: str = "", embed: str = "dense", seed: int = 0
) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(spec).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    convert(model, [("*", parse_format(label)), ("embed", parse_format(embed))])
    pack(model)
    if head:
        untie_head(model, parse_format(head))
    quantize_activations(model)
    return model


def cache_of(spec: ModelSpec, block_size: int = 4) -> KVCache:
    cache = KVCache(plan_decoder(spec), BlockPool(16, block_size))
    cache.pool.num_touched = 16  # type: ignore[misc]
    return cache


def row_of(step: CompiledDecodeStep, token: int, blocks: Sequence[int], position: int, cache: KVCache) -> torch.Tensor:
    """Logits of one row."""
    return step.logits([token], [RowSpan(blocks, position, 1)], [0], cache)


@pytest.mark.parametrize("blocks", [[2, 3, 4, 5], [6, 1, 3, 0]], ids=["neighbours", "scattered"])
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_logits_keys_and_values_are_those_of_the_plain_forward(name: str, blocks: list[int]) -> None:
    model = served(SPECS[name], embed="int8:g0" if name == "qwen3" else "dense")
    assert model.embed.packed == (name == "qwen3")
    assert executor_of(model) is CompiledDecodeStep
    tokens, span = torch.arange(3, 15), RowSpan(blocks, 11, 1)
    caches = []
    for short in (True, False):
        cache = KVCache(model.plan, BlockPool(8, 4))
        cache.pool.num_touched = 8  # type: ignore[misc]
        plan = cache.plan([RowSpan(blocks, 0, 11)], "cpu")
        model(tokens[None, :11], torch.arange(11)[None], attend=plan)
        if short:
            got = CompiledDecodeStep(model).logits([14], [span], [0], cache)
        else:
            wanted = model(tokens[None, 11:], torch.tensor([[11]]), attend=cache.plan([span], "cpu"))[0]
        caches.append(cache)
    # Rounding inputs to 8 bits turns last bits into a level here and there; the step has finer levels and
    # scales than the plain forward where that is torch's (the tests below compare it with the exact function).
    share = 0.05
    torch.testing.assert_close(got, wanted, atol=share * float(wanted.abs().max()), rtol=0)
    for layer in range(2):
        for mine, other in zip(caches[0].stored(layer), caches[1].stored(layer), strict=True):
            torch.testing.assert_close(mine, other, atol=share * float(other.abs().max()), rtol=0)


def test_the_engine_takes_it_for_few_rows_and_the_plain_forward_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served(head=HEAD)
    calls: list[int] = []
    plain = CompiledDecodeStep.logits
    monkeypatch.setattr(CompiledDecodeStep, "logits", lambda self, *a: (calls.append(1), plain(self, *a))[1])
    prompts = [[1, 5, 9, 12], [1, 7, 7], [1, 30, 31, 32, 33]]
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    alone = [Engine(model, max_requests=1, max_context=32).generate([p], sampling)[0].token_ids for p in prompts]
    assert len(calls) == 3 * 8
    calls.clear()
    together = [o.token_ids for o in Engine(model, max_requests=3, max_context=32).generate(prompts, sampling)]
    assert len(calls) == 8 and together == alone
    calls.clear()
    monkeypatch.setattr(cpu_decode, "MOST_ROWS", 16)
    Engine(model, max_requests=1, max_context=32).generate([list(range(1, 19))], sampling)
    assert len(calls) == 7  # the prompt has more rows than it takes
    monkeypatch.setattr(runner, "executor_of", lambda _: None)
    without = [Engine(model, max_requests=1, max_context=32).generate([p], sampling)[0].token_ids for p in prompts]
    # Last bits may turn a level of an input, and that a choice between two tokens that are almost equal.
    assert sum(a == b for a, b in zip(alone, without, strict=True)) >= 2


def test_the_measured_pass_is_the_one_that_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Runner(served(), BlockPool(4, 16))
    taken: list[int] = []
    kind = executor_of(made.model)
    assert kind is not None
    plain = kind.logits
    monkeypatch.setattr(
        kind, "logits", lambda self, tokens, *rest: (taken.append(len(tokens)), plain(self, tokens, *rest))[1]
    )
    assert made.measure_seconds(1) > 0 and taken and set(taken) == {1}


def test_requests_that_torch_computes_faster() -> None:
    one, drafts, prompt, far = RowSpan([0], 5000, 1), RowSpan([0], 5000, 16), RowSpan([0], 0, 64), RowSpan([0], 200, 64)
    assert CompiledDecodeStep.taken([one, far, drafts, prompt, RowSpan([0], 0, 65), one]) == [0, 2, 3, 5]


def test_a_request_does_not_depend_on_a_long_prompt_beside_it() -> None:
    """Drafts, a long prompt and a single row in one batch, whose wanted rows are in any order."""
    model, found = served(head=HEAD), []
    tokens = torch.randint(90, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    spans = [RowSpan([1, 2], 4, 3), RowSpan([5, 6, 7, 8, 9], 0, 18), RowSpan([3], 2, 1)]
    for together in (False, True):
        own = Runner(model, BlockPool(16, 4))
        own.cache.pool.num_touched = 16  # type: ignore[misc]
        own.refresh()
        own.forward(Batch([RowSpan([1, 2], 0, 4), RowSpan([3], 0, 2)], tokens[:6], []))
        if together:
            found.append(own.forward(Batch(spans, tokens[:22], [21, 1, 20, 2])))
            assert own.forward(Batch(spans, tokens[:22], [])).shape == (0, 90)  # a part of a prompt may want none
        else:
            parts = [(spans[2], [21], [0]), (spans[0], [0, 1, 2], [1, 2]), (spans[1], range(3, 21), [17])]
            made = [own.forward(Batch([span], [tokens[i] for i in at], rows)) for span, at, rows in parts]
            found.append(torch.cat(made)[[0, 1, 3, 2]])
    assert torch.equal(*found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_and_other_requests_change_no_text(temperature: float) -> None:
    model, prompts = served(head=HEAD), [[5, 6] * 12, list(range(1, 50)), [7, 8, 9] * 3]
    sampling = Sampling(max_tokens=14, ignore_eos=True, temperature=temperature, seed=4)
    alone = [Engine(model, max_requests=1, max_context=64).generate([p], sampling)[0].token_ids for p in prompts]
    engine = Engine(model, max_requests=3, max_context=64, drafter=NgramDrafter(shortest=1), num_drafts=4)
    assert [o.token_ids for o in engine.generate(prompts, sampling)] == alone
    assert engine.stats.num_drafted > engine.stats.num_accepted
    assert engine.stats.num_accepted > 0 or temperature  # a sampled text of this model hardly repeats itself


def test_a_draft_models_logits_are_for_the_targets_tokens() -> None:
    model, ids = served(), [3, 50, 7]
    trim_head(model, ids)
    drafter = DraftModel(model, vocab_ids=ids)
    table = drafter.pool.open(b"", [5])
    assert table is not None
    batch = Batch([RowSpan(table.blocks, 0, 1)], [5], [0])
    plain = drafter.runner.forward(batch)
    drafter.runner.refresh()  # from here on the short step
    assert drafter.runner._cpu is not None
    short = drafter.runner.forward(batch)
    assert short.shape == (1, SPEC.vocab_size)
    assert short.isfinite().nonzero()[:, 1].tolist() == sorted(ids)
    torch.testing.assert_close(short[:, ids], plain[:, ids], atol=0.05 * float(plain[:, ids].abs().max()), rtol=0)


def test_changed_weights_are_noticed_and_other_models_take_the_plain_forward() -> None:
    model, sampling = served(), Sampling(max_tokens=6, ignore_eos=True)
    engine = Engine(model, max_requests=1, max_context=32)
    first = engine.generate([[1, 5, 9]], sampling)[0].token_ids
    other = served(seed=5)
    model.load_state_dict(other.state_dict())
    engine.forget_prefixes()
    again = engine.generate([[1, 5, 9]], sampling)[0].token_ids
    assert again == Engine(other, max_requests=1, max_context=32).generate([[1, 5, 9]], sampling)[0].token_ids
    assert again != first


@pytest.mark.parametrize("changes", [{"parallel_residual": True}, {"act": "gelu"}])
def test_other_architectures_take_the_plain_forward_and_say_so_once(changes: dict[str, object]) -> None:
    assert executor_of(Decoder(SPEC)) is None  # layers that do not round their inputs: nothing to say
    model = served(replace(SPEC, **changes))  # type: ignore[arg-type]
    fall_back.cache_clear()
    with pytest.warns(UserWarning, match="not computed in one step for (parallel=True|mlp.act='gelu')"):
        assert executor_of(model) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = Runner(model, BlockPool(4, 4))
        runner.refresh()
    assert runner._cpu is None


# -- the step in C++ -----------------------------------------------------------------------------------------


def multiply_ref(host: Int8Host, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    of_x = rounded(x.flatten(0, -2), format_of(host).group or host.shape[1])
    y = (of_x @ host.effective_weight(torch.float32).t()).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


@torch.no_grad()
def difference(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, threads: int = 2, num: int = 13, begin: int = 0, seed: int = 1
) -> float:
    """Of the logits of the last of `num` tokens, which step after step has read from `begin` on, to those of the whole
    model with inputs rounded in plain torch; keys and values too. In units of the largest."""
    step, cache, blocks = CompiledDecodeStep(model), cache_of(model.spec), [6, 1, 3, 0, *range(15, 6, -1)]
    tokens = torch.randint(model.spec.vocab_size, (num,), generator=torch.Generator().manual_seed(seed))
    with monkeypatch.context() as patch:
        patch.setattr(Int8Host, "multiply", multiply_ref)
        other = cache_of(model.spec)
        plan = other.plan([RowSpan(blocks, 0, num)], "cpu")
        wanted = model(tokens[None], torch.arange(num)[None], attend=plan)[0, -1:]
        if begin:
            plan = cache.plan([RowSpan(blocks, 0, begin)], "cpu")
            model(tokens[None, :begin], torch.arange(begin)[None], attend=plan)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for position, token in enumerate(tokens[begin:].tolist(), begin):
            got = row_of(step, token, blocks, position, cache)
    finally:
        torch.set_num_threads(before)
    assert got.shape == wanted.shape
    pairs = [(got, wanted)]
    for layer in range(model.spec.num_layers):
        pairs += zip(cache.stored(layer), other.stored(layer), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def agrees(model: Decoder, monkeypatch: pytest.MonkeyPatch, **how: int) -> bool:
    """On one of three texts: about one text in ten has an input so close to the middle of two levels that sums in
    another order end on the other level, and from there on the texts differ by a level."""
    return any(difference(model, monkeypatch, **how, seed=seed) < 1e-4 for seed in (1, 2, 3))


@pytest.mark.parametrize(("name", "threads"), [*((n, t) for n in SPECS for t in (1, 2, 5)), *((n, 3) for n in FURTHER)])
@pytest.mark.few(10)
def test_it_computes_products_of_rounded_inputs(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agrees(served({**SPECS, **FURTHER}[name], head=HEAD), monkeypatch, threads=threads)


@pytest.mark.parametrize("num", [46, 51])
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 2), (2, 2)])
def test_positions_and_heads_that_are_taken_together(
    heads: tuple[int, int], num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More positions than are taken together, with some left over, on each of two threads."""
    model = served(replace(SPEC, num_heads=heads[0], num_kv_heads=heads[1]), head=HEAD)
    assert agrees(model, monkeypatch, num=num, begin=num - 1)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", [*SPECS, *FURTHER])
@torch.no_grad()
@pytest.mark.few(8)
def test_rows_do_not_depend_on_each_other(name: str, threads: int) -> None:
    """The next token of a request, three rows that are checked of another, and a prompt; one by one and together."""
    model = served({**SPECS, **FURTHER}[name], head=HEAD)
    step, spans = CompiledDecodeStep(model), [RowSpan([6, 1, 3], 9, 1), RowSpan([2, 4], 4, 3), RowSpan([0, 5], 0, 8)]
    tokens = torch.randint(90, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    rows, caches, found = [0, 1, 2, 3, 11], [], []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for together in (False, True):
            cache = cache_of(model.spec)
            for span in spans:
                for position in range(span.start):
                    row_of(step, tokens[position], span.blocks, position, cache)
            if together:
                found.append(step.logits(tokens[:12], spans, rows, cache))
            else:
                places = [(span.blocks, p) for span in spans for p in range(span.start, span.stop)]
                own = [row_of(step, t, *place, cache) for t, place in zip(tokens, places, strict=False)]
                found.append(torch.cat(own)[rows])
            caches.append(cache)
        assert step.logits(tokens[:12], spans, [], cache).shape == (0, 90)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    for layer in range(model.spec.num_layers):
        for mine, other in zip(*(cache.stored(layer) for cache in caches), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("label", ["int4:sym:g32", "int4:g0", "int3:g32", "int2:sym:g32", "int8:g32", "int4:min:g32"])
@pytest.mark.parametrize("head", ["", "int8:g32", "int4:g64", "int8:min:g32"])
@pytest.mark.few(8)
def test_formats_and_heads(label: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agrees(served(label=label, head=head), monkeypatch, num=5)


@pytest.mark.parametrize("embed", ["int8:g0", "int8:sym:g0", "int4:g32"])
def test_a_packed_embedding_is_the_head(embed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served(embed=embed)
    assert CompiledDecodeStep(model)._model.head.rows == 96  # 90, in tiles
    assert agrees(model, monkeypatch, num=5)


@pytest.mark.parametrize("embed", ["dense", "int8:g0"])
def test_prompts_that_are_read_in_several_parts(embed: str) -> None:
    model, prompt = served(embed=embed), [1 + i % 80 for i in range(50)]
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    parts = Engine(model, max_requests=1, max_context=64, chunk=16).generate([prompt], sampling)[0].token_ids
    assert parts == Engine(model, max_requests=1, max_context=64, chunk=64).generate([prompt], sampling)[0].token_ids


def test_prompts_and_single_tokens_share_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_activations, "has_arm_kernels", lambda: False)
    model = served(SPECS["one group"], embed="int8:g0")
    step = CompiledDecodeStep(model)
    row_of(step, 5, [0], 0, cache_of(model.spec))
    model(torch.arange(4)[None])  # makes no others
    hosts = [m for m in model.modules() if isinstance(m, Int8Host)]
    assert len(hosts) == 15
    matrices = [getattr(layer, name) for layer in step._layers for name in ("q", "k", "v", "out", "gate", "up", "down")]
    assert {m.codes for m in (*matrices, step._model.head)} == {host.weight_tiles.data_ptr() for host in hosts}
    for host in hosts:  # and hold nothing else
        names = {name for name, _ in host.named_buffers(recurse=False)}
        assert names == {f"weight_tile{rest}" for rest in ("s", "_scale", "_shift")} and host.int8 is None


def test_without_special_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpp.load_library(WITHOUT + TILES.read_text() + cpu_decode.SOURCE.read_text())
    assert library is not None
    known = cpu_decode._function()
    library.rows_step.argtypes, library.rows_step.restype = known.argtypes, known.restype
    monkeypatch.setattr(cpu_decode, "_function", lambda: library.rows_step)
    assert agrees(served(head=HEAD), monkeypatch)


@torch.no_grad()
def test_what_is_not_a_number_stays_so() -> None:
    for poison in (float("nan"), float("inf")):
        model = served(head=HEAD)
        model.embed.weight[7, 3] = poison
        logits = CompiledDecodeStep(model).logits([7], [RowSpan([0], 0, 1)], [0], cache_of(SPEC))
        assert logits.isnan().all()


def test_callers_on_several_threads_take_turns_and_a_fork_has_threads_of_its_own() -> None:
    model = served(head=HEAD)
    step = CompiledDecodeStep(model)
    wanted = row_of(step, 5, [0], 0, cache_of(SPEC))
    found: list[bool] = []

    def ask() -> None:
        cache = cache_of(SPEC)
        own = CompiledDecodeStep(model)
        found.extend(torch.equal(row_of(own, 5, [0], 0, cache), wanted) for _ in range(20))

    callers = [threading.Thread(target=ask) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 60
    child = os.fork()
    if child == 0:
        same = row_of(step, 5, [0], 0, cache_of(SPEC)).tolist() == wanted.tolist()
        os._exit(0 if same else 1)
    for _ in range(6000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
    assert ended and status == 0


def test_a_cache_that_grew_is_found_again() -> None:
    model = served(head=HEAD)
    step = CompiledDecodeStep(model)
    cache = KVCache(plan_decoder(SPEC), BlockPool(64, 4, grows=True))
    table = cache.pool.open(b"", [5])
    assert table is not None
    logits = []
    for position in range(100):
        assert cache.pool.grow(table, position + 1)
        logits.append(row_of(step, 5 + position % 7, table.blocks, position, cache))
    assert cache.num_moves > 2 * SPEC.num_layers  # moved on the way
    large, step = cache_of(SPEC, 16), CompiledDecodeStep(model)
    for position in range(100):
        again = row_of(step, 5 + position % 7, list(range(16)), position, large)
        torch.testing.assert_close(again, logits[position], atol=1e-4, rtol=1e-4)


def test_what_the_first_step_needs_is_compiled_while_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(cpp, "begin_compiling", lambda *sources: begun.extend(sources) or True)
    assert str(cpu_decode.begin_compiling()).startswith("compiling C++ for this processor, the first time only")
    monkeypatch.undo()
    assert all(cpp.load_library(source) is not None for source in begun)
    assert cpu_decode.begin_compiling() is None, "all of it was compiled by now"
    loaded: list[str] = []
    monkeypatch.setattr(cpp, "load_library", lambda source: loaded.append(source))
    for path in (tiled_linear.SOURCE, cpu_decode.SOURCE):
        tiled_linear.compiled(path)
    assert loaded == begun


def test_without_a_compiler_fp32_is_used_and_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Decoder(SPEC).eval()
    convert(model, [("*", parse_format("int4:g32"))])
    pack(model)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        before = model(tokens)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match=r"left out and fp32 is used: there is no C\+\+ compiler; install g\+\+"):
        assert quantize_activations(model) == []
    runner = Runner(model, BlockPool(4, 4))
    runner.refresh()
    assert runner._cpu is None
    with torch.no_grad():
        assert torch.equal(model(tokens), before)
