"""The HTTP side's view of the engine: which texts are open, who may add more, and what has come for each reader.

An `EngineClient` lives on the event loop. It admits texts or refuses them (429, 503), hands them to the engine's thread
through an `EnginePort`, and stores what reports bring in the `OutputCollector` of each request. The port is the
`EngineThread` itself where both share a process, or a socket to the process that has it (http_process.py).

Tokens become text here, but for requests with stop strings, for which the engine has to know the text.

A collector keeps what its reader has not taken yet and hands it over merged, one `ChoiceDelta` per choice. A client
that does not read therefore never stalls the others and never holds more than its own text. While the event loop writes
the events of one step the engine may compute the next ones: with hundreds of streams an event carries the tokens of a
few steps.

A step that never returns sends no report, so `abort_all` reaches the readers without it, and the port's
`seconds_in_step` tells.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import NamedTuple, Protocol

from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.engine.request import TextStream
from shoestring.serve.http.engine_messages import (
    ChoiceDelta,
    EngineFacts,
    EngineSnapshot,
    Message,
    PendingChoice,
    Report,
)
from shoestring.serve.http.request_schema import ApiError

OTHERS_SHARE = 4  # a 4th of the queue is kept for other clients than the one that fills it
TAKE_SIZE = 4096  # entries that a reader gets at once, beside the first delta
WAKE = 32  # readers that write their events before the event loop looks for new requests again
Piece = tuple[str, tuple[int]]  # a text that gained one token: cheaper than a delta


def merged(parts: Sequence[ChoiceDelta | Piece]) -> ChoiceDelta:
    """Consecutive parts of one choice as one."""
    deltas = [part for part in parts if isinstance(part, ChoiceDelta)]
    if len(parts) == len(deltas) == 1:
        return deltas[0]
    text = "".join([part[0] for part in parts])
    tokens = tuple(chain.from_iterable([part[1] for part in parts]))
    if not deltas:
        return ChoiceDelta(text, tokens, drafted=(False,) * len(tokens))
    scored = [d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None]
    return ChoiceDelta(
        text,
        tokens,
        logprobs=tuple(chain.from_iterable(d.logprobs for d in deltas)),
        prompt_logprobs=tuple(chain.from_iterable(scored)) if scored else None,
        finish_reason=next((d.finish_reason for d in reversed(deltas) if d.finish_reason), None),
        num_cached=max(d.num_cached for d in deltas),
        error=next((d.error for d in reversed(deltas) if d.error), None),
        drafted=tuple(chain.from_iterable(p.drafted if isinstance(p, ChoiceDelta) else (False,) for p in parts)),
        vectors_ND=next((d.vectors_ND for d in deltas if d.vectors_ND is not None), None),
        versions=next((d.versions for d in reversed(deltas) if d.versions), ()),
    )


def with_text(delta: ChoiceDelta, stream: TextStream) -> ChoiceDelta:
    """With the text of its tokens; that of the token that ends a text is none."""
    tokens = delta.token_ids[:-1] if delta.finish_reason == "stop" else delta.token_ids
    pieces = [stream.push(token) for token in tokens]
    return delta._replace(text="".join(pieces) + ("" if delta.finish_reason is None else stream.flush()))


class OutputCollector:
    """What has come for one request; on one event loop, with one reader."""

    def __init__(self) -> None:
        self._unread: deque[tuple[int, ChoiceDelta | Piece]] = deque()
        self._filled = self._closed = False
        self._waiter: asyncio.Future[None] | None = None  # of the reader; an asyncio.Event takes twice as long

    def put(self, index: int, part: ChoiceDelta | Piece) -> None:
        self.add(index, part)
        self.remind()

    def add(self, index: int, part: ChoiceDelta | Piece) -> None:
        """`put`, but the reader is woken later (`wake`)."""
        self._unread.append((index, part))

    def wake(self) -> None:
        """After `add`; a reader that has taken everything meanwhile is left alone."""
        if self._unread:
            self.remind()

    def remind(self) -> None:
        """Wake the reader; where nothing came, `take` returns {}."""
        self._filled = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """The reader is gone or must stop: `take` returns None from now on."""
        self._closed = True
        self.remind()

    async def take(self) -> dict[int, ChoiceDelta] | None:
        """What is unread, by choice, up to TAKE_SIZE; waits for something."""
        if not self._filled:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if len(self._unread) == 1 and not self._closed:
            index, (text, tokens, *more) = self._unread[0]
            if not more:  # one token, which is the rule: nothing to merge
                self._unread.clear()
                self._filled = False
                return {index: ChoiceDelta(text, tokens, drafted=(False,))}
        taken: dict[int, list[ChoiceDelta | Piece]] = {}
        size = 0
        while self._unread and size < TAKE_SIZE:
            index, part = self._unread.popleft()
            taken.setdefault(index, []).append(part)
            size += part.size if isinstance(part, ChoiceDelta) else 2
        self._filled = bool(self._unread) or self._closed
        if self._closed:
            return None
        if size >= TAKE_SIZE:
            await asyncio.sleep(0)  # other clients' turn
        return {index: merged(parts) for index, parts in taken.items()}


class EnginePort(Protocol):
    """How the engine's thread is reached."""

    @property
    def seconds_in_step(self) -> float:
        """How long the step that is computed now has taken; 0 between steps."""

    @property
    def seconds_silent(self) -> float:
        """How long nothing was heard of its process, which says something every second."""

    def post(self, message: Message, /) -> None: ...

    def count_rejected(self) -> None:
        """For the metrics: a request was refused because the queue was full."""

    def metrics_text(self) -> bytes:
        """The metrics for Prometheus; takes some milliseconds."""

    def change_adapter(self, name: str, place: str) -> bytes:
        """Load the adapter in this folder, or unload it where there is none; waits until that is done. ApiError where
        it cannot be."""


