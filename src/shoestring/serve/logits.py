"""What a request may ask about logits beyond sampling: bias, penalties, a least length, log-probabilities.

`Sampling` says how a token is drawn; `RuledSampling` adds rules that change logits before the draw, and asks
for log-probabilities of what was drawn. The engine knows nothing of either: it hands the target's logits and
each request's sampling to its `verify`, and `with_rules(verify)` is a `verify` that changes the logits first
and records afterwards. Row i of a request with drafts is changed as if its first i drafts had been written,
so drafts do not change what is said.

    logit - presence * [token was written] - frequency * times written + bias
    repetition penalty r (prompt and text): logit / r where positive, logit * r where negative

Log-probabilities are those of the model itself: log softmax of the logits before rules, temperature, top_k,
top_p and min_p.

Shapes: R rows, V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.model import collectives
from shoestring.model.transformer import Decoder, Head
from shoestring.serve.sampling import Sampling
from shoestring.serve.verify import Check, needs_logits
from shoestring.serve.whole_texts import few_plans

BLOCK_LOGITS = 1 << 23  # logits of a prompt held at once: 32 MB in fp32


@dataclass(frozen=True)
class Rules:
    bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    min_tokens: int = 0  # no token of `eos_ids` before this many are written
    eos_ids: tuple[int, ...] = ()

    @property
    def active(self) -> bool:
        return self != Rules(min_tokens=self.min_tokens, eos_ids=self.eos_ids) or self.min_tokens > 0


@dataclass(frozen=True)
class TokenLogprob:
    """A token, log p(token), and the likeliest tokens in its place with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Trace:
    """What a request has written so far, as its `verify` saw it. Owned by the thread that steps the engine."""

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Grammar(Protocol):
    """Which tokens may come next. `allowed` must not depend on calls for other rows."""

    def allowed(self, written: Sequence[int], vocab: int) -> Tensor | None:
        """[V] bool: the tokens that may follow `written`; None allows all."""


@dataclass(frozen=True)
class RuledSampling(Sampling):
    rules: Rules = Rules()
    num_logprobs: int | None = None  # None: not recorded; n: the token's own and those of the n likeliest
    grammar: Grammar | None = field(default=None, compare=False, repr=False)
    trace: Trace = field(default_factory=Trace, compare=False, repr=False)

    @property
    def ruled(self) -> bool:
        return self.rules.active or self.grammar is not None


Verify = Callable[..., list[list[int]]]


class Ruled:
    """`verify` that obeys the rules of `RuledSampling`s and fills their traces; others pass unchanged."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify

    def __call__(self, logits_RV: Tensor, checks: Sequence[Check], *rest: Any) -> list[list[int]]:
        gained = self._verify(apply_rules(logits_RV, checks), checks, *rest)
        record(logits_RV, checks, gained)
        return gained

    def needs_logits(self, checks: Sequence[Check]) -> bool:
        asked = [c.sampling for c in checks if isinstance(c.sampling, RuledSampling)]
        return any(s.ruled or s.num_logprobs is not None for s in asked) or needs_logits(self._verify, checks)

    def note_gained(self, checks: Sequence[Check], gained: Sequence[Sequence[int]]) -> None:
        for check, new in zip(checks, gained, strict=True):
            if isinstance(check.sampling, RuledSampling):
                check.sampling.trace.tokens.extend(new)


def with_rules(verify: Verify) -> Ruled:
    return Ruled(verify)


def apply_rules(logits_RV: Tensor, checks: Sequence[Check]) -> Tensor:
    """The logits after every request's rules; the same tensor where no request has any."""
    if not any(isinstance(c.sampling, RuledSampling) and c.sampling.ruled for c in checks):
        return logits_RV
    out_RV = logits_RV.clone() if logits_RV.dtype == torch.float64 else logits_RV.float().clone()
    row = 0
    for check in checks:
        sampling = check.sampling
        if isinstance(sampling, RuledSampling) and sampling.ruled:
            prompt = sampling.trace.prompt
            written = sampling.trace.tokens[: check.position - len(prompt)]
            for i in range(check.num_rows):
                so_far = [*written, *check.drafts[:i]]
                out_RV[row + i] = rule_row(out_RV[row + i], sampling.rules, prompt, so_far)
                if sampling.grammar is not None:
                    allowed_V = sampling.grammar.allowed(so_far, out_RV.shape[1])
                    if allowed_V is not None:
                        out_RV[row + i].masked_fill_(~allowed_V.to(out_RV.device), -torch.inf)
        row += check.num_rows
    return out_RV


