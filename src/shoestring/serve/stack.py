"""Several drafters as one: whoever gains most is asked first, the others where it has nothing to say.

The order begins as it was given, the cheapest first: a lookup costs nothing, so it should speak where it can. But a
lookup that is seldom right takes the turn from a model that would be. So it is counted how many tokens the proposals of
each one gained, and a later one goes in front of those that gain clearly less. One that was not heard for a while is
asked first once, so that texts that have changed are noticed.

The choice depends on how earlier guesses fared, never on those of this step: every rule of verification keeps its
distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring.errors import UserError
from shoestring.serve.cuda_graphs import Kind
from shoestring.serve.request import NO_DRAFT, Draft, Request

if TYPE_CHECKING:
    from shoestring.serve.drafters import Drafter

ENOUGH = 16  # proposals before a drafter is compared with others
MEMORY = 64  # proposals that count
OVERTAKES = 1.25  # times as many tokens: the one in front is cheaper
UNHEARD = 64  # rounds after which one that was not heard is asked first


@dataclass
class Gain:
    """Tokens that a proposal gained, in the mean over the last ones."""

    mean: float = 0.0
    num: int = 0
    heard: int = 0  # the round of the last proposal

    def add(self, num_accepted: int) -> None:
        self.num += 1
        self.mean += (num_accepted - self.mean) / min(self.num, MEMORY)


class Stacked:
    def __init__(self, drafters: Sequence[Drafter]) -> None:
        """In order of preference: the cheapest first."""
        if not drafters:
            raise UserError("a stack of no drafters; give at least one")
        self.drafters = list(drafters)
        self.gains = [Gain() for _ in drafters]
        self.caught_up = False  # one of those asked last had a long text to read first
        self._round = 0
        self._spoke: dict[int, int] = {}  # by request, the place of the drafter whose guesses it has

    def order(self) -> list[int]:
        """Places of the drafters, as they are asked now."""
        ranked: list[int] = []
        for i in range(len(self.drafters)):
            at = len(ranked)
            while at and self._overtakes(i, ranked[at - 1]):
                at -= 1
            ranked.insert(at, i)
        # Stable: of several that were not heard the better one comes first.
        return sorted(ranked, key=lambda i: self._round - self.gains[i].heard <= UNHEARD)

    def _overtakes(self, i: int, other: int) -> bool:
        mine, theirs = self.gains[i], self.gains[other]
        return min(mine.num, theirs.num) >= ENOUGH and mine.mean > OVERTAKES * theirs.mean

    def prepare(
        self, max_requests: int, kinds: Sequence[Kind], lengths: Sequence[int], max_context: int
    ) -> None:
        for drafter in self.drafters:
            if hasattr(drafter, "prepare"):
                drafter.prepare(max_requests, kinds, lengths, max_context)

    def behind(self, requests: Sequence[Request]) -> bool:
        return any(drafter.behind(requests) for drafter in self.drafters if hasattr(drafter, "behind"))

    @property
    def num_made(self) -> int:
        return sum(int(getattr(drafter, "num_made", 0)) for drafter in self.drafters)

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        found: dict[int, Draft] = {}
        silent, self.caught_up = list(requests), False
        self._round += 1
        for i in self.order():
            if not silent:
                break
            drafter = self.drafters[i]
            for request, draft in zip(silent, drafter.propose(silent, n), strict=True):
                if draft.tokens:
                    found[request.id] = draft
                    self._spoke[request.id] = i
                    self.gains[i].heard = self._round
            self.caught_up |= bool(getattr(drafter, "caught_up", False))
            silent = [r for r in silent if r.id not in found]
        return [found.get(r.id, NO_DRAFT) for r in requests]

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        i = self._spoke.pop(request.id, None)
        if i is not None:
            self.gains[i].add(num_accepted)
            self.drafters[i].observe(request, num_drafted, num_accepted)

    def release(self, request: Request) -> None:
        self._spoke.pop(request.id, None)
        for drafter in self.drafters:
            drafter.release(request)
