"""What a request may set about logits beyond sampling: bias, penalties, a minimum length, grammars, log-probabilities.

`Sampling` says how a token is drawn. `SamplingWithRules` adds rules that change logits before the draw, and requests
log-probabilities of what was drawn. The engine knows nothing of either: it hands the target's logits and each request's
sampling to its verifier, and `VerifyWithRules(verify)` changes the logits first and records afterwards. Row i of a
request with drafts is changed as if its first i drafts had been written, so drafts do not change the text.

The masks of a grammar come from other threads. The verifier asks for them before the forward (`prepare`) and reports
after it how many have come (`ready_rows`); the engine verifies those rows only.

    logit - presence * [token was written] - frequency * times written + bias
    repetition penalty r (prompt and text): logit / r where positive, logit * r where negative

Log-probabilities are those of the model itself: log softmax of the logits before rules, temperature, top_k, top_p and
min_p.

Shapes: R rows, V vocabulary, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.gemv.embed_argmax import NO_TOKEN
from shoestring.model import collectives
from shoestring.model.transformer import Decoder, Head
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.kv_cache import KVCache
from shoestring.serve.engine.prompt_attention import limit_cudnn_plans
from shoestring.serve.engine.sampling import Sampling, check_setting
from shoestring.serve.speculative.verify import Check, Verifier, Verify, as_verifier

BLOCK_LOGITS = 1 << 23  # logits of a prompt held at once: 32 MB in fp32
KV_BLOCK = 16  # positions


@dataclass(frozen=True)
class LogitRules:
    bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    min_tokens: int = 0  # no token of `eos_ids` before this many are written
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("presence", "frequency", "repetition"):
            check_setting(f"{name}_penalty", getattr(self, name))

    @cached_property  # asked for every text in every step
    def active(self) -> bool:
        return self != LogitRules(min_tokens=self.min_tokens, eos_ids=self.eos_ids) or self.min_tokens > 0


@dataclass(frozen=True)
class TokenLogprob:
    """A token, log p(token), and the likeliest tokens in its place with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class DistinctTokens:
    """Which tokens occur, as an index tensor that grows with them."""

    def __init__(self, tokens: Sequence[int], device: torch.device) -> None:
        self._known = set(tokens)
        self._at = torch.tensor(sorted(self._known), device=device, dtype=torch.int64)

    def add(self, tokens: Sequence[int]) -> None:
        self._at = self.at(tokens)
        self._known.update(tokens)

    def at(self, more: Sequence[int] = ()) -> Tensor:
        """Those that occur, `more` included."""
        new = [token for token in dict.fromkeys(more) if token not in self._known]
        return torch.cat([self._at, torch.tensor(new, device=self._at.device)]) if new else self._at


