"""The HTTP side at work: uvicorn with our limits on connections, from its first connection to the end of a drain.

It runs beside the engine in one process (`Service`), or in a process of its own (http_process.py).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import cast

import uvicorn

from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.engine.embedding import Pooling
from shoestring.serve.http.app import Api, ApiSettings
from shoestring.serve.http.connection import ConnectionLimits, LimitedConnection
from shoestring.serve.http.engine_client import EngineClient
from shoestring.serve.http.grammar import GrammarCache
from shoestring.serve.http.request_schema import ApiError
from shoestring.serve.http.serve_options import ServeOptions

log = logging.getLogger("shoestring.serve")


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Exclude what exists now (modules, weights, graphs) from garbage collection while the server runs: a full
    collection over all of it takes as long as a hundred steps, during which no request gets a token."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class HttpServer:
    """`run` blocks until `stop` is called or one of the signals comes, and all answers are given."""

    def __init__(
        self,
        options: ServeOptions,
        name: str,
        tokenizer: Tokenizer,
        client: EngineClient,
        grammars: GrammarCache,
        listener: socket.socket,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        self.client, self._drain_s, self._listener = client, options.drain_s, listener
        logging.getLogger("uvicorn.error").addFilter(_no_cancellation)
        settings = ApiSettings(
            name,
            options.api_keys,
            int(options.max_body_mb * 2**20),
            options.deadline_s,
            options.allow_origins,
            _host_names(options),
            options.body_timeout_s,
            tool_format=options.tool_format,
            pooling=cast(Pooling, "mean" if options.pooling == "auto" else options.pooling),
            admin_key=options.admin_key,
            adapter_folder=options.adapter_folder,
        )
        limits = ConnectionLimits(options.header_timeout_s, options.read_timeout_s, options.max_connections)
        self._api = Api(client, tokenizer, grammars, settings)
        config = uvicorn.Config(
            self._api.app(),
            http=partial(LimitedConnection, limits, {}),  # type: ignore[arg-type]
            ws="none",  # a WebSocket would leave LimitedConnection
            timeout_keep_alive=min(5.0, options.header_timeout_s),  # type: ignore[arg-type]
            backlog=128,  # so many new connections are taken in one turn of the event loop
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            # Requests left after the drain get an error; these seconds are for sending it.
            timeout_graceful_shutdown=int(options.drain_s) + 5,
        )
        self.server = _Server(config, self._drain, self._end_texts, signals)

    def run(self, before: Callable[[], Awaitable[None]] | None, on_started: Callable[[], None]) -> None:
        """On the event loop, `before` is awaited before the first connection is taken, `on_started` called when it can
        be."""

        async def serve() -> None:
            if before is not None:
                await before()
            self.server.on_started = on_started
            await self.server.serve([self._listener])

        try:
            asyncio.run(serve())
        finally:
            self._api.workers.stop()

    def stop(self) -> None:
        """Begin to drain; from any thread."""
        self.server.handle_exit(0, None)

    def _drain(self) -> None:
        log.info("draining: %d texts to finish, %.0f s at most", self.client.num_open, self._drain_s)
        self.client.close(ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"}))
        timer = threading.Timer(self._drain_s, self._end_texts)
        timer.daemon = True
        timer.start()

    def _end_texts(self) -> None:
        self.client.abort_all(ApiError(503, "the server shut down before this text was finished", code="draining"))


def _no_cancellation(record: logging.LogRecord) -> bool:
    """For the log of uvicorn, which shows a traceback for every answer that the second Ctrl-C cuts off."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class _Server(uvicorn.Server):
    """uvicorn's server, which reports when it begins to drain and when it must not wait any longer, and does not exit
    by the signal afterwards."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_drain: Callable[[], None],
        on_hurry: Callable[[], None],
        signals: tuple[signal.Signals, ...],
    ) -> None:
        super().__init__(config)
        self._on_drain, self._on_hurry, self._signals = on_drain, on_hurry, signals
        self.on_started: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in self._signals}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._on_hurry()  # uvicorn looks at `force_exit` every 0.1 s: most clients are told by then
            self.force_exit = True
            return
        self.should_exit = True
        self._on_drain()


def _host_names(options: ServeOptions) -> tuple[str, ...]:
    """What clients may call this server; a port in a name does not matter."""
    given = (name.strip().lower().rstrip(".") for name in options.allow_hosts)
    return (options.host.lower(), socket.gethostname().lower(), *(name.rsplit(":", 1)[0] for name in given))


class _LineFormatter(logging.Formatter):
    """`%(asctime)s %(levelname)s %(message)s`; the time of day is written once a second, not for every line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._second, self._shown = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._shown = time.strftime(self.default_time_format, time.localtime(self._second))
        return f"{self._shown},{int(record.msecs):03d}"


def log_to_stderr() -> None:
    """For a process of the server's own: there is a line for every request, so a record finds out nothing (file and
    line, thread, process) that the lines do not show."""
    logging._srcfile = None  # type: ignore[attr-defined]  # as the manual of logging says
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
