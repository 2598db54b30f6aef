"""Jobs that wait for a thread: bounded in number and bytes, and shared fairly between clients.

Clients take turns. Of one client's jobs the smallest goes first, so a short prompt does not wait for a long one of the
same sender. One client may hold a quarter of the queue. A job is always taken when nothing else waits, whatever its
size: the size of a single job is bounded elsewhere (the request body).

Left out: threads, clocks (request_workers.py).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
CLIENT_SHARE = 4  # one client holds at most a 4th of the queue


class FairQueueFull(Exception):
    """`of_client`: this client's share is used up; otherwise the whole queue is."""

    def __init__(self, of_client: bool) -> None:
        super().__init__("the client's share is full" if of_client else "the queue is full")
        self.of_client = of_client


@dataclass(frozen=True)
class Ticket(Generic[T]):
    client: str
    size: int  # bytes
    order: int  # of arrival
    item: T

    def __lt__(self, other: Ticket[T]) -> bool:
        return (self.size, self.order) < (other.size, other.order)


class FairQueue(Generic[T]):
    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        self.max_jobs, self.max_bytes = max_jobs, max_bytes
        self._clients: dict[str, list[Ticket[T]]] = {}  # a heap each; the first client is next
        self._num_arrived = 0

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def put(self, client: str, size: int, item: T) -> Ticket[T]:
        heap = self._clients.get(client, [])
        waiting = [ticket for tickets in self._clients.values() for ticket in tickets]
        if heap and not _fits(heap, size, self.max_jobs // CLIENT_SHARE, self.max_bytes // CLIENT_SHARE):
            raise FairQueueFull(of_client=True)
        if waiting and not _fits(waiting, size, self.max_jobs, self.max_bytes):
            raise FairQueueFull(of_client=False)
        self._num_arrived += 1
        ticket = Ticket(client, size, self._num_arrived, item)
        heapq.heappush(self._clients.setdefault(client, []), ticket)
        return ticket

    def pop(self) -> Ticket[T]:
        """The smallest job of the client whose turn it is, which then goes to the end of the line."""
        client = next(iter(self._clients))
        heap = self._clients.pop(client)
        ticket = heapq.heappop(heap)
        if heap:
            self._clients[client] = heap
        return ticket

    def remove(self, ticket: Ticket[T]) -> bool:
        """Whether it was still waiting."""
        heap = self._clients.get(ticket.client, [])
        kept = [t for t in heap if t is not ticket]
        if len(kept) == len(heap):
            return False
        heapq.heapify(kept)
        if kept:
            self._clients[ticket.client] = kept
        else:
            del self._clients[ticket.client]
        return True


def _fits(waiting: list[Ticket[T]], size: int, max_jobs: int, max_bytes: int) -> bool:
    return len(waiting) < max_jobs and sum(t.size for t in waiting) + size <= max_bytes
