"""Texts that wait for the engine, shared fairly between clients: whoever has the fewest texts running is next.

A client that asks for many texts cannot keep the others waiting. While it is alone it may use the whole engine. When
another client comes, texts of the one with the most give way until both have equally many (`who_gives_way`). A text
that has given way continues later, and reads the same. Texts of one client run in the order in which they came.

Pure bookkeeping: no engine, no threads.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class OfClient(Protocol):
    client: str


T = TypeVar("T", bound=OfClient)


class WaitingLine(Generic[T]):
    def __init__(self) -> None:
        self._clients: dict[str, deque[T]] = {}  # of equally entitled clients the first is next

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[T]:
        for texts in self._clients.values():
            yield from texts

    def push(self, text: T, *, first: bool = False) -> None:
        """At the end of its client's texts, or before them where it has run already."""
        texts = self._clients.setdefault(text.client, deque())
        (texts.appendleft if first else texts.append)(text)

    def remove(self, text: T) -> bool:
        """Whether it was waiting."""
        texts = self._clients.get(text.client)
        if texts is None or text not in texts:
            return False
        texts.remove(text)
        if not texts:
            del self._clients[text.client]
        return True

    def next_client(self, num_running: Counter[str]) -> str:
        """The waiting client with the fewest running texts."""
        return min(self._clients, key=lambda client: num_running[client])

    def pop(self, client: str) -> T:
        """The client's next text; the client goes to the end of the line."""
        texts = self._clients.pop(client)
        text = texts.popleft()
        if texts:
            self._clients[client] = texts
        return text


def who_gives_way(num_running: Counter[str], to: str) -> str | None:
    """The client with the most running texts, if it still has as many as `to` after giving one to it."""
    client, most = num_running.most_common(1)[0]
    return client if most - num_running[to] >= 2 else None
