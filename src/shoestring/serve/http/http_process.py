"""HTTP in a process of its own, so that the engine's process does nothing but steps.

Python runs one thread at a time in a process. With hundreds of streams, making JSON and events takes as much time as
stepping the engine; side by side in one process each waits for the other (docs/results/serving.md has the numbers).

`shoestring serve` forks the HTTP process first, before there are threads, a GPU or a model. It waits. When the engine
is ready, it gets the listening socket, the tokenizer and the engine's facts, and serves; from then on the two exchange
messages (engine_messages.py) over a pair of sockets that no other process can reach:

    HTTP -> engine    add, cancel, abort; asks for metrics and for a grammar to be compiled
    engine -> HTTP    one report per step, with the tokens of all texts; answers; a beat every second, also when idle

Signals go to the engine's process, which passes them on (STOPS): a terminal or a service manager may send them to
both. Each notices the end of the other by the end of the connection. Without the engine, every client gets an error,
and the HTTP process ends. Without HTTP, the engine's process ends, and says why. An engine's process that is stopped
is silent, which /health tells. An HTTP process that is stopped is continued, so that it drains.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from tokenizers import Tokenizer as Backend

from shoestring.errors import UserError
from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.engine.logit_rules import Grammar
from shoestring.serve.http.engine_client import EngineClient
from shoestring.serve.http.engine_messages import (
    CODEC,
    ChoiceDelta,
    EngineFacts,
    EngineSnapshot,
    Message,
    PendingChoice,
    Report,
    frame,
    grammar_sources,
    received,
)
from shoestring.serve.http.engine_thread import EngineThread
from shoestring.serve.http.grammar import GrammarCache, GrammarSource, MakeGrammar
from shoestring.serve.http.http_server import HttpServer, log_to_stderr, objects_frozen
from shoestring.serve.http.message_codec import FrameReader
from shoestring.serve.http.request_schema import ApiError
from shoestring.serve.http.request_workers import as_exception
from shoestring.serve.http.serve_options import ServeOptions

SIGNALS = signal.SIGTERM, signal.SIGINT
STOPS = signal.SIGUSR1, signal.SIGUSR2  # the first, and every later one: two of the same kind may arrive as one
READ = 1 << 18  # bytes at a time
ANSWER_S = 120.0  # the most that metrics or a grammar may take
LEAVE_S = 10.0  # for the HTTP process to end, once the engine is gone or its time to drain is over
BEAT_S = 1.0
DRAINED = "ended with code 0"
log = logging.getLogger("shoestring.serve")


class HttpProcessLost(UserError):
    """The HTTP process ended before it was told to, or not as it should."""


class HttpProcess:
    """The HTTP process, as the engine's process sees it."""

    def __init__(self, pid: int, connection: socket.socket, drain_s: float = 30.0) -> None:
        self._pid, self._connection, self._drain_s = pid, connection, drain_s
        self._sending = threading.Lock()  # the engine's thread and others send
        self._compiling = threading.Lock()  # one grammar at a time
        self._late_lock = threading.Lock()  # guards the two sets
        self._late: set[int] = set()  # texts that wait for a grammar before they are added
        self._late_and_left: set[int] = set()  # of those, the ones that were cancelled meanwhile
        self._told_to_stop = False
        self._closed = threading.Event()
        self._ended: str | None = None  # how

    @staticmethod
    def fork(options: ServeOptions) -> HttpProcess:
        """While this process has one thread: a fork copies no other."""
        ours, theirs = socket.socketpair()
        sys.stderr.flush()
        with warnings.catch_warnings():  # of Python 3.12, where a library has threads of its own that handle forks
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            theirs.close()
            return HttpProcess(pid, ours, options.drain_s)
        code = 1
        try:
            ours.close()
            code = serve_http(theirs, options)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)  # what the engine's process has registered for its exit is not this one's

    def open(
        self,
        listener: socket.socket,
        name: str,
        pooling: str,
        tokenizer: Tokenizer,
        facts: EngineFacts,
        engine_thread: EngineThread,
    ) -> None:
        """Hand over what it needs; the listening socket is no longer this process's. Before the thread starts: from
        here on no report is lost."""
        try:
            socket.send_fds(self._connection, [b"."], [listener.fileno()])
        except OSError:
            raise self._lost() from None
        listener.close()
        self._send(frame("about", name, pooling, tokenizer_json(tokenizer), facts))
        engine_thread.on_report = lambda report: self._send(frame("report", report))
        engine_thread.on_report(Report(snapshot=engine_thread.latest))  # what /stats shows before the first request

    def run(self, engine_thread: EngineThread, grammars: GrammarCache, on_started: Callable[[], None]) -> None:
        """Carry messages to the engine's thread until the HTTP process has drained and ended."""
        reader = FrameReader(CODEC)
        before: dict[signal.Signals, Any] = {}
        threading.Thread(target=self._beat, args=(engine_thread,), name="shoestring-beat", daemon=True).start()
        try:
            while data := self._read():
                for kind, given in reader.feed(data):
                    if kind == "started":
                        for sig in SIGNALS:
                            before[sig] = signal.signal(sig, lambda *_: self.stop())
                        on_started()
                    else:
                        self._pass_on(kind, given, engine_thread, grammars)
        finally:
            self._closed.set()
            for sig, handler in before.items():
                signal.signal(sig, handler)
        if not self._told_to_stop or self._how_it_ended() != DRAINED:
            raise self._lost()

    def stop(self) -> None:
        """Begin to drain; a second time: end without waiting. A process that is stopped is continued for it; one that
        does not end in its time is ended."""
        sig, seconds = STOPS[self._told_to_stop], LEAVE_S + (0.0 if self._told_to_stop else self._drain_s)
        self._told_to_stop = True
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)
            os.kill(self._pid, sig)
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        if self._ended is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _beat(self, engine_thread: EngineThread) -> None:
        """A thread of its own: a long step is no reason to fall silent, a process that is stopped is one."""
        while not self._closed.wait(BEAT_S):
            self._send(frame("beat", engine_thread.seconds_in_step))

    def close(self) -> None:
        """It notices that this process is done; it is not left behind."""
        self._closed.set()
        self._connection.close()
        if self._how_it_ended() is None:
            os.kill(self._pid, signal.SIGKILL)
            self._how_it_ended()

    def _lost(self) -> HttpProcessLost:
        how = self._how_it_ended() or "is still there, but closed its connection"
        return HttpProcessLost(f"the HTTP process {how}; the server stops")

    def _how_it_ended(self) -> str | None:
        """None: it has not, after LEAVE_S."""
        end = time.monotonic() + LEAVE_S
        while self._ended is None and time.monotonic() < end:
            pid, status = os.waitpid(self._pid, os.WNOHANG)  # of a process that ended, only once
            if pid and os.WIFSIGNALED(status):
                self._ended = f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
            elif pid:
                self._ended = f"ended with code {os.waitstatus_to_exitcode(status)}"
            else:
                time.sleep(0.01)
        return self._ended

    def _read(self) -> bytes:
        try:
            return self._connection.recv(READ)
        except OSError:
            return b""

    def _send(self, data: bytes) -> None:
        with self._sending, suppress(OSError):  # that it is gone is noticed by reading
            self._connection.sendall(data)

    def _pass_on(self, kind: str, given: list[Any], engine_thread: EngineThread, grammars: GrammarCache) -> None:
        if kind == "add":
            (choices,) = given
            if any(grammars.must_compile(source) for source in grammar_sources(choices)):
                # Compiled before, and forgotten since. Other messages are read meanwhile.
                with self._late_lock:
                    self._late.update(choice.id for choice in choices)
                late = (choices, engine_thread, grammars)
                threading.Thread(target=self._add_late, args=late, daemon=True).start()
            else:
                self._add(choices, engine_thread, grammars)
        elif kind == "cancel":
            with self._late_lock:
                self._late_and_left |= self._late.intersection(given[0])
            engine_thread.post(("cancel", given[0]))
        elif kind == "abort":
            with self._late_lock:
                self._late_and_left |= self._late
            engine_thread.post(("abort", given[0]))
        elif kind == "rejected":
            engine_thread.count_rejected()
        else:  # at most one of each kind at a time: the HTTP side has one thread for each
            work: Callable[[], Any] = engine_thread.metrics_text
            if kind == "compile":
                work = partial(grammars.of, given[1])
            elif kind == "adapter":
                work = partial(engine_thread.change_adapter, *given[1:])
            threading.Thread(target=self._answer, args=(given[0], work), daemon=True).start()

    def _add(self, choices: list[PendingChoice], engine_thread: EngineThread, grammars: GrammarCache) -> None:
        try:
            engine_thread.post(("add", received(choices, grammars.of)))
        except BaseException as error:  # e.g. a grammar that was compiled, forgotten, and now takes too long
            ids = [choice.id for choice in choices]
            parts = [(number, ChoiceDelta(error=_for_client(error))) for number in ids]
            self._send(frame("report", Report(parts=parts, ended=ids, snapshot=engine_thread.latest)))

    def _add_late(self, choices: list[PendingChoice], engine_thread: EngineThread, grammars: GrammarCache) -> None:
        ids = {choice.id for choice in choices}
        with self._compiling:
            self._add(choices, engine_thread, grammars)
        with self._late_lock:
            left = self._late_and_left & ids
            self._late -= ids
            self._late_and_left -= ids
        if left:  # the engine did not know them when this was said first
            engine_thread.post(("cancel", sorted(left)))

    def _answer(self, ticket: int, work: Callable[[], Any]) -> None:
        error, found = None, None
        try:
            found = work()
        except BaseException as raised:
            error = _for_client(raised)
        self._send(frame("answer", ticket, error, found if isinstance(found, bytes) else b""))


