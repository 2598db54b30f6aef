"""The thread that owns the engine: how requests get in and tokens get out.

The engine is not thread-safe, so only this thread calls it. One turn of its loop: read the inbox, let texts into the
engine, step it, report the outputs. Texts wait in a `FairLine`, so that clients share the engine fairly. Other
threads send messages through the inbox (`post`); `on_report` gets what came of a turn, all texts together, and passes
it on to the HTTP side (engine_client.py), which may be another process (http_process.py).

The engine ends requests at their deadline; texts that wait to be scored or to enter the engine are checked here. A step
that raises leaves the engine in an unknown state: every request gets an error, the thread ends, and its last report
closes the HTTP side. A step that never returns holds this thread: then the HTTP side keeps the deadlines.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import torch

from shoestring.errors import UserError, lost_peer
from shoestring.model.adapter_folder import AdapterFile, read_adapter
from shoestring.serve.engine.adapters import UnknownAdapter
from shoestring.serve.engine.embedding import embedding_batches
from shoestring.serve.engine.encoder import EncoderEngine
from shoestring.serve.engine.engine import Engine, Output, Request, UpdateRefused
from shoestring.serve.engine.logit_rules import GrammarLimitExceeded
from shoestring.serve.engine.request import NonFiniteLogits
from shoestring.serve.engine.weight_update import PreparedWeights, WeightTarget
from shoestring.serve.http.engine_messages import (
    ChoiceDelta,
    EmbeddingJob,
    EngineFacts,
    EngineSnapshot,
    Message,
    PendingChoice,
    Report,
    deadline_error,
)
from shoestring.serve.http.fair_line import FairLine, who_gives_way
from shoestring.serve.http.metrics import Metrics
from shoestring.serve.http.request_schema import ApiError
from shoestring.state.reshard.version import WeightsVersion

log = logging.getLogger("shoestring.serve")
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


@dataclass(eq=False)
class AdapterChange:
    """An adapter to load (`file`) or to unload; `done` is set when all who read the reports know."""

    name: str
    file: AdapterFile | None
    done: threading.Event = field(default_factory=threading.Event)
    error: ApiError | None = None


class EngineThread:
    seconds_silent = 0.0  # it shares its process with who asks

    def __init__(
        self,
        engine: Engine | EncoderEngine,
        metrics: Metrics,
        *,
        max_running: int,
        on_update: OnUpdate = "drain",
        update_wait_s: float = 30.0,
    ) -> None:
        """`on_update`: texts in the engine end with the weights they began with, for at most `update_wait_s`, while new
        ones wait (drain); or they go on with the new ones at once (recompute)."""
        self.engine, self.metrics = engine, metrics
        self.count_rejected: Callable[[], None] = metrics.rejected.inc
        self.metrics_text: Callable[[], bytes] = metrics.render
        self.on_update, self._update_wait_s = on_update, update_wait_s
        self._update: WeightUpdate | None = None
        self._updates: queue.SimpleQueue[WeightUpdate] = queue.SimpleQueue()
        self._changes: queue.SimpleQueue[AdapterChange] = queue.SimpleQueue()
        self._announced: queue.SimpleQueue[int] = queue.SimpleQueue()  # steps that are being pulled
        self.max_running = max_running
        self.on_report: Callable[[Report], None] = lambda report: None
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._known: dict[int, PendingChoice] = {}  # by their own ids; not done
        self._choices: dict[int, PendingChoice] = {}  # by the engine's request id
        self._not_started: set[PendingChoice] = set()  # of those, the ones that were not scheduled yet
        self._to_score: FairLine[PendingChoice] = FairLine()
        self._score_from = 0.0  # not before, while texts are computed
        self._scored: PendingChoice | None = None  # its prompt is being scored
        self._stopping = False
        self._line: FairLine[PendingChoice] = FairLine()
        self._told = _Told(engine, metrics)
        self._step_began: float | None = None  # None: waits for something to do
        self.latest = self._told.snapshot(0)  # of the last report, for other threads
        self._thread = threading.Thread(target=self._run, name="shoestring-engine", daemon=True)

    # -- called from anywhere -------------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def seconds_in_step(self) -> float:
        """How long the step that is computed now has taken; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def facts(self, max_queue: int) -> EngineFacts:
        engine = self.engine
        eos_ids = tuple(t for t in sorted(engine.eos_ids) if t < engine.vocab_size)
        sizes = engine.vocab_size, engine.max_context, engine.d_model
        return EngineFacts(*sizes, eos_ids, isinstance(engine, Engine), self.max_running, max_queue)

    def post(self, message: Message) -> None:
        self._inbox.put(message)

    def announce_weights(self, step: int) -> None:
        """The weights of this step are about to be pulled."""
        self._announced.put(step)
        self.post(("update", None))

    def serves(self, target: WeightTarget) -> bool:
        """Whether these are weights of the model itself, not of its draft model."""
        return isinstance(self.engine, Engine) and target.model is self.engine.model

    def update_weights(self, target: WeightTarget, values: PreparedWeights, version: WeightsVersion) -> float:
        """Have the engine take over new weights; waits for it. The seconds for which the engine stood still."""
        drains = self.on_update == "drain" and self.serves(target)  # a draft model changes no text
        wait_s = self._update_wait_s if drains else 0.0
        update = WeightUpdate(target, values, version, self.engine.clock() + wait_s)
        self._updates.put(update)
        self.post(("update", None))
        while not update.done.wait(1.0):
            if not self.alive:
                raise UserError("the engine has stopped")
        if update.error is not None:
            raise update.error
        return update.stall_s

    def change_adapter(self, name: str, place: str) -> bytes:
        """Load the adapter in this folder, or unload it where there is none; waits for it."""
        engine = self.engine
        try:
            if isinstance(engine, EncoderEngine) or engine.model.embed.group is not None:
                raise UserError("adapters are loaded while a decoder is served by one process")
            change = AdapterChange(name, read_adapter(place, engine.model) if place else None)
        except UserError as error:
            raise ApiError(400, str(error)) from None
        self._changes.put(change)
        self.post(("update", None))
        while not change.done.wait(1.0):
            if not self.alive:
                raise ApiError(503, "the engine has stopped; the server must be restarted", code="engine_dead")
        if change.error is not None:
            raise change.error
        log.info("adapter %r was %s", name, "loaded" if place else "unloaded")
        return b""

    def give_up(self, reason: ApiError) -> None:
        """End every text, though a step may never end: readers are told at once."""
        self.on_report(Report(snapshot=self.latest, closed=reason))
        self.post(("abort", reason))

    def stop(self, timeout: float = 10.0) -> None:
        self.post(("stop", None))
        if self._thread.ident is not None:
            self._thread.join(timeout)

    # -- the thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            if self.engine.runner.device.index is not None:
                torch.cuda.set_device(self.engine.runner.device)  # the current GPU is a property of each thread
            while not self._stopping and self._read_inbox():
                self._step_began = time.monotonic()
                self._expire_waiting()
                self._scored = self._next_to_score()
                if self._scored is not None:
                    if self._scored.embedding is None:
                        self._score(self._scored)
                    else:
                        self._embed(self._scored, self._scored.embedding)
                    self._scored = None
                self._let_in()
                if self.engine.busy:
                    self._hand_out(self.engine.step())
                self._update_engine()
                changes = self._change_adapters()
                self._publish()
                for change in changes:
                    change.done.set()
                self._step_began = None
        except Exception as error:
            reason = str(error) if isinstance(error, UserError) else lost_peer(error)
            if reason is not None:  # no defect of this process
                log.error("the engine loop ended: %s", reason)
            else:
                log.exception("the engine loop ended because a step failed")
        finally:
            self._step_began = None
            gone = ApiError(503, "the engine has stopped; the server must be restarted", code="engine_dead")
            self._told.report.closed, self._told.report.dead = gone, True
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
        if (engine.busy or self._begun) and began < update.not_after:
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
        if update.error is None and self.serves(update.target):
            self.metrics.note_weights(update.version, update.stall_s)
        update.done.set()

    def _change_adapters(self) -> list[AdapterChange]:
        """Load and unload what was asked for, between two steps."""
        done: list[AdapterChange] = []
        with suppress(queue.Empty):
            while isinstance(self.engine, Engine):
                change = self._changes.get_nowait()
                done.append(change)
                try:
                    if change.file is None:
                        self.engine.adapters.unload(change.name)
                    else:
                        self.engine.adapters.load(change.name, change.file)
                except UserError as error:
                    change.error = _adapter_error(error)
        return done

    def _read_inbox(self, wait: bool = True) -> bool:
        """Process all messages, waiting for one if the engine is idle; False: the loop must end."""
        updates = self._update is not None or not self._updates.empty()  # a turn takes one; others have no message left
        updates = updates or not self._changes.empty()
        wait = wait and not (self.engine.busy or self._to_score or self._line or updates)
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if message[0] == "stop":
                return False
            if message[0] == "abort":
                self._abort_all(message[1])
            elif message[0] == "add":
                self._known |= {choice.id: choice for choice in message[1]}
                for choice in message[1]:
                    self._add(choice)
            elif message[0] == "cancel":
                for choice in [self._known[number] for number in message[1] if number in self._known]:
                    self._drop(choice, "abort")

    def _add(self, choice: PendingChoice) -> None:
        if choice.embedding is not None:
            lengths = [len(text) for text in choice.embedding.texts]
            choice.embedding.batches = embedding_batches(lengths, self.engine.chunk)[::-1]  # the shortest are last
            self._to_score.put(choice.client, choice)
            return
        if choice.score_prompt is not None:
            self._to_score.put(choice.client, choice)
            return
        if choice.no_new_tokens:
            now = self.engine.clock()
            self._told.start(choice, now)
            self._told.time_first_token(choice, now)
            self._told.emit(choice, ChoiceDelta(finish_reason="length"))
            self._close_choice(choice, "length")
            return
        self._line.put(choice.client, choice)

    def _let_in(self) -> None:
        """Fill the engine from the line; where it is full, texts of clients with many give way to those with few."""
        if self._update is not None:  # new texts wait for new weights; those that have given way end with the old ones
            for choice in [c for c in self._begun if c.embedding is None][: self.max_running - len(self._choices)]:
                self._line.remove(choice.client, choice)
                self._enter(choice)
            return
        while self._line:
            num_running = Counter(choice.client for choice in self._choices.values())
            client = self._line.next_client(num_running)
            if len(self._choices) >= self.max_running:
                greedy = who_gives_way(num_running, client)
                if greedy is None:
                    return
                paused = max((c for c in self._choices.values() if c.client == greedy), key=lambda c: c.arrived)
                assert paused.request is not None
                self.engine.pause(paused.request)
                del self._choices[paused.request.id]
                self._line.put(paused.client, paused, first=True)
            self._enter(self._line.pop(client))

    def _enter(self, choice: PendingChoice) -> None:
        try:
            if choice.request is None:
                asked = choice.prompt, choice.sampling
                choice.request = self.engine.add(
                    *asked, adapter=choice.adapter, deadline=choice.deadline, checked=True, wants_text=False
                )
            else:
                self.engine.resume(choice.request)
        except UserError as error:
            self._fail(choice, _adapter_error(error))
            return
        self._choices[choice.request.id] = choice
        if choice.started is None:
            self._not_started.add(choice)

    def _next_to_score(self) -> PendingChoice | None:
        """Whose prompt or texts are next, if there is time now. Before new weights only what the old ones began."""
        if not self._to_score or (self.engine.busy and time.monotonic() < self._score_from):
            return None
        if self._update is None:
            return self._to_score.pop(self._to_score.next_client(Counter()))
        choice = next((c for c in self._begun if c.embedding is not None), None)
        if choice is not None:
            self._to_score.remove(choice.client, choice)
        return choice

    @property
    def _begun(self) -> list[PendingChoice]:
        """Texts that have given way, those whose prompt is scored, and requests with some embeddings computed."""
        embeds = [choice for choice in self._to_score if choice.embedding is not None and choice.embedding.vectors]
        texts = [choice for choice in self._line if choice.request is not None or choice.started is not None]
        return texts + embeds

    def _score(self, choice: PendingChoice) -> None:
        """Compute the log-probabilities of a prompt, then continue as for any other choice. Texts in the engine get a
        step after every part of it, and afterwards as much time as the last part took."""
        assert choice.score_prompt is not None
        self._told.start(choice, self.engine.clock())
        assert isinstance(self.engine, Engine)  # the HTTP side refuses texts of an encoder
        try:
            adapter = None if choice.adapter is None else self.engine.adapters.get(choice.adapter)
        except UnknownAdapter as error:
            self._fail(choice, _adapter_error(error))
            return
        slot, asked = -1 if adapter is None else adapter.slot, (choice.prompt, choice.score_prompt, self.engine.chunk)
        parts = self.engine.runner.prompt_logprob_parts(*asked, slot)
        num_scored = 0
        while num_scored < len(choice.prompt):
            if num_scored:
                self._turn_between_parts()
                if choice.done or self._stopping:
                    return
            began = time.monotonic()
            try:
                scored = next(parts)
            except Exception:  # the engine's state is untouched: other requests continue
                log.exception("log-probabilities of a prompt failed")
                self._fail(choice, ApiError(500, "computing the prompt's log-probabilities failed"))
                return
            self._score_from = 2 * time.monotonic() - began
            bad = next((i for i, entry in enumerate(scored) if entry is not None and math.isnan(entry.logprob)), None)
            if bad is not None:
                self._fail(choice, _engine_error(NonFiniteLogits(num_scored + bad)))
                return
            self._told.emit(choice, ChoiceDelta(prompt_logprobs=tuple(scored)))
            num_scored += len(scored)
        choice.score_prompt = None
        self._add(choice)

    def _embed(self, choice: PendingChoice, job: EmbeddingJob) -> None:
        """Compute the next batch of its texts; other clients' turn comes before the one after it. Texts in the engine
        get their time as in `_score`."""
        self._told.start(choice, self.engine.clock())
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
            self._to_score.put(choice.client, choice, first=True)
            return
        self._told.time_first_token(choice, self.engine.clock())
        found = torch.stack([job.vectors[i] for i in range(len(job.texts))])
        self._told.emit(choice, ChoiceDelta(vectors_ND=found, finish_reason="stop"))
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
        for choice in list(self._not_started):
            if choice.request is not None and choice.request.scheduled_at is not None:
                self._told.start(choice, choice.request.scheduled_at)
                self._not_started.discard(choice)
        gaps: dict[float, int] = {}  # most texts of a step have waited for the same time
        num_tokens = 0
        ids, texts, tokens = self._told.report.pieces
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
            logprobs = choice.sampling.history.logprobs
            plain = num == 1 and reason is None and not (output.num_accepted or logprobs)
            if plain and choice.id not in self._told.in_parts:
                ids.append(choice.id)
                texts.append(output.text)
                tokens.append(output.token_ids[0])
            else:
                part = ChoiceDelta(
                    output.text,
                    tuple(output.token_ids),
                    tuple(logprobs[choice.num_sent : choice.num_sent + num]),
                    finish_reason=reason,
                    num_cached=output.request.num_cached,
                    drafted=output.drafted,
                    versions=() if reason is None or self.engine.version is None else _named(output.request),
                )
                self._told.emit(choice, part)
            choice.num_sent += num
            num_tokens += num
            if num and choice.first_token is None:
                self._told.time_first_token(choice, now)
            elif num:
                gap = (now - choice.last_token) / num
                gaps[gap] = gaps.get(gap, 0) + num
                choice.last_token = now
            if reason is not None:
                self._close_choice(choice, reason)
        if num_tokens:
            self.metrics.generation_tokens.inc(num_tokens)
            self._told.rate.add(now, num_tokens)
        for gap, num in gaps.items():
            self.metrics.token_gap.observe(gap, num)

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
        self._told.emit(choice, ChoiceDelta(error=error))
        self._drop(choice, "error")

    def _drop(self, choice: PendingChoice, reason: str) -> None:
        if choice.done:
            return
        if choice.request is not None:
            self.engine.abort(choice.request)
        self._to_score.remove(choice.client, choice)
        self._line.remove(choice.client, choice)
        self._close_choice(choice, reason)

    def _close_choice(self, choice: PendingChoice, reason: str) -> None:
        now = self.engine.clock()
        choice.done = True
        if choice.request is not None:
            self._choices.pop(choice.request.id, None)
        self._known.pop(choice.id, None)
        self._not_started.discard(choice)
        self._told.end(choice, reason, now)

    def _abort_all(self, reason: ApiError) -> None:
        others: list[Message] = []
        with suppress(queue.Empty):
            while True:  # also those still in the inbox
                message = self._inbox.get_nowait()
                if message[0] == "add":
                    for choice in message[1]:
                        self._fail(choice, reason)
                elif message[0] == "stop":  # not this message's to answer
                    others.append(message)
        for message in others:
            self.post(message)
        for choice in (*self._choices.values(), *self._outside):
            try:
                self._fail(choice, reason)
            except Exception:  # an engine that failed may fail to abort as well
                self._close_choice(choice, "error")
        self._publish()

    def _publish(self) -> None:
        report = self._told.take(len(self._to_score) + len(self._line))
        self.latest = report.snapshot
        self.on_report(report)


