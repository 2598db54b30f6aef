"""Messages between two processes of ours as bytes: a frame is JSON for what is small, and binary parts behind it.

Both ways follow from the types that a message is declared with (`Codec`): dataclasses and named tuples are lists of
their fields, and numbers, texts, lists, tuples and None are themselves. Token ids (`TokenIds`), tensors and bytes are
binary, which JSON would take milliseconds for; a list of ids that stands in a message several times is sent once, and
is one list again on the other side. Nothing is pickled.

What JSON's own encoder can write is left to it: a list of numbers with one entry per text costs no Python per entry.

Left out: unions of several classes, and types that only one of the processes can have. Fields of such types say that
they are `LOCAL`, or the codec says what goes in their place.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

TokenIds = Annotated[list[int], "ids"]
LOCAL = {"local": True}  # metadata of a field that is not sent
HEAD = struct.Struct(">II")  # bytes of the JSON part and of the binary parts, which follow

Read = Callable[[Any, "_Binary"], Any] | None  # None: the value is what JSON gave
Write = Callable[[Any, "_Parts"], Any]


class _Parts:
    """The binary parts of a message that is written."""

    def __init__(self) -> None:
        self.found: list[bytes] = []
        self.sizes: list[int] = []
        self._places: dict[int, int] = {}  # of lists of ids, by their identity

    def put(self, data: bytes) -> int:
        self.found.append(data)
        self.sizes.append(len(data))
        return len(self.found) - 1

    def put_ids(self, ids: list[int]) -> int:
        if id(ids) not in self._places:
            self._places[id(ids)] = self.put(array("I", ids).tobytes())
        return self._places[id(ids)]


class _Binary:
    """The binary parts of a message that is read."""

    def __init__(self, data: bytes, sizes: Sequence[int]) -> None:
        self._parts, at = list[bytes](), 0
        for size in sizes:
            self._parts.append(data[at : at + size])
            at += size
        self._ids: dict[int, list[int]] = {}

    def bytes(self, place: int) -> bytes:
        return self._parts[place]

    def ids(self, place: int) -> list[int]:
        if place not in self._ids:
            self._ids[place] = array("I", self._parts[place]).tolist()
        return self._ids[place]

    def tensor(self, told: tuple[int, list[int]]) -> Tensor:
        place, shape = told
        data = bytearray(self._parts[place]) or bytearray(4)
        return torch.frombuffer(data, dtype=torch.float32)[: len(self._parts[place]) // 4].view(shape)


class Codec:
    """`messages`: what follows the name of each kind. `instead`: for a type that stands in a field, the one that is
    sent in its place (None: nothing, the field keeps its default). `own`: for a class that is no dataclass, its
    attributes and what makes one of them."""

    def __init__(
        self,
        messages: dict[str, tuple[Any, ...]],
        instead: dict[type, type | None],
        own: dict[type, tuple[tuple[str, ...], Callable[..., Any]]],
    ) -> None:
        self._instead, self._own = instead, own
        self._sent, self._read_of = cache(self._find_sent), cache(self._find_read)
        self._reads = {kind: [self._read_of(hint) for hint in hints] for kind, hints in messages.items()}

    def frame(self, kind: str, *values: Any) -> bytes:
        parts = _Parts()

        def plain(value: Any) -> Any:
            """For JSON's encoder: what it does not know."""
            if isinstance(value, Tensor):
                told = value.detach().float().cpu().contiguous()
                return parts.put(told.numpy().tobytes()), list(told.shape)
            if isinstance(value, bytes):
                return parts.put(value)
            if isinstance(value, frozenset):
                return sorted(value)
            if type(value) in self._own:
                return [getattr(value, name) for name in self._own[type(value)][0]]
            names, writes = self._sent(value.__class__)
            if not writes:
                return names(value)
            row = list(names(value))
            for i, write in writes:
                row[i] = None if row[i] is None else write(row[i], parts)
            return row

        encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=plain).encode
        content = encode([kind, *values, parts.sizes]).encode()  # the sizes are known when their turn comes
        return HEAD.pack(len(content), sum(parts.sizes)) + content + b"".join(parts.found)

    def read(self, content: bytes | bytearray, data: bytes) -> tuple[str, list[Any]]:
        kind, *told, sizes = json.loads(content)
        binary = _Binary(data, sizes)
        reads = self._reads[kind]
        return kind, [v if read is None else read(v, binary) for v, read in zip(told, reads, strict=True)]

    # -- types ----------------------------------------------------------------------------------------------
    def _fields(self, kind: type) -> dict[str, Any]:
        """The types of the fields that are sent."""
        assert is_dataclass(kind), f"{kind} is not declared"
        hints = get_type_hints(kind, include_extras=True)
        named = {f.name: hints[f.name] for f in fields(kind) if not f.metadata.get("local")}
        return {name: hint for name, hint in named.items() if self._instead.get(_alone(hint), hint) is not None}

    def _find_sent(self, kind: type) -> tuple[Callable[[Any], Sequence[Any]], list[tuple[int, Write]]]:
        """What gives the values of all fields, and what is to be done with some of them."""
        hints = self._fields(kind)
        found = [(i, write) for i, hint in enumerate(hints.values()) if (write := self._find_write(hint)) is not None]
        assert len(hints) > 1, f"{kind} has one field: send that"  # attrgetter gives no tuple then
        return attrgetter(*hints), found

    @staticmethod
    def _find_write(hint: Any) -> Write | None:
        """Only for what JSON's encoder would write as it is."""
        hint = _alone(hint)
        if hint == TokenIds:
            return lambda value, parts: parts.put_ids(value)
        if get_origin(hint) is list and get_args(hint) == (TokenIds,):
            return lambda value, parts: [parts.put_ids(ids) for ids in value]
        return None

    def _find_read(self, hint: Any) -> Read:
        if (alone := _alone(hint)) is not hint:
            inner = self._read_of(alone)
            return inner and (lambda v, b: None if v is None else inner(v, b))
        hint = self._instead.get(hint) or hint
        origin, args = get_origin(hint), get_args(hint)
        if hint == TokenIds:
            return lambda v, b: b.ids(v)
        if hint is Tensor:
            return lambda v, b: b.tensor(v)
        if hint is bytes:
            return lambda v, b: b.bytes(v)
        if origin is frozenset:
            return lambda v, _: frozenset(v)
        if origin is tuple and args[-1] is not Ellipsis:
            return self._row(tuple, args)
        if origin in (list, tuple) or getattr(origin, "__name__", "") == "Sequence":
            read, make = self._read_of(args[0]), tuple if origin is tuple else list
            if read is None:
                return (lambda v, _: tuple(v)) if make is tuple else None
            return lambda v, b: make([read(entry, b) for entry in v])
        if isinstance(hint, type) and hint in self._own:
            build = self._own[hint][1]
            return lambda v, _: build(*v)
        if isinstance(hint, type) and issubclass(hint, tuple):
            return self._row(lambda row: hint(*row), list(get_type_hints(hint, include_extras=True).values()))
        if isinstance(hint, type) and is_dataclass(hint):
            names, build_one = self._fields(hint), cast(Callable[..., Any], hint)
            return self._row(lambda row: build_one(**dict(zip(names, row, strict=True))), list(names.values()))
        return None

    def _row(self, make: Callable[[list[Any]], Any], hints: Sequence[Any]) -> Read:
        converted = [(i, read) for i, hint in enumerate(hints) if (read := self._read_of(hint)) is not None]

        def read_row(row: list[Any], binary: _Binary) -> Any:
            for i, read in converted:
                row[i] = read(row[i], binary)
            return make(row)

        return read_row


def _alone(hint: Any) -> Any:
    """Without `| None`."""
    options = [option for option in get_args(hint) if option is not NoneType]
    return options[0] if NoneType in get_args(hint) and len(options) == 1 else hint


class FrameReader:
    """Bytes as they come, messages as they are complete."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self._unread = codec, bytearray()

    def feed(self, data: bytes) -> list[tuple[str, list[Any]]]:
        self._unread += data
        found, at = [], 0
        while len(self._unread) >= at + HEAD.size:
            size, num_binary = HEAD.unpack_from(self._unread, at)
            middle = at + HEAD.size + size
            end = middle + num_binary
            if len(self._unread) < end:
                break
            found.append(self._codec.read(self._unread[at + HEAD.size : middle], bytes(self._unread[middle:end])))
            at = end
        del self._unread[:at]
        return found
