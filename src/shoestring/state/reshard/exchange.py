"""Weights between two jobs, over TCP: a publisher keeps its newest snapshot, and followers pull the boxes they need.

Pulling keeps the two apart: a follower that is dead, slow or absent costs the publisher nothing, and one that joins
late gets the newest snapshot. Every rank of the publisher answers for its own shards; the first one tells followers
where the others are. A follower plans with the layouts it is given (plan.py) which rank to ask for what.

A message is a length and a JSON object; raw bytes may follow it, whose sizes the receiver knows. Nothing is unpickled.
A follower takes what it asked for, each part once and with its CRC-32, or nothing.

Both sides prove that they know the key (SHOESTRING_PUBLISH_KEY, empty by default) by an HMAC over a random number of
each side and the addresses of both ends: a proof can neither be used again nor be handed on over another connection.
What follows is neither signed nor encrypted, so packets should not be changed on the way: use a trusted network.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoestring.errors import UserError, shortened, shown
from shoestring.json_files import Fields, parse_json
from shoestring.state.boxes import Box
from shoestring.state.files import DTYPE_NAMES, DTYPES
from shoestring.state.reshard.layouts import Layout, MeshLayout
from shoestring.state.reshard.plan import layout_from_json, layout_to_json
from shoestring.state.reshard.version import UnfitWeights

KEY = "SHOESTRING_PUBLISH_KEY"
PROTOCOL = 4
MOST_HEADER = 1 << 24  # bytes of a JSON object; the catalogue of 100,000 tensors has 9 MB
MOST_LINE = 1 << 16  # of one that is about no tensors
MOST_PROOF, PROOF_S = 1 << 12, 10.0  # bytes of each message, and seconds in all, for a stranger to prove the key
MOST_STRANGERS = 64  # connections without a proof; the oldest one gives way
MOST_FOLLOWERS = 64
MOST_RANKS, MOST_LAYOUTS, MOST_RUN = 1 << 12, 1 << 8, 1 << 8  # of a run; characters of its name
BUCKET = 64 << 20
SLOWEST = 1e6  # bytes per second of a transfer, below which it is given up
IDLE_S = 600.0  # a follower that asks nothing for so long is gone
SAY_S = 10.0  # between two lines about connections that were refused
log = logging.getLogger("shoestring.publish")


class Gone(UserError):
    """The snapshot that was asked for has been replaced by a newer one."""


# What an error says beside its sentence, so that the other side raises the same.
_ERRORS: dict[str, type[UserError]] = {"gone": Gone, "unfit": UnfitWeights}


# -- messages ---------------------------------------------------------------------------------------------------


class Channel:
    """JSON objects and raw bytes over a socket. Errors of the network are OSErrors, errors of the peer UserErrors."""

    def __init__(self, sock: socket.socket, peer: str, seconds: float) -> None:
        """`seconds`: as `within`."""
        self.sock, self.peer = sock, peer
        self.pulled = ""  # the digest of what this follower has pulled last
        self.within(seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def within(self, seconds: float) -> None:
        """What is sent and received from now on takes at most so long, all of it together."""
        self._until = time.monotonic() + seconds

    def send(self, message: Mapping[str, Any]) -> None:
        text = json.dumps(message).encode()
        self._send(struct.pack("<4sI", b"shsw", len(text)) + text)

    def send_bytes(self, t: Tensor) -> None:
        self._send(_bytes_of(t))

    def _send(self, data: bytes | memoryview) -> None:
        self._set_timeout()
        self.sock.sendall(data)

    def receive(self, most: int = MOST_LINE) -> dict[str, Any]:
        """A JSON object of at most so many bytes."""
        magic, length = struct.unpack("<4sI", self._read(bytearray(8)))
        if magic != b"shsw" or length > most:
            raise UserError(f"{self.peer} does not speak this protocol; is it the address of a publishing run?")
        text = self._read(bytearray(length)).decode("utf-8", "replace")
        message = parse_json(text, self.peer, "check the address")
        if not isinstance(message, dict):
            raise UserError(f"{self.peer} sent {shown(message)} instead of an object")
        if "error" in message:
            kind = next((kind for key, kind in _ERRORS.items() if message.get(key) is True), UserError)
            raise kind(f"{self.peer}: {shortened(str(message['error']), 300)}")
        return message

    def receive_bytes(self, like: Tensor) -> Tensor:
        """A tensor of the same shape and dtype."""
        t = torch.empty(like.shape, dtype=like.dtype)
        self._read(_bytes_of(t))
        return t

    def _read(self, into: Any) -> Any:
        view = memoryview(into)
        while len(view):
            self._set_timeout()
            num = self.sock.recv_into(view)
            if num == 0:
                raise ConnectionError("the connection was closed")
            view = view[num:]
        return into

    def _set_timeout(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{self.peer} is too slow")
        self.sock.settimeout(left)

    def ends(self) -> tuple[list[Any], list[Any]]:
        """This end of the connection and the other one, spelled alike on both sides."""
        return _end(self.sock.getsockname()), _end(self.sock.getpeername())

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def _bytes_of(t: Tensor) -> memoryview:
    view: memoryview = t.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def _end(name: Sequence[Any]) -> list[Any]:
    return [plain_host(name[0]), name[1]]


def plain_host(host: str) -> str:
    """An address as every machine writes it; names stay."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or not 0 <= int(port) < 65536:
        raise UserError(f"{text!r} is not an address; give HOST:PORT, for example 127.0.0.1:29600")
    return host, int(port)


