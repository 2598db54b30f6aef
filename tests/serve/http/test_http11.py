"""HTTP/1.1 as the connection speaks it: what clients may rely on, and what they may not do."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
from http_cases import connection_cases, outcome_of_connection  # noqa: E402
from http_harness import receive_all  # noqa: E402
from outcomes import Tally  # noqa: E402
from serving import running, wait_for  # noqa: E402

MAX_HEADER = 16 << 10  # bytes; uvicorn asks h11 for this many

TEXT = "/v1/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    limits = {"max_requests": 4, "max_context": 4096, "header_timeout_s": 0.5, "body_timeout_s": 0.6}
    with running(**limits) as started:
        yield started


def connect(service: Any) -> socket.socket:
    url = httpx.URL(service.url)
    return socket.create_connection((url.host, url.port), timeout=30)


def asked(*more: str, version: str = "1.1", **body: object) -> bytes:
    """A whole request for a text."""
    content = json.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True, **body})
    length = [] if any(line.startswith("Transfer-Encoding") for line in more) else [f"Content-Length: {len(content)}"]
    lines = [f"POST {TEXT} HTTP/{version}", "Host: localhost", "Content-Type: application/json", *length, *more]
    if not length:
        content = f"5\r\n{content[:5]}\r\n{len(content) - 5:X};name=x\r\n{content[5:]}\r\n0\r\nX-Trailer: y\r\n\r\n"
    return ("\r\n".join(lines) + "\r\n\r\n" + content).encode()


def answer(client: socket.socket, method: str = "POST") -> tuple[HTTPResponse, bytes]:
    """The only one that is on its way: the library reads ahead."""
    found = HTTPResponse(client, method=method)
    found.begin()
    return found, found.read()


def all_answers(client: socket.socket) -> bytes:
    received = b""
    while part := client.recv(65536):
        received += part
    return received


def test_one_connection_carries_many_requests(service: Any) -> None:
    with connect(service) as client:
        for more in ({}, {"stream": True}, {"max_tokens": -1}, {"stream": True, "n": 2}, {}):
            client.sendall(asked(**more))
            found, body = answer(client)
            assert found.status == (400 if more.get("max_tokens") else 200)
            assert body.endswith(b"data: [DONE]\n\n") == bool(more.get("stream")) and not found.will_close
            assert len(found.getheader("x-request-id", "")) == 16 and found.getheader("date")


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_the_header_of_a_stream_does_not_wait_for_the_first_token(
    service: Any, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """What is refused has its status all the same: the request was admitted before."""
    step, release = service.engine.step, threading.Event()

    def held() -> Any:
        assert release.wait(60)
        return step()

    monkeypatch.setattr(service.engine, "step", held)
    monkeypatch.setattr("shoestring.serve.http.app.KEEP_ALIVE_S", 600.0)  # no comment brings it
    try:
        with connect(service) as client:
            client.sendall(asked(version=version, stream=True))
            header = b""
            while not header.endswith(b"\r\n\r\n"):
                header += client.recv(1)
            assert header.startswith(b"HTTP/1.1 200 OK\r\n") and b"text/event-stream" in header
            with connect(service) as other:
                other.sendall(asked(stream=True, max_tokens=-1))
                assert answer(other)[0].status == 400
            release.set()
            events = b""
            while b"data: [DONE]\n\n" not in events:
                events += client.recv(65536)
    finally:
        release.set()


def test_a_connection_without_requests_is_closed_later(service: Any) -> None:
    with connect(service) as client:
        client.sendall(HEALTH)
        assert answer(client, "GET")[1] == b'{"status":"ok"}'
        assert all_answers(client) == b""


def test_bytes_of_a_request_may_come_one_by_one(service: Any) -> None:
    with connect(service) as client:
        for byte in asked(stream=True):
            client.sendall(bytes([byte]))
        assert answer(client)[0].status == 200


def test_a_body_in_chunks_with_names_and_trailers(service: Any) -> None:
    with connect(service) as client:
        for _ in range(2):
            client.sendall(asked("Transfer-Encoding: chunked"))
            assert answer(client)[0].status == 200


def test_requests_that_do_not_wait_for_answers_are_answered_in_order(service: Any) -> None:
    with connect(service) as client:
        client.sendall(asked(max_tokens=30, stream=True) + HEALTH + asked("Connection: close"))
        received = all_answers(client)
    assert received.count(b"HTTP/1.1 200 OK") == 3
    assert received.index(b"[DONE]") < received.index(b'{"status":"ok"}') < received.index(b'"usage":{')


def test_many_of_them_wait_unread_and_are_answered_one_by_one(service: Any) -> None:
    with connect(service) as client:
        client.sendall(asked() + HEALTH * 69 + HEALTH[:-2] + b"Connection: close\r\n\r\n")
        received = all_answers(client)
    assert received.count(b"HTTP/1.1 200 OK") == 71
    assert received.lower().count(b"connection: close") == 1


def test_who_leaves_with_requests_on_the_way_is_noticed(service: Any) -> None:
    with connect(service) as client:
        client.sendall(asked(max_tokens=4000, stream=True) + asked(max_tokens=4000))
        assert client.recv(10)
        assert service.client.num_open == 1
    wait_for(lambda: service.client.num_open == 0)
    assert service.engine.stats.num_steps < 4000


def test_the_answer_to_head_is_a_header(service: Any) -> None:
    with connect(service) as client:
        client.sendall(HEALTH.replace(b"GET", b"HEAD"))
        found, body = answer(client, "HEAD")
        assert (found.status, body) == (405, b"") and int(found.getheader("content-length", "0")) > 0
        client.sendall(HEALTH)
        assert answer(client, "GET")[1] == b'{"status":"ok"}'


@pytest.mark.parametrize("stream", [False, True])
def test_an_older_client_is_answered_without_chunks(service: Any, stream: bool) -> None:
    with connect(service) as client:
        client.sendall(asked(version="1.0", stream=stream).replace(b"Host: localhost\r\n", b""))
        head, _, body = all_answers(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head.lower() and b"chunked" not in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)


def test_a_client_that_wants_to_be_asked_for_its_body_is(service: Any) -> None:
    head, _, body = asked("Expect: 100-continue").partition(b"\r\n\r\n")
    with connect(service) as client:
        client.sendall(head + b"\r\n\r\n")
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert answer(client)[0].status == 200
        client.sendall(head.replace(b"application/json", b"text/plain") + b"\r\n\r\n")  # refused without its body
        assert answer(client)[0].status == 415


def test_a_wish_for_another_protocol_is_not_heard(service: Any) -> None:
    """Some clients offer HTTP/2 with every request, and send its body as ever."""
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA")
    sent = asked(*upgrade)
    with connect(service) as client:
        for parts in ([sent], [sent[:-10], sent[-10:]], [asked(*upgrade, "Transfer-Encoding: chunked")], [asked()]):
            for data in parts:
                client.sendall(data)
                time.sleep(0.05)
            found, body = answer(client)
            assert found.status == 200 and json.loads(body)["choices"]
        client.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(client)[0].status == 404


def test_no_body_is_read_after_the_last_request(service: Any) -> None:
    with connect(service) as client:
        client.sendall(asked("Connection: close") + b"\r\n\0garbage" + asked())
        received = all_answers(client)
    assert received.count(b"HTTP/1.1 ") == received.lower().count(b"connection: close") == 1 and b" 200 " in received


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA b: c\r\n\r\n",
        b"GET /hea\xc3\xa4lth HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_what_is_not_http_is_said_to_be(service: Any, sent: bytes) -> None:
    with connect(service) as client:
        client.sendall(sent)
        head, _, body = all_answers(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"connection: close" in head.lower()
    assert body == b"Invalid HTTP request received."


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])  # the second is refused without its body
@pytest.mark.parametrize("first", ["POST /v1/completions", "POST /nowhere", "GET /health"])
def test_a_body_that_breaks_off_has_one_answer(
    service: Any, caplog: pytest.LogCaptureFixture, first: str, kind: str
) -> None:
    head = f"{first} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(service) as client:
        client.sendall(head.encode() + b"no number\r\n")
        received = all_answers(client)
    assert received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1 ") == 1
    wait_for(lambda: not service.server.server_state.tasks)
    assert "Traceback" not in caplog.text and "ASGI callable" not in caplog.text


def test_a_header_has_a_size(service: Any) -> None:
    line = b"X-Filler: " + b"x" * 1000 + b"\r\n"
    with connect(service) as client:
        client.sendall(HEALTH[:-2] + line * (MAX_HEADER // len(line) - 1) + b"\r\n")
        assert answer(client, "GET")[0].status == 200
        client.sendall(HEALTH[:-2])
        refused = b""
        for _ in range(400):
            try:
                client.sendall(line)
            except OSError:
                break
        try:
            refused = client.recv(100)
        except ConnectionResetError:  # the answer was dropped with what the server did not read
            refused = b" 400 "
        assert b" 400 " in refused


@pytest.mark.parametrize("filler", [b"X-Filler: " + b"x" * 120_000, b"X-Filler:" + b" " * 120_000 + b"x"])
@pytest.mark.parametrize("end", [b"\r\n", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: y\r\n"])
def test_a_header_or_trailer_that_comes_at_once_has_a_size_too(service: Any, filler: bytes, end: bytes) -> None:
    with connect(service) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        if end.startswith(b"\r\n"):
            client.sendall(HEALTH[:-2] + filler + b"\r\n\r\n")
        else:
            client.sendall(HEALTH[:-2].replace(b"GET", b"POST") + end + filler + b"\r\n\r\n")
        try:
            received = all_answers(client)
        except ConnectionResetError:  # the answer was dropped with what the server did not read
            received = b"HTTP/1.1 400 "
    assert received.startswith(b"HTTP/1.1 40") and received.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("length", [0, 5, 40])
def test_a_body_with_two_ends_has_one_answer_and_no_next_request(service: Any, length: int) -> None:
    """Where one reader goes by the length and another by the chunks, a hidden request is between the two ends."""
    both = f"Content-Length: {length}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode()
    with connect(service) as client:
        client.sendall(HEALTH[:-2].replace(b"GET", b"POST") + both + HEALTH)
        received = all_answers(client)
    assert received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in received.lower()


def test_a_request_may_follow_the_end_of_a_long_body(service: Any) -> None:
    """Its header is not taken for one of as many bytes as came with it."""
    with connect(service) as client:
        client.sendall(asked(prompt="a" * 100_000).replace(TEXT.encode(), b"/tokenize") + HEALTH[:20])
        assert answer(client)[0].status == 400  # /tokenize takes no max_tokens
        client.sendall(HEALTH[20:])
        assert answer(client, "GET")[0].status == 200


def test_hostile_connections(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    url, tally = httpx.URL(service.url), Tally("connections")
    cases = list(connection_cases(seed=3, num=66))
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda case: receive_all(url.host, url.port, case.parts, case.leaves), cases)
        for case, received in zip(cases, found, strict=True):
            outcome, told = ("hang", "") if received is None else outcome_of_connection(received)
            tally.add(outcome, case.name, told)
    tally.check()
    assert tally.counts["ok"] > 5 and tally.counts["clean"] > 10
    assert "Traceback" not in caplog.text and "a connection broke" not in caplog.text
    wait_for(lambda: service.client.num_open == 0 and not service.server.server_state.connections)
