"""Hostile sessions of live weights: followers that attack a publisher, and publishers that attack a follower.

`attack_publisher` and `attack_follower` play one session, drawn from its seed. A follower is attacked with the real
publisher's code, changed in one place, or with a connection between the two. What a session may end in stands in
outcomes.py; weights of a hostile publisher that would be taken over are a traceback.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
from outcomes import Outcome

from shoestring.errors import UserError
from shoestring.model import Decoder
from shoestring.serve.engine.weight_pull import WeightPull
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.state.boxes import Box
from shoestring.state.reshard import exchange
from shoestring.state.reshard.exchange import Channel, Publisher, SnapshotServer
from shoestring.state.reshard.layouts import BoxLayout, MeshLayout, shard

Address = tuple[str, int]
STALL_S = 0.3  # of the followers that are attacked: silence ends a session

# Values that stand where others are expected.
ODD: list[Any] = [
    *(None, True, -1, 0, 7, 2**39, 2**63, 1e300, 0.5, "", "é", "\u0000", "x" * 3000, [], [[]], {}, {"a": 1}),
    *([1, 2], [-1, 3], ["a", "b"], [None], [2**62, 2**62], {"name": "int_asym"}, {"name": 3}, {"name": "slorb"}),
]
FORMATS: list[Any] = [
    {"name": "int_asym", "bits": 4, "group": 32},
    *({"name": "int_asym", "bits": 4, "group": g} for g in (0, 1, 7, -32, 2**40)),
    *({"name": "int_asym", "bits": b} for b in (0, 5, 64)),
    {"name": "float_asym", "table": "nf3", "scales": 2, "group": 32},
    {"name": "float_asym", "table": "nf9"},
    {"name": "fp8", "group": 128},
    {"name": "sparse24"},
    {"name": "stacked", "first": {"name": "sparse24"}, "second": {"name": "int_asym", "bits": 4, "group": 16}},
    {"name": "stacked", "first": {"name": "stacked"}, "second": 3},
    {"name": "slorb", "first": {"name": "sparse24"}, "block_inputs": 0},
    {"name": "slorb", "first": {"name": "sparse24"}, "block_inputs": 16},
    {"name": "dense"},
]


# -- against a publisher -----------------------------------------------------------------------------------------


def logged_in(address: Address) -> Channel:
    """A follower that knows the key and goes on as it likes."""
    publisher = Publisher(address, 10.0)
    publisher._channel.within(20.0)
    return publisher._channel


def ask(address: Address, request: Any) -> dict[str, Any]:
    """The publisher's first answer; errors that it says are UserErrors."""
    channel = logged_in(address)
    try:
        channel.send(request)
        return channel.receive(exchange.MOST_HEADER)
    finally:
        channel.close()


def _raw(address: Address, data: bytes, waits: bool = True) -> None:
    with socket.create_connection(address, timeout=20) as stranger, suppress(ConnectionError):
        stranger.sendall(data)
        while waits and stranger.recv(4096):
            pass


