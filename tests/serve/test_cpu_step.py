"""The short steps of one row on a CPU: the same logits and the same cache as the plain forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoestring.formats import IntAsym, convert, pack
from shoestring.formats.int8_activations import quantize_activations
from shoestring.kernels.cpp import find_compiler
from shoestring.kernels.w4a8 import unusable
from shoestring.model import Decoder, ModelSpec
from shoestring.model.untie import untie_head
from shoestring.serve import Engine, Sampling, runner
from shoestring.serve.blocks import BlockPool
from shoestring.serve.cpu_step import CpuStep, steppable
from shoestring.serve.drafters import DraftModel, trim_head
from shoestring.serve.kv_cache import KVCache, Span
from shoestring.serve.runner import Batch
from shoestring.serve.token_step import TokenStep

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
SPEC = ModelSpec(96, 64, 2, 4, 2, 16, 128, 64, bos_id=1, eos_id=2)
SPECS = {
    "llama": SPEC,
    "qwen2": replace(SPEC, model_type="qwen2", qkv_bias=True),
    "qwen3": replace(SPEC, model_type="qwen3", qk_norm=True),
    "one group": replace(SPEC, num_kv_heads=1, mlp_bias=True, out_bias=True),
}


STEPS = [
    CpuStep,
    pytest.param(TokenStep, marks=pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")),
]


def served(spec: ModelSpec = SPEC, *, symmetric: bool = False) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(spec).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    convert(model, [("*", IntAsym(4, 32, symmetric=symmetric))])
    pack(model)
    quantize_activations(model)
    return model


@pytest.mark.parametrize("blocks", [[2, 3, 4, 5], [6, 1, 3, 0]], ids=["neighbours", "scattered"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("step", STEPS)
@torch.no_grad()
def test_logits_keys_and_values_are_those_of_the_plain_forward(
    name: str, blocks: list[int], step: type[CpuStep | TokenStep]
) -> None:
    model = served(SPECS[name])
    assert steppable(model)
    tokens, span = torch.arange(3, 15), Span(blocks, 11, 1)
    caches = []
    for short in (True, False):
        cache = KVCache(model.spec, BlockPool(8, 4))
        cache.pool.num_touched = 8  # type: ignore[misc]
        plan = cache.plan([Span(blocks, 0, 11)], "cpu")
        model(tokens[None, :11], torch.arange(11)[None], attend=plan)
        if short:
            got = step(model).logits(14, span, cache)
        else:
            wanted = model(tokens[None, 11:], torch.tensor([[11]]), attend=cache.plan([span], "cpu"))[0]
        caches.append(cache)
    # The rounding of inputs to 8 bits turns last bits into a level here and there; TokenStep has scales that the
    # plain forward rounds (tests/serve/test_token_step.py compares it with the exact function).
    share = 0.02 if step is CpuStep else 0.05
    torch.testing.assert_close(got, wanted, atol=share * float(wanted.abs().max()), rtol=0)
    for layer in range(2):
        for mine, other in zip(caches[0].stored(layer), caches[1].stored(layer), strict=True):
            torch.testing.assert_close(mine, other, atol=share * float(other.abs().max()), rtol=0)


@pytest.mark.parametrize("step", STEPS)
def test_the_engine_takes_it_for_single_rows_and_the_plain_forward_for_others(
    monkeypatch: pytest.MonkeyPatch, step: type[CpuStep | TokenStep]
) -> None:
    monkeypatch.setattr(runner, "compilable", lambda _: step is TokenStep)
    model = served()
    untie_head(model, IntAsym(8, 0, symmetric=True))
    quantize_activations(model)
    calls: list[int] = []
    plain = step.logits
    monkeypatch.setattr(step, "logits", lambda self, *a: (calls.append(1), plain(self, *a))[1])
    prompts = [[1, 5, 9, 12], [1, 7, 7], [1, 30, 31, 32, 33]]
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    alone = [
        Engine(model, max_requests=1, max_context=32).generate([p], sampling)[0].token_ids for p in prompts
    ]
    assert len(calls) == 3 * 7  # every token but the first, which the prompt's rows give
    calls.clear()
    Engine(model, max_requests=3, max_context=32).generate(prompts, sampling)
    assert not calls
    monkeypatch.setattr(runner, "steppable", lambda _: False)
    without = [
        Engine(model, max_requests=1, max_context=32).generate([p], sampling)[0].token_ids for p in prompts
    ]
    # Last bits may turn a level of an input, and that a choice between two tokens that are almost equal.
    assert sum(a == b for a, b in zip(alone, without, strict=True)) >= 2


def test_a_draft_models_logits_are_for_the_targets_tokens() -> None:
    model, ids = served(), [3, 50, 7]
    trim_head(model, ids)
    drafter = DraftModel(model, vocab_ids=ids)
    table = drafter.pool.open(b"", [5])
    assert table is not None
    batch = Batch([Span(table.blocks, 0, 1)], [5], [0])
    plain = drafter.runner.forward(batch)
    drafter.runner.refresh()  # from here on the short step
    assert drafter.runner._cpu is not None
    short = drafter.runner.forward(batch)
    assert short.shape == (1, SPEC.vocab_size)
    assert short.isfinite().nonzero()[:, 1].tolist() == sorted(ids)
    torch.testing.assert_close(
        short[:, ids], plain[:, ids], atol=0.05 * float(plain[:, ids].abs().max()), rtol=0
    )


def test_changed_weights_are_noticed_and_other_models_take_the_plain_forward() -> None:
    model, sampling = served(), Sampling(max_tokens=6, ignore_eos=True)
    engine = Engine(model, max_requests=1, max_context=32)
    first = engine.generate([[1, 5, 9]], sampling)[0].token_ids
    torch.manual_seed(5)
    other = served(symmetric=False)
    with torch.no_grad():
        for buffer in other.buffers():
            if buffer.dtype == torch.float16:
                buffer.copy_(buffer * (1 + torch.rand_like(buffer)))
    model.load_state_dict(other.state_dict())
    engine.forget_prefixes()
    again = engine.generate([[1, 5, 9]], sampling)[0].token_ids
    assert again == Engine(other, max_requests=1, max_context=32).generate([[1, 5, 9]], sampling)[0].token_ids
    assert again != first
    assert not steppable(Decoder(SPEC))
    assert not steppable(served(replace(SPEC, model_type="mistral", sliding_window=8)))
    assert not steppable(served(replace(SPEC, act="geglu")))
