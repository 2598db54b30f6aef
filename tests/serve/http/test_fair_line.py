"""Who waits for whom: clients take turns, small jobs of one client go first, and shares are bounded."""

from __future__ import annotations

import pytest

from shoestring.serve.http.fair_line import FairLine, LineFull


def order(queue: FairLine[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_clients_take_turns_and_the_smallest_of_each_goes_first() -> None:
    queue: FairLine[str] = FairLine(100, 10_000)
    for size in (30, 10, 20, 10):
        queue.put("busy", f"busy {size}", size)
    queue.put("late", "late 500", 500)
    queue.put("later", "later 1", 1)
    assert order(queue) == ["busy 10", "late 500", "later 1", "busy 10", "busy 20", "busy 30"]


def test_one_client_fills_only_its_share() -> None:
    queue: FairLine[int] = FairLine(8, 4000)
    for i in range(2):
        queue.put("greedy", i, 1)
    with pytest.raises(LineFull) as by_number:
        queue.put("greedy", 2, 1)
    queue.put("other", 3, 900)
    with pytest.raises(LineFull) as by_bytes:
        queue.put("other", 4, 900)
    assert by_number.value.of_client and by_bytes.value.of_client
    for i in range(5):
        queue.put(f"client {i}", i, 1)
    with pytest.raises(LineFull) as whole:
        queue.put("one more", 9, 1)
    assert not whole.value.of_client and len(queue) == 8


def test_a_job_larger_than_every_share_is_taken_by_an_idle_queue() -> None:
    queue: FairLine[str] = FairLine(8, 100)
    queue.put("a", "large", 1000)
    assert order(queue) == ["large"]


def test_what_is_removed_frees_its_share() -> None:
    queue: FairLine[int] = FairLine(8, 100)
    for i in range(2):
        queue.put("a", i, 1)
    assert queue.remove("a", 0) and not queue.remove("a", 0)
    queue.put("a", 2, 1)
    assert sorted(queue.pop() for _ in range(2)) == [1, 2] and not queue.remove("a", 1)
    assert len(queue) == 0
