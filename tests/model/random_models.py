"""Models with random weights, and what they say: for tests that write a model in one way and read it in another."""

from __future__ import annotations

import torch

from shoestring.model import Decoder, ModelSpec


def build(spec: ModelSpec, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(spec)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Of a model of ours or of transformers."""
    tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits
