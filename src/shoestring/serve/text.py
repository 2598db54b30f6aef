"""Text of one request as its tokens arrive: whole characters only, and nothing that may still become a stop
string.

A stop string can span tokens. Text is therefore held back as long as it could be the beginning of one; when a
stop string is complete, the text ends before it. Of several, the one *completed* first wins, so the result
does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TokenStream(Protocol):
    """`Tokenizer.stream()`: token ids in, text out, never half a UTF-8 character."""

    def step(self, token_id: int, /) -> str: ...
    def finish(self) -> str: ...


class TextStream:
    def __init__(self, stream: TokenStream, stop: Sequence[str] = ()) -> None:
        self._stream, self._stop = stream, tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain; a completed stop string sets `stopped`."""
        assert not self.stopped
        self._held += self._stream.step(token)
        return self._cut() or self._release(len(self._held) - held_back(self._held, self._stop))

    def flush(self) -> str:
        """What was held back, when a request ends otherwise. An unfinished character is dropped."""
        if self.stopped:
            return ""
        self._held += self._stream.finish().rstrip("\ufffd")
        return self._cut() or self._release(len(self._held))

    def _cut(self) -> str:
        """The text before a completed stop string; '' when there is none."""
        end = find_stop(self._held, self._stop)
        if end is None:
            return ""
        self.stopped = True
        piece, self._held = self._held[:end], ""
        return piece

    def _release(self, num: int) -> str:
        piece, self._held = self._held[:num], self._held[num:]
        return piece


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the text ends: the start of the stop string that is complete first."""
    hits = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    return min(hits)[1] if hits else None


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` with which some stop string begins."""
    longest = max((len(s) - 1 for s in stop), default=0)
    for num in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-num:]) for s in stop):
            return num
    return 0
