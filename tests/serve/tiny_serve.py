"""Tiny random decoders, a byte tokenizer and a lookup drafter for the engine's tests."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace

import torch

from shoestring.model import Decoder, ModelSpec
from shoestring.serve.engine import Request
from shoestring.serve.request import Draft
from shoestring.serve.sampling import Sampling, sample

SPEC = ModelSpec(
    vocab_size=29,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    d_ff=24,
    max_positions=64,
)


def tiny_decoder(seed: int = 0, **changes: object) -> Decoder:
    """fp64, so that the order of additions does not decide a token; wide weights, so that texts vary."""
    torch.manual_seed(seed)
    model = Decoder(replace(SPEC, **changes)).double()
    model.compute_dtype = torch.float64
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0, 0.6)
    return model.eval()


def naive(
    model: Decoder, prompt: Sequence[int], sampling: Sampling, eos: frozenset[int] = frozenset()
) -> list[int]:
    """The definition: a full forward per token, no cache."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens and len(tokens) < model.spec.max_positions:
        with torch.no_grad():
            logits = model(torch.tensor([tokens]))[0, -1:]
        tokens.append(int(sample(logits, [sampling], [len(tokens)])))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def near_copy(model: Decoder, noise: float) -> Decoder:
    """A drafter that mostly agrees: the same weights with some noise."""
    copy = Decoder(model.spec).double()
    copy.compute_dtype = torch.float64
    copy.load_state_dict(model.state_dict())
    gen = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for param in copy.parameters():
            param.add_(noise * torch.randn(param.shape, generator=gen, dtype=param.dtype))
    return copy.eval()


class ByteTokenizer:
    """Every byte is a token; 0 ends a text."""

    eos_ids: set[int] = {0}  # noqa: RUF012
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def stream(self) -> ByteStream:
        return ByteStream()


class ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, id: int) -> str:
        return self._decoder.decode(bytes([id]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class LookupDrafter:
    """Prompt lookup: what followed the last two tokens the last time they occurred in this request."""

    def __init__(self) -> None:
        self.num_drafted = self.num_accepted = 0
        self.live: set[int] = set()

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        self.live |= {r.id for r in requests}
        return [Draft(self._lookup(r.tokens, n)) for r in requests]

    def _lookup(self, tokens: list[int], n: int) -> list[int]:
        for at in range(len(tokens) - 3, -1, -1):
            if tokens[at : at + 2] == tokens[-2:]:
                return tokens[at + 2 : at + 2 + n]
        return []

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def release(self, request: Request) -> None:
        self.live.discard(request.id)
