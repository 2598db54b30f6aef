"""The model itself, without some of its sublayers, as its own drafter.

No weights and no memory of its own: the guesses are written into the request's own blocks, above what is
computed, and read what the whole model wrote below. The pass that verifies them computes every sublayer of
the same positions and overwrites them, so nothing is copied and nothing has to be rolled back. The drafter never
has to catch up either: what it reads is always there.

A request that leaves sublayers out by itself has no keys and values for them, so its drafts leave those out, too.

Left out: stopping a draft when the model becomes unsure (the goodput controller chooses lengths), trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.model.skip import SkipSet
from shoestring.serve.cuda_graphs import Kind
from shoestring.serve.drafters import Drafter, write_drafts
from shoestring.serve.kv_cache import Span
from shoestring.serve.request import NO_DRAFT, Draft, Request
from shoestring.serve.runner import Batch, Runner
from shoestring.serve.stack import Stacked


class SelfSkip:
    def __init__(self, runner: Runner, skip: SkipSet) -> None:
        """`runner` is the target's: its cache holds the requests that `propose` is asked about."""
        self.runner, self.skip = runner, skip.check(runner.model.spec)
        self._joined: dict[str, SkipSet] = {}  # id of a request's own set -> what its drafts leave out

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass

    def release(self, request: Request) -> None:
        pass  # the blocks are the request's

    def prepare(
        self, max_requests: int, kinds: Sequence[Kind], lengths: Sequence[int], max_context: int
    ) -> None:
        """One row each, whatever the length (serve/prepare.py)."""
        self.runner.prepare(max_requests, kinds, [1], self.skip)

    @torch.no_grad()
    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        able: dict[SkipSet, list[Request]] = {}
        for left, request in zip(range(len(requests), 0, -1), requests, strict=True):
            if self._make_room(request, n, spare=left):
                able.setdefault(self._skip_of(request), []).append(request)
        found: dict[int, Draft] = {}
        for skip, alike in able.items():
            drafts = self._write(alike, n, skip)
            found |= {r.id: draft for r, draft in zip(alike, drafts, strict=True)}
        return [found.get(r.id, NO_DRAFT) for r in requests]

    def _write(self, requests: list[Request], n: int, skip: SkipSet) -> list[Draft]:
        # The last committed token is computed here without the skipped sublayers, and again by the target.
        last = [r.tokens[-1] for r in requests]
        drafts = self._chain(requests, n, skip, last)
        if drafts is not None:
            return drafts

        def advance(tokens: Sequence[int] | Tensor, i: int) -> Tensor:
            return self.runner.forward(Batch(_spans(requests, i), tokens, range(len(requests))), skip)

        return write_drafts(requests, n, advance(last, -1), advance)

    def _chain(self, requests: list[Request], n: int, skip: SkipSet, last: list[int]) -> list[Draft] | None:
        """The drafts chosen on the device, where the runner can: the host waits once, at the end."""
        if any(r.rule != "coupled" and not r.sampling.greedy for r in requests):
            return None
        samplings = [r.sampling for r in requests]
        flight = self.runner.choose(Batch(_spans(requests, -1), last, range(len(last))), samplings, skip)
        if flight is None:
            return None
        flights = [flight]
        flights += [self.runner.choose_next(_spans(requests, i), samplings, skip) for i in range(n - 1)]
        chosen = [f.tokens() for f in flights]
        return [Draft([found[row][-1] for found in chosen]) for row in range(len(requests))]

    def _make_room(self, request: Request, n: int, spare: int) -> bool:
        """Blocks for the drafts, the last of which is never computed. A block is left for each of the `spare`
        requests that may need one for its next token: nobody is preempted for a guess."""
        assert request.table is not None and request.ready
        pool, num = self.runner.cache.pool, len(request.tokens) + n - 1
        if num > self.runner.model.spec.max_positions:
            return False
        if pool.blocks_for(num) - len(request.table.blocks) > max(0, pool.num_available - spare):
            return False
        return pool.grow(request.table, num)

    def _skip_of(self, request: Request) -> SkipSet:
        own = request.skip_at(request.num_computed)
        if own is None:
            return self.skip
        if own.id not in self._joined:
            self._joined[own.id] = self.skip.plus(own)
        return self._joined[own.id]


def _spans(requests: list[Request], i: int) -> list[Span]:
    """One row each, at the place of draft i; -1 is the last committed token."""
    spans = []
    for request in requests:
        assert request.table is not None
        spans.append(Span(request.table.blocks, len(request.tokens) + i, 1))
    return spans


def stack_self_skip(drafter: Drafter | None, runner: Runner, skip: SkipSet) -> Drafter:
    """The model as its own drafter, asked where `drafter` has nothing to say."""
    own = SelfSkip(runner, skip)
    return own if drafter is None else Stacked([drafter, own])
