"""One connection: HTTP/1.1 between a socket and the application, with limits on what a client may leave undone.

A protocol for uvicorn's server. uvicorn's own have no such limits, and spend more processor time on a request than all
of the application does. Here

- a header must be complete `header_timeout_s` seconds after the connection, or after the first byte of a later request,
  and may have MAX_HEADER bytes beside what came with its first;
- a client that reads nothing for `read_timeout_s` seconds is disconnected;
- of more than `max_connections`, the one that has waited for its client the longest is closed. Requests that have
  arrived whole are never closed: where all are such, the new connection gets a 503;
- a body in hundreds of tiny chunks is refused: each costs as much to parse as a large one;
- requests may be sent before earlier ones are answered (pipelining), MAX_PIPELINED of them.

The time for a body is the handler's (app.py), which can answer with an error.

The parser is httptools, or h11 (h11_parser.py) where that is not installed. The header of a response is written with
the first part of its body: a system call costs as much as parsing a request.

Left out: TLS, HTTP/2, WebSockets, trailers, other transfer codings than chunked.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import unquote

import uvicorn
from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from shoestring.serve.http.h11_parser import H11Parser, h11
from shoestring.serve.http.request_schema import ApiError
from shoestring.serve.http.responses import written


class NotHttpError(Exception):
    """What came is refused without a look at the application."""


make_parser: Callable[[LimitedConnection], Any]
PARSER_ERRORS: tuple[type[Exception], ...]
try:
    from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

    make_parser, PARSER_ERRORS = HttpRequestParser, (HttpParserError, h11.RemoteProtocolError, NotHttpError)
except ModuleNotFoundError:  # no wheel for this machine

    class HttpParserUpgrade(Exception):  # type: ignore[no-redef]
        """Never raised."""

    class HttpParserCallbackError(Exception):  # type: ignore[no-redef]
        """Never raised."""

    make_parser, PARSER_ERRORS = H11Parser, (h11.RemoteProtocolError, NotHttpError)

log = logging.getLogger("shoestring.serve")

MAX_HEADER = 16 << 10  # bytes
MAX_PIPELINED = 64
SMALL_CHUNK = 256  # bytes
MAX_SMALL_CHUNKS = 256  # in one body
SPARE_FILES = 64  # file descriptors for everything but connections
NOT_HTTP = b"Invalid HTTP request received."


STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


@dataclass(frozen=True)
class ConnectionLimits:
    header_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    max_connections: int = 512

    def within_files(self) -> int:
        """`max_connections`, or fewer where the process may not open so many files."""
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.max_connections if allowed < 0 else max(1, min(self.max_connections, allowed - SPARE_FILES))


class Exchange:
    """One request and its response, as the application sees them: `receive` and `send` are ASGI's."""

    def __init__(self, connection: LimitedConnection, scope: Scope, keep_alive: bool, expects_continue: bool) -> None:
        self.scope, self.keep_alive = scope, keep_alive
        self._connection, self._expects_continue = connection, expects_continue
        self.gone: asyncio.Future[None] = connection.loop.create_future()  # done when the client leaves
        self.more_body = True  # is to come
        self._body, self._unread = bytearray(), False  # a part of the body, or its end
        self._waiter: asyncio.Future[None] | None = None  # of `receive`
        self.started = self.complete = False  # the response
        self._head = b""  # of the response, not written yet
        self._chunked = False
        self._left: int | None = None  # bytes of a body whose length was told

    # -- called by the connection ---------------------------------------------------------------------------
    def add_body(self, part: bytes, *, is_last: bool = False) -> int:
        """The bytes that are unread."""
        self._body += part
        self.more_body, self._unread = not is_last, True
        self._wake()
        return len(self._body)

    def lose(self) -> None:
        """The client has left, or is not listened to any more."""
        if not self.complete and not self.gone.done():
            self.gone.set_result(None)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def run(self, app: ASGIApp) -> None:
        transport = self._connection.transport
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:  # the server does not wait for it any longer
            transport.abort()
            raise
        except Exception:
            log.exception("an answer broke")
            transport.close()
        else:
            if not self.complete and not self.gone.done():
                log.error("an answer was not finished: %s %r", self.scope["method"], self.scope["path"][:80])
                transport.close()

    # -- called by the application --------------------------------------------------------------------------
    async def receive(self) -> Message:
        while not self.complete and not self.gone.done():
            if self._unread:
                message = {"type": "http.request", "body": bytes(self._body), "more_body": self.more_body}
                self._body, self._unread = bytearray(), False
                return message
            if self.more_body:
                if self._expects_continue and not self.started:
                    self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._expects_continue = False
                self._connection.flow.resume_reading()
            self._waiter = self._connection.loop.create_future()
            await self._waiter
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        flow = self._connection.flow
        if flow.write_paused and not self.gone.done():
            await flow.drain()
        if self.gone.done():
            return
        if message["type"] == "http.response.start":
            assert not self.started, "a response has one header"
            self.started, self._head = True, self._header(message)
            return
        assert self.started and not self.complete, f"{message['type']} before the header or after the end"
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError(f"the body is not as long as its header says, by {-self._left} bytes")
        if self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = body if more else body + b"0\r\n\r\n"
        elif self._has_no_body:
            body = b""
        if data := self._head + body:
            self._connection.transport.write(data)
        self._head = b""
        if not more:
            self.complete = True
            self._wake()
            self._connection.on_answered(self)

    @property
    def _has_no_body(self) -> bool:
        return self.scope["method"] == "HEAD"

    def _header(self, message: Message) -> bytes:
        lines, closes = [STATUS_LINES[message["status"]]], False
        for name, value in (*self._connection.default_headers, *message["headers"]):
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                self._left = None if self._has_no_body else int(value)
            elif name == b"connection":
                closes = value.lower() == b"close"
        if self._left is None and not self._has_no_body:
            if self.scope["http_version"] == "1.1":
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:  # the end of the connection is the end of the body
                self.keep_alive = False
        self.keep_alive = self.keep_alive and not closes
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise RuntimeError("a header of the response has a line break")
        return head + b"\r\n"


