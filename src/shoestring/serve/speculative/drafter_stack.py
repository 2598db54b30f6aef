"""Several drafters as one, and drafters by name.

The drafters are called in an order; each one gets the requests for which those before it had no draft. The order starts
as given, the cheapest first: a lookup costs almost nothing. A lookup that is seldom right would block a draft model
that is right more often, so the stack averages the accepted tokens per proposal of each drafter. A later drafter moves
ahead of those that gain clearly less. A drafter that has had no proposal for a while is called first once, so that a
change of the text is noticed.

The order depends on earlier drafts only, never on those of this step: every verification rule keeps its distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoestring.errors import UserError
from shoestring.model.transformer import Decoder
from shoestring.paths import drafter_names
from shoestring.serve.engine.graphs import SamplingKind
from shoestring.serve.engine.request import NO_DRAFT, Draft, Request
from shoestring.serve.engine.runner import Runner
from shoestring.serve.speculative.draft_model import DraftModel, check_vocabulary, read_drafter_file, trim_head
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.ngram_drafter import NgramDrafter

MIN_PROPOSALS = 16  # of a drafter before it is compared with others
MEMORY = 64  # proposals that the average covers
OVERTAKES = 1.25  # times as many accepted tokens, to move ahead: the drafter in front is cheaper
RETRY_ROUNDS = 64  # a drafter without a proposal for so many rounds is called first


@dataclass
class AcceptedTokens:
    """Accepted tokens per proposal of one drafter, averaged over the last MEMORY proposals."""

    mean: float = 0.0
    num: int = 0
    last_round: int = 0  # of its last proposal

    def add(self, num_accepted: int) -> None:
        self.num += 1
        self.mean += (num_accepted - self.mean) / min(self.num, MEMORY)


class DrafterStack(Drafter):
    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """In order of preference: the cheapest first."""
        if not drafters:
            raise UserError("a stack of no drafters; give at least one")
        self.drafters = list(drafters)
        # Of the first that knows it: a lookup, which does not, proposes where a draft model would mostly be right, too.
        self.known_acceptance = next((d.known_acceptance for d in drafters if d.known_acceptance), ())
        self.accepted = [AcceptedTokens() for _ in drafters]
        self.caught_up = False
        self._round = 0
        self._author: dict[int, int] = {}  # request id -> index of the drafter whose drafts it has

    def order(self) -> list[int]:
        """Indices of the drafters, in the order of the next calls."""
        ranked: list[int] = []
        for i in range(len(self.drafters)):
            at = len(ranked)
            while at and self._overtakes(i, ranked[at - 1]):
                at -= 1
            ranked.insert(at, i)
        # A stable sort: of several drafters that are due for a retry the better one comes first.
        return sorted(ranked, key=lambda i: self._round - self.accepted[i].last_round <= RETRY_ROUNDS)

    def _overtakes(self, i: int, other: int) -> bool:
        mine, theirs = self.accepted[i], self.accepted[other]
        return min(mine.num, theirs.num) >= MIN_PROPOSALS and mine.mean > OVERTAKES * theirs.mean

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        found: dict[int, Draft] = {}
        without, self.caught_up = list(requests), False
        self._round += 1
        for i in self.order():
            if not without:
                break
            drafter = self.drafters[i]
            for request, draft in zip(without, drafter.propose(without, n), strict=True):
                if draft.tokens:
                    found[request.id] = draft
                    self._author[request.id] = i
                    self.accepted[i].last_round = self._round
            self.caught_up |= drafter.caught_up
            without = [r for r in without if r.id not in found]
        return [found.get(r.id, NO_DRAFT) for r in requests]

    def check(self, target: Decoder) -> None:
        for drafter in self.drafters:
            drafter.check(target)

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        i = self._author.pop(request.id, None)
        if i is not None:
            self.accepted[i].add(num_accepted)
            self.drafters[i].observe(request, num_drafted, num_accepted)

    def release(self, request: Request) -> None:
        self._author.pop(request.id, None)
        for drafter in self.drafters:
            drafter.release(request)

    def warm_up(
        self,
        max_requests: int,
        kinds: Sequence[SamplingKind],
        lengths: Sequence[int],
        max_context: int,
        *,
        prefills: bool = True,
    ) -> None:
        for drafter in self.drafters:
            drafter.warm_up(max_requests, kinds, lengths, max_context, prefills=prefills)

    def is_behind(self, requests: Sequence[Request]) -> bool:
        return any(drafter.is_behind(requests) for drafter in self.drafters)

    def runners(self) -> list[Runner]:
        return [runner for drafter in self.drafters for runner in drafter.runners()]

    @property
    def num_graphs(self) -> int:
        return sum(drafter.num_graphs for drafter in self.drafters)


def open_drafter(text: str, target: Decoder, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Drafter:
    """'ngram', the path of a draft model, or several joined by '+', the cheapest first."""
    from shoestring.model.folder import load_model

    drafters: list[Drafter] = []
    for name in drafter_names(text):
        if name == "ngram":
            drafters.append(NgramDrafter())
            continue
        loaded = load_model(name, device=device, dtype=dtype)
        loaded.model.eval()
        check_vocabulary(name, loaded.spec.vocab_size, target)
        vocab_ids, acceptance = read_drafter_file(loaded.path, target.spec.vocab_size)
        if vocab_ids is not None:
            trim_head(loaded.model, vocab_ids)
        drafters.append(DraftModel(loaded.model, vocab_ids=vocab_ids, known_acceptance=acceptance))
    return drafters[0] if len(drafters) == 1 else DrafterStack(drafters)
