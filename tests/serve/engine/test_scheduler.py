from __future__ import annotations

import random

import pytest

from shoestring.serve.engine.block_pool import BlockPool
from shoestring.serve.engine.request import Draft, Request
from shoestring.serve.engine.sampling import Sampling
from shoestring.serve.engine.scheduler import QueueFull, ScheduledStep, Scheduler


def scheduler(num_blocks: int = 8, size: int = 4, **changes: int) -> Scheduler:
    settings = {"max_requests": 4, "chunk": 16, **changes}
    return Scheduler(BlockPool(num_blocks, size), lambda request: b"root", **settings)  # type: ignore[arg-type]


def request(id: int, num: int, first: int = 0) -> Request:
    return Request([first] * num, num, Sampling(), id)


def compute(s: Scheduler, plan: ScheduledStep) -> list[int]:
    """What a step does to requests, without a model: every reached end gains one token."""
    gained = []
    for r, num in plan.work:
        assert r.table is not None
        assert r.num_computed + num <= len(r.table.blocks) * s.pool.block_size
        reached = r.num_computed + num >= len(r.tokens)
        if reached:
            r.tokens.append(r.id)
            gained.append(r.id)
        r.num_computed = len(r.tokens) - 1 if reached else r.num_computed + num
        s.pool.seal(r.table, r.tokens, r.num_computed)
        r.draft = Draft([])
    return gained


def rows(plan: ScheduledStep) -> dict[int, int]:
    return {r.id: num for r, num in plan.work}


def test_a_prompt_is_read_in_chunks_behind_those_who_write() -> None:
    s = scheduler(num_blocks=20, chunk=6)
    s.add(request(0, 2))
    assert compute(s, s.schedule()) == [0]
    s.add(request(1, 12))
    plan = s.schedule()
    assert rows(plan) == {0: 1, 1: 5}
    compute(s, plan)
    assert rows(s.schedule()) == {0: 1, 1: 5}


def test_drafts_get_what_is_left_but_never_before_another_writer() -> None:
    s = scheduler(num_blocks=20, chunk=5)
    for id in range(3):
        s.add(request(id, 1))
    compute(s, s.schedule())
    for r in s.running:
        r.draft = Draft([7] * 4)
    assert rows(s.schedule()) == {0: 3, 1: 1, 2: 1}


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    s = scheduler(num_blocks=4, size=2)
    s.add(request(0, 3, first=5))
    s.add(request(1, 3, first=6))
    s.add(request(2, 3, first=7))
    compute(s, s.schedule())
    assert [r.id for r in s.running] == [0, 1] and [r.id for r in s.waiting] == [2]
    compute(s, s.schedule())  # both have 4 tokens computed; the next one needs a block
    plan = s.schedule()
    assert [r.id for r in plan.preempted] == [1] and rows(plan) == {0: 1}
    assert [r.id for r in s.waiting] == [1, 2]
    one = s.waiting[0]
    assert (one.table, one.num_computed, one.num_preempted) == (None, 0, 1)
    assert len(one.tokens) == 5  # what it had written stays
    compute(s, plan)
    s.remove(s.running[0])
    plan = s.schedule()
    assert [r.id for r in plan.admitted] == [1]
    # One of its two sealed blocks went to the oldest; the one at the start of the chain is still there.
    assert rows(plan) == {1: 3} and one.num_computed == 2


def test_nobody_is_preempted_for_a_guess() -> None:
    s = scheduler(num_blocks=2, size=4)
    s.add(request(0, 2))
    s.add(request(1, 2))
    compute(s, s.schedule())
    for r in s.running:
        r.draft = Draft([9] * 6)
    plan = s.schedule()
    assert not plan.preempted and rows(plan) == {0: 2, 1: 2}  # 3 tokens and what the block has room for


def test_equal_prompts_share_once_the_first_is_read() -> None:
    s = scheduler(num_blocks=20, chunk=8)
    s.add(request(0, 13, first=3))
    s.add(request(1, 13, first=3))
    compute(s, s.schedule())
    compute(s, s.schedule())
    first, second = s.running
    assert first.table is not None and second.table is not None
    assert second.table.blocks[:2] == first.table.blocks[:2]


def test_the_queue_is_bounded() -> None:
    s = scheduler(max_waiting=2)
    s.add(request(0, 1))
    s.add(request(1, 1))
    with pytest.raises(QueueFull, match="max_waiting"):
        s.add(request(2, 1))
    compute(s, s.schedule())
    s.add(request(2, 1))


@pytest.mark.parametrize("seed", range(3))
def test_everybody_finishes_whatever_comes_and_goes(seed: int) -> None:
    """10,000 adds, aborts and finishes in all, without a model: the blocks add up and nobody starves."""
    rng = random.Random(seed)
    s = scheduler(num_blocks=rng.randrange(6, 12), size=4, chunk=rng.randrange(2, 20), max_requests=5)
    live: dict[int, tuple[Request, int]] = {}  # request, tokens it wants
    num_added = num_ended = num_preempted = 0
    for _ in range(100_000):
        if num_added < 1700 and len(live) < 12 and rng.random() < 0.7:
            r = Request([rng.randrange(2) for _ in range(rng.randrange(1, 12))], 0, Sampling(), num_added)
            live[r.id] = r, min(24, len(r.tokens) + rng.randrange(1, 12))
            s.add(r)
            num_added += 1
        if live and rng.random() < 0.1:
            r, _ = live.pop(rng.choice(list(live)))
            s.remove(r)
            num_ended += 1
        for r in s.running:
            if r.ready and rng.random() < 0.5:
                want = live[r.id][1]
                r.draft = Draft([1] * min(rng.randrange(0, 5), want - len(r.tokens) - 1))
        plan = s.schedule()
        num_preempted += len(plan.preempted)
        assert sum(num for _, num in plan.work) <= s.chunk
        assert plan.work or not live
        if s.running:
            assert s.running[0].id == min(r.id for r in s.running)  # the oldest is never overtaken
        compute(s, plan)
        for r, want in list(live.values()):
            if len(r.tokens) >= want:
                s.remove(live.pop(r.id)[0])
                num_ended += 1
        pool = s.pool
        assert pool.num_free + pool.num_used + pool.num_cached == pool.num_blocks
        assert sum(pool._refs.values()) == sum(len(r.table.blocks) for r in s.running if r.table)
        if num_added == 1700 and not live:
            break
    assert num_ended == num_added == 1700
    assert s.pool.num_used == 0 and num_preempted > 0
