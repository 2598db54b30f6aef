"""Requests and what the engine says about them: plain data, shared by scheduler, drafters and engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shoestring.model.skip import SkipSet
from shoestring.serve.blocks import Table
from shoestring.serve.sampling import Sampling
from shoestring.serve.text import TextStream
from shoestring.serve.verify import Rule

FinishReason = Literal["stop", "length", "abort", "deadline"]


class Awaited:
    """Guesses that a device is still writing, row by row of tokens_NG. The step that verifies them can be launched
    behind them and takes them from there, so that the host waits once for both."""

    def __init__(self, num_rows: int, num_each: int, device: torch.device) -> None:
        self._shape = num_rows, num_each
        self.tokens_NG = torch.empty(0)
        self._read: Callable[[], list[list[int]]] | None = None
        self._drafts: list[tuple[int, list[int]]] = []
        self.then: list[Callable[[list[list[int]]], None]] = []  # called with all guesses once they are known
        self._events: tuple[torch.cuda.Event, ...] = ()
        if device.type == "cuda":
            self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events[0].record()
        self._began = time.perf_counter()
        self.seconds = 0.0  # that they took; known with them

    def launched(self, tokens_R: Tensor, read: Callable[[], list[list[int]]]) -> list[Draft]:
        """The drafts of all rows; `read` waits for them."""
        self.tokens_NG, self._read = tokens_R.view(self._shape), read
        self.seconds = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()
        num_rows, num_each = self._shape
        return [self.draft(row, num_each) for row in range(num_rows)]

    def draft(self, row: int, num: int) -> Draft:
        tokens = [-1] * num
        self._drafts.append((row, tokens))
        return Draft(tokens, awaited=self, row=row)

    def resolve(self) -> None:
        """Wait for the guesses and fill them into the drafts."""
        if self._read is None:
            return
        found, self._read = self._read(), None
        for row, tokens in self._drafts:
            tokens[:] = found[row][: len(tokens)]
        for told in self.then:
            told(found)
        if self._events:
            self._events[1].synchronize()
            self.seconds = 1e-3 * self._events[0].elapsed_time(self._events[1])


@dataclass(frozen=True)
class Draft:
    """Guesses about the tokens that follow a request's `tokens`.

    probs_GV[i] is the distribution that guess i was *drawn* from; None when the guesses were not drawn (a
    lookup, an argmax, or noise shared with the target). `awaited`: the tokens are -1 until it is resolved.
    """

    tokens: list[int]
    probs_GV: Tensor | None = None
    awaited: Awaited | None = None
    row: int = 0  # of `awaited`

    def cut(self, num: int) -> Draft:
        if num >= len(self.tokens):
            return self
        if self.awaited is not None:
            return self.awaited.draft(self.row, max(0, num))
        return Draft(self.tokens[:num], None if self.probs_GV is None else self.probs_GV[:num])


NO_DRAFT = Draft([])


@dataclass(eq=False)
class Request:
    tokens: list[int]  # prompt and committed new tokens
    num_prompt: int
    sampling: Sampling  # the seed is always filled in
    id: int
    text_stream: TextStream | None = field(default=None, repr=False)
    rule: Rule = "coupled"  # how its drafts are verified; a drafter that samples has to know
    deadline: float | None = None  # on the engine's clock
    draft: Draft = NO_DRAFT
    num_computed: int = 0
    table: Table | None = field(default=None, repr=False)  # its blocks while it runs
    num_preempted: int = 0
    num_cached: int = 0  # prompt tokens that the prefix cache held when it was first admitted
    text: str = ""  # released so far; never shrinks
    finish_reason: FinishReason | None = None
    # Which sublayers it leaves out (skipping.py): `skip` below position switch_at, `late_skip` from there on.
    skip: SkipSet | None = None
    late_skip: SkipSet | None = None
    switch_at: int | None = None
    num_watched: int = 0  # new tokens whose FFNs were looked at
    similarity: Tensor | None = field(default=None, repr=False)  # per layer, summed over those

    def skip_at(self, position: int) -> SkipSet | None:
        return self.skip if self.switch_at is None or position < self.switch_at else self.late_skip

    def until_switch(self, position: int) -> int | None:
        """Rows from `position` on that are computed alike, where that is bounded."""
        if self.switch_at is None or position >= self.switch_at:
            return None
        return self.switch_at - position

    @property
    def drafts(self) -> list[int]:
        return self.draft.tokens

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def ready(self) -> bool:
        """Only the last committed token is left to compute: the next row gains a token."""
        return self.num_computed == len(self.tokens) - 1


@dataclass(frozen=True)
class Output:
    """What one step gave one request. The first `num_accepted` of the tokens were guessed by the drafter."""

    request: Request
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    num_accepted: int = 0


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]  # every new token, the end-of-text or stop-completing one included
    finish_reason: FinishReason
    num_prompt: int


def completion_of(request: Request) -> Completion:
    assert request.finish_reason is not None
    return Completion(request.text, request.new_tokens, request.finish_reason, request.num_prompt)


@dataclass
class Stats:
    """Counters since the engine was built."""

    num_steps: int = 0
    num_rows: int = 0
    num_new_tokens: int = 0
    num_drafts: int = 0  # proposals of at least one token that were verified, one per request and step
    num_drafted: int = 0  # tokens of those
    num_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # accepted drafts by place: first, second, ...
    num_prefix_asked: int = 0  # tokens of admitted requests
    num_prefix_hits: int = 0  # of those, tokens whose keys and values were in the prefix cache
    num_preemptions: int = 0

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    def count(self, num_drafted: int, num_accepted: int, num_new: int) -> None:
        """A request gained num_new tokens; of its drafts so many were accepted."""
        self.num_new_tokens += num_new
        self.num_drafts += num_drafted > 0
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if num_accepted:
            self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
            for place in range(num_accepted):
                self.accepted_at[place] += 1