class RuleTensors:
    """The rules of one request as tensors on the device of the logits. They are kept from step to step: counting a long
    prompt again for every token would hold up all other requests."""

    def __init__(self, rules: LogitRules, prompt: Sequence[int], like_V: Tensor) -> None:
        """`like_V`: a row of logits."""
        self.rules, device = rules, like_V.device
        self._bias_at = torch.tensor([token for token, _ in rules.bias], device=device, dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in rules.bias], device=device, dtype=like_V.dtype)
        self._eos_at = torch.tensor(rules.eos_ids, device=device, dtype=torch.int64)
        self._seen = DistinctTokens(prompt if rules.repetition != 1 else (), device)  # in prompt and text
        self._written = DistinctTokens((), device)
        self._count_V = torch.zeros_like(like_V)  # how often each was written
        self._num_counted = 0

    def apply(self, logits_V: Tensor, written: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """A row after `written` and `drafts`. `written` only grows from call to call."""
        rules, out_V = self.rules, logits_V.clone()
        self._count(written)
        if rules.repetition != 1:
            seen = self._seen.at(drafts)
            before, most = out_V[seen], torch.finfo(out_V.dtype).max
            after = torch.where(before > 0, before / rules.repetition, before * rules.repetition)
            # A penalty near 0 must not make a finite logit infinite: that is how a broken model is told.
            out_V[seen] = torch.where(before.isfinite(), after.clamp(-most, most), before)
        if rules.presence or rules.frequency:
            token, count_V = self._written.at(drafts), self._count_V
            if drafts:
                count_V = self._added(count_V.clone(), drafts)
            out_V[token] -= rules.presence + rules.frequency * count_V[token]
        if rules.bias:
            out_V[self._bias_at] += self._bias
        if len(written) + len(drafts) < rules.min_tokens and 0 < len(rules.eos_ids) < len(out_V):
            out_V[self._eos_at] = -torch.inf
        return out_V

    def _count(self, written: Sequence[int]) -> None:
        assert self._num_counted <= len(written)
        new, self._num_counted = written[self._num_counted :], len(written)
        if new and self.rules.repetition != 1:
            self._seen.add(new)
        if new and (self.rules.presence or self.rules.frequency):
            self._written.add(new)
            self._added(self._count_V, new)

    def _added(self, count_V: Tensor, tokens: Sequence[int]) -> Tensor:
        at = torch.tensor(tokens, device=count_V.device)
        return count_V.index_add_(0, at, count_V.new_ones(len(at)))


@dataclass
class TokenHistory:
    """A request's tokens so far, as its verifier saw them. Owned by the thread that steps the engine."""

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tensors: RuleTensors | None = field(default=None, repr=False)  # made with the first logits


class GrammarLimitExceeded(UserError):
    """The text cannot go on because its grammar became too complex; the server answers 400."""


class Grammar(Protocol):
    """Which tokens may come next. Masks are computed on other threads."""

    def begin(self, written: Sequence[int], drafts: Sequence[int]) -> None:
        """Start to compute the masks after `written` and after each of the drafts, where that was not done yet."""

    def num_ready(self, written: Sequence[int], drafts: Sequence[int], until: float) -> int:
        """How many of these masks exist, from the first; waits for the others until this time (time.monotonic). Raises
        GrammarLimitExceeded."""

    def allowed(self, written: Sequence[int], drafts: Sequence[int], vocab: int) -> Tensor | None:
        """[V] bool: the tokens that may follow `written` and all of `drafts`, once they are known; None allows all."""


@dataclass(frozen=True)
class SamplingWithRules(Sampling):
    rules: LogitRules = LogitRules()
    num_logprobs: int | None = None  # None: not recorded; n: the token's own and those of the n likeliest
    grammar: Grammar | None = field(default=None, compare=False, repr=False)
    history: TokenHistory = field(default_factory=TokenHistory, compare=False, repr=False)

    @property
    def changes_logits(self) -> bool:
        return self.rules.active or self.grammar is not None


class VerifyWithRules(Verifier):
    """`verify` that obeys the rules of `SamplingWithRules`s and fills their histories; others pass unchanged."""

    def __init__(self, verify: Verify | Verifier) -> None:
        self._inner = as_verifier(verify)

    def __call__(self, logits_RV: Tensor, checks: Sequence[Check]) -> list[list[int]]:
        gained = self._inner(apply_rules(logits_RV, checks), checks)
        record(logits_RV, checks, gained)
        return gained

    def needs_logits(self, checks: Sequence[Check]) -> bool:
        asked = [c.sampling for c in checks if isinstance(c.sampling, SamplingWithRules)]
        return any(s.changes_logits or s.num_logprobs is not None for s in asked) or self._inner.needs_logits(checks)

    def prepare(self, checks: Sequence[Check]) -> None:
        for check in checks:
            if (grammar := _grammar_of(check)) is not None:
                grammar.begin(_written(check), check.drafts)

    def ready_rows(self, checks: Sequence[Check], wait_s: float) -> list[int | UserError]:
        until, found = time.monotonic() + wait_s, list[int | UserError]()
        for check in checks:
            grammar = _grammar_of(check)
            try:
                ready = None if grammar is None else grammar.num_ready(_written(check), check.drafts, until)
                found.append(check.num_rows if ready is None else ready)
            except GrammarLimitExceeded as error:
                found.append(error)
        return found

    def note_gained(self, checks: Sequence[Check], gained: Sequence[Sequence[int]]) -> None:
        for check, new in zip(checks, gained, strict=True):
            sampling = check.sampling
            if isinstance(sampling, SamplingWithRules):
                sampling.history.tokens.extend(without_no_token(new))


def apply_rules(logits_RV: Tensor, checks: Sequence[Check]) -> Tensor:
    """The logits after every request's rules; the same tensor where no request has any."""
    if not any(isinstance(c.sampling, SamplingWithRules) and c.sampling.changes_logits for c in checks):
        return logits_RV
    out_RV = logits_RV.clone() if logits_RV.dtype == torch.float64 else logits_RV.float().clone()
    row = 0
    for check in checks:
        sampling = check.sampling
        if isinstance(sampling, SamplingWithRules) and sampling.changes_logits:
            written = _written(check)
            if sampling.rules.active and sampling.history.tensors is None:
                sampling.history.tensors = RuleTensors(sampling.rules, sampling.history.prompt, out_RV[row])
            for i in range(check.num_rows):
                if sampling.history.tensors is not None:
                    out_RV[row + i] = sampling.history.tensors.apply(out_RV[row + i], written, check.drafts[:i])
                if sampling.grammar is not None:
                    allowed_V = sampling.grammar.allowed(written, check.drafts[:i], out_RV.shape[1])
                    if allowed_V is not None:
                        # What is not finite stays: a mask must not hide that the model is broken.
                        barred_V = ~allowed_V.to(out_RV.device) & out_RV[row + i].isfinite()
                        out_RV[row + i].masked_fill_(barred_V, -torch.inf)
        row += check.num_rows
    return out_RV


def _grammar_of(check: Check) -> Grammar | None:
    return check.sampling.grammar if isinstance(check.sampling, SamplingWithRules) else None


def _written(check: Check) -> list[int]:
    """The new tokens before the check's drafts."""
    assert isinstance(check.sampling, SamplingWithRules)
    history = check.sampling.history
    return history.tokens[: check.position - len(history.prompt)]


def record(logits_RV: Tensor, checks: Sequence[Check], gained: Sequence[Sequence[int]]) -> None:
    """Append what each request with a history gained, with log-probabilities if requested."""
    row = 0
    for check, new in zip(checks, gained, strict=True):
        sampling = check.sampling
        if isinstance(sampling, SamplingWithRules):
            known = without_no_token(new)
            sampling.history.tokens.extend(known)
            if sampling.num_logprobs is not None and known:
                rows_RV = logits_RV[row : row + len(known)]
                sampling.history.logprobs.extend(token_logprobs(rows_RV, known, sampling.num_logprobs))
        row += check.num_rows


def without_no_token(gained: Sequence[int]) -> Sequence[int]:
    """NO_TOKEN is always the last."""
    return gained[:-1] if gained and gained[-1] == NO_TOKEN else gained


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
def prompt_logprob_parts(
    model: Decoder, tokens: Sequence[int], num_top: int, chunk: int
) -> Iterator[list[TokenLogprob | None]]:
    """For each token of a prompt its TokenLogprob given those before it; None for the first.

    A forward for every `chunk` tokens, logits a block of rows at a time. The caller may do other work between parts; a
    prompt of several has a KV cache of its own meanwhile.
    """
    device, num_rows = model.device, len(tokens) - 1  # the last token is only predicted
    cache = None
    if num_rows > chunk:
        cache = KVCache(model.plan, BlockPool(-(-num_rows // KV_BLOCK), KV_BLOCK, prefix_cache=False))
    for start in range(0, max(1, num_rows), chunk):
        stop = min(start + chunk, num_rows)
        found: list[TokenLogprob | None] = [None] if start == 0 else []
        if stop > start:
            ids = torch.tensor([list(tokens[start:stop])], device=device)
            readout = partial(_read_logprobs, found, tokens[start + 1 : stop + 1], num_top)
            with limit_cudnn_plans():
                if cache is None:
                    model(ids, readout=readout)
                else:
                    at = torch.arange(start, stop, device=device)[None]
                    span = RowSpan(range(cache.pool.num_blocks), start, stop - start)
                    model(ids, at, attend=cache.plan([span], device), readout=readout)
        yield found


def _read_logprobs(
    found: list[TokenLogprob | None], targets: Sequence[int], num_top: int, hidden_BTD: Tensor, head: Head
) -> Tensor:
    """A readout that appends to `found` what row i says about targets[i]."""
    hidden_RD, head = hidden_BTD[0], head.to(hidden_BTD.dtype)
    num_shards = 1 if head.group is None else head.group.size()
    block = max(1, BLOCK_LOGITS // (head.weight_VD.shape[0] * num_shards))
    for start in range(0, len(hidden_RD), block):
        logits = head.logits(hidden_RD[start : start + block])
        if head.group is not None:
            logits = collectives.gather_last(logits, head.group)
        found.extend(token_logprobs(logits, targets[start : start + len(logits)], num_top))
    return hidden_BTD
