"""Clients that leave, or promise too much, while they send a body."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")

from serving import running, wait_for  # noqa: E402

from shoestring.model.tokenizer import Tokenizer  # noqa: E402

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


def test_a_request_whose_client_has_left_is_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for a long text of another client; when its turn comes it is not there any more."""
    held, encode = threading.Event(), Tokenizer.encode
    texts: list[str] = []

    def watched(self: Tokenizer, text: str, **options: Any) -> list[int]:
        texts.append(text[:5])
        assert text[0] != "1" or held.wait(60)
        return encode(self, text, **options)

    def send(service: Any, text: str) -> socket.socket:
        url = httpx.URL(service.url)
        content = json.dumps({"prompt": text * 20_000}).encode()
        sent = socket.create_connection((url.host, url.port), timeout=60)
        head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sent.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        return sent

    caplog.set_level("INFO", logger="shoestring.serve")
    with running() as service:
        monkeypatch.setattr(Tokenizer, "encode", watched)
        with send(service, "1") as first:
            wait_for(lambda: texts)
            send(service, "2").close()
            wait_for(lambda: "'/tokenize' 499" in caplog.text)
            held.set()
            assert first.recv(100).startswith(b"HTTP/1.1 200")
        with send(service, "3") as third:
            assert third.recv(100).startswith(b"HTTP/1.1 200")
    assert texts == ["11111", "33333"]