def _for_client(raised: BaseException) -> ApiError:
    """What a client is told; a defect of the server is logged."""
    error = as_exception(raised)
    if isinstance(error, ApiError):
        return error
    log.error("a message of the HTTP process could not be answered", exc_info=error)
    return ApiError(500, "internal error; the server's log says more")


# -- in the HTTP process --------------------------------------------------------------------------------------


def serve_http(connection: socket.socket, options: ServeOptions) -> int:
    """From the fork to the end of the process; the exit code."""
    for sig in (*SIGNALS, *STOPS):
        signal.signal(sig, signal.SIG_IGN)  # the engine's process says when to drain
    torch.set_num_threads(1)
    # The tokenizer's work stays on the thread that asks, which has a priority of its own (request_workers.py).
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        return 0  # the engine did not start, which its process has said
    log_to_stderr()
    reader, frames = FrameReader(CODEC), list[tuple[str, list[Any]]]()
    while not frames:
        if not (data := connection.recv(READ)):
            return 1
        frames = reader.feed(data)
    (_, (name, pooling, told, facts)), *early = frames
    tokenizer = tokenizer_from(told)
    port = EngineConnection(reader, early)
    client = EngineClient(facts, port, tokenizer, EngineSnapshot())
    http = HttpServer(
        replace(options, pooling=pooling),
        name,
        tokenizer,
        client,
        RemoteGrammars(port),
        socket.socket(fileno=descriptors[0]),
        signals=STOPS,
    )
    with objects_frozen():
        http.run(lambda: port.open(connection, client, http), port.say_started)
    return int(port.lost)


