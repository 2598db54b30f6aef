"""What the engine's tests compare with: decoding by definition, a drafter that looks texts up, and samplings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from shoestring.model import Decoder
from shoestring.serve.engine.engine import Request
from shoestring.serve.engine.request import Draft
from shoestring.serve.engine.sampling import Sampling, sample
from shoestring.serve.speculative.drafter import Drafter

greedy_st = st.builds(Sampling, max_tokens=st.integers(1, 16))
drawn_st = st.builds(
    Sampling,
    temperature=st.sampled_from([0.4, 1.0]),
    top_k=st.sampled_from([0, 6]),
    seed=st.integers(0, 99),
    max_tokens=st.integers(1, 16),
)


def naive(model: Decoder, prompt: Sequence[int], sampling: Sampling, eos: frozenset[int] = frozenset()) -> list[int]:
    """The definition: a full forward per token, no cache."""
    return naive_texts(model, [prompt], [sampling], eos)[0]


def naive_texts(
    model: Decoder, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], eos: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Of several texts at once; what pads the shorter ones stands behind them, where nothing looks."""
    texts = [list(prompt) for prompt in prompts]
    ends = [min(len(p) + s.max_tokens, model.spec.max_positions) for p, s in zip(prompts, samplings, strict=True)]
    while who := [i for i, text in enumerate(texts) if len(text) < ends[i]]:
        longest = max(len(texts[i]) for i in who)
        padded = torch.tensor([texts[i] + [0] * (longest - len(texts[i])) for i in who])
        with torch.no_grad():
            logits = model(padded)
        rows = torch.stack([logits[row, len(texts[i]) - 1] for row, i in enumerate(who)])
        tokens = sample(rows, [samplings[i] for i in who], [len(texts[i]) for i in who])
        for i, token in zip(who, tokens.tolist(), strict=True):
            texts[i].append(token)
            if token in eos:
                ends[i] = 0
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


class LookupDrafter(Drafter):
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
