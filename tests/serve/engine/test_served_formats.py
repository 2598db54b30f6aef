"""Every kind of Format decodes through the engine: the text is that of the packed model's own forward."""

from __future__ import annotations

import pytest
import torch
from naive_decoding import LookupDrafter, naive

from shoestring.formats import convert, pack, parse_format
from shoestring.serve import Engine, Sampling
from tiny import tiny_decoder

FORMATS = ["int8:g0", "int4:g8", "int2:g8", "nf3:s1:g8", "nf4:s2:g8", "fp4:g8", "sparse24", "sparse24+int4:g8"]
EMBEDS = {"int8:g0": "int8:g0", "int4:g8": "int4:g8", "nf4:s2:g8": "nf3:s1:g8"}  # with these, the embedding as well


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_packed_layers_write_the_models_text(format: str, graphs: bool) -> None:
    """Prompts in pieces, several requests at once, drafts: one row, few rows and many of every layer."""
    model = tiny_decoder(d_model=32, d_ff=48).float()
    model.compute_dtype = torch.float32
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(0.5)  # in fp32 the order of additions must not decide a token
    embed = [("embed", parse_format(EMBEDS[format]))] if format in EMBEDS else []
    report = convert(model, [*embed, ("blocks.*", parse_format(format))])
    pack(model)
    assert model.embed.packed == bool(embed)
    assert report.bits_per_weight < 32 and all(
        layer.packed for block in model.blocks for layer in (block.attn.q, block.mlp.up, block.mlp.down)
    )
    prompts = [[1, 2, 3], [4 + i % 7 for i in range(20)], [5]]
    samplings = [Sampling(max_tokens=10), Sampling(max_tokens=8, temperature=0.7, seed=3), Sampling(max_tokens=6)]
    want = [naive(model, p, s) for p, s in zip(prompts, samplings, strict=True)]
    for drafter in (None, LookupDrafter()):
        engine = Engine(model, graphs=graphs, chunk=12, max_requests=2, drafter=drafter, num_drafts=2)
        assert [c.token_ids for c in engine.generate(prompts, samplings)] == want
