"""A step's work, between requests and the runner: what is computed, what is verified, what is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoestring.model.skip import SkipSet
from shoestring.serve.blocks import Table
from shoestring.serve.cuda_graphs import Flight, Guess
from shoestring.serve.goodput import Goodput
from shoestring.serve.kv_cache import Span
from shoestring.serve.request import Awaited, Draft, Request
from shoestring.serve.runner import Batch
from shoestring.serve.skipping import Work
from shoestring.serve.verify import Check


def batch_of(work: Work) -> tuple[Batch, list[Request]]:
    """What a step computes, and the requests that it verifies."""
    tokens: list[int] = []
    rows: list[int] = []
    spans: list[Span] = []
    checked: list[Request] = []
    guesses: list[Guess] = []
    for request, num in work:
        assert request.table is not None
        drafts, awaited = request.draft.tokens, request.draft.awaited
        start, stop, last = request.num_computed, request.num_computed + num, len(request.tokens) - 1
        if stop > last:
            checked.append(request)
            first_row = len(tokens) + last - start
            rows.extend(range(first_row, first_row + 1 + len(drafts)))
        tokens += request.tokens[start:stop]
        tokens += drafts[: max(0, stop - last - 1)]
        if awaited is not None and drafts and drafts[0] < 0:
            guesses.append((len(spans), awaited.tokens_NG, request.draft.row, len(drafts)))
        spans.append(Span(request.table.blocks, start, num))
    return Batch(spans, tokens, rows, guesses), checked


def by_end(work: Work) -> tuple[Work, Work]:
    """Those whose rows reach the end of their text, which gains them a token, and the others."""
    parts: tuple[Work, Work] = [], []
    for request, num in work:
        parts[request.num_computed + num < len(request.tokens)].append((request, num))
    return parts


def check_of(request: Request, num_coming: int = 0) -> Check:
    """`num_coming`: tokens that it will have gained by then."""
    draft, position = request.draft, len(request.tokens) + num_coming
    return Check(tuple(draft.tokens), position, request.sampling, draft.probs_GV, request.rule)


class Proposal:
    """A drafter's answer, and those of its guesses that are still on the device."""

    def __init__(
        self, drafts: Sequence[Draft] = (), num_each: int = 0, seconds: float = 0.0, usual: bool = True
    ) -> None:
        """`seconds` until it answered; not `usual`: they say nothing about the next time."""
        self._usual = usual
        self._num, self._each, self._seconds = len(drafts), num_each, seconds
        found = {id(d.awaited): d.awaited for d in drafts if d.awaited is not None}
        self.awaited: list[Awaited] = list(found.values())

    def settle(self, goodput: Goodput | None) -> None:
        """Wait for the guesses, and tell the controller, once, what they took."""
        awaited, self.awaited = self.awaited, []
        for guesses in awaited:
            guesses.resolve()
        if goodput is not None and self._each:
            took = max(self._seconds, sum(g.seconds for g in awaited))
            goodput.drafted(self._num, self._each, took, self._usual)
        self._each = 0


@dataclass(frozen=True)
class Launched:
    """A step on its way: its requests, as they were, and where their tokens will be."""

    requests: list[Request]
    tables: list[Table | None]
    checks: list[Check]
    skip: SkipSet | None
    handle: Flight
    began: float
    ahead: bool = False  # launched before the tokens of the step before it were known
    reads: bool = False  # a prompt, too: no measure of how long a step takes

    @property
    def alive(self) -> list[bool]:
        """Which of the requests still run, and have not been preempted since."""
        return [
            r.finish_reason is None and r.table is t for r, t in zip(self.requests, self.tables, strict=True)
        ]
