"""The thread that owns the engine, and how requests get in and tokens get out.

The engine is not thread-safe, so one thread calls it: take what arrived, end what was cancelled or is late,
step, hand out. Others talk to it through a queue of messages; it talks to the event loop of a client through
that client's `Mailbox`.

A mailbox holds at most one unread `Delta` per choice: what a slow reader has not taken yet is merged, so a
client that does not read never stalls the others and never holds more than its own text.

A step that raises leaves an engine in an unknown state: every request is told, the loop ends, `alive` turns
False, and nothing is accepted any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import torch

from shoestring.errors import UserError
from shoestring.serve.engine import Engine, Output, Request
from shoestring.serve.logits import RuledSampling, TokenLogprob
from shoestring.serve.metrics import Metrics
from shoestring.serve.schema import ApiError

log = logging.getLogger("shoestring.serve")


@dataclass(frozen=True)
class Delta:
    """What is new for one choice since it was last read."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    num_cached: int = 0
    error: ApiError | None = None
    drafted: tuple[bool, ...] = ()  # for each token, whether the drafter had guessed it

    def then(self, later: Delta) -> Delta:
        return Delta(
            self.text + later.text,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            self.prompt_logprobs if later.prompt_logprobs is None else later.prompt_logprobs,
            later.finish_reason or self.finish_reason,
            max(self.num_cached, later.num_cached),
            later.error or self.error,
            self.drafted + later.drafted,
        )


class Mailbox:
    """Written by the engine's thread, read by one coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._lock = threading.Lock()
        self._unread: dict[int, Delta] = {}
        self._closed = False

    def put(self, index: int, delta: Delta) -> None:
        with self._lock:
            first = not self._unread
            before = self._unread.get(index)
            self._unread[index] = delta if before is None else before.then(delta)
        if first:
            self._wake()

    def close(self) -> None:
        """The reader is gone or must stop: `take` returns None from now on."""
        self._closed = True
        self._wake()

    async def take(self) -> dict[int, Delta] | None:
        """Everything unread, by choice; waits for something."""
        await self._filled.wait()
        self._filled.clear()
        with self._lock:
            unread, self._unread = self._unread, {}
        return None if self._closed else unread

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the event loop has ended, and with it the reader
            self._loop.call_soon_threadsafe(self._filled.set)


@dataclass(eq=False)
class Job:
    """One choice of one client's request."""

    prompt: list[int]
    sampling: RuledSampling
    mailbox: Mailbox
    index: int
    deadline: float = math.inf  # of time.monotonic
    score_prompt: int | None = None  # log-probabilities of the prompt, with this many alternatives
    no_new_tokens: bool = False  # a Sampling cannot say max_tokens=0
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    request: Request | None = field(default=None, repr=False)
    num_sent: int = 0
    done: bool = False