def rule_row(logits_V: Tensor, rules: Rules, prompt: Sequence[int], written: Sequence[int]) -> Tensor:
    """One row of logits after the rules, given the prompt and what was written since."""
    out_V = logits_V.clone()
    vocab = len(out_V)
    if rules.repetition != 1:
        seen = torch.tensor(sorted({*prompt, *written}), device=out_V.device, dtype=torch.int64)
        before = out_V[seen]
        out_V[seen] = torch.where(before > 0, before / rules.repetition, before * rules.repetition)
    if written and (rules.presence or rules.frequency):
        token = torch.tensor(written, device=out_V.device)
        count_V = torch.bincount(token, minlength=vocab).to(out_V.dtype)
        out_V -= rules.presence * (count_V > 0) + rules.frequency * count_V
    if rules.bias:
        index = torch.tensor([t for t, _ in rules.bias], device=out_V.device)
        out_V[index] += torch.tensor([b for _, b in rules.bias], device=out_V.device, dtype=out_V.dtype)
    if len(written) < rules.min_tokens and 0 < len(rules.eos_ids) < vocab:
        out_V[torch.tensor(rules.eos_ids, device=out_V.device)] = -torch.inf
    return out_V


def record(logits_RV: Tensor, checks: Sequence[Check], gained: Sequence[Sequence[int]]) -> None:
    """Append what each ruled request gained to its trace, with log-probabilities where asked."""
    row = 0
    for check, new in zip(checks, gained, strict=True):
        sampling = check.sampling
        if isinstance(sampling, RuledSampling):
            sampling.trace.tokens.extend(new)
            if sampling.num_logprobs is not None:
                rows_RV = logits_RV[row : row + len(new)]
                sampling.trace.logprobs.extend(token_logprobs(rows_RV, new, sampling.num_logprobs))
        row += check.num_rows


def token_logprobs(logits_RV: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """log p of tokens[r] under row r, with the num_top likeliest tokens of the row."""
    logits = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    logp_RV = logits.log_softmax(dim=-1)
    own_R = logp_RV.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    top = torch.topk(logp_RV, min(num_top, logits.shape[1]), dim=-1)
    values, indices = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprob(token, own, tuple(zip(index, value, strict=True)))
        for token, own, index, value in zip(tokens, own_R, indices, values, strict=True)
    ]


@torch.no_grad()
def prompt_logprobs(model: Decoder, tokens: Sequence[int], num_top: int) -> list[TokenLogprob | None]:
    """For each token of a prompt its TokenLogprob given those before it; None for the first.

    One forward over the whole prompt without a cache, logits a block of rows at a time.
    """
    found: list[TokenLogprob | None] = [None]

    def read(hidden_BTD: Tensor, head: Head) -> Tensor:
        hidden_RD, weight_VD = hidden_BTD[0, :-1], head.weight_VD.to(hidden_BTD.dtype)
        num_shards = 1 if head.group is None else head.group.size()
        block = max(1, BLOCK_LOGITS // (weight_VD.shape[0] * num_shards))
        for start in range(0, len(hidden_RD), block):
            logits = F.linear(hidden_RD[start : start + block], weight_VD)
            if head.group is not None:
                logits = collectives.gather_last(logits, head.group)
            found.extend(token_logprobs(logits, tokens[start + 1 : start + 1 + len(logits)], num_top))
        return hidden_BTD

    device = model.embed.weight.device
    if len(tokens) > 1:
        with few_plans():
            model(torch.tensor([list(tokens)], device=device), readout=read)
    return found
