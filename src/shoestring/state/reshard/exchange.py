"""Weights between two jobs, over TCP: a publisher keeps its newest snapshot, and followers pull the boxes they need.

Pulling keeps the two apart: a follower that is dead, slow or absent costs the publisher nothing, and one that joins
late gets the newest snapshot. Every rank of the publisher answers for its own shards; the first one tells followers
where the others are. A follower plans with the layouts it is given (plan.py) which rank to ask for what.

A message is a length, a JSON object, and the raw bytes that the object announces, with their CRC-32. Nothing is
unpickled. A follower proves that it knows the key (SHOESTRING_PUBLISH_KEY on both sides; empty by default) by an HMAC
over a random challenge; weights are not encrypted, so the address should be one of a trusted network.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoestring.errors import UserError, shown
from shoestring.json_files import Fields, parse_json
from shoestring.state.boxes import Box
from shoestring.state.files import DTYPE_NAMES, DTYPES
from shoestring.state.reshard.layouts import Layout
from shoestring.state.reshard.plan import layout_from_json, layout_to_json

KEY = "SHOESTRING_PUBLISH_KEY"
PROTOCOL = 3
MOST_HEADER = 1 << 26  # bytes of a JSON object
MOST_FOLLOWERS = 64
BUCKET = 64 << 20
IDLE_S = 600.0  # a follower that asks nothing for so long is gone
MOST_PROOF, PROOF_S = 1 << 12, 10.0  # bytes and seconds for a stranger to prove that it knows the key
log = logging.getLogger("shoestring.publish")


class Gone(UserError):
    """The snapshot that was asked for has been replaced by a newer one."""


# -- messages ---------------------------------------------------------------------------------------------------


class Channel:
    """JSON objects and raw bytes over a socket. Errors of the network are OSErrors, errors of the peer UserErrors."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock, self.peer = sock, peer
        self.pulled = ""  # the digest of what this follower has pulled last
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, header: Mapping[str, Any], payload: Sequence[Tensor] = ()) -> None:
        views = [t.contiguous().reshape(-1).view(torch.uint8).numpy().data for t in payload]
        body = dict(header)
        if views:
            crc = 0
            for view in views:
                crc = zlib.crc32(view, crc)
            body |= {"num_bytes": sum(len(v) for v in views), "crc": crc}
        text = json.dumps(body).encode()
        self.sock.sendall(struct.pack("<4sI", b"shsw", len(text)) + text)
        for view in views:
            self.sock.sendall(view)

    def receive(self, most: int = MOST_HEADER) -> dict[str, Any]:
        """A JSON object of at most so many bytes."""
        magic, length = struct.unpack("<4sI", self._read(8))
        if magic != b"shsw" or length > most:
            raise UserError(f"{self.peer} does not speak this protocol; is it the address of a publishing run?")
        header = parse_json(self._read(length).decode("utf-8", "replace"), self.peer, "check the address")
        if not isinstance(header, dict):
            raise UserError(f"{self.peer} sent {shown(header)} instead of an object")
        if "error" in header:
            raise (Gone if header.get("gone") is True else UserError)(f"{self.peer}: {shown(header['error'])}")
        return header

    def receive_bytes(self, header: Mapping[str, Any], most: int) -> Tensor:
        fields = Fields(header, self.peer)
        data_N = torch.empty(fields.whole("num_bytes", least=0, most=most), dtype=torch.uint8)
        view = data_N.numpy().data
        while len(view):
            num = self.sock.recv_into(view)
            if num == 0:
                raise ConnectionError("the connection was closed in the middle of a transfer")
            view = view[num:]
        if zlib.crc32(data_N.numpy().data) != fields.whole("crc", least=0):
            raise UserError(f"a bucket from {self.peer} arrived damaged")
        return data_N

    def _read(self, num: int) -> bytes:
        data = bytearray()
        while len(data) < num:
            part = self.sock.recv(num - len(data))
            if not part:
                raise ConnectionError("the connection was closed")
            data += part
        return bytes(data)

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or not 0 <= int(port) < 65536:
        raise UserError(f"{text!r} is not an address; give HOST:PORT, for example 127.0.0.1:29600")
    return host, int(port)


def _proof(challenge: str) -> str:
    return hmac.new(os.environ.get(KEY, "").encode(), challenge.encode(), hashlib.sha256).hexdigest()


# -- publishing -------------------------------------------------------------------------------------------------


class Snapshot(Protocol):
    """The weights of one step, as one rank holds them."""

    step: int
    digest: str
    turns: int  # how often the run had gone back (Offered)

    def parts(self, name: str, box: Box, form: Mapping[str, Any]) -> dict[str, Tensor]:
        """The elements of `box`, in the form that a follower asked for: {"": tensor}, or the parts of a Format."""
        ...