class Reader(NamedTuple):
    """Who reads an open text."""

    collector: OutputCollector
    choice: int  # of the request
    client: str
    stream: TextStream | None  # None: the engine gives the text


class EngineClient:
    def __init__(self, facts: EngineFacts, port: EnginePort, tokenizer: Tokenizer, snapshot: EngineSnapshot) -> None:
        self.facts, self.port, self.snapshot = facts, port, snapshot
        self._tokenizer = tokenizer
        self.alive = True
        self.closed: ApiError | None = None  # why nothing new is accepted
        self._loop: asyncio.AbstractEventLoop | None = None  # since the first request
        self._ids = itertools.count()
        self._open: dict[int, Reader] = {}  # submitted and not ended
        self._num_open_of: Counter[str] = Counter()  # by client
        self._to_wake: dict[OutputCollector, None] = {}  # in the order in which something came for them
        self._waking = False  # the event loop will call `_wake_some`

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def max_texts(self) -> int:
        """Open texts of one client: a part of the queue is kept for the others."""
        return self.facts.max_running + self.facts.max_queue - self.facts.max_queue // OTHERS_SHARE

    # -- on the event loop ----------------------------------------------------------------------------------
    def submit(self, choices: Sequence[PendingChoice], collector: OutputCollector) -> None:
        """Take all of them or none; a full queue is a 429, a closed one a 503. All are of one client."""
        room, client = self.facts.max_running + self.facts.max_queue, choices[0].client
        if self.closed is not None:
            raise self.closed.with_traceback(None)
        if len(choices) > self.max_texts:
            raise ApiError(
                400, f"this request asks for {len(choices)} texts at once; the server takes at most {self.max_texts}"
            )
        own = self._num_open_of[client]
        full = None
        if self.num_open + len(choices) > room:
            full = f"the queue is full ({self.num_open} texts, at most {room})"
        elif own + len(choices) > self.max_texts:
            full = f"your part of the queue is full ({own} texts, at most {self.max_texts})"
        if full is not None:
            self.port.count_rejected()
            waiting = max(1, self.num_open - self.facts.max_running)
            wait = self.snapshot.seconds_per_choice * waiting / self.facts.max_running
            raise ApiError(
                429,
                f"{full}; try again later",
                code="queue_full",
                headers={"Retry-After": str(min(60, max(1, math.ceil(wait))))},
            )
        self._loop = asyncio.get_running_loop()
        for index, choice in enumerate(choices):
            choice.id = next(self._ids)
            sampling = choice.sampling
            stream = None
            if not sampling.stop:
                stream = TextStream(self._tokenizer.stream(shown=sampling.shown_special, after=choice.prompt))
            self._open[choice.id] = Reader(collector, index, client, stream)
        self._num_open_of[client] += len(choices)
        self.port.post(("add", choices))

    def cancel(self, choices: Sequence[PendingChoice]) -> None:
        """The client has left. Memory is free before the next step; finished choices are left alone."""
        if left := [choice.id for choice in choices if choice.id in self._open]:
            self.port.post(("cancel", left))

    def receive(self, report: Report) -> None:
        """Counters first: a reader that has its answer finds it counted."""
        self.snapshot = report.snapshot
        readers = self._open
        filled: list[tuple[Reader, ChoiceDelta | Piece]] = []
        for number, text, token in zip(*report.pieces, strict=True):
            if (reader := readers.get(number)) is not None:
                filled.append((reader, (text if reader.stream is None else reader.stream.push(token), (token,))))
        for number, part in report.parts:
            if (reader := readers.get(number)) is not None:
                filled.append((reader, part if reader.stream is None else with_text(part, reader.stream)))
        for number in report.ended:
            if (reader := readers.pop(number, None)) is not None:
                self._num_open_of[reader.client] -= 1
                if not self._num_open_of[reader.client]:
                    del self._num_open_of[reader.client]
        self.alive = self.alive and not report.dead
        for reader, told in filled:
            reader.collector.add(reader.choice, told)
            self._to_wake[reader.collector] = None
        if report.closed is not None:
            self.close(report.closed)
            self._tell_all(report.closed)
        if report.dead:  # what was submitted meanwhile is not reported
            self._open.clear()
            self._num_open_of.clear()
        if not self._waking:
            self._wake_some()

    def _wake_some(self) -> None:
        """Hundreds of readers that write at once keep a new request from the engine for as long. Others wait for a turn
        of the event loop."""
        woken = list(islice(self._to_wake, WAKE))
        for collector in woken:
            del self._to_wake[collector]
            collector.wake()
        self._waking = bool(self._to_wake)
        if self._waking:
            assert self._loop is not None  # there are readers
            self._loop.call_soon(self._wake_some)

    def _tell_all(self, error: ApiError) -> None:
        for reader in self._open.values():
            reader.collector.put(reader.choice, ChoiceDelta(error=error))

    # -- from any thread ------------------------------------------------------------------------------------
    def deliver(self, report: Report) -> None:
        """`receive` on the event loop."""
        self._on_loop(lambda: self.receive(report))

    def close(self, reason: ApiError) -> None:
        """Accept nothing new; running choices continue."""
        self.closed = self.closed or reason

    def abort_all(self, reason: ApiError) -> None:
        """End every text. Readers are told at once, the engine when its step ends."""

        def abort() -> None:
            self._tell_all(reason)
            self.port.post(("abort", reason))

        self._on_loop(abort)

    def _on_loop(self, work: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(work)
                return
        with suppress(RuntimeError):  # no reader is left; the rest is bookkeeping
            work()