def publish_key() -> bytes:
    return os.fsencode(os.environ.get(KEY, ""))


def check_key(address: tuple[str, int], insecure: bool, way: str) -> None:
    """UserError for an address that other machines reach, without a key."""
    host = plain_host(address[0])
    if insecure or publish_key() or host == "localhost":
        return
    with suppress(ValueError):  # a name, of whatever machine
        if ipaddress.ip_address(host).is_loopback:
            return
    raise UserError(
        f"{host}:{address[1]} is reached over a network: set {KEY} to the same secret on both sides, or give {way}"
    )


def _proof(key: bytes, prover: str, nonces: Sequence[str], ends: Sequence[list[Any]]) -> bytes:
    """`nonces` and `ends` of the publisher and of the follower; the `prover` is one of the two."""
    told = json.dumps([PROTOCOL, prover, *nonces, *ends]).encode()
    return hmac.new(key, told, hashlib.sha256).hexdigest().encode()


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
    def from_json(data: Mapping[str, Any], where: str, num_ranks: int) -> Catalogue:
        fields = Fields(data, where)
        entries, run = fields.list("layouts"), fields.text("run")
        if len(entries) > MOST_LAYOUTS or len(run) > MOST_RUN or not run.isprintable():
            raise UserError(f"{where} offers {len(entries)} layouts of {shown(run)}, which no run does")
        layouts = [layout_from_json(entry, where, num_ranks) for entry in entries]
        if not all(isinstance(layout, MeshLayout) for layout in layouts):
            raise UserError(f"{where}: a run shares its tensors over a mesh, not in boxes")
        tensors = {}
        for row in fields.list("tensors"):
            match row:
                case [str(name), list(shape), str(dtype), int(place)] if dtype in DTYPES and 0 <= place < len(layouts):
                    if not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
                        raise UserError(f"{where}: {shown(shape)} is not a shape")
                    tensors[name] = (tuple(shape), DTYPES[dtype], layouts[place])
                case _:
                    raise UserError(f"{where}: {shown(row)} does not describe a tensor")
        return Catalogue(run, tensors)


