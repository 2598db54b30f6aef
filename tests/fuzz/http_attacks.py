"""Many hostile clients at once, as a program of its own, so that it does not share Python's lock with what measures it.

    python tests/fuzz/http_attacks.py HOST PORT ATTACK SECONDS ADDRESS     runs one attack, prints its outcomes as JSON

Each attack is a number of clients that send the same kind of request again and again. `ADDRESS` is the address that
they connect from (127.0.0.2 is another client than 127.0.0.1).
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MB = 1 << 20
WORDS = "The quick brown fox jumps over the lazy dog. "


def post(path: str, content: bytes, *, close: bool = True) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    return "\r\n".join([*lines, *["Connection: close"] * close, "", ""]).encode() + content


def asks(path: str, **body: Any) -> bytes:
    return post(path, json.dumps(body).encode())


# -- requests: sent whole, read to the end --------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hi"}]
LONG_TEXTS = {"max_tokens": 4000, "ignore_eos": True}
SLOW_SCHEMA = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "pattern": f"([a-z]{{1,{50 + i}}}|[0-9]+)*"} for i in range(200)},
}
REQUESTS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "texts of 3.9 MB to tokenize": (12, lambda: asks("/tokenize", prompt=WORDS * (39 * MB // 10 // len(WORDS)))),
    "texts of 1 MB to tokenize": (12, lambda: asks("/tokenize", prompt="1234567890" * (MB // 10))),
    "tokenize flood": (8, lambda: asks("/tokenize", prompt="a" * MB)),
    "64 long prompts each": (7, lambda: asks(TEXT, prompt=[WORDS * 1300] * 64)),
    "prompts of 3.9 MB": (12, lambda: asks(TEXT, prompt=" " * (39 * MB // 10))),
    "prompts just too long": (32, lambda: asks(TEXT, prompt=WORDS * 220)),
    "prompts of 15 KB, many": (64, lambda: asks(TEXT, prompt="7" * 15_000)),
    "a key of 3 MB": (4, lambda: asks(TEXT, **{"prompt": "a", "k" * (3 * MB): 1})),
    "300,000 keys": (6, lambda: asks(TEXT, prompt="a", logit_bias={str(i): 1 for i in range(300_000)})),
    "1.9 million ids": (8, lambda: post(TEXT, b'{"prompt": [' + b"1," * 1_900_000 + b"1]}")),
    "800,000 strings as ids": (8, lambda: asks("/detokenize", tokens=["x"] * 800_000)),
    "65,536 ids to detokenize": (16, lambda: asks("/detokenize", tokens=list(range(256)) * 256)),
    "a million arrays": (8, lambda: post(TEXT, b'{"prompt": [' + b"[]," * MB + b"[]]}")),
    "80,000 messages": (4, lambda: asks(CHAT, messages=[{"role": "user", "content": ""}] * 80_000)),
    "4,096 messages": (8, lambda: asks(CHAT, messages=[{"role": "user", "content": ""}] * 4_096, max_tokens=1)),
    "schemas of 200 patterns": (
        8,
        lambda: asks(
            CHAT,
            messages=HELLO,
            max_tokens=2,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SLOW_SCHEMA}},
        ),
    ),
    "log-probabilities of long texts": (
        2,
        lambda: asks(TEXT, prompt="a", n=4, logprobs=20, max_tokens=2000, ignore_eos=True),
    ),
    "scored prompts": (4, lambda: asks(TEXT, prompt=[[5] * 4000] * 8, echo=True, logprobs=20, max_tokens=0)),
    "bodies of 31 MB": (4, lambda: post(TEXT, b" " * (31 * MB))),
    "paths of nothing": (64, lambda: b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
    "metrics": (32, lambda: b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
    "texts for the whole queue": (80, lambda: asks(TEXT, prompt="a", **LONG_TEXTS)),
}


# -- connections: never quite whole ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ends: float

    @property
    def time_left(self) -> bool:
        return time.monotonic() < self.ends

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


async def slow_header(wire: Wire) -> None:
    await wire.send(b"GET / HTTP/1.1\r\n")
    while wire.time_left:
        await wire.send(b"X-a: b\r\n")
        await asyncio.sleep(0.5)


async def slow_body(wire: Wire) -> None:
    await wire.send(post(TEXT, b" " * MB)[:-MB])
    while wire.time_left:
        await wire.send(b" ")
        await asyncio.sleep(0.5)


async def says_nothing(wire: Wire) -> None:
    await asyncio.wait_for(wire.reader.read(), max(0.0, wire.ends - time.monotonic()))


async def connects_and_leaves(wire: Wire) -> None:
    wire.writer.transport.abort()


async def tiny_chunks(wire: Wire) -> None:
    await wire.send(post(TEXT, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
    while wire.time_left:
        await wire.send(b"1\r\n \r\n" * 2000)


async def never_reads(wire: Wire) -> None:
    await wire.send(asks("/tokenize", prompt="zq" * (MB // 4)))
    await asyncio.sleep(max(0.0, wire.ends - time.monotonic()))


async def reads_no_stream(wire: Wire) -> None:
    await wire.send(asks(TEXT, prompt="a", stream=True, logprobs=20, **LONG_TEXTS))
    await asyncio.sleep(max(0.0, wire.ends - time.monotonic()))


async def pipelines(wire: Wire) -> None:
    async def read() -> None:
        while await wire.reader.read(1 << 16):
            pass

    reading = asyncio.create_task(read())
    try:
        while wire.time_left:
            await wire.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
    finally:
        reading.cancel()


async def sends_noise(wire: Wire) -> None:
    await wire.send(random.randbytes(20_000))
    await wire.reader.read()


async def leaves_midway(wire: Wire) -> None:
    whole = asks("/tokenize", prompt=WORDS * 15_000)
    await wire.send(whole)
    wire.writer.transport.abort()


WIRES: dict[str, tuple[int, Callable[[Wire], Any]]] = {
    "headers a line at a time": (700, slow_header),
    "bodies a byte at a time": (700, slow_body),
    "connections that say nothing": (700, says_nothing),
    "connections that come and go": (50, connects_and_leaves),
    "bodies in tiny chunks": (16, tiny_chunks),
    "answers that are not read": (24, never_reads),
    "streams that are not read": (6, reads_no_stream),
    "pipelines of requests": (24, pipelines),
    "noise": (32, sends_noise),
    "clients that leave": (16, leaves_midway),
}
ATTACKS = (*REQUESTS, *WIRES)


# -- running one ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def connected(host: str, port: int, address: str, ends: float) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(host, port, local_addr=(address, 0), limit=MB)
    try:
        yield Wire(reader, writer, ends)
    finally:
        writer.transport.abort()


async def ask_again_and_again(
    host: str, port: int, address: str, ends: float, content: bytes, told: Counter[str]
) -> None:
    """Until the time is up. A status that was not read by then counts as no answer, not as a hang."""
    while time.monotonic() < ends:
        try:
            async with asyncio.timeout(max(0.1, ends - time.monotonic())):
                async with connected(host, port, address, ends) as wire:
                    with suppress(ConnectionError):  # refused before all of it was sent
                        await wire.send(content)
                    line = await wire.reader.readline()
                    told[line.split(b" ")[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"] += 1
                    while await wire.reader.read(1 << 16):
                        pass
        except (OSError, TimeoutError):
            told["cut"] += 1
            await asyncio.sleep(0.01)


async def connect_again_and_again(
    host: str, port: int, address: str, ends: float, act: Callable[[Wire], Any], told: Counter[str]
) -> None:
    while time.monotonic() < ends:
        try:
            async with asyncio.timeout(max(0.1, ends - time.monotonic())):
                async with connected(host, port, address, ends) as wire:
                    await act(wire)
            told["left"] += 1
        except (OSError, TimeoutError):
            told["cut"] += 1
        await asyncio.sleep(0.01)


async def run(host: str, port: int, name: str, seconds: float, address: str) -> dict[str, int]:
    told: Counter[str] = Counter()
    content = REQUESTS[name][1]() if name in REQUESTS else b""
    ends = time.monotonic() + seconds
    if name in REQUESTS:
        num = REQUESTS[name][0]
        work = [ask_again_and_again(host, port, address, ends, content, told) for _ in range(num)]
    else:
        num, act = WIRES[name]
        work = [connect_again_and_again(host, port, address, ends, act, told) for _ in range(num)]
    await asyncio.gather(*work)
    return dict(told)


def main() -> None:
    host, port, name, seconds, address = sys.argv[1:]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
    print(json.dumps(asyncio.run(run(host, int(port), name, float(seconds), address))))


if __name__ == "__main__":
    main()
