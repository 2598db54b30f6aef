"""Threads for the work on requests that would block the event loop: reading bodies, encoding and decoding text,
compiling grammars, writing large responses.

There is one thread per lane, so that a long job delays only jobs of its own kind:

    light      small bodies: at most LIGHT_BYTES, milliseconds each; the smallest are read on the event loop (app.py)
    heavy      larger bodies and prompts: up to seconds each; the tokenizer releases the GIL meanwhile
    tokens     long texts for /tokenize and /detokenize, which no context bounds
    grammar    compiling JSON schemas
    render     writing responses with many log-probabilities

Each lane has a `FairLine`: clients take turns, one client can fill only its share. A job that finds the queue full is
refused (429); one that is not done in time is given up (503). Both say when to try again.

A job may hold the GIL for most of its time (JSON). The heavy lane therefore rests after a long job for as long as that
took, up to MOST_REST_S: between two of them the engine gets through whole steps.

The threads of both lanes ask the system for little of the processor (POLITE): where it is full, the threads of the
engine's step wait for each other, and one of them that is set aside for a tokenizer holds them all, layer after layer.

A running job cannot be interrupted. Whatever bounds its length belongs to the job itself: limits on bytes, on the
number of messages and prompts, and `encode_within` (request_parsing.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from shoestring.serve.http.fair_line import FairLine, LineFull
from shoestring.serve.http.request_schema import ApiError

T = TypeVar("T")
Lane = Literal["light", "heavy", "tokens", "grammar", "render"]
LIGHT_BYTES = 16 << 10
MAX_JOBS = 256  # waiting in one lane
MAX_BYTES = 64 << 20
RETRY_S = 2
LONG_S, MOST_REST_S = 0.02, 0.3
POLITE = 10  # the niceness of a thread: a tenth of a processor that others want


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    begun: bool = False

    def finish(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():  # given up, or its client has left
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


def as_exception(raised: BaseException) -> Exception:
    """A panic of a library in Rust is no Exception: it would end the thread, and nobody would be told."""
    if isinstance(raised, Exception):
        return raised
    if isinstance(raised, KeyboardInterrupt | SystemExit):
        raise raised
    error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


class RequestWorkers:
    def __init__(self, max_wait_s: float = 30.0, max_jobs: int = MAX_JOBS, max_bytes: int = MAX_BYTES) -> None:
        self.max_wait_s = max_wait_s
        self._lanes = {
            "light": _LaneThread("light", max_jobs, max_bytes),
            "heavy": _LaneThread("heavy", max_jobs, max_bytes, polite=True),
            "tokens": _LaneThread("tokens", max_jobs, max_bytes, polite=True),
            "grammar": _LaneThread("grammar", max_jobs, max_bytes),
            # Their texts are written and paid for: bounded by the engine's queue, never refused.
            "render": _LaneThread("render", 1 << 62, 1 << 62),
        }

    async def run(self, lane: Lane, client: str, size: int, work: Callable[[], T]) -> T:
        """What `work()` returns, on the thread of the lane; `size` is in bytes."""
        loop = asyncio.get_running_loop()
        job = _Job(work, loop, loop.create_future())
        thread = self._lanes[lane]
        try:
            thread.put(client, size, job)
        except LineFull as full:
            whose = "of yours " if full.of_client else ""
            raise ApiError(
                429,
                f"too many requests {whose}are waiting to be read; try again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_S)},
            ) from None
        give_up = loop.call_later(self.max_wait_s, job.finish, None, self._late(lane))
        try:
            return await job.future  # type: ignore[no-any-return]
        finally:
            give_up.cancel()
            if not job.begun:
                thread.remove(client, job)

    def stop(self) -> None:
        for thread in self._lanes.values():
            thread.stop()

    def _late(self, lane: Lane) -> ApiError:
        what = "write the answer" if lane == "render" else "read the request"
        return ApiError(
            503,
            f"the server is busy and did not {what} within {self.max_wait_s:.0f} seconds; try again later",
            code="overloaded",
            headers={"Retry-After": str(RETRY_S)},
        )


class _LaneThread:
    def __init__(self, name: str, max_jobs: int, max_bytes: int, polite: bool = False) -> None:
        """`polite`: it leaves time to others, and rests after a long job."""
        self._polite = polite
        self._line: FairLine[_Job] = FairLine(max_jobs, max_bytes)
        self._changed = threading.Condition()
        self._stopped = False
        threading.Thread(target=self._run, name=f"shoestring-{name}", daemon=True).start()

    def put(self, client: str, size: int, job: _Job) -> None:
        with self._changed:
            self._line.put(client, job, size)
            self._changed.notify()

    def remove(self, client: str, job: _Job) -> None:
        with self._changed:
            self._line.remove(client, job)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        if self._polite and sys.platform == "linux":  # where niceness is a thread's; elsewhere it is the process's
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, max(POLITE, os.getpriority(os.PRIO_PROCESS, 0)))  # 0: this thread
        while True:
            with self._changed:
                while not self._line and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                job = self._line.pop()
                job.begun = True
            result, error, began = None, None, time.monotonic()
            try:
                result = job.work()
            except BaseException as raised:  # of the request, whose handler gets it
                error = as_exception(raised)
            with suppress(RuntimeError):  # the event loop has ended
                job.loop.call_soon_threadsafe(job.finish, result, error)
            del job, result, error  # a large request is not kept until the next one
            if self._polite and (took := time.monotonic() - began) > LONG_S:
                time.sleep(min(took, MOST_REST_S))
