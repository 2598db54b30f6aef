"""The thread that owns the engine: how requests get in and tokens get out.

The engine is not thread-safe, so only this thread calls it. One turn of its loop: read the inbox, let texts into the
engine, step it, hand out the outputs. Texts wait in a `WaitingLine`, so that clients share the engine fairly. Other
threads send messages through the inbox; the thread answers through the `OutputCollector` of each client, on that
client's event loop.

A collector keeps what its reader has not taken yet and hands it over merged, one `ChoiceDelta` per choice. A client
that does not read therefore never stalls the others and never holds more than its own text. One turn hands over a
bounded number of tokens, because writing them out happens on the event loop.

The event loop and this thread share one interpreter: while one writes events, the other does not step. `Delivery`
therefore wakes all readers of a step together, and lets the loop rest after a round for a multiple of the time that it
took. With few streams a round is shorter than a step and every token is an event of its own; with hundreds of streams
an event carries the tokens of a few steps, and the engine keeps most of its speed (benchmarks/serve_saturation.py).

The engine ends requests at their deadline; texts that wait to be scored or to enter the engine are checked here. A step
that raises leaves the engine in an unknown state: every request gets an error, the thread ends, `alive` turns False and
nothing is accepted any more. A step that never returns holds this thread, so `abort_all` reaches the clients without
it, `seconds_in_step` tells others, and app.py checks deadlines once more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shoestring.errors import UserError, lost_peer
from shoestring.serve.engine.embedding import Pooling, embedding_batches
from shoestring.serve.engine.encoder import EncoderEngine
from shoestring.serve.engine.engine import Engine, Output, Request, UpdateRefused
from shoestring.serve.engine.logit_rules import GrammarLimitExceeded, SamplingWithRules, TokenLogprob
from shoestring.serve.engine.request import NonFiniteLogits
from shoestring.serve.engine.weight_update import PreparedWeights, WeightTarget
from shoestring.serve.http.metrics import Metrics
from shoestring.serve.http.request_schema import ApiError
from shoestring.serve.http.waiting_line import WaitingLine, who_gives_way
from shoestring.state.reshard.version import WeightsVersion

OTHERS_SHARE = 4  # a 4th of the queue is kept for other clients than the one that fills it
log = logging.getLogger("shoestring.serve")


class ChoiceDelta(NamedTuple):  # made for every token: a frozen dataclass takes three times as long
    """What is new for one choice since it was last read."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    num_cached: int = 0
    error: ApiError | None = None
    drafted: tuple[bool, ...] = ()  # for each token, whether it was an accepted draft
    vectors_ND: Tensor | None = None  # the embeddings of a request
    # At the end, where weights may change: (weights, the first token that they wrote).
    versions: tuple[tuple[str, int], ...] = ()

    @property
    def size(self) -> int:
        """Entries to write: tokens, and their log-probabilities with alternatives."""
        if not self.logprobs and self.prompt_logprobs is None:
            return 1 + len(self.token_ids)
        scored = [entry for entry in (*self.logprobs, *(self.prompt_logprobs or ())) if entry is not None]
        return 1 + len(self.token_ids) + sum(1 + len(entry.top) for entry in scored)


def merged(parts: Sequence[ChoiceDelta | Output]) -> ChoiceDelta:
    """Consecutive parts of one choice as one."""
    if len(parts) == 1 and isinstance(parts[0], ChoiceDelta):
        return parts[0]
    deltas = [part for part in parts if isinstance(part, ChoiceDelta)]
    outputs = [part for part in parts if isinstance(part, Output)]
    found = ChoiceDelta(
        "".join([part.text for part in parts]),
        tuple(chain.from_iterable([part.token_ids for part in parts])),
        num_cached=outputs[-1].request.num_cached if outputs else 0,
        drafted=tuple(chain.from_iterable([part.drafted for part in parts])),
    )
    if not deltas:
        return found
    return found._replace(
        logprobs=tuple(chain.from_iterable(d.logprobs for d in deltas)),
        prompt_logprobs=next((d.prompt_logprobs for d in reversed(deltas) if d.prompt_logprobs is not None), None),
        finish_reason=next((d.finish_reason for d in reversed(deltas) if d.finish_reason), None),
        num_cached=max(found.num_cached, *(d.num_cached for d in deltas)),
        error=next((d.error for d in reversed(deltas) if d.error), None),
        vectors_ND=next((d.vectors_ND for d in deltas if d.vectors_ND is not None), None),
        versions=next((d.versions for d in reversed(deltas) if d.versions), ()),
    )


