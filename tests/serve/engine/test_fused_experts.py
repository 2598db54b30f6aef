"""A layer's experts for serving are those of the model, for few rows, several tiles of them, and many."""

from __future__ import annotations

import pytest
import torch
from naive_decoding import naive

from shoestring.formats import convert, kernel_layout, pack, parse_format, use_kernels
from shoestring.model import Decoder
from shoestring.model.spec import Experts
from shoestring.model.transformer import MixtureOfExperts
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.fused_decoder import unusable
from shoestring.serve.engine.fused_experts import FusedExperts, experts_unusable
from tiny import tiny_decoder

EXPERTS = Experts(num=6, top_k=2, d_ff=64, shared_d_ff=32)
ROWS = (1, 5, 40, 80)


def model_with_experts(format: str | None = None, **changes: object) -> Decoder:
    """In fp32; `format`: of the blocks, packed."""
    model = tiny_decoder(**{"d_model": 64, "num_heads": 4, "experts": EXPERTS, **changes}).float()
    model.compute_dtype = torch.float32
    if format is not None:
        convert(model, [("blocks.*.mlp.*", parse_format(format))])
        pack(model)
    return model


def experts_of(model: Decoder) -> MixtureOfExperts:
    mlp = model.blocks[0].mlp
    assert isinstance(mlp, MixtureOfExperts)
    return mlp


def check(mlp: MixtureOfExperts, dtype: torch.dtype, device: str, tolerance: float) -> None:
    fused = FusedExperts.of(mlp, dtype)
    for rows in ROWS:
        x, normed = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(rows)).to(device, dtype)
        want = x + mlp(normed)
        assert (fused(x, normed) - want).norm() <= tolerance * want.norm(), rows


@torch.no_grad()
def test_dense_experts_hold_nothing_twice() -> None:
    mlp = experts_of(model_with_experts())
    before = {n: p.clone() for n, p in mlp.named_parameters()}
    check(mlp, torch.float32, "cpu", 1e-5)
    up = FusedExperts.of(mlp, torch.float32).up.weight
    assert up is not None and mlp.experts[3].up.weight.untyped_storage().data_ptr() == up.data_ptr()
    assert all(torch.equal(p, before[n]) for n, p in mlp.named_parameters())


@torch.no_grad()
def test_packed_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_experts("int4:g32")
    assert "no grouped kernel" in str(unusable(model)), "stored parts have no grouped kernel"
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    use_kernels(model)
    assert unusable(model) is None
    check(experts_of(model), torch.float32, "cpu", 1e-5)


def test_half_packed_experts_are_computed_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_experts()
    convert(model, [(f"blocks.*.mlp.experts.*.{name}", parse_format("int4:g32")) for name in ("gate", "up")])
    pack(model)
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    use_kernels(model)
    assert unusable(model) == "the experts have packed and dense weights"


def test_pruned_experts_are_computed_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_experts("sparse24+int4:g8")
    monkeypatch.setattr(kernel_layout, "chunks_usable", lambda t: True)
    use_kernels(model)
    assert "no grouped kernel" in str(unusable(model)), "chunks of the kept values are no grouped weight"


def test_experts_that_cannot_be_grouped_are_computed_by_the_model() -> None:
    model = model_with_experts()
    convert(model, [("blocks.0.mlp.experts.1.*", parse_format("int4:g32"))])
    assert experts_unusable(experts_of(model), torch.float32) == "the experts have weights of several Formats"
    assert Engine(model).generate([[1, 2, 3]], Sampling(max_tokens=4))[0].token_ids


def test_a_served_mixture_writes_the_models_text() -> None:
    model = tiny_decoder(experts=EXPERTS)
    prompts, sampling = [[1, 2, 3], [4, 5], list(range(20)) * 2], Sampling(max_tokens=12)
    texts = Engine(model, graphs=True, max_requests=3).generate(prompts, sampling)
    assert [t.token_ids for t in texts] == [naive(model, p, sampling) for p in prompts]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("format", [None, "int4:g32", "nf3:s2:g32"])
def test_experts_on_a_gpu(format: str | None) -> None:
    model = model_with_experts(format).to("cuda", torch.bfloat16)
    model.compute_dtype = torch.bfloat16
    use_kernels(model)
    with torch.no_grad():
        check(experts_of(model), torch.bfloat16, "cuda", 0.02)
    for num in (1, 3):
        engine = Engine(model, max_requests=num)
        texts = engine.generate([[1, 2, 3]] * num, Sampling(max_tokens=8, ignore_eos=True))
        assert engine.runner.fast and {len(t.token_ids) for t in texts} == {8}
        assert len({tuple(t.token_ids) for t in texts}) == 1
