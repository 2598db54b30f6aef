"""Run on two ranks by test_tensor_parallel.py: one engine, its weights cut in two."""

from __future__ import annotations

from typing import Any

import torch
from naive_decoding import LookupDrafter, naive_texts
from test_adapters import adapter

from shoestring.formats import convert, pack, parse_format
from shoestring.model import Decoder
from shoestring.model.skip import SkipSet, Sublayer
from shoestring.model.spec import Experts
from shoestring.serve import Engine, NgramDrafter, Sampling
from shoestring.serve.engine.embedding import embedding_parts
from shoestring.serve.engine.logit_rules import prompt_logprob_parts
from shoestring.serve.engine.tensor_parallel import open_ranks
from tiny import tiny_decoder

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [7], [1, 2, 3, 4]]
SAMPLINGS = [Sampling(max_tokens=12), Sampling(max_tokens=12, temperature=0.8, seed=5)] * 2
SKIP = SkipSet([Sublayer(1, "attn"), Sublayer(0, "mlp")])


def whole_model(name: str) -> Decoder:
    if name == "qwen":  # a vocabulary that is cut, too; the others' 29 cannot be
        return tiny_decoder(vocab_size=30, qk_norm=True, tied=False, qkv_bias=True)
    if name == "experts":
        return tiny_decoder(experts=Experts(4, 2, 16, shared_d_ff=16), qk_norm=True, qk_norm_over="width")
    model = tiny_decoder(d_ff=32, vocab_size=30 if name == "packed" else 29)
    if name == "packed":  # with a tied head, whose rows are cut as codes
        convert(model, [("embed", parse_format("int8:g0")), ("blocks.*", parse_format("int4:g8"))])
        pack(model, dtype=torch.float64)
    return model


ranks = open_ranks("cpu")
assert ranks is not None
for name in ("llama", "qwen", "packed", "experts"):
    whole = whole_model(name)
    model = ranks.share(whole_model(name))
    files = {} if name == "experts" else {"x": adapter(0, whole), "y": adapter(1, whole)}
    if not ranks.first:
        ranks.follow(model, adapters=files)
        continue
    want = naive_texts(whole, PROMPTS, SAMPLINGS)
    cases: list[dict[str, Any]] = [
        {"chunk": 5, "block_size": 4},
        {"num_blocks": 6, "block_size": 8},  # too few for all: preemption
        {"drafter": LookupDrafter(), "num_drafts": 3},
        {"drafter": NgramDrafter()},  # lengths by measured speed: the first rank's clock alone decides
        {"draft_skip": SKIP, "num_drafts": 2},
    ]
    for options in {"llama": cases, "experts": cases[:1]}.get(name, cases[::2]):
        engine = Engine(model, ranks=ranks, **options)
        got = [c.token_ids for c in engine.generate(PROMPTS, SAMPLINGS)]
        assert got == want, (name, options)
        assert engine.cache.pool.num_used == 0
    names = ["x", None, "y", "x"] if files else [None] * 4
    adapted = []
    for options in ({}, {"ranks": ranks, "block_size": 4}):
        engine = Engine(model if options else whole, **options)
        for key, file in files.items():
            engine.adapters.load(key, file)
        adapted.append([c.token_ids for c in engine.generate(PROMPTS, SAMPLINGS, names)])
    assert adapted[0] == adapted[1] and (adapted[0] != want or not files), name
    skipped = [c.token_ids for c in Engine(whole, skip=SKIP).generate(PROMPTS, SAMPLINGS)]
    got = [c.token_ids for c in Engine(model, skip=SKIP, ranks=ranks).generate(PROMPTS, SAMPLINGS)]
    assert got == skipped and got != want
    scored = [entry for part in prompt_logprob_parts(whole, PROMPTS[1], 2, 99) for entry in part]
    found = [entry for part in engine.runner.prompt_logprob_parts(PROMPTS[1], 2, 3) for entry in part]
    for a, b in zip(found[1:], scored[1:], strict=True):
        assert a is not None and b is not None
        assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-5
    for texts, chunk in (([PROMPTS[1]], 3), (PROMPTS, 99)):  # one in parts, four at once
        *_, alone = embedding_parts(whole, texts, "mean", 99)
        *_, shared = engine.runner.embedding_parts(texts, "mean", chunk)
        assert alone is not None and shared is not None and torch.allclose(alone, shared, atol=1e-5)
    q = model.blocks[0].attn.q  # type: ignore[union-attr]
    held = q.weight_codes if name == "packed" else q.weight.to_local()  # type: ignore[union-attr]
    assert held.shape[0] == 8, "half of the 16 rows"  # type: ignore[union-attr]
    assert name != "packed" or model.embed.operands()["codes"].shape[0] == 15
    ranks.dismiss()
    print(name, "same tokens")
ranks.close()
