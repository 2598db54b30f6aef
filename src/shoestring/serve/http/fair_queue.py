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
        self._bytes: dict[str, int] = {}  # of each
        self._num_waiting = self._num_arrived = 0

    def __len__(self) -> int:
        return self._num_waiting

    def put(self, client: str, size: int, item: T) -> Ticket[T]:
        heap = self._clients.get(client)
        if heap is not None and (
            len(heap) >= self.max_jobs // CLIENT_SHARE or self._bytes[client] + size > self.max_bytes // CLIENT_SHARE
        ):
            raise FairQueueFull(of_client=True)
        if self._num_waiting and (
            self._num_waiting >= self.max_jobs or sum(self._bytes.values()) + size > self.max_bytes
        ):
            raise FairQueueFull(of_client=False)
        self._num_arrived += 1
        self._num_waiting += 1
        ticket = Ticket(client, size, self._num_arrived, item)
        heapq.heappush(self._clients.setdefault(client, []), ticket)
        self._bytes[client] = self._bytes.get(client, 0) + size
        return ticket

    def pop(self) -> Ticket[T]:
        """The smallest job of the client whose turn it is, which then goes to the end of the line."""
        client = next(iter(self._clients))
        heap = self._clients.pop(client)
        ticket = heapq.heappop(heap)
        self._keep(client, heap, ticket)
        return ticket

    def remove(self, ticket: Ticket[T]) -> bool:
        """Whether it was still waiting."""
        heap = self._clients.get(ticket.client, [])
        kept = [t for t in heap if t is not ticket]
        if len(kept) == len(heap):
            return False
        heapq.heapify(kept)
        self._keep(ticket.client, kept, ticket)
        return True

    def _keep(self, client: str, heap: list[Ticket[T]], gone: Ticket[T]) -> None:
        """What is left of a client without `gone`."""
        self._num_waiting -= 1
        if heap:
            self._clients[client] = heap
            self._bytes[client] -= gone.size
        else:
            self._clients.pop(client, None)
            del self._bytes[client]
