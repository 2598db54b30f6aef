"""Work off the event loop: a long job delays only its own lane, a full queue is a 429, a late job a 503."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

pytest.importorskip("pydantic", reason="the server needs shoestring[serve]")

from shoestring.serve.http.request_schema import ApiError
from shoestring.serve.http.request_workers import MOST_REST_S, POLITE, Lane, RequestWorkers


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """What jobs wait for; set at the end, so that no thread is left waiting."""
    event = threading.Event()
    yield event
    event.set()


def test_a_long_job_delays_only_its_own_lane(held: threading.Event) -> None:
    async def ask() -> tuple[float, str]:
        workers = RequestWorkers()
        long = asyncio.create_task(workers.run("heavy", "a", 1 << 20, held.wait))
        began = time.monotonic()
        light = await workers.run("light", "b", 10, lambda: "done")
        took = time.monotonic() - began
        held.set()
        assert await long
        workers.stop()
        return took, light

    took, light = asyncio.run(ask())
    assert light == "done" and took < 5


def test_long_texts_to_tokenize_delay_no_prompt_and_take_little_of_the_processor(held: threading.Event) -> None:
    async def ask() -> list[int]:
        workers = RequestWorkers()
        long = asyncio.create_task(workers.run("tokens", "a", 1 << 20, held.wait))
        niceness = partial(os.getpriority, os.PRIO_PROCESS, 0)
        lanes: tuple[Lane, ...] = ("heavy", "light", "render")
        found = [await asyncio.wait_for(workers.run(lane, "b", 1 << 20, niceness), 5) for lane in lanes]
        held.set()
        assert await long
        found.append(await workers.run("tokens", "a", 1, niceness))
        workers.stop()
        return found

    heavy, light, render, tokens = asyncio.run(ask())
    if sys.platform == "linux":
        assert heavy == tokens == min(19, max(POLITE, light)) and render == light == os.getpriority(os.PRIO_PROCESS, 0)


def test_errors_reach_the_one_who_asked() -> None:
    async def ask() -> None:
        workers = RequestWorkers()
        with pytest.raises(ZeroDivisionError):
            await workers.run("light", "a", 1, lambda: 1 // 0)
        assert await workers.run("light", "a", 1, lambda: 7) == 7
        workers.stop()

    asyncio.run(ask())


def test_a_panic_of_a_library_does_not_end_the_lane() -> None:
    """The tokenizers library is written in Rust: its panics are no `Exception`."""

    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic("index out of bounds")

    async def ask() -> None:
        workers = RequestWorkers(max_wait_s=20)
        with pytest.raises(RuntimeError, match="Panic: index out of bounds"):
            await workers.run("light", "a", 1, panic)
        assert await workers.run("light", "a", 1, lambda: 7) == 7
        workers.stop()

    asyncio.run(ask())


def test_a_full_queue_is_a_429_and_another_client_still_gets_in(held: threading.Event) -> None:
    async def ask() -> None:
        workers = RequestWorkers(max_jobs=8)
        running = threading.Event()
        waiting = [asyncio.create_task(workers.run("heavy", "greedy", 1, lambda: running.set() or held.wait()))]
        while not running.is_set():
            await asyncio.sleep(0.001)
        waiting += [asyncio.create_task(workers.run("heavy", "greedy", 1, held.wait)) for _ in range(2)]
        await asyncio.sleep(0)  # two wait: their share of 8
        with pytest.raises(ApiError) as refused:
            await workers.run("heavy", "greedy", 1, held.wait)
        assert refused.value.status == 429 and refused.value.code == "queue_full"
        assert int(refused.value.headers["Retry-After"]) > 0 and "of yours" in refused.value.message
        other = asyncio.create_task(workers.run("heavy", "other", 1, lambda: "in"))
        held.set()
        assert await other == "in" and all(await asyncio.gather(*waiting))
        workers.stop()

    asyncio.run(ask())


def test_a_job_that_is_late_is_given_up_and_never_begun(held: threading.Event) -> None:
    begun = []

    async def ask() -> None:
        workers = RequestWorkers(max_wait_s=0.1)
        first = asyncio.create_task(workers.run("heavy", "a", 1, held.wait))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError) as late:
            await workers.run("heavy", "a", 1, lambda: begun.append(1))
        assert late.value.status == 503 and late.value.code == "overloaded" and late.value.headers["Retry-After"]
        with pytest.raises(ApiError):
            await first
        held.set()
        await asyncio.sleep(MOST_REST_S + 0.1)  # the lane rests after a long job
        assert await workers.run("heavy", "a", 1, lambda: "goes on") == "goes on"
        workers.stop()

    asyncio.run(ask())
    assert not begun


@pytest.mark.parametrize(
    ("lane", "told"), [("light", "did not read the request"), ("render", "did not write the answer")]
)
def test_what_was_not_done_in_time_is_said(held: threading.Event, lane: Lane, told: str) -> None:
    async def ask() -> None:
        workers = RequestWorkers(max_wait_s=0.05)
        with pytest.raises(ApiError, match=told):
            await workers.run(lane, "a", 1, held.wait)
        held.set()
        workers.stop()

    asyncio.run(ask())


def test_long_jobs_leave_time_between_them() -> None:
    """The first result is not late; the second job begins after a rest as long as the first."""

    async def run() -> tuple[float, float]:
        workers = RequestWorkers()
        began = time.monotonic()
        first, second = (asyncio.create_task(workers.run("heavy", "a", 1, lambda: time.sleep(0.15))) for _ in range(2))
        await first
        early = time.monotonic() - began
        await second
        workers.stop()
        return early, time.monotonic() - began

    early, late = asyncio.run(run())
    assert late >= 0.44 and late - early >= 0.29