@dataclass(frozen=True)
class Catalogue:
    """What a publisher offers: shape, dtype and layout by name."""

    run: str
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype, Layout]]

    def to_json(self) -> dict[str, Any]:
        layouts: dict[Layout, int] = {}
        for _, _, layout in self.tensors.values():
            layouts.setdefault(layout, len(layouts))
        rows = [[n, list(s), DTYPE_NAMES[d], layouts[lay]] for n, (s, d, lay) in self.tensors.items()]
        return {"run": self.run, "layouts": [layout_to_json(lay) for lay in layouts], "tensors": rows}

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> Catalogue:
        fields = Fields(data, where)
        layouts = [layout_from_json(entry, where) for entry in fields.list("layouts")]
        tensors = {}
        for row in fields.list("tensors"):
            match row:
                case [str(name), list(shape), str(dtype), int(place)] if dtype in DTYPES and 0 <= place < len(layouts):
                    if not all(isinstance(n, int) and 0 <= n < 1 << 40 for n in shape):
                        raise UserError(f"{where}: {shown(shape)} is not a shape")
                    tensors[name] = (tuple(shape), DTYPES[dtype], layouts[place])
                case _:
                    raise UserError(f"{where}: {shown(row)} does not describe a tensor")
        return Catalogue(fields.text("run"), tensors)


