"""Small models and correlated inputs for the tests of shrink/."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoestring.model import Decoder, ModelSpec

SPEC = ModelSpec(
    vocab_size=96,
    d_model=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ff=128,
    max_positions=64,
    model_type="qwen2",
    qkv_bias=True,
)
GPT2 = ModelSpec(
    vocab_size=96,
    d_model=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    d_ff=128,
    max_positions=64,
    model_type="gpt2",
    norm="layer",
    act="gelu_tanh",
    positions="learned",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)


def tiny_model(spec: ModelSpec = SPEC) -> Decoder:
    """Random, with norms and biases that are not trivial and a few loud channels, as trained models have."""
    gen = torch.Generator().manual_seed(0)
    model = Decoder(spec)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=gen) * 0.15)
            if "norm" in name and name.endswith("weight"):
                p.abs_().add_(0.5)
                p[::13] *= 8
    return model.eval()


def tokens(num_windows: int = 6, context: int = 32) -> Tensor:
    return torch.randint(0, 96, (num_windows, context), generator=torch.Generator().manual_seed(1))


def correlated(width: int = 128, num_tokens: int = 2048) -> Tensor:
    """Inputs whose channels depend on each other and differ in size."""
    gen = torch.Generator().manual_seed(2)
    mix = torch.randn(width // 4, width, generator=gen)
    x = torch.randn(num_tokens, width // 4, generator=gen) @ mix
    loud = torch.exp(torch.randn(width, generator=gen))
    return (x + 0.3 * torch.randn(num_tokens, width, generator=gen)) * loud


def random_weight(rows: int = 48, width: int = 128, skew: bool = False) -> Tensor:
    gen = torch.Generator().manual_seed(3)
    w = torch.randn(rows, width, generator=gen) * 0.05
    return torch.where(w > 0, w * 0.35, w) if skew else w


def dying(limit: int, action: Callable[..., Any]) -> Callable[..., Any]:
    """`action` for so many calls; the next one is Ctrl-C."""
    calls = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) > limit:
            raise KeyboardInterrupt
        return action(*args, **kwargs)

    return call
