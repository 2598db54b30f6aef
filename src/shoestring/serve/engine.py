"""The engine: many requests, one step rule.

A request has `tokens` (committed), `drafts` (proposed, not verified) and `num_computed <= len(tokens)`: the
number of positions whose keys and values are valid. A step computes rows of [num_computed, len(tokens) +
len(drafts)), as many as the row budget allows. Rows that stop short of the last committed token only move
`num_computed`; rows that reach it are verified: the new tokens are appended, num_computed = len(tokens) - 1,
drafts = []. Prefill, chunked prefill, decoding, speculation and its roll-back are all this one rule; plain
decoding has no drafts.

Requests that are ready to gain a token go first and get one row each, then their drafts, then prompts in
order of arrival: a long prompt never stalls those who are already writing.

No module-level state: several engines (a target and its drafter, say) live in one process.

Left out: paged memory, prefix sharing, preemption, CUDA graphs, a server loop. A thread that owns the engine
calls add, abort and step; nothing here locks.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.model.transformer import Decoder
from shoestring.serve.kv_cache import KVCache, Span
from shoestring.serve.sampling import Sampling
from shoestring.serve.text import TextStream, TokenStream
from shoestring.serve.verify import Check, coupled

FinishReason = Literal["stop", "length", "abort"]
Verify = Callable[[Tensor, Sequence[Check]], list[list[int]]]
Prompt = str | Sequence[int]


class TextCodec(Protocol):
    """The part of `model.tokenizer.Tokenizer` that the engine uses."""

    eos_ids: set[int]

    def encode(self, text: str) -> list[int]: ...
    def stream(self) -> TokenStream: ...


@dataclass(eq=False)
class Request:
    tokens: list[int]  # prompt and committed new tokens
    num_prompt: int
    sampling: Sampling  # the seed is always filled in, so that the text can be had again
    id: int
    text_stream: TextStream | None = field(default=None, repr=False)
    drafts: list[int] = field(default_factory=list)
    num_computed: int = 0
    slot: int | None = None
    text: str = ""  # released so far; never shrinks
    finish_reason: FinishReason | None = None

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def ready(self) -> bool:
        """Only the last committed token is left to compute: the next row gains a token."""
        return self.num_computed == len(self.tokens) - 1


class Drafter(Protocol):
    """Guesses tokens ahead. Its guesses cost time when wrong, never correctness."""

    def propose(self, requests: Sequence[Request], n: int) -> list[list[int]]:
        """At most n guesses for each request about what follows its `tokens`."""

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """How the guesses of the last step fared."""

    def release(self, request: Request) -> None:
        """The request is over; drop whatever was kept for it."""


@dataclass(frozen=True)
class Output:
    """What one step gave one request."""

    request: Request
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]  # every new token, the end-of-text or stop-completing one included
    finish_reason: FinishReason
    num_prompt: int


@dataclass
class Stats:
    """Counters since the engine was built."""

    num_steps: int = 0
    num_rows: int = 0
    num_new_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class Engine:
    def __init__(
        self,
        model: Decoder,
        tokenizer: TextCodec | None = None,
        *,
        max_requests: int = 8,
        max_context: int | None = None,
        chunk: int = 512,
        drafter: Drafter | None = None,
        num_drafts: int = 4,
        verify: Verify = coupled,
        eos_ids: Iterable[int] | None = None,
    ) -> None:
        """`chunk` is the budget of rows per step; `num_drafts` the most guesses per request and step."""
        spec = model.spec
        context = spec.max_positions if max_context is None else max_context
        if not 1 <= context <= spec.max_positions:
            raise UserError(
                f"max_context={context} does not fit this model, which has {spec.max_positions} positions; "
                f"give 1 to {spec.max_positions}"
            )
        for name, value, least in (
            ("max_requests", max_requests, 1),
            ("chunk", chunk, 1),
            ("num_drafts", num_drafts, 0),
        ):
            if value < least:
                raise UserError(f"{name}={value} is not allowed; give {least} or more")
        self.model, self.tokenizer, self.max_context, self.chunk = model, tokenizer, context, chunk
        self.drafter, self.num_drafts, self.verify = drafter, num_drafts, verify
        self.eos_ids = _eos_ids(model, tokenizer) if eos_ids is None else set(eos_ids)
        self.cache = KVCache(spec, slots=max_requests, max_context=context)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = Stats()
        self._ids = itertools.count()

    # -- requests in and out --------------------------------------------------------------------------------
    def add(self, prompt: Prompt, sampling: Sampling | None = None) -> Request:
        """Queue a prompt (text or token ids). It starts when a slot is free."""
        request = self._request(prompt, sampling)
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now; its slot is free at once. A finished request is left as it is."""
        if request.finish_reason is None:
            self._finish(request, "abort")
            if request in self.waiting:
                self.waiting.remove(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def _request(self, prompt: Prompt, sampling: Sampling | None) -> Request:
        sampling = sampling or Sampling()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError(
                    "a text prompt needs a tokenizer, and this model came without one; give token ids"
                )
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = [int(t) for t in prompt]
        vocab = self.model.spec.vocab_size
        if not tokens:
            raise UserError("the prompt is empty; give at least one token to continue from")
        if len(tokens) >= self.max_context:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, but the context holds {self.max_context}, "
                f"the first new one included; shorten it to {self.max_context - 1} tokens or raise max_context"
            )
        bad = next((t for t in tokens if not 0 <= t < vocab), None)
        if bad is not None:
            raise UserError(
                f"token id {bad} is outside the vocabulary of {vocab} (0 to {vocab - 1}); "
                "encode the prompt with this model's own tokenizer"
            )
        if sampling.stop and self.tokenizer is None:
            raise UserError(
                f"stop strings {sampling.stop} need a tokenizer; build the engine with one or drop them"
            )
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        stream = None if self.tokenizer is None else TextStream(self.tokenizer.stream(), sampling.stop)
        return Request(tokens, len(tokens), sampling, next(self._ids), stream)

    # -- the step -------------------------------------------------------------------------------------------
    # no_grad, not inference_mode: a sharded model keeps tensors that it makes here and trains on with them.
    @torch.no_grad()
    def step(self) -> list[Output]:
        """Compute one batch of rows; the requests that gained tokens or ended, in no particular order."""
        self._admit()
        self._propose()
        work = self._schedule()
        if not work:
            return []
        logits_RV, checked = self._forward(work)
        self.stats.num_steps += 1
        self.stats.num_rows += sum(num for _, num in work)
        if not checked:
            return []
        gained = self.verify(logits_RV, [Check(tuple(r.drafts), len(r.tokens), r.sampling) for r in checked])
        return [self._commit(r, new) for r, new in zip(checked, gained, strict=True)]

    def _admit(self) -> None:
        while self.waiting and self.cache.num_free:
            request = self.waiting.popleft()
            request.slot = self.cache.allocate()
            self.running.append(request)

    def _propose(self) -> None:
        if self.drafter is None or self.num_drafts == 0:
            return
        ready = [r for r in self.running if r.ready and self._room(r) > 1]
        if not ready:
            return
        for request, drafts in zip(ready, self.drafter.propose(ready, self.num_drafts), strict=True):
            # Of the tokens that still fit, the last is always the target's own.
            request.drafts = [int(t) for t in drafts[: min(self.num_drafts, self._room(request) - 1)]]
            assert all(0 <= t < self.model.spec.vocab_size for t in request.drafts), (
                "draft outside the vocabulary"
            )

    def _room(self, request: Request) -> int:
        """How many tokens the request may still gain."""
        return min(request.num_prompt + request.sampling.max_tokens, self.max_context) - len(request.tokens)

    def _schedule(self) -> list[tuple[Request, int]]:
        """(request, rows) within the budget. Drafts without a row are dropped."""
        budget = self.chunk
        work: list[tuple[Request, int]] = []
        ready = [r for r in self.running if r.ready][:budget]
        for num_later, request in zip(reversed(range(len(ready))), ready, strict=True):
            num = _grant(request, budget - num_later)  # those who come after get one row each
            work.append((request, num))
            budget -= num
        for request in self.running:
            if not request.ready and budget > 0:
                num = _grant(request, budget)
                work.append((request, num))
                budget -= num
        # Equal row counts side by side attend in one call; the sort is stable.
        return sorted(work, key=lambda item: item[1])

    def _forward(self, work: list[tuple[Request, int]]) -> tuple[Tensor, list[Request]]:
        """Logits of the rows to verify, and the requests they belong to. Moves num_computed of the others."""
        device = self.model.embed.weight.device
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        spans: list[Span] = []
        checked: list[Request] = []
        for request, num in work:
            assert request.slot is not None
            span = Span(request.slot, request.num_computed, num)
            last = len(request.tokens) - 1
            if span.stop > last:
                checked.append(request)
                first_row = len(tokens) + last - span.start
                rows.extend(range(first_row, first_row + 1 + len(request.drafts)))
            tokens.extend((request.tokens + request.drafts)[span.start : span.stop])
            positions.extend(range(span.start, span.stop))
            spans.append(span)
        logits_RV = self.model(
            torch.tensor([tokens], device=device),
            torch.tensor([positions], device=device),
            attend=self.cache.plan(spans, device),
            rows=torch.tensor(rows, device=device, dtype=torch.int64),
        )
        for request, num in work:
            # A checked request's is set by its commit; after an abort in between nobody reads it.
            request.num_computed = min(request.num_computed + num, len(request.tokens) - 1)
        return logits_RV, checked

    def _commit(self, request: Request, gained: list[int]) -> Output:
        num_drafted, num_accepted = len(request.drafts), len(gained) - 1
        before = len(request.text)
        kept: list[int] = []
        reason: FinishReason | None = None
        for token in gained:
            kept.append(token)
            request.tokens.append(token)
            reason = self._after_token(request, token)
            if reason is not None:
                break
        request.num_computed = len(request.tokens) - 1
        request.drafts = []
        self.stats.num_new_tokens += len(kept)
        self.stats.num_drafted += num_drafted
        self.stats.num_accepted += num_accepted
        if self.drafter is not None:
            self.drafter.observe(request, num_drafted, num_accepted)
        if reason is not None:
            self._finish(request, reason)
        return Output(request, kept, request.text[before:], reason)

    def _after_token(self, request: Request, token: int) -> FinishReason | None:
        """Append the token's text; why the request ends with this token, if it does."""
        if token in self.eos_ids and not request.sampling.ignore_eos:
            return "stop"
        if request.text_stream is not None:
            request.text += request.text_stream.push(token)
            if request.text_stream.stopped:
                return "stop"
        return "length" if self._room(request) == 0 else None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.drafts = []
        if request.text_stream is not None:
            request.text += request.text_stream.flush()
        if request.slot is not None:
            self.running.remove(request)
            self.cache.release(request.slot)
            request.slot = None
            if self.drafter is not None:
                self.drafter.release(request)

    # -- whole texts ----------------------------------------------------------------------------------------
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """Complete all prompts (one Sampling for all, or one each), as many at once as there are slots."""
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            raise UserError("generate() takes a list of prompts; put the single prompt into a list")
        if sampling is None or isinstance(sampling, Sampling):
            samplings: list[Sampling | None] = [sampling] * len(prompts)
        else:
            samplings = list(sampling)
        if len(samplings) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts but {len(samplings)} samplings; give one for all or one each"
            )
        # All are checked before the first runs: a bad prompt does not cost the time of the good ones.
        requests = [self._request(p, s) for p, s in zip(prompts, samplings, strict=True)]
        self.waiting.extend(requests)
        try:
            while any(r.finish_reason is None for r in requests):
                self.step()
        finally:
            for request in requests:
                self.abort(request)
        return [_completion(r) for r in requests]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[str]:
        """Text pieces as they become certain. Closing the iterator aborts the request."""
        if self.tokenizer is None:
            raise UserError(
                "streaming text needs a tokenizer; build the engine with one, or use add() and step()"
            )
        return self._stream(self._request(prompt, sampling))  # errors come now, not at the first piece

    def _stream(self, request: Request) -> Iterator[str]:
        self.waiting.append(request)
        sent = 0
        try:
            while True:
                if len(request.text) > sent:
                    piece, sent = request.text[sent:], len(request.text)
                    yield piece
                elif request.finish_reason is not None:
                    return
                else:
                    self.step()
        finally:
            self.abort(request)


def _grant(request: Request, budget: int) -> int:
    """How many of its rows a request computes now; drafts that get no row are dropped."""
    stop = min(request.num_computed + budget, len(request.tokens) + len(request.drafts))
    if stop >= len(request.tokens):
        request.drafts = request.drafts[: stop - len(request.tokens)]
    return stop - request.num_computed


def _completion(request: Request) -> Completion:
    assert request.finish_reason is not None
    return Completion(request.text, request.new_tokens, request.finish_reason, request.num_prompt)


def _eos_ids(model: Decoder, tokenizer: TextCodec | None) -> set[int]:
    ids = set() if tokenizer is None else set(tokenizer.eos_ids)
    return ids | set(model.spec.eos_ids)
