"""Clients that connect and then do nothing, little, or too much; over real sockets."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
import h11  # noqa: E402
from serving import running, wait_for  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from shoestring.errors import UserError  # noqa: E402
from shoestring.serve.http.connection import ConnectionLimits, LimitedConnection, _Http  # noqa: E402
from shoestring.serve.http.middleware import is_known_host, network_of  # noqa: E402
from shoestring.serve.http.server import ServeOptions  # noqa: E402

TEXT = "/v1/completions"
HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
ASKED = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(ASKED) + ASKED


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    times = {"header_timeout_s": 0.4, "body_timeout_s": 0.6, "read_timeout_s": 0.8}
    with running(max_connections=6, max_requests=6, max_queue=4, **times) as started:
        yield started


def connect(service: Any) -> socket.socket:
    url = httpx.URL(service.url)
    return socket.create_connection((url.host, url.port), timeout=30)


def read_all(client: socket.socket) -> bytes:
    """Until the server closes; a reset counts as closed."""
    received = b""
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def status(client: socket.socket) -> int:
    return int(client.recv(4096).split(b" ", 2)[1])


@pytest.mark.parametrize("sent", [b"", b"G", HEAD, WHOLE + b"GET /hea"])
def test_a_header_that_does_not_come_ends_the_connection(service: Any, sent: bytes) -> None:
    with connect(service) as client:
        began = time.monotonic()
        client.sendall(sent)
        received = read_all(client)
        assert 0.3 < time.monotonic() - began < 20
    assert received.count(b"HTTP/1.1 200") == sent.count(ASKED)


def test_a_header_byte_by_byte_gains_no_time(service: Any) -> None:
    with connect(service) as client:
        began = time.monotonic()
        try:
            for byte in HEAD * 3:
                client.sendall(bytes([byte]))
                time.sleep(0.02)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert time.monotonic() - began < 6 and read_all(client) == b""


def test_a_body_that_does_not_come_is_a_408(service: Any) -> None:
    with connect(service) as client:
        client.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        received = read_all(client)
    assert b" 408 " in received and b"body_timeout" in received and b"0.6" not in received


def test_a_body_after_the_answer_does_not_hold_the_connection(service: Any) -> None:
    with connect(service) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert status(client) == 200
        began = time.monotonic()
        try:
            while time.monotonic() - began < 20:
                client.sendall(b"x")
                time.sleep(0.05)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert time.monotonic() - began < 20


def test_a_client_that_does_not_read_is_disconnected(service: Any) -> None:
    content = json.dumps({"prompt": "zq" * (1 << 19)}).encode()  # an answer that fits no buffer
    url = httpx.URL(service.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect((url.host, url.port))
        client.sendall(
            HEAD.replace(TEXT.encode(), b"/tokenize") + b"Content-Length: %d\r\n\r\n" % len(content) + content
        )
        assert status(client) == 200
        wait_for(lambda: not service.server.server_state.connections, 60)


def test_newcomers_push_out_those_that_wait_the_longest() -> None:
    with running(max_connections=6, max_requests=6, header_timeout_s=300.0, body_timeout_s=300.0) as service:
        idle = [connect(service) for _ in range(6)]
        slow = connect(service)
        slow.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        for _ in range(3):
            assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}
        assert all(read_all(client) == b"" for client in idle[:2])  # long before their time-outs are over
        for client in (idle[-1], slow):
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
        for client in (*idle, slow):
            client.close()


def test_where_all_connections_are_at_work_a_newcomer_gets_a_503(service: Any) -> None:
    content = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "n": 1, "stream": True}).encode()
    busy = []
    for _ in range(6):
        client = connect(service)
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        assert status(client) == 200
        busy.append(client)
    refused = httpx.get(f"{service.url}/health")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"] == "2"
    for client in busy:
        client.close()
    wait_for(lambda: service.client.num_open == 0)
    assert httpx.get(f"{service.url}/health").status_code == 200


@pytest.mark.parametrize("behind", [b"", b"GET /health HTTP/1.1\r\n"])
def test_a_client_that_leaves_is_noticed_after_a_large_body_too(behind: bytes) -> None:
    """uvicorn does not read on where more than 64 KiB of a body came at once, until the application asks for more, nor
    where a next request waits."""

    async def leaves() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["more_body"]:
                pass
            read.set()
            await scope["exchange"].gone
            noticed.set()

        read, noticed = asyncio.Event(), asyncio.Event()
        config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None)
        config.load()
        connection = LimitedConnection(ConnectionLimits(), {}, config=config, server_state=ServerState(), app_state={})
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, ours)
        # Given by hand, because a socket would cut the parts as it likes.
        connection.data_received(HEAD + b"Content-Length: 180000\r\n\r\n" + b" " * 1000)
        await asyncio.sleep(0.05)  # the application has asked for the rest
        connection.data_received(b" " * 179_000 + behind)
        await read.wait()
        theirs.close()
        await asyncio.wait_for(noticed.wait(), 60)

    asyncio.run(leaves())


@pytest.mark.parametrize("size", [0, 300_000])
@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_leaves_with_an_unread_request_behind_ends_its_text(
    service: Any, size: int, resets: bool
) -> None:
    asked = json.dumps({"prompt": "a", "max_tokens": 500, "ignore_eos": True, "temperature": 0}).encode()
    head = HEAD + b"Content-Length: %d\r\n\r\n"
    step = service.engine.step

    def slowly() -> Any:
        time.sleep(0.05)
        return step()

    service.engine.step = slowly
    try:
        client = connect(service)
        client.setblocking(False)
        with suppress(BlockingIOError):
            client.sendall(head % len(asked) + asked + head % (len(ASKED) + size) + b" " * size + ASKED)
        wait_for(lambda: service.client.num_open == 1)
        before = service.engine.stats.num_new_tokens
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        wait_for(lambda: service.client.num_open == 0)
        assert service.engine.stats.num_new_tokens - before < 400
    finally:
        service.engine.step = step


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """As many bytes as the path says; none of 0."""
    num = int(scope["path"][1:])
    if not num:
        await scope["exchange"].gone
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % num)]})
    await send({"type": "http.response.body", "body": bytes(num)})


class ByHand:
    """A connection on an event loop whose clock goes as the test says."""

    def __init__(self, limits: ConnectionLimits, opened: dict[LimitedConnection, None] | None = None) -> None:
        self.limits, self.loop, self.seconds = limits, asyncio.get_running_loop(), 0.0
        config = uvicorn.Config(answer, lifespan="off", ws="none", log_config=None, timeout_keep_alive=5)
        config.load()
        given = {"config": config, "server_state": ServerState(), "app_state": {}}
        self.connection = LimitedConnection(limits, {} if opened is None else opened, **given)  # type: ignore[arg-type]
        self.received, self.closed = 0, False

    async def open(self) -> ByHand:
        self.loop.time = lambda: self.seconds  # type: ignore[method-assign]
        ours, self.client = socket.socketpair()
        self.client.setblocking(False)
        await self.loop.connect_accepted_socket(lambda: self.connection, ours)
        return self

    async def send(self, data: bytes) -> None:
        self.client.sendall(data)
        await self.later(0)

    async def read(self) -> None:
        """What there is."""
        with suppress(BlockingIOError):
            while part := self.client.recv(1 << 20):
                self.received += len(part)
            self.closed = True
        await self.later(0)

    async def later(self, seconds: float) -> None:
        self.seconds += seconds
        for _ in range(20):
            await asyncio.sleep(0)


def get(num_bytes: int) -> bytes:
    return b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % num_bytes


def test_a_client_that_reads_slowly_is_not_one_that_reads_nothing() -> None:
    async def reads(num_bytes: int) -> ByHand:
        hand = await ByHand(ConnectionLimits(read_timeout_s=60)).open()
        await hand.send(get(1 << 22))
        while hand.received <= num_bytes and not hand.closed:
            await hand.later(50)
            await hand.read()
        await hand.later(61)
        await hand.later(61)
        await hand.read()
        return hand

    assert asyncio.run(reads(1 << 22)).received > 1 << 22
    stopped = asyncio.run(reads(1 << 21))
    assert 1 << 21 < stopped.received < 1 << 22 and stopped.closed


def test_a_complete_answer_must_be_read_too() -> None:
    async def asks() -> None:
        opened: dict[LimitedConnection, None] = {}
        hand = await ByHand(ConnectionLimits(read_timeout_s=60), opened).open()
        while not hand.connection.transport.get_write_buffer_size():  # little enough for uvicorn to go on
            await hand.send(get(30_000))
        assert not hand.connection.flow.write_paused
        await hand.later(6)  # no next request: the connection ends when all is read
        await hand.later(53)
        assert len(opened) == 1
        await hand.later(2)
        assert not opened

    asyncio.run(asks())


def test_a_next_request_is_computed_though_the_answer_before_it_was_read_late() -> None:
    async def asks(num_before: int | None) -> int:
        hand, num = await ByHand(ConnectionLimits(read_timeout_s=60)).open(), 0
        while not hand.connection.transport.get_write_buffer_size():
            await hand.send(get(30_000) + (get(0) if num == num_before else b""))
            num += 1
        while hand.connection.transport.get_write_buffer_size():
            await hand.read()
        await hand.later(61 if num_before is not None else 0)
        await hand.read()
        assert not hand.closed
        return num - 1

    num_before = asyncio.run(asks(None))
    assert asyncio.run(asks(num_before)) == num_before


@pytest.mark.parametrize("paused", [False, True])
def test_a_next_header_has_its_time_though_the_answer_before_it_was_read_late(paused: bool) -> None:
    async def begins() -> None:
        hand = await ByHand(ConnectionLimits(header_timeout_s=10)).open()
        while not hand.connection.transport.get_write_buffer_size():  # the answer fits no buffer
            await hand.send(get(1 << 20 if paused else 30_000))
        assert hand.connection.flow.write_paused == paused
        if paused:
            await hand.send(get(1)[:9])
        while hand.connection.transport.get_write_buffer_size():
            await hand.read()
        if not paused:
            await hand.send(get(1)[:9])
        await hand.read()
        await hand.later(9)
        await hand.read()
        assert not hand.closed
        await hand.later(2)
        await hand.read()
        assert hand.closed

    asyncio.run(begins())


def test_a_connection_that_was_just_answered_is_not_the_one_that_waits_the_longest() -> None:
    async def newcomer() -> list[bool]:
        opened: dict[LimitedConnection, None] = {}
        limits = ConnectionLimits(max_connections=2)
        answered, idle = [await ByHand(limits, opened).open() for _ in range(2)]
        await answered.send(get(1))
        await ByHand(limits, opened).open()
        return [hand.connection.transport.is_closing() for hand in (answered, idle)]

    assert asyncio.run(newcomer()) == [False, True]


def test_a_body_in_tiny_chunks_is_refused(service: Any) -> None:
    with connect(service) as client:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(b"1\r\n \r\n" * 20_000)
        assert b" 400 " in read_all(client)
    with connect(service) as client:  # some are fine
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        client.sendall(b"1\r\n \r\n" * 200 + b"%x\r\n%s\r\n0\r\n\r\n" % (len(ASKED), ASKED))
        assert status(client) == 200


@pytest.mark.parametrize("form", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n"])
def test_a_body_may_come_in_tiny_parts_of_the_network(form: bytes) -> None:
    """They are the network's, not the client's doing."""
    http = _Http(h11.SERVER)
    http.receive_data(HEAD + form)
    assert isinstance(http.next_event(), h11.Request)
    for _ in range(1000):
        http.receive_data(b" ")
        assert http.next_event().data == b" "
    http.receive_data(b"\r\n0\r\n\r\n" if b"chunked" in form else b"")
    assert isinstance(http.next_event(), h11.EndOfMessage)


def test_garbage_behind_a_request_ends_only_its_connection(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    streamed = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True}).encode()
    for garbage in (b"\0\xff" * 50, b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
        with connect(service) as client:
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(streamed) + streamed + garbage)
            assert status(client) in (200, 400)
            read_all(client)
    assert "Traceback" not in caplog.text and "Fatal error" not in caplog.text
    assert httpx.get(f"{service.url}/health").status_code == 200


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *((name, True) for name in ("localhost", "LocalHost:8000", "a.localhost", "127.0.0.1", "192.168.1.7:8000")),
        *((name, True) for name in ("[::1]:8000", "[fe80::1]", "llm.example", "llm.example:81", "llm.example.", "")),
        *((name, False) for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil")),
        *((name, False) for name in ("evil.example:80:80", "llm.example.evil", "[::1", "x@localhost", "1", "ä", "\0")),
    ],
)
def test_a_name_is_known_or_not(host: str, known: bool) -> None:
    assert is_known_host(host, ("llm.example",)) == known


def test_all_addresses_of_one_client_are_one() -> None:
    assert network_of("10.0.0.1") == network_of("::ffff:10.0.0.1") != network_of("10.0.0.2")
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2%eth0") != network_of("2001:db8:0:1::1")
    assert network_of("x" * 9000) == "x" * 64


def test_without_a_key_a_foreign_name_is_refused() -> None:
    """A page whose own name resolves to this machine (DNS rebinding) reads nothing."""
    evil = {"Host": "evil.example"}
    with running(allow_hosts=("Good.example:80",)) as service:
        for path in ("/", "/v1/models", "/metrics", "/health"):
            refused = httpx.get(service.url + path, headers=evil)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "host_not_allowed"
        assert httpx.post(service.url + TEXT, json={"prompt": "a"}, headers=evil).status_code == 403
        assert httpx.get(f"{service.url}/v1/models", headers={"Host": "good.example:8000"}).status_code == 200
    with running(api_keys=("k",)) as service:
        assert httpx.get(f"{service.url}/health", headers=evil).status_code == 200
        key = {"Authorization": "Bearer k"}
        assert httpx.get(f"{service.url}/v1/models", headers=evil | key).status_code == 200


def test_bad_limits_are_said_at_once() -> None:
    for options, words in (
        ({"max_connections": 0}, "max_connections=0 is not allowed; give 1 or more"),
        ({"header_timeout_s": 0}, "header_timeout_s=0"),
        ({"allow_hosts": ("https://x.example/",)}, "without http://"),
        ({"allow_origins": ("",)}, r"allow_origins=\('',\) is not allowed; give sites such as https://app"),
        ({"allow_origins": ("https://x.example", "https://x.example/")}, "without a path or / at the end"),
        ({"drain_s": math.inf}, r"drain_s=inf is not allowed; give 0 or more and at most 31536000 \(a year\)"),
        ({"drain_s": 1e30}, "drain_s=1e"),
        ({"max_body_mb": math.inf}, "max_body_mb=inf is not allowed; give more than 0, at most 1e"),
        ({"follow": "localhost:0"}, "nobody publishes at port 0"),
    ):
        with pytest.raises(UserError, match=words):
            ServeOptions(**options)  # type: ignore[arg-type]
    ServeOptions(allow_origins=("*", "null", "http://localhost:3000", "https://x.example", "chrome-extension://abc"))
