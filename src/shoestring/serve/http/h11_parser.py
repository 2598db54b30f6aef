"""h11 behind the interface of httptools' parser: where httptools is not installed, and for clients that offer another
protocol (connection.py).

A connection of h11 reads one request here and writes nothing; the next request has a new one.
"""

from __future__ import annotations

from typing import Any

import h11


class H11Parser:
    def __init__(self, protocol: Any) -> None:
        self._protocol, self._begun = protocol, False
        self._connection = h11.Connection(h11.SERVER)

    def feed_data(self, data: bytes) -> None:
        self._connection.receive_data(data)
        if not self._begun and data.strip(b"\r\n"):
            self._begin()
        while (event := self._connection.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Request):
                self._request = event
                self._protocol.on_url(event.target)
                for name, value in event.headers:
                    self._protocol.on_header(name, value)
                self._protocol.on_headers_complete()
            elif isinstance(event, h11.Data):
                self._protocol.on_body(bytes(event.data))
            else:
                assert isinstance(event, h11.EndOfMessage), event
                rest, _ = self._connection.trailing_data
                self._connection, self._begun = h11.Connection(h11.SERVER), False
                self._protocol.on_message_complete()
                if rest:
                    self._connection.receive_data(rest)
                    self._begin()

    def get_method(self) -> bytes:
        return self._request.method

    def get_http_version(self) -> str:
        return self._request.http_version.decode()

    def should_upgrade(self) -> bool:
        return False

    def _begin(self) -> None:
        self._begun = True
        self._protocol.on_message_begin()
