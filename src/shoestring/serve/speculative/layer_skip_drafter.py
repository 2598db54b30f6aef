"""The target without some of its sublayers as its own drafter.

It has no weights and no KV cache of its own: drafts are written into the request's own blocks, above the computed
positions, and attend to what the whole model wrote below. The pass that verifies them computes every sublayer of the
same positions and overwrites them, so nothing is copied or rolled back, and the drafter never has to catch up.

A request that skips sublayers itself has no keys and values for them, so its drafts skip those as well.

Left out: ending a draft early when the model becomes unsure (draft_length.py chooses lengths), trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.model.skip import SkipSet
from shoestring.serve.engine.block_pool import RowSpan
from shoestring.serve.engine.graphs import SamplingKind
from shoestring.serve.engine.request import NO_DRAFT, Draft, Request
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.engine.step_kinds import StepLimits
from shoestring.serve.speculative.draft_model import decode_drafts
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.drafter_stack import DrafterStack


class LayerSkipDrafter(Drafter):
    def __init__(self, runner: Runner, skip: SkipSet) -> None:
        """`runner` is the target's: its KV cache holds the requests that `propose` gets."""
        self.runner, self.skip = runner, skip.check(runner.model.spec)
        self._unions: dict[str, SkipSet] = {}  # id of a request's own skip set -> what its drafts skip

    def warm_up(
        self,
        max_requests: int,
        kinds: Sequence[SamplingKind],
        lengths: Sequence[int],
        max_context: int,
        *,
        prefills: bool = True,
    ) -> None:
        # A draft is decoded one row per request and pass, whatever its length, and each pass is a launch.
        self.runner.prepare(["decode"], StepLimits(max_requests, kinds, self.skip, grouped=False))

    @torch.no_grad()
    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        able: dict[SkipSet, list[Request]] = {}
        for left, request in zip(range(len(requests), 0, -1), requests, strict=True):
            if self._make_room(request, n, spare=left):
                able.setdefault(self._skip_set_of(request), []).append(request)
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

        return decode_drafts(requests, n, advance(last, -1), advance)

    def _chain(self, requests: list[Request], n: int, skip: SkipSet, last: list[int]) -> list[Draft] | None:
        """Drafts chosen on the device, so that the host waits once, at the end; None where that is not possible."""
        if any(r.rule.needs_draft_probabilities(r.sampling) for r in requests):
            return None
        samplings = [r.sampling for r in requests]
        flight = self.runner.launch_decode(Batch(_spans(requests, -1), last, range(len(last))), samplings, skip)
        if flight is None:
            return None
        flights = [flight]
        for i in range(n - 1):
            flights += self.runner.launch_next(_spans(requests, i), samplings, skip)
        chosen = [f.tokens() for f in flights]
        return [Draft([found[row][-1] for found in chosen]) for row in range(len(requests))]

    def _make_room(self, request: Request, n: int, spare: int) -> bool:
        """Blocks for the drafts, the last of which is never computed. One block stays free for each of the `spare`
        requests that may need it for its next token: no request is preempted for drafts."""
        assert request.table is not None and request.ready
        pool, num = self.runner.cache.pool, len(request.tokens) + n - 1
        if num > self.runner.model.spec.max_positions:
            return False
        if pool.blocks_for(num) - len(request.table.blocks) > max(0, pool.num_available - spare):
            return False
        return pool.grow(request.table, num)

    def _skip_set_of(self, request: Request) -> SkipSet:
        own = request.skip_at(request.num_computed)
        if own is None:
            return self.skip
        if own.id not in self._unions:
            self._unions[own.id] = self.skip.plus(own)
        return self._unions[own.id]


def _spans(requests: list[Request], i: int) -> list[RowSpan]:
    """One row each, at the position of draft i; -1 is the last committed token."""
    spans = []
    for request in requests:
        assert request.table is not None
        spans.append(RowSpan(request.table.blocks, len(request.tokens) + i, 1))
    return spans


def add_layer_skip(drafter: Drafter | None, runner: Runner, skip: SkipSet) -> Drafter:
    """The target without `skip` as a drafter, after `drafter` where there is one."""
    own = LayerSkipDrafter(runner, skip)
    return own if drafter is None else DrafterStack([drafter, own])