class LimitedConnection(asyncio.Protocol):
    """`opened` holds all connections of the server, in the order in which they last began to wait: a search for the one
    that has waited the longest ends at the first or soon after, however many there are."""

    def __init__(
        self,
        limits: ConnectionLimits,
        opened: dict[LimitedConnection, None],
        *,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.loop = _loop or asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self.flow: FlowControl
        self._limits, self._opened, self._state = limits, opened, server_state
        self._app: ASGIApp = config.loaded_app
        self._keep_alive_s = config.timeout_keep_alive
        self._parser: Any = make_parser(self)
        self._current: Exchange | None = None  # is being answered
        self._newest: Exchange | None = None  # was or is being read
        self._pipelined: deque[Exchange] = deque()  # between the two, and the newest
        self._reads_message = self._reads_header = self._ended = False  # ended: nothing more is read
        self._header_size: int | None = None  # None: it began in this part of what came
        self._num_small = 0
        # What is waited for, and until when. A timer that is set already stays: it looks again when it is due.
        self._waits: Literal["", "header", "next request", "reader"] = ""
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._state.default_headers

    @property
    def waits_for_client(self) -> bool:
        """For a header, the rest of a body, or to be read from."""
        return self._current is None or self._current.more_body or self.flow.write_paused

    # -- called by asyncio ----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport, self.flow = transport, FlowControl(transport)
        self._server, self._client = get_local_addr(transport), get_remote_addr(transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._wait("header", self._limits.header_timeout_s)
        if len(self._opened) > self._limits.within_files():
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            self._feed(data)
        except PARSER_ERRORS as error:
            cause = error.__context__ if isinstance(error, HttpParserCallbackError) else error
            if isinstance(error, HttpParserCallbackError) and not isinstance(cause, NotHttpError):
                log.error("a connection broke", exc_info=cause)
            if not self._ended:  # otherwise it came after the last request
                self._refuse(str(cause))
            return
        if self._reads_header:
            self._header_size = 0 if self._header_size is None else self._header_size + len(data)
            if self._header_size > MAX_HEADER:
                self._refuse(f"a header of more than {MAX_HEADER} bytes")
                return
        if self._current is not None:
            if not self.flow.write_paused:
                self._waits = ""
        elif self._reads_message and self._waits != "header":
            self._wait("header", self._limits.header_timeout_s)
        elif not self._reads_message and self._waits == "header":
            self._wait("next request", self._keep_alive_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)  # type: ignore[arg-type]
        self._opened.pop(self, None)
        self._waits, self._ended = "", True
        if self._timer is not None:
            self._timer.cancel()
        if self._current is not None:
            self._current.lose()
        self._pipelined.clear()
        self._parser = None  # it refers to the connection
        self.flow.resume_writing()

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self._wait("reader", self._limits.read_timeout_s)

    def resume_writing(self) -> None:
        self.flow.resume_writing()
        self._waits = ""
        if self._current is None and not self.transport.is_closing():
            self._wait("next request", self._keep_alive_s)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            # Some clients offer HTTP/2 with every request. It is not spoken here, so the request is one as any other;
            # but httptools takes its body for the other protocol.
            method, version = self._parser.get_method(), self._parser.get_http_version().encode()
            headers = [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
            head = b"".join([b"%b %b HTTP/%b\r\n" % (method, self._url, version), *headers, b"\r\n"])
            self._parser = H11Parser(self)
            self._parser.feed_data(head + data[upgrade.args[0] :])

    # -- called by the parser -------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        if self._ended:
            raise NotHttpError("a request after the last one")
        self._reads_message = self._reads_header = True
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()
        self._header_size, self._num_small = None, 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_header:  # a trailer is ignored
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._reads_header = False
        if self._parser.should_upgrade():
            return
        version, headers = self._parser.get_http_version(), self._headers
        if version not in ("1.0", "1.1"):
            raise NotHttpError(f"version {version}")
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            raise NotHttpError("no Host, or more than one")
        raw_path, _, query = self._url.partition(b"?")
        if not self._url.isascii():
            raise NotHttpError("a target that is not ASCII")
        path = raw_path.decode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": "http",
            "method": self._parser.get_method().decode(),
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers,
        }
        keep_alive, expects_continue = version == "1.1", False
        for name, value in headers:
            if name == b"connection" and b"close" in value.lower():
                keep_alive = False
            elif name == b"expect" and value.lower() == b"100-continue":
                expects_continue = version == "1.1"
        scope["exchange"] = self._newest = Exchange(self, scope, keep_alive, expects_continue)
        if self._current is None:
            self._start(self._newest)
        elif len(self._pipelined) < MAX_PIPELINED:
            self._pipelined.append(self._newest)
        else:
            raise NotHttpError(f"more than {MAX_PIPELINED} requests at once")

    def on_body(self, part: bytes) -> None:
        assert self._newest is not None
        if len(part) < SMALL_CHUNK:
            self._num_small += 1
            if self._num_small > MAX_SMALL_CHUNKS:
                raise NotHttpError("a body in too many small chunks")
        if not self._newest.complete and self._newest.add_body(part) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        assert self._newest is not None
        self._reads_message = False
        self._newest.add_body(b"", is_last=True)
        self._ended = not self._newest.keep_alive

    # -- called by an exchange, and by uvicorn --------------------------------------------------------------
    def on_answered(self, exchange: Exchange) -> None:
        self._state.total_requests += 1
        self._current = None
        if self.transport.is_closing():
            return
        if not exchange.keep_alive:
            self._close()
            return
        self.flow.resume_reading()
        if self._pipelined:
            self._start(self._pipelined.popleft())
        elif not self.flow.write_paused:
            self._wait("next request", self._keep_alive_s)

    def shutdown(self) -> None:
        """Answer what has come, and close."""
        if self._current is None:
            self._close()
        else:
            self._current.keep_alive = False

    def _start(self, exchange: Exchange) -> None:
        self._current = exchange
        task = self.loop.create_task(exchange.run(self._app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    # -- limits ---------------------------------------------------------------------------------------------
    def _refuse(self, why: str) -> None:
        """What comes cannot be told apart any more. Requests that came whole before are answered."""
        log.warning("%s: not HTTP, or more than is taken: %s", self._client[0] if self._client else "a client", why)
        self._ended = True
        whole = [e for e in (self._current, *self._pipelined) if e is not None and not e.more_body]
        if whole:
            if self._pipelined and self._pipelined[-1].more_body:
                self._pipelined.pop()
            whole[-1].keep_alive = False
            return
        if self._current is None or not self._current.started:
            head = STATUS_LINES[400] + b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            self.transport.write(head % len(NOT_HTTP) + b"connection: close\r\n\r\n" + NOT_HTTP)
        if self._current is not None:
            self._current.lose()
        self._close()

    def _close(self) -> None:
        self._ended = True
        self.transport.close()
        if self.transport.get_write_buffer_size():  # closed when it has been read
            self._wait("reader", self._limits.read_timeout_s)
        else:
            self._waits = ""

    def _wait(self, what: Literal["header", "next request", "reader"], seconds: float) -> None:
        self._opened.pop(self, None)
        self._opened[self] = None
        self._waits, self._until = what, self.loop.time() + seconds
        if self._timer is None or self._timer.when() > self._until:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(self._until, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._waits:
            return
        if self.loop.time() < self._until:
            self._timer = self.loop.call_at(self._until, self._look)
        elif self._waits == "next request":
            self._close()
        else:
            self.transport.abort()  # close() would wait until the client has read what is left

    def _make_room(self) -> None:
        waiting = (c for c in self._opened if c.waits_for_client and c is not self)
        longest = next(waiting, None)
        if longest is not None:
            del self._opened[longest]
            longest.transport.abort()
            return
        log.warning("%d connections are busy; a new one is refused", len(self._opened) - 1)
        error = ApiError(503, "the server has as many connections as it takes; try again later", code="overloaded")
        body = written(error.body()).encode()
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Retry-After: 2\r\nConnection: close\r\n\r\n" + body)
        self._close()