class EngineConnection(asyncio.Protocol):
    """The `EnginePort` of the HTTP process."""

    def __init__(self, reader: FrameReader, early: list[tuple[str, list[Any]]]) -> None:
        """`early`: messages that came together with the first."""
        self._reader, self._early, self.lost = reader, early, False
        self._gone: ApiError | None = None  # why the engine's process answers no more
        self._tickets = itertools.count()
        self._asked: dict[int, Future[bytes]] = {}
        self._unsent: list[bytes] = []  # frames of this turn of the event loop
        self._heard, self._in_step = time.monotonic(), 0.0  # the last word of the engine's process, and its step's time

    async def open(self, connection: socket.socket, client: EngineClient, http: HttpServer) -> None:
        self._loop, self._client, self._http = asyncio.get_running_loop(), client, http
        self._heard = time.monotonic()
        self._take(self._early)
        connection.setblocking(False)
        self._transport, _ = await self._loop.create_connection(lambda: self, sock=connection)

    def say_started(self) -> None:
        self._send(frame("started"))

    def post(self, message: Message) -> None:
        self._send(frame(*message))

    def _send(self, data: bytes) -> None:
        """Requests that came together go together: one system call for all, here and in the engine's process."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    @property
    def seconds_silent(self) -> float:
        return time.monotonic() - self._heard

    @property
    def seconds_in_step(self) -> float:
        return self._in_step + self.seconds_silent if self._in_step else 0.0

    def count_rejected(self) -> None:
        self._send(frame("rejected"))

    def metrics_text(self) -> bytes:
        return self.ask("metrics")

    def change_adapter(self, name: str, place: str) -> bytes:
        return self.ask("adapter", name, place)

    def ask(self, kind: str, *given: Any) -> bytes:
        """The engine process's answer; from a worker thread, which waits for it."""
        ticket, answer = next(self._tickets), Future[bytes]()
        self._asked[ticket] = answer

        def send() -> None:
            if self._gone is None:
                self._send(frame(kind, ticket, *given))
            elif not answer.done():  # `connection_lost` may have found it
                answer.set_exception(self._gone)

        try:
            self._loop.call_soon_threadsafe(send)
            return answer.result(ANSWER_S)
        except TimeoutError:
            raise ApiError(503, "the engine does not answer; try again later", code="overloaded") from None
        finally:
            del self._asked[ticket]

    # -- called by asyncio ----------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        self._take(self._reader.feed(data))

    def _take(self, messages: list[tuple[str, list[Any]]]) -> None:
        for kind, given in messages:
            if kind == "report":
                self._in_step = 0.0
                self._client.receive(given[0])
            elif kind == "beat":
                self._in_step = given[0]
            elif (answer := self._asked.get(given[0])) is not None:
                _, error, found = given
                if error is None:
                    answer.set_result(found)
                else:
                    answer.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = ApiError(503, "the engine has stopped; the server must be restarted", code="engine_dead")
        self._client.receive(Report(snapshot=self._client.snapshot, closed=self._gone, dead=True))
        for answer in list(self._asked.values()):  # worker threads take theirs out
            with suppress(InvalidStateError):  # answered, and not taken out yet
                answer.set_exception(self._gone)
        if not self._http.server.should_exit:
            self.lost = True
            log.error("the engine's process is gone; the server stops")
            self._http.stop()


class RemoteGrammars(GrammarCache):
    """Grammars that the engine's process compiles and keeps; here they are their sources."""

    def __init__(self, port: EngineConnection) -> None:
        super().__init__()
        self._port = port

    def compile(self, source: GrammarSource) -> MakeGrammar | ApiError:
        try:
            self._port.ask("compile", source)
        except ApiError as error:
            if error.status >= 500:
                raise
            return error
        return lambda: cast(Grammar, source)  # it is sent, and `received` finds the grammar


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "backend": tokenizer.backend.to_str(),
        "special": tokenizer.special,
        "chat_template": tokenizer.chat_template,
        "tool_use_template": tokenizer.tool_use_template,
        "more_eos": sorted(tokenizer.eos_ids),
        "split_special": tokenizer.split_special,
    }


def tokenizer_from(given: dict[str, Any]) -> Tokenizer:
    return Tokenizer(Backend.from_str(given.pop("backend")), **given)