TAKE_SIZE = 4096  # entries that a reader gets at once, beside the first delta
REST = 10.0  # the event loop writes for a tenth of the time; it holds up the engine meanwhile
MOST_REST_S = 0.05  # a reader may notice more
SWITCH_S = 0.0005  # Python's own 5 ms are longer than a step: so long would each thread wait for the other


class OutputCollector:
    """Written by the engine's thread, read by one coroutine. Both ends of a deque may be used at once: no lock. The
    reader is woken after a delta is stored, so what it misses in one turn comes in the next."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._unread: deque[tuple[int, ChoiceDelta | Output]] = deque()
        self._closed = self._reminded = False

    def put(self, index: int, delta: ChoiceDelta) -> None:
        """Hand over at once."""
        self.store(index, delta)
        self._wake()

    def store(self, index: int, part: ChoiceDelta | Output) -> None:
        """Without waking the reader: `fill` does. A part may be what the engine gave: it is made a delta when it is
        taken, with all that have come by then."""
        self._unread.append((index, part))

    def fill(self) -> None:
        """Wake the reader; on its event loop."""
        self._filled.set()

    def remind(self) -> None:
        """Wake the reader with an empty hand: `take` returns {}; on its event loop."""
        self._reminded = True
        self._filled.set()

    def close(self) -> None:
        """The reader is gone or must stop: `take` returns None from now on."""
        self._closed = True
        self._wake()

    async def take(self) -> dict[int, ChoiceDelta] | None:
        """What is unread, by choice, up to TAKE_SIZE; waits for something."""
        await self._filled.wait()
        while not (self._unread or self._closed or self._reminded):  # woken twice for the same
            self._filled.clear()
            await self._filled.wait()
        self._reminded = False
        taken: dict[int, list[ChoiceDelta | Output]] = {}
        size = 0
        while self._unread and size < TAKE_SIZE:
            index, part = self._unread.popleft()
            taken.setdefault(index, []).append(part)
            size += part.size if isinstance(part, ChoiceDelta) else 1 + len(part.token_ids)
        if not self._unread:
            self._filled.clear()
        if self._closed:
            return None
        if size >= TAKE_SIZE:
            await asyncio.sleep(0)  # other clients' turn
        return {index: merged(parts) for index, parts in taken.items()}

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the event loop has ended, and with it the reader
            self.loop.call_soon_threadsafe(self._filled.set)


class Delivery:
    """Wakes the readers of one event loop, in rounds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop, self._clock = loop, clock
        self._lock = threading.Lock()
        self._filled: dict[OutputCollector, None] = {}  # of the next round
        self._scheduled = False
        self._next = 0.0  # no round before

    def wake(self, collectors: Iterable[OutputCollector]) -> None:
        """From the engine's thread, after a step."""
        with self._lock:
            self._filled.update(dict.fromkeys(collectors))
            if self._scheduled or not self._filled:
                return
            self._scheduled = True
        with suppress(RuntimeError):  # the event loop has ended, and with it the readers
            self._loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        wait = self._next - self._clock()
        if wait > 0:
            self._loop.call_later(wait, self._round)
        else:
            self._round()

    def _round(self) -> None:
        with self._lock:
            filled, self._filled = self._filled, {}
        began = self._clock()
        for collector in filled:
            collector.fill()
        self._loop.call_soon(self._written, began)  # behind the readers, who have just been scheduled

    def _written(self, began: float) -> None:
        now = self._clock()
        self._next = now + min(REST * (now - began), MOST_REST_S)
        with self._lock:
            self._scheduled = bool(self._filled)
            more = self._scheduled
        if more:
            self._schedule()