class SnapshotServer:
    """Answers followers from threads of its own, always with the newest snapshot."""

    def __init__(self, address: tuple[str, int], catalogue: Catalogue) -> None:
        self.catalogue, self.key = catalogue, publish_key()
        self.endpoints: list[tuple[str, int]] = []  # of all ranks; set on the first
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._strangers: dict[Channel, None] = {}  # the oldest first
        self._channels: set[Channel] = set()  # of followers that have proved the key
        self._said_at = -SAY_S
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
        self._listener.listen(128)
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
        with self._changed:
            channels = [*self._channels, *self._strangers]
        for channel in channels:
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
            channel = Channel(sock, f"{peer[0]}:{peer[1]}", PROOF_S)
            with self._changed:  # another thread may go through them
                self._strangers[channel] = None
                oldest = next(iter(self._strangers)) if len(self._strangers) > MOST_STRANGERS else None
                if oldest is not None:
                    del self._strangers[oldest]
            if oldest is not None:
                oldest.close()
            threading.Thread(target=self._serve, args=(channel,), name="publish-to", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        try:
            self._log_in(channel)
            while True:
                channel.within(IDLE_S)
                self._answer(channel, Fields(channel.receive(MOST_HEADER), channel.peer))
        except (OSError, UserError) as error:
            quiet = self._closed or isinstance(error, OSError)  # gone, too slow, or the oldest stranger
            if not quiet and time.monotonic() >= self._said_at + SAY_S:  # strangers must not fill the log
                self._said_at = time.monotonic()
                log.warning("a follower at %s was dropped: %s", channel.peer, error)
        finally:
            channel.close()
            with self._changed:
                self._strangers.pop(channel, None)
                self._channels.discard(channel)
                self._changed.notify_all()

    def _log_in(self, channel: Channel) -> None:
        challenge, (own, peer) = secrets.token_hex(16), channel.ends()
        channel.send({"protocol": PROTOCOL, "challenge": challenge})
        hello = Fields(channel.receive(MOST_PROOF), channel.peer)
        told = (challenge, hello.text("nonce")), (own, peer)
        if not hmac.compare_digest(hello.text("proof").encode(), _proof(self.key, "follower", *told)):
            channel.send({"error": _WRONG_KEY})
            raise UserError(_WRONG_KEY)
        with self._changed:
            full = len(self._channels) >= MOST_FOLLOWERS
            if not full and channel in self._strangers:
                del self._strangers[channel]
                self._channels.add(channel)
        if full:
            channel.send({"error": f"it has {MOST_FOLLOWERS} followers already"})
            raise UserError(f"there are {MOST_FOLLOWERS} followers already")
        channel.send({"proof": _proof(self.key, "publisher", *told).decode()})
        channel.within(IDLE_S)
        channel.send({**self.catalogue.to_json(), "endpoints": self.endpoints})

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
        try:
            if snapshot is None or snapshot.step != step or digest not in ("", snapshot.digest):
                raise Gone(f"step {step} is not kept any more")
            for bucket in _buckets(snapshot, request.list("pieces"), request.list("forms")):
                channel.within(IDLE_S)
                channel.send({"parts": [row for row, _ in bucket]})
                for _, t in bucket:
                    channel.send_bytes(t)
        except UserError as error:
            channel.send({"error": str(error), **{key: isinstance(error, kind) for key, kind in _ERRORS.items()}})
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


_Row = list[Any]  # number of the piece, part, dtype, shape, checksum
_WRONG_KEY = f"the key is wrong; set {KEY} alike on both sides (addresses that are translated on the way also read so)"


def _buckets(snapshot: Snapshot, pieces: Sequence[Any], forms: Sequence[Any]) -> Iterator[list[tuple[_Row, Tensor]]]:
    filled: list[tuple[_Row, Tensor]] = []
    size = 0
    for number, entry in enumerate(pieces):
        match entry:
            case [str(name), list(start), list(stop), int(at)] if 0 <= at < len(forms) and _is_box(start, stop):
                if not isinstance(forms[at], dict):
                    raise UserError(f"{shown(forms[at])} is not a form of a tensor")
                parts = snapshot.parts(name, Box(tuple(start), tuple(stop)), forms[at])
            case _:
                raise UserError(f"{shown(entry)} is not a piece of a tensor")
        for part, t in parts.items():
            t = t.contiguous()
            filled.append(([number, part, DTYPE_NAMES[t.dtype], list(t.shape), zlib.crc32(_bytes_of(t))], t))
            size += t.nbytes
            if size >= BUCKET:
                yield filled
                filled, size = [], 0
    if filled:
        yield filled


def _is_box(start: list[Any], stop: list[Any]) -> bool:
    whole = all(type(n) is int for n in (*start, *stop))
    return whole and len(start) == len(stop) and all(0 <= a <= b for a, b in zip(start, stop, strict=True))


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
        self._timeout_s = timeout_s
        peer = f"the publisher at {address[0]}:{address[1]}"
        self._channel = Channel(socket.create_connection(address, timeout=timeout_s), peer, timeout_s)
        try:
            self._log_in(publish_key(), peer)
            told = Fields(self._channel.receive(MOST_HEADER), peer)
            self.endpoints = [_endpoint(e, peer) for e in told.list("endpoints")]
            if not 0 < len(self.endpoints) <= MOST_RANKS:
                raise UserError(f"{peer} names {len(self.endpoints)} ranks; a run has 1 to {MOST_RANKS}")
            self.catalogue = Catalogue.from_json(told.values, peer, len(self.endpoints))
        except BaseException:
            self.close()
            raise

    def _log_in(self, key: bytes, peer: str) -> None:
        fields = Fields(self._channel.receive(MOST_PROOF), peer)
        if fields.whole("protocol") != PROTOCOL:
            raise UserError(f"{peer} speaks another version of the protocol; use one release for both")
        told = (fields.text("challenge"), secrets.token_hex(16)), self._channel.ends()[::-1]
        self._channel.send({"nonce": told[0][1], "proof": _proof(key, "follower", *told).decode()})
        proof = Fields(self._channel.receive(MOST_PROOF), peer).text("proof")
        if not hmac.compare_digest(proof.encode(), _proof(key, "publisher", *told)):
            raise UserError(f"{peer} does not know the key; set {KEY} alike on both sides")

    @property
    def host(self) -> str:
        """The address that it was found at."""
        return str(self._channel.ends()[1][0])

    def newest(self, other_than: Offered | None = None, seconds: float = 0.0) -> Offered | None:
        """The newest snapshot of this rank; waits up to `seconds` for another than the given one."""
        known = {} if other_than is None else {"step": other_than.step, "turns": other_than.turns}
        self._channel.within(self._timeout_s + seconds)
        self._channel.send({"op": "wait", "seconds": seconds, **known})
        found = Fields(self._channel.receive(), self._channel.peer).object("newest", None)
        if found is None:
            return None
        fields = Fields(found, self._channel.peer)
        return Offered(fields.whole("step", least=0), fields.text("digest"), fields.whole("turns", least=0))

    def pull(
        self, step: int, digest: str, pieces: Sequence[WantedPiece], places: Sequence[Mapping[str, Tensor]]
    ) -> int:
        """Get the pieces of a snapshot into their places, by part. The number of bytes. Returns where every part of
        every piece has come, once, in the size of its place and with its checksum; the places are not usable otherwise.

        Snapshots are told apart by digests: a run that goes back publishes a step again, with other weights."""
        peer, forms, rows = self._channel.peer, dict[str, int](), []
        for p in pieces:
            form = forms.setdefault(json.dumps(dict(p.form)), len(forms))
            rows.append([p.name, list(p.box.start), list(p.box.stop), form])
        due = {(number, part): t for number, parts in enumerate(places) for part, t in parts.items()}
        num_bytes = sum(t.nbytes for t in due.values())
        self._channel.within(self._timeout_s)
        self._channel.send(
            {"op": "get", "step": step, "digest": digest, "pieces": rows, "forms": [json.loads(form) for form in forms]}
        )
        while True:
            self._channel.within(self._timeout_s)
            header = self._channel.receive(MOST_HEADER)
            if header.get("done") is True and not due:
                return num_bytes
            if header.get("done") is True:
                name = pieces[next(iter(due))[0]].name
                raise UserError(f"{peer} ended early: {len(due)} parts are missing, the first of {name!r}")
            coming = [_take_due(due, row, peer) for row in Fields(header, peer).list("parts")]
            if not coming:
                raise UserError(f"{peer} sent a message without parts")
            self._channel.within(self._timeout_s + sum(place.nbytes for place, _ in coming) / SLOWEST)
            for place, checksum in coming:
                t = self._channel.receive_bytes(place)
                if zlib.crc32(_bytes_of(t)) != checksum:
                    raise UserError(f"a part from {peer} arrived damaged")
                place.copy_(t)

    def close(self) -> None:
        self._channel.close()


def _take_due(due: dict[tuple[int, str], Tensor], row: Any, peer: str) -> tuple[Tensor, int]:
    """The place of a part that is announced, and its checksum; it is not due any more."""
    match row:
        case [int(number), str(part), str(dtype), list(shape), int(checksum)] if (number, part) in due:
            place = due[number, part]
            if (DTYPE_NAMES[place.dtype], list(place.shape)) == (dtype, shape):
                return due.pop((number, part)), checksum
    raise UserError(f"{peer} sent {shown(row)}: not asked for, sent before, or of another size")


def _endpoint(entry: Any, where: str) -> tuple[str, int]:
    match entry:
        case [str(host), int(port)] if 0 < port < 65536:
            return host, port
    raise UserError(f"{where}: {shown(entry)} is not an endpoint")
