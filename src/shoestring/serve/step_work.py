"""A step's work, between requests and the runner: what is computed, what is verified, what is on its way."""

from __future__ import annotations

from dataclasses import dataclass

from shoestring.model.skip import SkipSet
from shoestring.serve.blocks import Table
from shoestring.serve.cuda_graphs import Flight
from shoestring.serve.kv_cache import Span
from shoestring.serve.request import Request
from shoestring.serve.runner import Batch
from shoestring.serve.skipping import Work
from shoestring.serve.verify import Check


def batch_of(work: Work) -> tuple[Batch, list[Request]]:
    """What a step computes, and the requests that it verifies."""
    tokens: list[int] = []
    rows: list[int] = []
    spans: list[Span] = []
    checked: list[Request] = []
    for request, num in work:
        assert request.table is not None
        span = Span(request.table.blocks, request.num_computed, num)
        last = len(request.tokens) - 1
        if span.stop > last:
            checked.append(request)
            first_row = len(tokens) + last - span.start
            rows.extend(range(first_row, first_row + 1 + len(request.drafts)))
        tokens.extend((request.tokens[span.start :] + request.drafts)[:num])
        spans.append(span)
    return Batch(spans, tokens, rows), checked


def check_of(request: Request) -> Check:
    draft = request.draft
    return Check(tuple(draft.tokens), len(request.tokens), request.sampling, draft.probs_GV, request.rule)


@dataclass(frozen=True)
class Launched:
    """A step on its way: its requests, as they were, and where their tokens will be."""

    requests: list[Request]
    tables: list[Table | None]
    checks: list[Check]
    skip: SkipSet | None
    handle: Flight
    began: float

    @property
    def alive(self) -> list[bool]:
        """Which of the requests still run, and have not been preempted since."""
        return [
            r.finish_reason is None and r.table is t for r, t in zip(self.requests, self.tables, strict=True)
        ]
