"""Every kind of Format decodes through the engine: the text is that of the packed model's own forward."""

from __future__ import annotations

import pytest
import torch
from naive_decoding import LookupDrafter, naive_texts

from benchmarks.models import engine_logits
from shoestring.formats import convert, pack, parse_format, use_kernels
from shoestring.serve import Engine, Sampling
from tiny import tiny_decoder

FORMATS = ["int8:g0", "int4:g8", "int2:g8", "nf3:s1:g8", "nf4:s2:g8", "fp4:g8", "sparse24", "sparse24+int4:g8"]
EMBEDS = {"int8:g0": "int8:g0", "int4:g8": "int4:g8", "nf4:s2:g8": "nf3:s1:g8"}  # with these, the embedding as well


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.few(10)
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
    want = naive_texts(model, prompts, samplings)
    for drafter in (None, LookupDrafter()):
        engine = Engine(model, graphs=graphs, chunk=12, max_requests=2, drafter=drafter, num_drafts=2)
        assert [c.token_ids for c in engine.generate(prompts, samplings)] == want


GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
)


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("embed", ["int8:g0", "int4:g32", "nf4:s2:g32"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_embeddings_and_heads(embed: str, tied: bool, device: str) -> None:
    """Logits of fused steps; on a GPU the rows and the head are read by kernels."""
    model = tiny_decoder(d_model=64, d_ff=128, tied=tied).float().to(device)
    convert(model, [("embed", parse_format(embed)), *([] if tied else [("head", parse_format(embed))])], skip=())
    pack(model)
    tokens = [1 + i % 27 for i in range(24)]
    want = model(torch.tensor([tokens], device=device))[0]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model.to(dtype).compute_dtype = dtype
    use_kernels(model)
    own = (model(torch.tensor([tokens], device=device))[0].to(want) - want).norm()  # what bf16 costs
    got = engine_logits(model, tokens, graphs=True).to(want)
    assert (got - want).norm() <= 1.5 * own + 1e-5 * want.norm()