@dataclass(eq=False)
class EmbeddingJob:
    """The texts of one request for embeddings, and the vectors that are there already."""

    texts: list[list[int]]
    pooling: Pooling
    batches: list[list[int]] = field(default_factory=list)  # left to compute; which texts together
    vectors: dict[int, Tensor] = field(default_factory=dict)  # by number of the text

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(eq=False)
class PendingChoice:
    """One choice of one client's request, from its arrival to its last token."""

    prompt: list[int]  # checked against vocabulary and context (request_parsing.py)
    sampling: SamplingWithRules
    collector: OutputCollector
    index: int
    deadline: float = math.inf  # on the engine's clock, time.monotonic
    score_prompt: int | None = None  # log-probabilities of the prompt, with this many alternatives
    no_new_tokens: bool = False  # a Sampling cannot say max_tokens=0
    embedding: EmbeddingJob | None = None  # instead of a text
    client: str = ""  # with whom it shares its part of the engine
    # When its body had been read, when it was first scheduled, when its first and its latest tokens were handed out.
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    request: Request | None = field(default=None, repr=False)
    num_sent: int = 0
    done: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.prompt) if self.embedding is None else self.embedding.num_tokens


@dataclass(frozen=True)
class EngineSnapshot:
    """Load and counters after the latest step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    tokens_per_s: float = 0.0


Message = tuple[Literal["add", "cancel", "abort", "stop", "update"], Sequence[PendingChoice], ApiError | None]
OnUpdate = Literal["drain", "recompute"]


@dataclass(eq=False)
class WeightUpdate:
    """New weights on their way into the engine; `done` is set when they are in, or cannot be."""

    target: WeightTarget
    values: PreparedWeights
    version: WeightsVersion
    not_after: float  # on the engine's clock: what runs then goes on with the new weights
    done: threading.Event = field(default_factory=threading.Event)
    error: UserError | None = None
    stall_s: float = 0.0


class EngineThread:
    def __init__(
        self,
        engine: Engine | EncoderEngine,
        metrics: Metrics,
        *,
        max_running: int,
        max_queue: int,
        on_update: OnUpdate = "drain",
        update_wait_s: float = 30.0,
    ) -> None:
        """`on_update`: texts in the engine end with the weights they began with, for at most `update_wait_s`, while new
        ones wait (drain); or they go on with the new ones at once (recompute)."""
        self.engine, self.metrics = engine, metrics
        self.on_update, self._update_wait_s = on_update, update_wait_s
        self._update: WeightUpdate | None = None
        self._updates: queue.SimpleQueue[WeightUpdate] = queue.SimpleQueue()
        self._announced: queue.SimpleQueue[int] = queue.SimpleQueue()  # steps that are being pulled
        self.max_running, self.max_queue = max_running, max_queue
        self.snapshot = EngineSnapshot()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._choices: dict[int, PendingChoice] = {}  # by the engine's request id
        self._to_score: WaitingLine[PendingChoice] = WaitingLine()
        self._score_from = 0.0  # not before, while texts are computed
        self._scored: PendingChoice | None = None  # its prompt is being scored
        self._stopping = False
        self._line: WaitingLine[PendingChoice] = WaitingLine()
        self._outputs: list[tuple[PendingChoice, ChoiceDelta | Output]] = []
        self._deliveries: WeakKeyDictionary[asyncio.AbstractEventLoop, Delivery] = WeakKeyDictionary()
        self._lock = threading.Lock()  # guards _open, _num_open_of and _closed
        self._open: set[PendingChoice] = set()  # submitted and not done
        self._num_open_of: Counter[str] = Counter()  # by client
        self._step_began: float | None = None  # None: waits for something to do
        self._closed: ApiError | None = None
        self._seconds_per_choice = 1.0  # moving average, for Retry-After
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
        return len(self._open)

    @property
    def seconds_in_step(self) -> float:
        """How long the step that is computed now has taken; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def closed(self) -> ApiError | None:
        """Why nothing new is accepted, if so."""
        return self._closed

    @property
    def max_texts(self) -> int:
        """Open texts of one client: a part of the queue is kept for the others."""
        return self.max_running + self.max_queue - self.max_queue // OTHERS_SHARE

    def submit(self, choices: Sequence[PendingChoice]) -> None:
        """Take all of them or none; a full queue is a 429, a closed one a 503. All are of one client."""
        room = self.max_running + self.max_queue
        with self._lock:
            if self._closed is not None:
                raise self._closed.with_traceback(None)
            if len(choices) > self.max_texts:
                raise ApiError(
                    400,
                    f"this request asks for {len(choices)} texts at once; the server takes at most {self.max_texts}",
                )
            own = self._num_open_of[choices[0].client]
            full = None
            if self.num_open + len(choices) > room:
                full = f"the queue is full ({self.num_open} texts, at most {room})"
            elif own + len(choices) > self.max_texts:
                full = f"your part of the queue is full ({own} texts, at most {self.max_texts})"
            if full is not None:
                self.metrics.rejected.inc()
                wait = self._seconds_per_choice * max(1, self.num_open - self.max_running) / self.max_running
                raise ApiError(
                    429,
                    f"{full}; try again later",
                    code="queue_full",
                    headers={"Retry-After": str(min(60, max(1, math.ceil(wait))))},
                )
            self._open.update(choices)
            self._num_open_of[choices[0].client] += len(choices)
        self._inbox.put(("add", list(choices), None))

    def announce_weights(self, step: int) -> None:
        """The weights of this step are about to be pulled."""
        self._announced.put(step)
        self._inbox.put(("update", (), None))

    def serves(self, target: WeightTarget) -> bool:
        """Whether these are weights of the model itself, not of its draft model."""
        return isinstance(self.engine, Engine) and target.model is self.engine.model

    def update_weights(self, target: WeightTarget, values: PreparedWeights, version: WeightsVersion) -> float:
        """Have the engine take over new weights; waits for it. The seconds for which the engine stood still."""
        drains = self.on_update == "drain" and self.serves(target)  # a draft model changes no text
        wait_s = self._update_wait_s if drains else 0.0
        update = WeightUpdate(target, values, version, self.engine.clock() + wait_s)
        self._updates.put(update)
        self._inbox.put(("update", (), None))
        while not update.done.wait(1.0):
            if not self.alive:
                raise UserError("the engine has stopped")
        if update.error is not None:
            raise update.error
        return update.stall_s

    def cancel(self, choices: Sequence[PendingChoice]) -> None:
        """The client has left. Memory is free before the next step; finished choices are left alone."""
        if any(not choice.done for choice in choices):
            self._inbox.put(("cancel", list(choices), None))

    def close(self, reason: ApiError) -> None:
        """Accept nothing new; running choices continue."""
        with self._lock:
            self._closed = self._closed or reason

    def abort_all(self, reason: ApiError) -> None:
        """End every text. Clients are told at once, the engine when its step ends."""
        with self._lock:
            told = list(self._open)
        for choice in told:
            choice.collector.put(choice.index, ChoiceDelta(error=reason))
        self._inbox.put(("abort", (), reason))

    def stop(self, timeout: float = 10.0) -> None:
        self._inbox.put(("stop", (), None))
        if self._thread.ident is not None:
            self._thread.join(timeout)

    # -- the thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(min(usual, SWITCH_S))
        try:
            if self.engine.runner.device.index is not None:
                torch.cuda.set_device(self.engine.runner.device)  # the current GPU is a property of each thread
            while not self._stopping and self._read_inbox():
                self._step_began = time.monotonic()
                self._expire_waiting()
                if self._to_score and (time.monotonic() >= self._score_from or not self.engine.busy):
                    self._scored = self._to_score.pop(self._to_score.next_client(Counter()))
                    if self._scored.embedding is None:
                        self._score(self._scored)
                    else:
                        self._embed(self._scored, self._scored.embedding)
                    self._scored = None
                self._let_in()
                if self.engine.busy:
                    self._hand_out(self.engine.step())
                self._update_engine()
                self._publish()
                self._step_began = None
        except Exception as error:
            reason = str(error) if isinstance(error, UserError) else lost_peer(error)
            if reason is not None:  # no defect of this process
                log.error("the engine loop ended: %s", reason)
            else:
                log.exception("the engine loop ended because a step failed")
        finally:
            sys.setswitchinterval(usual)
            self._step_began = None
            gone = ApiError(503, "the engine has stopped; the server must be restarted", code="engine_dead")
            self.close(gone)
            self._abort_all(gone)

    def _update_engine(self) -> None:
        """Take over new weights, if there are any and the time has come."""
        engine = self.engine
        if isinstance(engine, EncoderEngine):
            return
        with suppress(queue.Empty):
            while True:
                engine.runner.announce_weights(self._announced.get_nowait())
        if self._update is None:
            try:
                self._update = self._updates.get_nowait()
            except queue.Empty:
                return
        update, began = self._update, engine.clock()
        if engine.busy and began < update.not_after:
            return
        self._update = None
        try:
            self._hand_out(engine.update_weights(update.target, update.values, update.version))
        except UpdateRefused as error:
            self._hand_out(error.outputs)
            update.error = error
        except UserError as error:
            update.error = error
        update.stall_s = engine.clock() - began
        if self.serves(update.target):
            self.metrics.note_weights(update.version, update.stall_s, taken=update.error is None)
        update.done.set()

    def _read_inbox(self, wait: bool = True) -> bool:
        """Process all messages, waiting for one if the engine is idle; False: the loop must end."""
        wait = wait and not (self.engine.busy or self._to_score or self._line or self._update)
        while True:
            try:
                kind, choices, reason = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if kind == "stop":
                return False
            if kind == "abort":
                assert reason is not None
                self._abort_all(reason)
            for choice in choices:
                if kind == "add":
                    self._add(choice)
                else:
                    self._drop(choice, "abort")

    def _add(self, choice: PendingChoice) -> None:
        if choice.embedding is not None:
            lengths = [len(text) for text in choice.embedding.texts]
            choice.embedding.batches = embedding_batches(lengths, self.engine.chunk)[::-1]  # the shortest are last
            self._to_score.push(choice)
            return
        if choice.score_prompt is not None:
            self._to_score.push(choice)
            return
        if choice.no_new_tokens:
            now = self.engine.clock()
            self._start(choice, now)
            self._time_first_token(choice, now)
            self._emit(choice, ChoiceDelta(finish_reason="length"))
            self._close_choice(choice, "length")
            return
        self._line.push(choice)

    def _let_in(self) -> None:
        """Fill the engine from the line; where it is full, texts of clients with many give way to those with few."""
        while self._line and self._update is None:  # new texts wait for new weights
            num_running = Counter(choice.client for choice in self._choices.values())
            client = self._line.next_client(num_running)
            if len(self._choices) >= self.max_running:
                greedy = who_gives_way(num_running, client)
                if greedy is None:
                    return
                self._pause(max((c for c in self._choices.values() if c.client == greedy), key=lambda c: c.arrived))
            self._enter(self._line.pop(client))

    def _enter(self, choice: PendingChoice) -> None:
        try:
            if choice.request is None:
                choice.request = self.engine.add(choice.prompt, choice.sampling, deadline=choice.deadline, checked=True)
            else:
                self.engine.resume(choice.request)
        except UserError as error:
            self._fail(choice, ApiError(400, str(error)))
            return
        self._choices[choice.request.id] = choice

    def _pause(self, choice: PendingChoice) -> None:
        assert choice.request is not None
        self.engine.pause(choice.request)
        del self._choices[choice.request.id]
        self._line.push(choice, first=True)

    def _score(self, choice: PendingChoice) -> None:
        """Compute the log-probabilities of a prompt, then continue as for any other choice. Texts in the engine get a
        step after every part of it, and afterwards as much time as the last part took."""
        assert choice.score_prompt is not None
        self._start(choice, self.engine.clock())
        parts = self.engine.runner.prompt_logprob_parts(choice.prompt, choice.score_prompt, self.engine.chunk)
        scored: list[TokenLogprob | None] = []
        while len(scored) < len(choice.prompt):
            if scored:
                self._turn_between_parts()
                if choice.done or self._stopping:
                    return
            began = time.monotonic()
            try:
                scored += next(parts)
            except Exception:  # the engine's state is untouched: other requests continue
                log.exception("log-probabilities of a prompt failed")
                self._fail(choice, ApiError(500, "computing the prompt's log-probabilities failed"))
                return
            self._score_from = 2 * time.monotonic() - began
        bad = next((i for i, entry in enumerate(scored) if entry is not None and math.isnan(entry.logprob)), None)
        if bad is not None:
            self._fail(choice, _engine_error(NonFiniteLogits(bad)))
            return
        self._emit(choice, ChoiceDelta(prompt_logprobs=tuple(scored)))
        choice.score_prompt = None
        self._add(choice)

    def _embed(self, choice: PendingChoice, job: EmbeddingJob) -> None:
        """Compute the next batch of its texts; other clients' turn comes before the one after it. Texts in the engine
        get their time as in `_score`."""
        self._start(choice, self.engine.clock())
        numbers, vectors = job.batches.pop(), None
        parts = self.engine.runner.embedding_parts([job.texts[i] for i in numbers], job.pooling, self.engine.chunk)
        while True:
            began = time.monotonic()
            try:
                vectors = next(parts)
            except Exception:  # the engine's state is untouched: other requests continue
                log.exception("an embedding failed")
                self._fail(choice, ApiError(500, "computing the embeddings failed; the server's log says more"))
                return
            self._score_from = 2 * time.monotonic() - began
            if vectors is not None:
                break
            self._turn_between_parts()
            if choice.done or self._stopping:
                return
        if not vectors.isfinite().all():
            self._fail(choice, _engine_error(NonFiniteLogits(len(job.texts[numbers[0]]))))
            return
        job.vectors.update(zip(numbers, vectors, strict=True))
        if job.batches:
            self._to_score.push(choice, first=True)
            return
        self._time_first_token(choice, self.engine.clock())
        found = torch.stack([job.vectors[i] for i in range(len(job.texts))])
        self._emit(choice, ChoiceDelta(vectors_ND=found, finish_reason="stop"))
        self._close_choice(choice, "stop")

    def _turn_between_parts(self) -> None:
        """What the loop does in one turn, but for scoring. The choice that is scored may be cancelled in it."""
        self._stopping = not self._read_inbox(wait=False)
        self._step_began = time.monotonic()
        self._expire_waiting()
        self._let_in()
        if self.engine.busy:
            self._hand_out(self.engine.step())
        self._publish()

    def _hand_out(self, outputs: Sequence[Output]) -> None:
        now = self.engine.clock()
        for choice in self._choices.values():
            if choice.started is None and choice.request is not None and choice.request.scheduled_at is not None:
                self._start(choice, choice.request.scheduled_at)
        gaps: Counter[float] = Counter()  # most texts of a step have waited for the same time
        num_tokens = 0
        for output in outputs:
            choice = self._choices[output.request.id]
            reason = output.finish_reason
            if reason == "deadline":
                self._fail(choice, deadline_error(choice))
                continue
            if reason == "error":
                self._fail(choice, _engine_error(output.request.error))
                continue
            num = len(output.token_ids)
            part: ChoiceDelta | Output = output
            logprobs = choice.sampling.history.logprobs
            if logprobs or reason is not None:
                part = ChoiceDelta(
                    output.text,
                    tuple(output.token_ids),
                    tuple(logprobs[choice.num_sent : choice.num_sent + num]),
                    finish_reason=reason,
                    num_cached=output.request.num_cached,
                    drafted=output.drafted,
                    versions=() if reason is None or self.engine.version is None else _named(output.request),
                )
            choice.num_sent += num
            num_tokens += num
            if num and choice.first_token is None:
                self._time_first_token(choice, now)
            elif num:
                gaps[(now - choice.last_token) / num] += num
                choice.last_token = now
            self._outputs.append((choice, part))
            if reason is not None:
                self._close_choice(choice, reason)
        if num_tokens:
            self.metrics.generation_tokens.inc(num_tokens)
            self._rate.add(now, num_tokens)
        for gap, num in gaps.items():
            self.metrics.token_gap.observe(gap, num)

    def _time_first_token(self, choice: PendingChoice, now: float) -> None:
        """The three are observed together, so that queue and prefill always sum to the time to the first token."""
        assert choice.started is not None
        choice.first_token = choice.last_token = now
        self.metrics.first_token.observe(now - choice.arrived)
        self.metrics.queue_time.observe(choice.started - choice.arrived)
        self.metrics.prefill_time.observe(now - choice.started)

    def _start(self, choice: PendingChoice, when: float) -> None:
        if choice.started is None:
            choice.started = when
            self._num_prompt_tokens += choice.num_prompt
            self.metrics.prompt_tokens.inc(choice.num_prompt)
            self.metrics.prompt_length.observe(choice.num_prompt)

    def _expire_waiting(self) -> None:
        now = self.engine.clock()
        for choice in [c for c in self._outside if now >= c.deadline]:
            self._fail(choice, deadline_error(choice))

    @property
    def _outside(self) -> list[PendingChoice]:
        """The choices that are not in the engine yet."""
        scored = [] if self._scored is None or self._scored.done else [self._scored]
        return [*scored, *self._to_score, *self._line]

    def _fail(self, choice: PendingChoice, error: ApiError) -> None:
        self._emit(choice, ChoiceDelta(error=error))
        self._drop(choice, "error")

    def _drop(self, choice: PendingChoice, reason: str) -> None:
        if choice.done:
            return
        if choice.request is not None:
            self.engine.abort(choice.request)
        self._to_score.remove(choice)
        self._line.remove(choice)
        self._close_choice(choice, reason)

    def _close_choice(self, choice: PendingChoice, reason: str) -> None:
        now = self.engine.clock()
        choice.done = True
        if choice.request is not None:
            self._choices.pop(choice.request.id, None)
        with self._lock:
            if choice in self._open:
                self._open.remove(choice)
                self._num_open_of[choice.client] -= 1
                if not self._num_open_of[choice.client]:
                    del self._num_open_of[choice.client]
        self._seconds_per_choice += 0.1 * (now - (choice.started or now) - self._seconds_per_choice)
        self.metrics.count_finished(reason)
        self.metrics.text_length.observe(choice.num_sent)
        if reason in ("stop", "length"):
            assert choice.first_token is not None
            self.metrics.latency.observe(choice.last_token - choice.arrived)
            self.metrics.decode_time.observe(choice.last_token - choice.first_token)

    def _abort_all(self, reason: ApiError) -> None:
        stops = False
        while True:  # also those still in the inbox
            try:
                kind, choices, _ = self._inbox.get_nowait()
            except queue.Empty:
                break
            stops = stops or kind == "stop"
            for choice in choices if kind == "add" else ():
                self._fail(choice, reason)
        if stops:  # not this message's to answer
            self._inbox.put(("stop", (), None))
        for choice in (*self._choices.values(), *self._outside):
            try:
                self._fail(choice, reason)
            except Exception:  # an engine that failed may fail to abort as well
                self._close_choice(choice, "error")
        self._publish()

    def _emit(self, choice: PendingChoice, delta: ChoiceDelta) -> None:
        self._outputs.append((choice, delta))

    def _publish(self) -> None:
        """Update snapshot and metrics before outputs are sent: a client that has its answer finds it counted."""
        stats = self.engine.stats
        self.snapshot = EngineSnapshot(
            num_running=len(self.engine.running),
            num_waiting=len(self.engine.waiting) + len(self._to_score) + len(self._line),
            kv_usage=kv_usage(self.engine),
            num_prompt_tokens=self._num_prompt_tokens,
            num_new_tokens=stats.num_new_tokens,
            num_drafted=stats.num_drafted,
            num_accepted=stats.num_accepted,
            tokens_per_s=self._rate.per_second(self.engine.clock()),
        )
        self.metrics.count_stats(stats)
        self.metrics.num_running.set(self.snapshot.num_running)
        self.metrics.num_waiting.set(self.snapshot.num_waiting)
        self.metrics.kv_usage.set(self.snapshot.kv_usage)
        outputs, self._outputs = self._outputs, []
        by_loop: dict[asyncio.AbstractEventLoop, list[OutputCollector]] = {}
        for choice, part in outputs:
            collector = choice.collector
            collector.store(choice.index, part)
            by_loop.setdefault(collector.loop, []).append(collector)
        for loop, collectors in by_loop.items():
            if loop not in self._deliveries:
                self._deliveries[loop] = Delivery(loop)
            self._deliveries[loop].wake(collectors)


def _named(request: Request) -> tuple[tuple[str, int], ...]:
    return tuple(("as loaded" if version is None else str(version), first) for version, first in request.versions)


def deadline_error(choice: PendingChoice) -> ApiError:
    return ApiError(
        408,
        f"the request was not finished within {choice.deadline - choice.arrived:.0f} seconds",
        code="deadline_exceeded",
        headers={"x-should-retry": "false"},
    )


def _engine_error(error: UserError | None) -> ApiError:
    """Why the engine ended one request; the others go on."""
    assert error is not None
    if isinstance(error, GrammarLimitExceeded):
        return ApiError(400, str(error), param="response_format", code="schema_too_complex")
    assert isinstance(error, NonFiniteLogits)
    log.error("a request ended with an error: %s", error)
    return ApiError(500, str(error), code="nonfinite_logits")


def kv_usage(engine: Engine | EncoderEngine) -> float:
    """Share of the KV cache that running requests hold; blocks that are only cached count as free."""
    if isinstance(engine, EncoderEngine):
        return 0.0
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
