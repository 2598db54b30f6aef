"""What waits for something that clients share, fairly: the one with the fewest things running is next.

The jobs for a worker thread wait in one (request_workers.py), the texts that want into the engine in another
(engine_thread.py). A client that brings much cannot keep the others waiting; of clients with equally many running, the
one that has waited for the longest is next, so they take turns. What one client brings goes by size, then in the order
in which it came: a short prompt does not wait for a long one of the same sender, and texts, which have no size, never
pass each other. A text that has given way to another client's (`who_gives_way`) goes before those that have not begun.

A line may be bounded, in number and in bytes: one client may then hold a quarter of it. What finds the line empty is
taken whatever its size, which is bounded elsewhere (the request body).

Pure bookkeeping: no threads, no clocks.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
CLIENT_SHARE = 4  # one client holds at most a 4th of a bounded line


class LineFull(Exception):
    """`of_client`: this client's share is used up; otherwise the whole line is."""

    def __init__(self, of_client: bool) -> None:
        super().__init__("the client's share is full" if of_client else "the line is full")
        self.of_client = of_client


@dataclass(frozen=True)
class _Place(Generic[T]):
    size: int
    order: int  # of arrival; negative where it had begun
    item: T

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.order


class FairLine(Generic[T]):
    def __init__(self, most: float = math.inf, most_bytes: float = math.inf) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._clients: dict[str, list[_Place[T]]] = {}  # in order; of equally entitled clients the first is next
        self._num = self._bytes = self._num_arrived = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[T]:
        for places in self._clients.values():
            yield from (place.item for place in places)

    def put(self, client: str, item: T, size: int = 0, *, first: bool = False) -> None:
        """`first`: before everything else of the client that has this size."""
        mine = self._clients.get(client, [])
        bounded = mine and self.most_bytes < math.inf
        if bounded and sum(place.size for place in mine) + size > self.most_bytes / CLIENT_SHARE:
            raise LineFull(of_client=True)
        if mine and len(mine) + 1 > self.most / CLIENT_SHARE:
            raise LineFull(of_client=True)
        if self._num and (self._num >= self.most or self._bytes + size > self.most_bytes):
            raise LineFull(of_client=False)
        self._num_arrived += 1
        order = -self._num_arrived if first else self._num_arrived
        insort(self._clients.setdefault(client, mine), _Place(size, order, item), key=lambda place: place.key)
        self._num, self._bytes = self._num + 1, self._bytes + size

    def next_client(self, num_running: Counter[str]) -> str:
        """The waiting client with the fewest things running."""
        return min(self._clients, key=lambda client: num_running[client])

    def pop(self, client: str | None = None) -> T:
        """What is next of a client, or of the first one; the client goes to the end of the line."""
        client = next(iter(self._clients)) if client is None else client
        places = self._clients.pop(client)
        place = places.pop(0)
        if places:
            self._clients[client] = places
        self._num, self._bytes = self._num - 1, self._bytes - place.size
        return place.item

    def remove(self, client: str, item: T) -> bool:
        """Whether it was still waiting."""
        places = self._clients.get(client, [])
        at = next((i for i, place in enumerate(places) if place.item is item), None)
        if at is None:
            return False
        self._num, self._bytes = self._num - 1, self._bytes - places.pop(at).size
        if not places:
            del self._clients[client]
        return True


def who_gives_way(num_running: Counter[str], to: str) -> str | None:
    """The client with the most running texts, if it still has as many as `to` after giving one to it."""
    client, most = num_running.most_common(1)[0]
    return client if most - num_running[to] >= 2 else None
