"""One connection, with limits on what a client may leave undone.

uvicorn's protocol waits for as long as it takes for a request's header, and for a client that does not read what it
asked for. Here

- a header must be complete `header_timeout_s` seconds after the connection, or after the first byte of a later request;
- a client that reads nothing for `read_timeout_s` seconds is disconnected, also where its answer is complete;
- of more than `max_connections`, the one that has waited for its client the longest is closed. Requests that have
  arrived whole are never closed: where all are such, the new connection gets a 503;
- a header or trailer of more than MAX_HEADER bytes is refused, also where it comes at once;
- a request with a length and in chunks is refused: what is behind a proxy may read another end of it;
- a body in hundreds of tiny chunks is refused: each costs as much to parse as a large one.

The time for a body is the handler's (app.py), which can answer with an error.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import select
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from shoestring.serve.http.request_schema import ApiError
from shoestring.serve.http.responses import written

log = logging.getLogger("shoestring.serve")

MAX_HEADER = 16 << 10  # bytes; h11 itself compares only what is incomplete
SMALL_CHUNK = 256  # bytes
MAX_SMALL_CHUNKS = 256  # in one body
LOOK_S = 0.5  # seconds between two looks whether a client with an unread request is still there
END = getattr(select, "POLLRDHUP", 0)  # 0: a system that does not tell it (macOS)
SPARE_FILES = 64  # file descriptors for everything but connections


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
    """What the application may know of a request beside ASGI's messages; its scope holds it under "exchange"."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self.gone: asyncio.Future[None] = loop.create_future()  # done when the client leaves before its answer is whole
        self.receive: Receive = cycle.receive  # type: ignore[assignment]

    @property
    def more_body(self) -> bool:
        """Is to come."""
        return self._cycle.more_body


class LimitedConnection(H11Protocol):
    """uvicorn's protocol with time-outs. A timer runs whenever the server waits for the client.

    `opened` holds all connections of the server, in the order in which they last began to wait: a search for the one
    that has waited the longest ends at the first or soon after, however many there are.
    """

    def __init__(self, limits: ConnectionLimits, opened: dict[LimitedConnection, None], **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Http(h11.SERVER, MAX_HEADER)
        self._limits, self._opened = limits, opened
        self._timer: asyncio.TimerHandle | None = None
        self._num_unread = 0  # bytes that the client had not taken when the timer was set
        self._exchange: Exchange | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    @property
    def waits_for_client(self) -> bool:
        """For a header, the rest of a body, or to be read from."""
        return self._between_requests or self.cycle.more_body or self.flow.write_paused

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # -- called by asyncio ----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer(self._limits.header_timeout_s)
        if len(self._opened) > self._limits.within_files():
            self._make_room()

    def data_received(self, data: bytes) -> None:
        first = self._timer is None or self.timeout_keep_alive_task is not None  # since the last answer
        if first and self._between_requests and not self.flow.write_paused:
            self._set_timer(self._limits.header_timeout_s)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._opened.pop(self, None)
        self._stop_timer()
        if self._end_timer is not None:
            self._end_timer.cancel()
        super().connection_lost(exc)
        if self._exchange is not None and self.cycle.disconnected:
            self._exchange.gone.set_result(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer(self._limits.read_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer()
        if self._between_requests:  # a next header may have begun meanwhile; and the rest has to be read, too
            self._set_timer(self._limits.header_timeout_s)

    # -- called by uvicorn ----------------------------------------------------------------------------------
    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # its task has not begun: that is for a later turn of the event loop
            self._exchange = Exchange(self.cycle, self.loop)
            self.cycle.scope["exchange"] = self._exchange  # type: ignore[typeddict-unknown-key]
            if not self.flow.write_paused:
                self._stop_timer()
        if self.flow.read_paused and not self._between_requests and not self.cycle.more_body:
            # uvicorn stops reading at a large body until the application asks for more of it, which nobody does after
            # the last part. Without reading, a client that leaves is not noticed. A next request has to wait, though.
            next_request, _closed = self.conn.trailing_data
            if not next_request:
                self.flow.resume_reading()
            elif END and self._end_timer is None:
                self._end_timer = self.loop.call_later(LOOK_S, self._look_for_end)

    def _look_for_end(self) -> None:
        """While the next request waits unread, asyncio does not report that the client has left."""
        self._end_timer = None
        if self.transport.is_closing() or not self.flow.read_paused:
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), END)
        if poll.poll(0):  # an error, too
            self.transport.abort()
        else:
            self._end_timer = self.loop.call_later(LOOK_S, self._look_for_end)

    def on_response_complete(self) -> None:
        if self._timer is None and self.transport.get_write_buffer_size():
            self._set_timer(self._limits.read_timeout_s)
        else:
            self._move_back()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
            if not self._between_requests:  # a body that breaks off: its handler must not answer a second time
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        else:  # a response is on its way already, and what follows cannot be told from its parts
            self.transport.close()

    # -- limits ---------------------------------------------------------------------------------------------
    def _set_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._move_back()
        self._start_timer(seconds)

    def _start_timer(self, seconds: float) -> None:
        self._num_unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(seconds, self._late)

    def _move_back(self) -> None:
        """It begins to wait now."""
        self._opened.pop(self, None)
        self._opened[self] = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if 0 < self.transport.get_write_buffer_size() < self._num_unread:  # it reads, if slowly
            self._start_timer(self._limits.read_timeout_s)
            return
        self._timer = None
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
        self.transport.close()


class _Http(h11.Connection):
    """Refuses long headers, bodies with two ends, and a body of too many tiny chunks. The header of a response is
    written with the first part of its body, and the chunks of a stream without h11's checks of each."""

    _num_small = 0
    _header = b""  # not written yet
    _chunked = False  # the response that is being sent

    def next_event(self) -> Any:
        before = len(self._receive_buffer)
        event = super().next_event()
        if isinstance(event, h11.Request | h11.EndOfMessage) and before - len(self._receive_buffer) > MAX_HEADER:
            raise h11.RemoteProtocolError("a header that is too long")
        if isinstance(event, h11.Request):
            self._num_small = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("a body with a length and in chunks")
        elif isinstance(event, h11.Data) and event.chunk_end and len(event.data) < SMALL_CHUNK:
            self._num_small += 1
            if self._num_small > MAX_SMALL_CHUNKS:
                raise h11.RemoteProtocolError("a body in too many small chunks")
        return event

    def send(self, event: Any) -> bytes | None:  # type: ignore[override]  # h11 has a signature for each event
        if isinstance(event, h11.Response):
            self._header = super().send(event) or b""
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in self._header.lower()
            return b""
        header, self._header = self._header, b""
        if self._chunked and isinstance(event, h11.Data):
            return header + (b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b"")
        self._chunked = False
        written = super().send(event)
        return header + written if written else header or written
