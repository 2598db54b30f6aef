"""Drafts by n-gram lookup (prompt lookup): the end of a text is looked up in the text itself.

The drafts are what followed the last occurrence of its last n tokens. No weights, almost no time. It pays where text
repeats itself: code edits, summaries, extraction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoestring.errors import UserError
from shoestring.serve.engine.request import Draft, Request
from shoestring.serve.speculative.drafter import Drafter


@dataclass(eq=False)
class _IndexedText:
    """A text, and for every n-gram in it the position that follows its last occurrence."""

    tokens: list[int]
    next_position: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0


class NgramDrafter(Drafter):
    def __init__(self, *, longest: int = 4, shortest: int = 2, history: int = 0) -> None:
        """n-grams of `longest` down to `shortest` tokens. `history`: how many tokens of finished requests to keep for
        later ones. 0 keeps none, since one user's text could otherwise show in another user's speed."""
        if not 1 <= shortest <= longest:
            raise UserError(f"n-grams of {shortest} to {longest} tokens: give 1 <= shortest <= longest")
        if history < 0:
            raise UserError(f"history={history} is not allowed; give 0 or more tokens")
        self.longest, self.shortest, self.history = longest, shortest, history
        self._live: dict[int, _IndexedText] = {}
        self._finished: deque[_IndexedText] = deque()  # newest first
        self._num_finished_tokens = 0

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        return [Draft(self._continue(r, n)) for r in requests]

    def release(self, request: Request) -> None:
        text = self._live.pop(request.id, None)
        if text is None or not self.history or request.finish_reason is None:
            return
        self._index(text)
        self._finished.appendleft(text)
        self._num_finished_tokens += len(text.tokens)
        while self._num_finished_tokens > self.history:
            self._num_finished_tokens -= len(self._finished.pop().tokens)

    def _continue(self, request: Request, n: int) -> list[int]:
        text = self._live.setdefault(request.id, _IndexedText(request.tokens))
        self._index(text)
        end = request.tokens[-self.longest :]
        # The longest match first; of equal ones this text before others, the newest of those first.
        for length in range(len(end), self.shortest - 1, -1):
            gram = tuple(end[-length:])
            for source in (text, *self._finished):
                if gram in source.next_position:
                    return _run_on(source.tokens, source.next_position[gram], n, wrap=source is text)
        return []

    def _index(self, text: _IndexedText) -> None:
        tokens = text.tokens
        # The n-gram that ends the text is not in the index: nothing follows it yet.
        for at in range(max(1, text.num_indexed), len(tokens)):
            for length in range(self.shortest, min(self.longest, at) + 1):
                text.next_position[tuple(tokens[at - length : at])] = at
        text.num_indexed = max(1, len(tokens))


def _run_on(tokens: list[int], at: int, n: int, *, wrap: bool) -> list[int]:
    """tokens[at:][:n]. `wrap`: a text that ends before that repeats from `at`, as the match predicts."""
    found = tokens[at : at + n]
    period = len(found)
    while wrap and len(found) < n:
        found.append(found[-period])
    return found