class SnapshotServer:
    """Answers followers from threads of its own, always with the newest snapshot."""

    def __init__(self, address: tuple[str, int], catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.endpoints: list[tuple[str, int]] = []  # of all ranks; set on the first
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._channels: set[Channel] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(address)
        except OSError as error:
            self._listener.close()
            raise UserError(
                f"cannot publish at {address[0]}:{address[1]}: {error.strerror}; give an address of this machine "
                "with a free port"
            ) from None
        self._listener.listen(16)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="publish", daemon=True).start()

    @property
    def num_followers(self) -> int:
        return len(self._channels)

    def publish(self, snapshot: Snapshot) -> None:
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()

    def wait_until_pulled(self, seconds: float) -> bool:
        """Whether every follower has pulled the newest snapshot by then."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._snapshot is None or all(c.pulled == self._snapshot.digest for c in self._channels),
                timeout=seconds,
            )

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in list(self._channels):
            channel.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of file descriptors, say
                continue
            if len(self._channels) >= MOST_FOLLOWERS:
                sock.close()
                continue
            sock.settimeout(PROOF_S)
            channel = Channel(sock, f"{peer[0]}:{peer[1]}")
            with self._changed:  # another thread may go through them
                self._channels.add(channel)
            threading.Thread(target=self._serve, args=(channel,), name="publish-to", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        try:
            challenge = secrets.token_hex(16)
            channel.send({"protocol": PROTOCOL, "challenge": challenge})
            hello = Fields(channel.receive(MOST_PROOF), channel.peer)
            if not hmac.compare_digest(hello.text("proof"), _proof(challenge)):
                channel.send({"error": f"the key is wrong; set {KEY} to the publisher's"})
                return
            channel.sock.settimeout(IDLE_S)
            channel.send({**self.catalogue.to_json(), "endpoints": self.endpoints})
            while True:
                self._answer(channel, Fields(channel.receive(), channel.peer))
        except (OSError, UserError, ValueError) as error:
            if not (self._closed or isinstance(error, ConnectionError | TimeoutError)):
                log.warning("a follower at %s was dropped: %s", channel.peer, error)
        finally:
            channel.close()
            with self._changed:
                self._channels.discard(channel)
                self._changed.notify_all()

    def _answer(self, channel: Channel, request: Fields) -> None:
        op = request.text("op")
        if op == "wait":
            other_than = request.whole("step", -1, least=-1), request.whole("turns", 0, least=0)
            snapshot = self._wait(other_than, request.number("seconds", 0.0, least=0))
            found = None
            if snapshot is not None:
                found = {"step": snapshot.step, "digest": snapshot.digest, "turns": snapshot.turns}
            channel.send({"newest": found})
            return
        if op != "get":
            channel.send({"error": f"{shown(op)} is not a request"})
            return
        with self._changed:
            snapshot = self._snapshot
        step, digest = request.whole("step", least=0), request.text("digest", "")
        if snapshot is None or snapshot.step != step or digest not in ("", snapshot.digest):
            channel.send({"error": f"step {step} is not kept any more", "gone": True})
            return
        try:
            for bucket in _buckets(snapshot, request.list("pieces")):
                channel.send({"parts": [row for row, _ in bucket]}, [t for _, t in bucket])
        except UserError as error:
            channel.send({"error": str(error)})
            return
        channel.send({"done": True})
        with self._changed:
            channel.pulled = snapshot.digest
            self._changed.notify_all()

    def _wait(self, other_than: tuple[int, int], seconds: float) -> Snapshot | None:
        """The newest snapshot, once it is not that of these steps and turns."""

        def is_other() -> bool:
            newest = self._snapshot
            return self._closed or (newest is not None and (newest.step, newest.turns) != other_than)

        with self._changed:
            self._changed.wait_for(is_other, timeout=min(seconds, 60.0))
            return self._snapshot


_Row = list[Any]  # number of the piece, part, dtype, shape


def _buckets(snapshot: Snapshot, pieces: Sequence[Any]) -> Iterator[list[tuple[_Row, Tensor]]]:
    filled: list[tuple[_Row, Tensor]] = []
    size = 0
    for number, entry in enumerate(pieces):
        match entry:
            case [str(name), list(start), list(stop), dict(form)]:
                parts = snapshot.parts(name, Box(tuple(start), tuple(stop)), form)
            case _:
                raise UserError(f"{shown(entry)} is not a piece of a tensor")
        for part, t in parts.items():
            filled.append(([number, part, DTYPE_NAMES[t.dtype], list(t.shape)], t))
            size += t.nbytes
            if size >= BUCKET:
                yield filled
                filled, size = [], 0
    if filled:
        yield filled


# -- following --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WantedPiece:
    """A box of a tensor that a follower wants from one rank; `form` says how (Snapshot.parts)."""

    name: str
    box: Box
    form: Mapping[str, Any]


@dataclass(frozen=True)
class Offered:
    """A snapshot of one rank. A run that goes back (train/rollback.py) discards steps and publishes others of the same
    numbers: what it offers after more turns is newer, whatever its step."""

    step: int
    digest: str
    turns: int

    @property
    def place(self) -> tuple[int, int]:
        """In the order of what the run publishes; the same on all of its ranks."""
        return self.turns, self.step


class Publisher:
    """A follower's end: one rank of a publishing run."""

    def __init__(self, address: tuple[str, int], timeout_s: float = 30.0) -> None:
        sock = socket.create_connection(address, timeout=timeout_s)
        self._channel = Channel(sock, f"the publisher at {address[0]}:{address[1]}")
        try:
            fields = Fields(self._channel.receive(), self._channel.peer)
            if fields.whole("protocol") != PROTOCOL:
                raise UserError(
                    f"{self._channel.peer} speaks another version of the protocol; use one release for both"
                )
            self._channel.send({"proof": _proof(fields.text("challenge"))})
            hello = self._channel.receive()
            self.catalogue = Catalogue.from_json(hello, self._channel.peer)
            self.endpoints = [
                _endpoint(e, self._channel.peer) for e in Fields(hello, self._channel.peer).list("endpoints")
            ]
        except BaseException:
            self.close()
            raise

    def newest(self, other_than: Offered | None = None, seconds: float = 0.0) -> Offered | None:
        """The newest snapshot of this rank; waits up to `seconds` for another than the given one."""
        known = {} if other_than is None else {"step": other_than.step, "turns": other_than.turns}
        self._channel.send({"op": "wait", "seconds": seconds, **known})
        found = self._channel.receive().get("newest")
        if found is None:
            return None
        fields = Fields(found, self._channel.peer)
        return Offered(fields.whole("step", least=0), fields.text("digest"), fields.whole("turns", least=0))

    def pull(
        self, step: int, digest: str, pieces: Sequence[WantedPiece], write: Callable[[WantedPiece, str, Tensor], None]
    ) -> int:
        """Get the pieces of a snapshot; `write` takes each part as it arrives. The number of bytes.

        Snapshots are told apart by digests: a run that goes back publishes a step again, with other weights."""
        rows = [[p.name, list(p.box.start), list(p.box.stop), dict(p.form)] for p in pieces]
        self._channel.send({"op": "get", "step": step, "digest": digest, "pieces": rows})
        total = 0
        while True:
            header = self._channel.receive()
            if header.get("done") is True:
                return total
            data_N = self._channel.receive_bytes(header, most=1 << 40)
            total += len(data_N)
            at = 0
            for row in Fields(header, self._channel.peer).list("parts"):
                match row:
                    case [int(number), str(part), str(dtype), list(shape)] if dtype in DTYPES:
                        kind = DTYPES[dtype]
                    case _:
                        raise UserError(f"{self._channel.peer} sent {shown(row)} for a part")
                if not 0 <= number < len(pieces) or not all(isinstance(n, int) and n >= 0 for n in shape):
                    raise UserError(f"{self._channel.peer} sent {shown(row)} for a part")
                size = kind.itemsize * math.prod(shape)
                if at + size > len(data_N):
                    raise UserError(f"{self._channel.peer} sent something else than it was asked for")
                write(pieces[number], part, data_N[at : at + size].clone().view(kind).reshape(shape))
                at += size

    def close(self) -> None:
        self._channel.close()


def _endpoint(entry: Any, where: str) -> tuple[str, int]:
    match entry:
        case [str(host), int(port)] if 0 < port < 65536:
            return host, port
    raise UserError(f"{where}: {shown(entry)} is not an endpoint")