@dataclass(frozen=True)
class State:
    """What the loop looked like after its latest step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    tokens_per_s: float = 0.0


Message = tuple[Literal["add", "cancel", "abort", "stop"], Sequence[Job], ApiError | None]


class EngineLoop:
    def __init__(self, engine: Engine, metrics: Metrics, *, max_running: int, max_queue: int) -> None:
        self.engine, self.metrics = engine, metrics
        self.max_running, self.max_queue = max_running, max_queue
        self.state = State()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # by the engine's request id
        self._to_score: deque[Job] = deque()
        self._outbox: list[tuple[Job, Delta]] = []
        self._lock = threading.Lock()  # guards _num_open and _closed
        self._num_open = 0  # jobs submitted and not done
        self._closed: ApiError | None = None
        self._seconds_per_job = 1.0  # moving average, for Retry-After
        self._rate = _Rate()
        self._num_prompt_tokens = 0
        self._thread = threading.Thread(target=self._run, name="shoestring-engine", daemon=True)

    # -- called from anywhere -------------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def closed(self) -> ApiError | None:
        """Why nothing new is accepted, if so."""
        return self._closed

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take all of them or none; a full queue is a 429, a closed one a 503."""
        room = self.max_running + self.max_queue
        with self._lock:
            if self._closed is not None:
                raise self._closed.with_traceback(None)
            if len(jobs) > room:
                raise ApiError(
                    400, f"this request asks for {len(jobs)} texts at once; the server takes at most {room}"
                )
            if self._num_open + len(jobs) > room:
                self.metrics.rejected.inc()
                wait = self._seconds_per_job * max(1, self._num_open - self.max_running) / self.max_running
                raise ApiError(
                    429,
                    f"the queue is full ({self._num_open} texts, at most {room}); try again later",
                    code="queue_full",
                    headers={"Retry-After": str(min(60, max(1, math.ceil(wait))))},
                )
            self._num_open += len(jobs)
        self._inbox.put(("add", list(jobs), None))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody wants these any more; memory is free before the next step. Finished ones are left alone."""
        if any(not job.done for job in jobs):
            self._inbox.put(("cancel", list(jobs), None))

    def close(self, reason: ApiError) -> None:
        """Accept nothing new; what runs goes on."""
        with self._lock:
            self._closed = self._closed or reason

    def abort_all(self, reason: ApiError) -> None:
        self._inbox.put(("abort", (), reason))

    def stop(self, timeout: float = 10.0) -> None:
        self._inbox.put(("stop", (), None))
        if self._thread.ident is not None:
            self._thread.join(timeout)

    # -- the thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            if self.engine.runner.device.index is not None:
                torch.cuda.set_device(self.engine.runner.device)  # every thread has a current GPU of its own
            while self._take():
                self._expire()
                if self._to_score:
                    self._score(self._to_score.popleft())
                if self.engine.busy:
                    self._hand_out(self.engine.step())
                self._publish()
        except Exception:
            log.exception("the engine loop ended because a step failed")
        finally:
            gone = ApiError(503, "the engine has stopped; the server must be restarted", code="engine_dead")
            self.close(gone)
            self._abort_all(gone)

    def _take(self) -> bool:
        """Read the inbox, waiting where there is nothing else to do; False when the loop shall end."""
        wait = not (self.engine.busy or self._to_score)
        while True:
            try:
                kind, jobs, reason = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if kind == "stop":
                return False
            if kind == "abort":
                assert reason is not None
                self._abort_all(reason)
            for job in jobs:
                if kind == "add":
                    self._add(job)
                else:
                    self._drop(job, "abort")

    def _add(self, job: Job) -> None:
        if job.score_prompt is not None:
            self._to_score.append(job)
            return
        if job.no_new_tokens:
            self._start(job)
            self._tell(job, Delta(finish_reason="length"))
            self._close_job(job, "length")
            return
        try:
            job.request = self.engine.add(job.prompt, job.sampling)
        except UserError as error:
            self._fail(job, ApiError(400, str(error)))
            return
        self._jobs[job.request.id] = job

    def _score(self, job: Job) -> None:
        """Log-probabilities of a prompt, then the job goes on without that wish."""
        assert job.score_prompt is not None
        self._start(job)
        try:
            scored = self.engine.runner.prompt_logprobs(job.prompt, job.score_prompt)
        except Exception:  # it has touched nothing of the engine: the others can go on
            log.exception("log-probabilities of a prompt failed")
            self._fail(job, ApiError(500, "computing the prompt's log-probabilities failed"))
            return
        self._tell(job, Delta(prompt_logprobs=tuple(scored)))
        job.score_prompt = None
        self._add(job)

    def _hand_out(self, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        for job in self._jobs.values():
            if job.started is None and job.request is not None and job.request.num_computed > 0:
                self._start(job)
        for output in outputs:
            job = self._jobs[output.request.id]
            num = len(output.token_ids)
            logprobs = job.sampling.trace.logprobs[job.num_sent : job.num_sent + num]
            job.num_sent += num
            reason = output.finish_reason
            delta = Delta(
                output.text,
                tuple(output.token_ids),
                tuple(logprobs),
                finish_reason=reason,
                num_cached=output.request.num_cached,
                drafted=tuple(i < output.num_accepted for i in range(num)),
            )
            self._time_tokens(job, num, now)
            self._tell(job, delta)
            if reason is not None:
                self._close_job(job, reason)

    def _time_tokens(self, job: Job, num: int, now: float) -> None:
        if num == 0:
            return
        self.metrics.generation_tokens.inc(num)
        self._rate.add(now, num)
        if job.first_token is None:
            job.first_token = now
            self.metrics.first_token.observe(now - job.arrived)
            self.metrics.prefill_time.observe(now - (job.started or job.arrived))
        else:
            for _ in range(num):
                self.metrics.token_gap.observe((now - job.last_token) / num)
        job.last_token = now

    def _start(self, job: Job) -> None:
        if job.started is None:
            job.started = time.monotonic()
            self._num_prompt_tokens += len(job.prompt)
            self.metrics.prompt_tokens.inc(len(job.prompt))
            self.metrics.prompt_length.observe(len(job.prompt))
            self.metrics.queue_time.observe(job.started - job.arrived)

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [j for j in (*self._jobs.values(), *self._to_score) if now >= j.deadline]:
            late = ApiError(
                408,
                f"the request was not finished within {job.deadline - job.arrived:.0f} seconds",
                code="deadline_exceeded",
                headers={"x-should-retry": "false"},
            )
            self._fail(job, late)

    def _fail(self, job: Job, error: ApiError) -> None:
        self._tell(job, Delta(error=error))
        self._drop(job, "error")

    def _drop(self, job: Job, reason: str) -> None:
        if job.done:
            return
        if job.request is not None:
            self.engine.abort(job.request)
        elif job in self._to_score:
            self._to_score.remove(job)
        self._close_job(job, reason)

    def _close_job(self, job: Job, reason: str) -> None:
        now = time.monotonic()
        job.done = True
        if job.request is not None:
            self._jobs.pop(job.request.id, None)
        with self._lock:
            self._num_open -= 1
        self._seconds_per_job += 0.1 * (now - (job.started or now) - self._seconds_per_job)
        self.metrics.count_finished(reason)
        self.metrics.text_length.observe(job.num_sent)
        if reason in ("stop", "length"):
            self.metrics.latency.observe(now - job.arrived)
            self.metrics.decode_time.observe(now - (job.first_token or now))

    def _abort_all(self, reason: ApiError) -> None:
        while True:  # also those that nobody has read yet
            try:
                kind, jobs, _ = self._inbox.get_nowait()
            except queue.Empty:
                break
            for job in jobs if kind == "add" else ():
                self._fail(job, reason)
        for job in (*self._jobs.values(), *self._to_score):
            try:
                self._fail(job, reason)
            except Exception:  # an engine that failed once may fail to abort, too
                self._close_job(job, "error")
        self._publish()

    def _tell(self, job: Job, delta: Delta) -> None:
        self._outbox.append((job, delta))

    def _publish(self) -> None:
        """Show the new state, then hand out: whoever gets an answer finds it counted."""
        stats, started = self.engine.stats, sum(j.started is not None for j in self._jobs.values())
        self.state = State(
            num_running=started,
            num_waiting=len(self._jobs) - started + len(self._to_score),
            kv_usage=kv_usage(self.engine),
            num_prompt_tokens=self._num_prompt_tokens,
            num_new_tokens=stats.num_new_tokens,
            num_drafted=stats.num_drafted,
            num_accepted=stats.num_accepted,
            tokens_per_s=self._rate.per_second(time.monotonic()),
        )
        self.metrics.count_stats(stats)
        self.metrics.num_running.set(self.state.num_running)
        self.metrics.num_waiting.set(self.state.num_waiting)
        self.metrics.kv_usage.set(self.state.kv_usage)
        outbox, self._outbox = self._outbox, []
        for job, delta in outbox:
            job.mailbox.put(job.index, delta)


def kv_usage(engine: Engine) -> float:
    """Share of the key/value memory that running requests hold; what is merely cached can be had."""
    pool = engine.cache.pool
    return pool.num_used / pool.num_blocks


class _Rate:
    """Tokens per second over the last few seconds."""

    def __init__(self, window: float = 5.0) -> None:
        self._window, self._events, self._sum = window, deque[tuple[float, int]](), 0

    def add(self, now: float, num: int) -> None:
        self._events.append((now, num))
        self._sum += num
        self._trim(now)

    def per_second(self, now: float) -> float:
        self._trim(now)
        if len(self._events) < 2:
            return 0.0
        return self._sum / max(1e-3, min(self._window, now - self._events[0][0]))

    def _trim(self, now: float) -> None:
        while self._events and self._events[0][0] < now - self._window:
            self._sum -= self._events.popleft()[1]
