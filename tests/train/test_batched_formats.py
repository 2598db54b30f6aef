"""Weights batched: the same weights, losses and gradients as one by one."""

from __future__ import annotations

import pytest
import torch

from shoestring.formats import convert, parse_format
from shoestring.formats.convert import format_linears
from shoestring.methods.distill.range_gradient import with_range_gradient
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import init_weights
from shoestring.train.batched_formats import BatchedFormats, families
from shoestring.train.cuda_graph import GraphedPasses
from shoestring.train.objectives import CrossEntropy
from shoestring.train.step import Micro

SPEC = ModelSpec(
    vocab_size=64, d_model=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, d_ff=128, max_positions=32
)
FORMATS = ("int2:g32", "int4:g64:learned", "nf3:s2:g32", "nf3:s2:g32:learned", "sparse24:held", "sparse24:held+slorb16")


def make(label: str, *, published: bool = False) -> Decoder:
    model = Decoder(SPEC)
    init_weights(model, seed=3)
    format = parse_format(label)
    convert(model, [("*", with_range_gradient(format) if published else format)])
    return model


def gradients(model: Decoder, objective: object) -> tuple[float, dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    micro = Micro(tokens[:, :-1], tokens[:, 1:], torch.arange(32).view(2, 16))
    model.zero_grad()
    loss = objective(model, micro)  # type: ignore[operator]
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("label", FORMATS)
def test_losses_and_gradients_are_those_of_layers_one_by_one(label: str) -> None:
    model = make(label)
    alone, batched = gradients(model, CrossEntropy()), gradients(model, BatchedFormats(CrossEntropy()))
    assert alone[0] == batched[0]
    assert alone[1].keys() == batched[1].keys()
    for name, grad in alone[1].items():
        torch.testing.assert_close(batched[1][name], grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("label", ["int2:g32", "nf3:s2:g32"])
def test_the_published_range_gradient_is_the_same(label: str) -> None:
    model = make(label, published=True)
    alone, batched = (gradients(model, CrossEntropy()), gradients(model, BatchedFormats(CrossEntropy(), limit=10_000)))
    assert alone[0] == batched[0]
    for name, grad in alone[1].items():
        torch.testing.assert_close(batched[1][name], grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("label", ["int2:g32", "nf3:s2:g32:learned"])
def test_rows_that_pass_one_after_the_other_give_the_same_gradients(label: str) -> None:
    model = make(label)
    alone, batched = (gradients(model, CrossEntropy()), gradients(model, BatchedFormats(CrossEntropy(), rows=1)))
    assert batched[0] == pytest.approx(alone[0], rel=1e-6)
    assert alone[1].keys() == batched[1].keys()
    for name, grad in alone[1].items():
        torch.testing.assert_close(batched[1][name], grad, rtol=1e-4, atol=1e-6)


def test_families_have_one_width_and_at_most_the_limit() -> None:
    found = list(families(make("int2:g32"), limit=20_000))
    assert found and all(len({x.in_features for x in part}) == 1 and len(part) > 1 for part in found)
    assert all(sum(x.weight.numel() for x in part) <= 20_000 for part in found)


@pytest.mark.parametrize("label", ["sparse24:tile", "sparse24:soft", "sparse24:mvue", "sparse24+int4:g32"])
def test_formats_that_look_at_more_than_a_row_are_left_alone(label: str) -> None:
    assert not list(families(make(label)))


def test_nothing_stays_behind_even_after_an_error() -> None:
    model = make("int2:g32")

    def broken(model: object, micro: object) -> torch.Tensor:
        assert any(x.made is not None for _, x in format_linears(model))  # type: ignore[arg-type]
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        gradients(model, BatchedFormats(broken))
    assert all(x.made is None for _, x in format_linears(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("label", ["int2:g32:learned", "nf3:s2:g32", "sparse24:held+slorb16"])
def test_weights_made_together_in_passes_of_rows_can_be_captured(label: str) -> None:
    model, objective = make(label).cuda(), BatchedFormats(CrossEntropy(), rows=1)
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1)).cuda()
    micro = Micro(tokens[:, :-1], tokens[:, 1:], torch.arange(32, device="cuda").view(2, 16))

    def passes() -> torch.Tensor:
        loss = objective(model, micro)
        loss.backward()
        return loss.detach()

    replay = GraphedPasses(passes, [p for p in model.parameters() if p.requires_grad])
    assert not replay.reason
    model.zero_grad()
    captured = float(replay()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert captured[0] == pytest.approx(float(passes()), rel=1e-5)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(captured[1][name], p.grad, rtol=1e-4, atol=1e-6)
