"""Rows that hold several samples: each sees itself alone, forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from shoestring.model.attention import causal_attention
from shoestring.model.layer_plan import plan_decoder
from shoestring.model.segments import segment_attend, segment_positions
from tiny import LLAMA, tiny_llama

LENGTHS = (5, 1, 9, 3)
BOUNDS = torch.tensor([0, 5, 6, 15, 18, 18, 18], dtype=torch.int32)  # empty segments behind the last one


def test_positions_begin_anew_in_each_segment() -> None:
    found = segment_positions(BOUNDS, torch.Size([2, 9])).flatten().tolist()
    assert found == [p for n in LENGTHS for p in range(n)]


def test_a_packed_row_has_the_logits_and_gradients_of_its_samples_alone() -> None:
    model = tiny_llama()
    samples = [torch.randint(0, LLAMA.vocab_size, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    packed = torch.cat(samples, 1).view(2, 9)
    attend = segment_attend(model.plan, BOUNDS, 9)
    logits = model(packed, segment_positions(BOUNDS, packed.shape), attend=attend, context=9).flatten(0, 1)
    logits.square().sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = torch.cat([model(s)[0] for s in samples])
    alone.square().sum().backward()
    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert (grads[name] - p.grad).norm() < 1e-5 * p.grad.norm(), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("window", [None, 4])
def test_varlen_attention_equals_the_loop(window: int | None) -> None:
    plan = plan_decoder(dataclasses.replace(LLAMA, num_heads=8, num_kv_heads=2, head_dim=64))
    attn = dataclasses.replace(plan.layers[0].attn, window=window)
    plan = dataclasses.replace(plan, layers=(dataclasses.replace(plan.layers[0], attn=attn), *plan.layers[1:]))
    drawn: Any = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 9, h, 64, device="cuda", generator=drawn).bfloat16() for h in (8, 2, 2))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = segment_attend(plan, BOUNDS.cuda(), 9)(0, *leaves)
    dy = torch.randn_like(out)
    out.backward(dy)
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    cuts = [t.flatten(0, 1)[None].split(LENGTHS, 1) for t in wide]
    alone = torch.cat([causal_attention(*part, window=window) for part in zip(*cuts, strict=True)], 1).view(out.shape)
    alone.backward(dy.float())
    torch.testing.assert_close(out.float(), alone, rtol=2e-2, atol=2e-2)
    for ours, expected in zip(leaves, wide, strict=True):
        assert ours.grad is not None and expected.grad is not None
        assert (ours.grad.float() - expected.grad).norm() < 1e-2 * expected.grad.norm()
