"""Who waits for whom: clients take turns, small jobs of one client go first, and shares are bounded."""

from __future__ import annotations

import pytest

from shoestring.serve.http.fair_queue import FairQueue, FairQueueFull


def order(queue: FairQueue[str]) -> list[str]:
    return [queue.pop().item for _ in range(len(queue))]


def test_clients_take_turns_and_the_smallest_of_each_goes_first() -> None:
    queue: FairQueue[str] = FairQueue(100, 10_000)
    for size in (30, 10, 20, 10):
        queue.put("busy", size, f"busy {size}")
    queue.put("late", 500, "late 500")
    queue.put("later", 1, "later 1")
    assert order(queue) == ["busy 10", "late 500", "later 1", "busy 10", "busy 20", "busy 30"]


def test_one_client_fills_only_its_share() -> None:
    queue: FairQueue[int] = FairQueue(8, 4000)
    for i in range(2):
        queue.put("greedy", 1, i)
    with pytest.raises(FairQueueFull) as by_number:
        queue.put("greedy", 1, 2)
    queue.put("other", 900, 3)
    with pytest.raises(FairQueueFull) as by_bytes:
        queue.put("other", 900, 4)
    assert by_number.value.of_client and by_bytes.value.of_client
    for i in range(5):
        queue.put(f"client {i}", 1, i)
    with pytest.raises(FairQueueFull) as whole:
        queue.put("one more", 1, 9)
    assert not whole.value.of_client and len(queue) == 8


def test_a_job_larger_than_every_share_is_taken_by_an_idle_queue() -> None:
    queue: FairQueue[str] = FairQueue(8, 100)
    queue.put("a", 1000, "large")
    assert order(queue) == ["large"]


def test_what_is_removed_frees_its_share() -> None:
    queue: FairQueue[int] = FairQueue(8, 100)
    tickets = [queue.put("a", 1, i) for i in range(2)]
    assert queue.remove(tickets[0]) and not queue.remove(tickets[0])
    queue.put("a", 1, 2)
    assert sorted(queue.pop().item for _ in range(2)) == [1, 2] and not queue.remove(tickets[1])
    assert len(queue) == 0
