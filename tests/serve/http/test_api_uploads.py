"""Clients that leave, or promise too much, while they send a body."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from serving import running  # noqa: E402

TEXT = "/v1/completions"


def test_a_client_that_leaves_while_it_sends_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    def send(service: Any, length: int) -> socket.socket:
        url = httpx.URL(service.url)
        sent = socket.create_connection((url.host, url.port), timeout=60)
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}"
        sent.sendall(head.encode() + b"\r\n\r\n{")
        return sent

    caplog.set_level("INFO", logger="shoestring.serve")
    with running() as service:
        send(service, 100).close()
        until = time.monotonic() + 60
        while "499" not in caplog.text and time.monotonic() < until:
            time.sleep(0.02)
        assert f"POST '{TEXT}' 499" in caplog.text and "Traceback" not in caplog.text
        with send(service, 99_999_999_999) as sent:  # refused by what it says, not by what it sends
            assert b" 413 " in sent.recv(4096)