def _framed(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<4sI", b"shsw", len(text) if length is None else length) + text


def _slow(draw: random.Random, address: Address) -> None:
    """A byte now and then, until the publisher has had enough."""
    with socket.create_connection(address, timeout=20) as stranger, suppress(ConnectionError):
        for byte in _framed(b'{"nonce": "' + b"x" * 200):
            stranger.sendall(bytes([byte]))
            time.sleep(draw.uniform(0.0, 0.02))


def _odd_login(draw: random.Random, address: Address) -> None:
    hello: Any = {"nonce": "n", "proof": "é"}
    hello[draw.choice(("nonce", "proof"))] = draw.choice(ODD)
    if draw.random() < 0.2:
        hello = draw.choice(ODD)
    channel = Channel(socket.create_connection(address, timeout=20), "the publisher", 20.0)
    try:
        channel.receive(exchange.MOST_PROOF)
        channel.send(hello)
        channel.receive(exchange.MOST_PROOF)
    finally:
        channel.close()
    raise AssertionError(f"let in with {hello!r}")


def _replayed(draw: random.Random, address: Address) -> None:
    """The proof of another connection."""
    told: list[dict[str, Any]] = []

    class Recording(Channel):
        def send(self, message: Any) -> None:
            told.append(message)
            super().send(message)

    with _channels_of_this_thread(Recording):
        Publisher(address, 10.0).close()
    hello = next(m for m in told if "proof" in m and "nonce" in m)
    channel = Channel(socket.create_connection(address, timeout=20), "the publisher", 20.0)
    try:
        channel.receive(exchange.MOST_PROOF)
        channel.send(hello)
        channel.receive(exchange.MOST_PROOF)
    finally:
        channel.close()
    raise AssertionError("let in with an old proof")


_lock = threading.Lock()


@contextmanager
def _channels_of_this_thread(kind: type[Channel]) -> Iterator[None]:
    was, mine = exchange.Channel, threading.get_ident()
    with _lock:
        exchange.Channel = lambda *given: (kind if threading.get_ident() == mine else was)(*given)  # type: ignore
        try:
            yield
        finally:
            exchange.Channel = was  # type: ignore[misc]


def _odd_get(draw: random.Random, address: Address) -> None:
    piece: list[Any] = ["blocks.0.mlp.up.weight", [0, 0], [128, 64], 0]
    form: Any = {"dtype": "F32", "format": draw.choice(FORMATS) if draw.random() < 0.6 else None}
    request: Any = {"op": "get", "step": 2, "digest": "", "pieces": [piece], "forms": [form]}
    for _ in range(draw.choice((0, 1, 1, 2))):
        place = draw.randrange(7)
        odd = draw.choice(ODD)
        if place < 4:
            piece[place] = odd
        elif place == 4:
            request[draw.choice(("op", "step", "digest", "pieces", "forms"))] = odd
        elif place == 5 and isinstance(form, dict):
            form[draw.choice(("dtype", "format"))] = odd
        else:
            start, stop = draw.randrange(140), draw.randrange(140)
            piece[1], piece[2] = [start, draw.choice((0, 3, 32))], [stop, draw.choice((0, 5, 32, 64, 65))]
    ask(address, request)


def _leaves(draw: random.Random, address: Address) -> None:
    """Asks for everything, and goes."""
    channel = logged_in(address)
    rows = [["embed.weight", [0, 0], [96, 64], 0]] * draw.randrange(1, 2000)
    channel.send({"op": "get", "step": 2, "pieces": rows, "forms": [{"dtype": "F32"}]})
    channel.close()


def _odd_wait(draw: random.Random, address: Address) -> None:
    ask(address, {"op": "wait", draw.choice(("step", "turns", "seconds")): draw.choice(ODD[1:])})


def _odd_frames(draw: random.Random, address: Address) -> None:
    text = draw.choice(
        [b"", b"{", b"[" * 4000, b"\xff\xfe", b"null", b'{"error": "x"}', b'{"nonce": 1, "nonce": 2}', b"1" * 4000]
    )
    _raw(address, _framed(text, draw.choice((None, None, 0, 2**31, 2**32 - 1))))


AGAINST_PUBLISHER: dict[str, Callable[[random.Random, Address], object]] = {
    "another protocol": lambda draw, address: _raw(address, draw.randbytes(draw.randrange(8, 3000))),
    "says nothing": lambda draw, address: _raw(address, b"", waits=False),
    "a byte now and then": _slow,
    "frames": _odd_frames,
    "proofs": _odd_login,
    "an old proof": _replayed,
    "requests": _odd_get,
    "waits": _odd_wait,
    "leaves in the middle": _leaves,
}


def attack_publisher(seed: int, address: Address) -> tuple[Outcome, str, str]:
    draw = random.Random(f"publish {seed}")
    name = list(AGAINST_PUBLISHER)[seed % len(AGAINST_PUBLISHER)]
    try:
        AGAINST_PUBLISHER[name](draw, address)
    except (OSError, UserError) as error:
        late = isinstance(error, TimeoutError)
        return "hang" if late else "clean", f"{name} {seed}", str(error)
    except AssertionError as error:
        return "traceback", f"{name} {seed}", str(error)
    return "ok", f"{name} {seed}", ""


# -- against a follower ------------------------------------------------------------------------------------------


class Hostile(SnapshotServer):
    """A publisher that knows the key, and sends what `attack` makes of its messages."""

    def __init__(self, snapshot: Any, catalogue: exchange.Catalogue, draw: random.Random, attack: str) -> None:
        super().__init__(("127.0.0.1", 0), catalogue)
        self.endpoints = [self.address]
        self.draw, self.attack = draw, attack
        if attack in FROM_THE_CATALOGUE:
            self._change_catalogue()
        self.publish(snapshot)

    def _change_catalogue(self) -> None:
        draw, told = self.draw, dict(self.catalogue.tensors)
        if self.attack == "ranks elsewhere":
            self.endpoints = [self.address, (draw.choice(("192.0.2.1", "example.org", "::2", "0.0.0.0")), 29600)]
        elif self.attack == "a run's name":
            self.catalogue = replace(self.catalogue, run=draw.choice(("x" * 5000, "a\nb", "\x1b[2J")))
        else:
            name = draw.choice(list(told))
            shape, dtype, _ = told[name]
            layout = draw.choice(
                [
                    MeshLayout((2,), (shard(0),)),
                    MeshLayout((1,), (shard(9),)),
                    MeshLayout((1,), (shard(0, 10**8),)),
                    MeshLayout((1,), (shard(0),), (5,)),
                    BoxLayout(((0, Box((0,) * len(shape), tuple(1 for _ in shape))),)),
                ]
            )
            changed = draw.choice([((*shape[::-1], 3), dtype, layout), (shape, dtype, layout)])
            self.catalogue = replace(self.catalogue, tensors={**told, name: changed})

    def _answer(self, channel: Channel, request: Any) -> None:
        if request.get("op") != "get":
            if self.attack == "what is newest":
                odd = {"step": 2, "digest": "d", "turns": 0}
                odd[self.draw.choice(list(odd))] = self.draw.choice([None, -1, [], {}, 1.5, {"a": 2}])
                channel.send({"newest": self.draw.choice([odd, 3, [1], "x"])})
            else:
                super()._answer(channel, request)
            return
        buckets = list(exchange._buckets(self._snapshot, request.list("pieces"), request.list("forms")))
        parts = [one for bucket in buckets for one in bucket]
        self.ATTACKS[self.attack](self, channel, parts)
        channel.send({"done": True})

    def _send(self, channel: Channel, parts: Any) -> None:
        if parts:
            channel.send({"parts": [row for row, _ in parts]})
            for _, t in parts:
                channel.send_bytes(t)

    def _some(self, channel: Channel, parts: Any) -> None:
        self._send(channel, [one for one in parts if self.draw.random() < 0.9][: len(parts) - 1])

    def _twice(self, channel: Channel, parts: Any) -> None:
        at, to = self.draw.sample(range(len(parts)), 2)
        parts[to] = parts[at]
        self._send(channel, parts)

    def _one_row(self, channel: Channel, parts: Any) -> None:
        at, field = self.draw.randrange(len(parts)), self.draw.randrange(5)
        row, t = parts[at]
        odd = self.draw.choice([odd for odd in ODD if odd != row[field]])
        parts[at] = [*row[:field], odd, *row[field + 1 :]][: self.draw.choice((5, 5, 4))], t
        self._send(channel, parts)

    def _header(self, channel: Channel, parts: Any) -> None:
        channel.send(self.draw.choice([{"parts": odd} for odd in ODD] + [{"parts": [odd]} for odd in ODD]))

    def _damage(self, channel: Channel, parts: Any) -> None:
        at = self.draw.choice([n for n, (_, t) in enumerate(parts) if t.numel()])
        row, t = parts[at]
        data = t.clone().reshape(-1).view(torch.uint8)
        data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        parts[at] = row, data
        self._send(channel, parts)

    def _short(self, channel: Channel, parts: Any) -> None:
        channel.send({"parts": [row for row, _ in parts]})
        for _, t in parts[: self.draw.randrange(len(parts))]:
            channel.send_bytes(t)
        raise ConnectionError("leaves")

    def _slowly(self, channel: Channel, parts: Any) -> None:
        data = _framed(b'{"parts": [' + b" " * 5000 + b"]}")
        with suppress(OSError):
            for byte in data:
                channel.sock.sendall(bytes([byte]))
                time.sleep(0.02)

    def _numbers(self, channel: Channel, parts: Any) -> None:
        floats = [n for n, (_, t) in enumerate(parts) if t.is_floating_point() and t.numel()]
        at = self.draw.choice(floats)
        row, t = parts[at]
        bad = self.draw.choice((float("nan"), float("inf"), float("-inf"), 3e38))
        t = t.clone()
        t.reshape(-1)[self.draw.randrange(t.numel())] = bad
        parts[at] = [*row[:4], exchange.zlib.crc32(exchange._bytes_of(t))], t
        self._send(channel, parts)

    ATTACKS: ClassVar[dict[str, Callable[[Hostile, Channel, Any], None]]] = {
        "ends at once": lambda self, channel, parts: None,
        "some of the parts": _some,
        "a part twice": _twice,
        "a row": _one_row,
        "a header": _header,
        "damaged": _damage,
        "too short": _short,
        "slow": _slowly,
        "not finite": _numbers,
    }


FROM_THE_CATALOGUE = ("ranks elsewhere", "a run's name", "layouts")
BETWEEN = ("relayed", "without the key", "an old session")
AGAINST_FOLLOWER = (*Hostile.ATTACKS, *FROM_THE_CATALOGUE, "what is newest", *BETWEEN)


@contextmanager
def relay(address: Address) -> Iterator[Address]:
    """A port whose connections are handed on, byte for byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pump(a: socket.socket, b: socket.socket) -> None:
            with suppress(OSError):
                while data := a.recv(65536):
                    b.sendall(data)
                b.shutdown(socket.SHUT_WR)

        def accept() -> None:
            with suppress(OSError):
                one, _ = listener.accept()
                two = socket.create_connection(address)
                threads = [threading.Thread(target=pump, args=ends, daemon=True) for ends in ((one, two), (two, one))]
                for thread in threads:
                    thread.start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()


@contextmanager
def recorded(address: Address, target: WeightTarget) -> Iterator[Address]:
    """A port that says again what a publisher has said to another follower."""
    said = bytearray()

    class Listening(Channel):
        def _read(self, into: Any) -> Any:
            said.extend(got := super()._read(into))
            return got

    with _channels_of_this_thread(Listening):
        pull = WeightPull(address, target, timeout_s=10.0)
    pull.pull(2)
    pull.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                one, _ = listener.accept()
                one.sendall(said)
                while one.recv(65536):
                    pass

        threading.Thread(target=answer, daemon=True).start()
        yield listener.getsockname()


def attack_follower(seed: int, honest: SnapshotServer, served: Decoder, key: str) -> tuple[Outcome, str, str]:
    """One session of a hostile publisher; `honest`: the real one, which knows the key."""
    draw = random.Random(f"follow {seed}")
    name = AGAINST_FOLLOWER[seed % len(AGAINST_FOLLOWER)]
    target = WeightTarget(served)
    hostile = None
    try:
        if name == "relayed":
            with relay(honest.address) as address:
                _follow(address, target)
        elif name == "an old session":
            with recorded(honest.address, target) as address:
                _follow(address, target)
        else:
            hostile = Hostile(honest._snapshot, honest.catalogue, draw, name if name not in BETWEEN else "ends at once")
            if name == "without the key":
                hostile.key = draw.choice((b"", b"another", key.encode() + b" "))
                hostile._log_in = lambda channel: _pretend(hostile, channel)  # type: ignore[method-assign, arg-type]
            _follow(hostile.address, target)
    except (OSError, UserError) as error:
        return "clean", f"{name} {seed}", str(error)
    except Exception as error:
        return "traceback", f"{name} {seed}", repr(error)
    finally:
        if hostile is not None:
            hostile.close()
    return "traceback", f"{name} {seed}", "the weights would have been taken over"


def _follow(address: Address, target: WeightTarget) -> None:
    """As the server's follower does, up to the engine."""
    pull = WeightPull(address, target, timeout_s=STALL_S)
    try:
        found = pull.newest()
        assert found is not None
        target.prepare(pull.pull(found.step)[0])
    finally:
        pull.close()


def _pretend(server: SnapshotServer, channel: Channel) -> None:
    """A publisher that lets everybody in, and proves what it can."""
    channel.send({"protocol": exchange.PROTOCOL, "challenge": "0" * 32})
    hello = channel.receive()
    told = ("0" * 32, hello["nonce"]), channel.ends()
    channel.send({"proof": exchange._proof(server.key, "publisher", *told).decode()})
    channel.send({**server.catalogue.to_json(), "endpoints": server.endpoints})