class _Told:
    """What the thread tells of its work: the report of the turn, and the metrics."""

    def __init__(self, engine: Engine | EncoderEngine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self.report = Report()  # of this turn, so far
        self.in_parts: set[int] = set()  # choices in its parts
        self.rate = _Rate()
        self._seconds_per_choice = 1.0  # moving average, for Retry-After
        self._num_prompt_tokens = 0

    def emit(self, choice: PendingChoice, delta: ChoiceDelta) -> None:
        self.report.parts.append((choice.id, delta))
        self.in_parts.add(choice.id)

    def start(self, choice: PendingChoice, when: float) -> None:
        if choice.started is None:
            choice.started = when
            self._num_prompt_tokens += choice.num_prompt
            self._metrics.prompt_tokens.inc(choice.num_prompt)
            self._metrics.prompt_length.observe(choice.num_prompt)

    def time_first_token(self, choice: PendingChoice, now: float) -> None:
        """The three are observed together, so that queue and prefill always sum to the time to the first token."""
        assert choice.started is not None
        choice.first_token = choice.last_token = now
        self._metrics.first_token.observe(now - choice.arrived)
        self._metrics.queue_time.observe(choice.started - choice.arrived)
        self._metrics.prefill_time.observe(now - choice.started)

    def end(self, choice: PendingChoice, reason: str, now: float) -> None:
        self.report.ended.append(choice.id)
        self._seconds_per_choice += 0.1 * (now - (choice.started or now) - self._seconds_per_choice)
        self._metrics.count_finished(reason)
        self._metrics.text_length.observe(choice.num_sent)
        if reason in ("stop", "length"):
            assert choice.first_token is not None
            self._metrics.latency.observe(choice.last_token - choice.arrived)
            self._metrics.decode_time.observe(choice.last_token - choice.first_token)

    def snapshot(self, num_outside: int) -> EngineSnapshot:
        """`num_outside`: texts that wait and are not in the engine."""
        engine, stats = self._engine, self._engine.stats
        return EngineSnapshot(
            num_running=len(engine.running),
            num_waiting=len(engine.waiting) + num_outside,
            kv_usage=kv_usage(engine),
            num_prompt_tokens=self._num_prompt_tokens,
            num_new_tokens=stats.num_new_tokens,
            num_drafted=stats.num_drafted,
            num_accepted=stats.num_accepted,
            tokens_per_s=self.rate.per_second(engine.clock()),
            seconds_per_choice=self._seconds_per_choice,
            drafts=engine.drafter is not None,
            version=engine.version,
            adapters=tuple(engine.adapters.names) if isinstance(engine, Engine) else (),
        )

    def take(self, num_outside: int) -> Report:
        """The metrics are up to date before outputs are sent: a client that has its answer finds it counted."""
        report, self.report = self.report, Report()
        self.in_parts.clear()
        report.snapshot = now = self.snapshot(num_outside)
        self._metrics.count_stats(self._engine.stats)
        self._metrics.num_running.set(now.num_running)
        self._metrics.num_waiting.set(now.num_waiting)
        self._metrics.kv_usage.set(now.kv_usage)
        return report


def _named(request: Request) -> tuple[tuple[str, int], ...]:
    return tuple(("as loaded" if version is None else str(version), first) for version, first in request.versions)


def _adapter_error(error: UserError) -> ApiError:
    if isinstance(error, UnknownAdapter):
        return ApiError(404, str(error), param="model", code="model_not_found")
    return ApiError(400, str(error))


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
