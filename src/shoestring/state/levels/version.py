"""What one copy of a version holds: which boxes of which tensors, which values, and whether copies together are whole.

A version is the state of one step of one life of the run (a life begins with every start of the trainer, so that two
futures of one step are never mixed). Every rank's copy lists its own boxes; a version is complete when the boxes of the
copies cover every tensor and their names are those that the ranks wrote down together (`names_sum`), so that a copy
that is missing altogether is noticed too. Pure; no torch: the agent imports this.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoestring.errors import UserError, shown
from shoestring.state.boxes import Box, uncovered

FORMAT, VERSION = "shoestring-version", 1
LIFE = "private@life"  # a value beside those of the state; names like this are not compared with the run's
# safetensors' names and bytes an element; state/files.py has the torch dtypes (a test compares).
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
_LIFE = re.compile(r"[0-9a-f]{1,32}")
_KEYS = {"format", "version", "step", "life", "rank", "world_size", "host", "names_sum", "levels", "boxes", "values"}
_KEYS |= {"algorithm", "chunk_bytes", "chunks"}


@dataclass(frozen=True)
class HeldBox:
    """One box of a tensor, and where its bytes begin in the slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return self.box.size * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class HeldCopy:
    """One rank's share of a version."""

    step: int
    life: str
    rank: int
    world_size: int
    host: str
    names_sum: str  # of all tensors of all ranks: `sum_of_names`
    boxes: tuple[HeldBox, ...]
    values: Mapping[str, Any] = field(default_factory=dict)  # encoded: state/manifest.py
    levels: tuple[str, ...] = ("memory",)  # where this version is meant to go
    algorithm: str = "xxh3"
    chunk_bytes: int = 1 << 26
    chunks: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int, str]:
        return self.step, self.life

    @property
    def num_bytes(self) -> int:
        """From the first byte of the slot to the end of the last box."""
        return max((b.offset + b.num_bytes for b in self.boxes), default=0)


def sum_of_names(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """A fingerprint of {name: (dtype, shape)}."""
    return hashlib.sha256(json.dumps(sorted((n, d, list(s)) for n, (d, s) in tensors.items())).encode()).hexdigest()


def missing_of(copies: Iterable[HeldCopy]) -> str | None:
    """What the copies together lack of a complete version, in a clause; None where they lack nothing."""
    copies = list(copies)
    if not copies:
        return "there is none"
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, list[Box]] = {}
    for copy in copies:
        if copy.names_sum != copies[0].names_sum:
            return "they are of different states"
        for held in copy.boxes:
            if tensors.setdefault(held.name, (held.dtype, held.shape)) != (held.dtype, held.shape):
                return f"{held.name} has two shapes"
            boxes.setdefault(held.name, []).append(held.box)
    for name, (_, shape) in tensors.items():
        if gaps := uncovered(shape, boxes[name]):
            return f"{name} from {list(gaps[0].start)} to {list(gaps[0].stop)} is missing"
    if sum_of_names(tensors) != copies[0].names_sum:
        return f"the tensors of some rank are missing (there are copies of ranks {sorted({c.rank for c in copies})})"
    return None


# -- JSON ----------------------------------------------------------------------------------------------------


def dump_index(copy: HeldCopy) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        **{key: getattr(copy, key) for key in ("step", "life", "rank", "world_size", "host", "names_sum")},
        "levels": list(copy.levels),
        "boxes": [[b.name, b.dtype, list(b.shape), list(b.box.start), list(b.box.stop), b.offset] for b in copy.boxes],
        "values": dict(copy.values),
        "algorithm": copy.algorithm,
        "chunk_bytes": copy.chunk_bytes,
        "chunks": list(copy.chunks),
    }


def parse_index(index: Mapping[str, Any], most_bytes: int, where: str) -> HeldCopy:
    """The checked content of an index; UserError for anything that a writer would not have written."""

    def bad(what: str) -> UserError:
        return UserError(f"{where} {what}; it is damaged or was made by something else, and is not used")

    if index.get("format") != FORMAT or set(index) != _KEYS:
        raise bad("is not the index of a version")
    if index["version"] != VERSION:
        raise UserError(f"{where} has version {shown(index['version'])}, this program reads {VERSION}")
    for key in ("step", "rank", "world_size", "chunk_bytes"):
        if not _is_int(index[key]):
            raise bad(f"has a bad {key}")
    for key in ("host", "names_sum", "algorithm"):
        if not isinstance(index[key], str) or len(index[key]) > 300:
            raise bad(f"has a bad {key}")
    if not isinstance(index["life"], str) or not _LIFE.fullmatch(index["life"]):
        raise bad("has a bad life")
    for key in ("levels", "chunks"):
        if not isinstance(index[key], list) or not all(isinstance(v, str) for v in index[key]):
            raise bad(f"has bad {key}")
    if not isinstance(index["boxes"], list) or not isinstance(index["values"], dict) or not index["chunk_bytes"]:
        raise bad("has bad boxes or values")
    boxes = tuple(_box(entry, bad) for entry in index["boxes"])
    copy = HeldCopy(
        **{key: index[key] for key in ("step", "life", "rank", "world_size", "host", "names_sum", "values")},
        boxes=boxes,
        levels=tuple(index["levels"]),
        algorithm=index["algorithm"],
        chunk_bytes=index["chunk_bytes"],
        chunks=tuple(index["chunks"]),
    )
    if copy.num_bytes > most_bytes:
        raise bad("has a box beyond its end")
    if len(copy.chunks) != -(-copy.num_bytes // copy.chunk_bytes):
        raise bad("does not have one checksum per chunk")
    ends = 0
    for held in sorted(boxes, key=lambda b: (b.offset, b.num_bytes)):
        if held.offset < ends:
            raise bad("has boxes that overlap")
        ends = held.offset + held.num_bytes
    return copy


def _box(entry: Any, bad: Any) -> HeldBox:
    if not isinstance(entry, list) or len(entry) != 6:
        raise bad("has a bad box")
    name, dtype, shape, start, stop, offset = entry
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in ITEM_BYTES or not _is_int(offset):
        raise bad("has a bad box")
    if not all(isinstance(v, list) and all(_is_int(n) for n in v) for v in (shape, start, stop)):
        raise bad("has a bad box")
    if not len(shape) == len(start) == len(stop) or len(shape) > 64:
        raise bad("has a bad box")
    # Every dimension has a range inside it; that of a tensor without elements may be empty.
    if any(not (a < b <= n or a == b == n == 0) for a, b, n in zip(start, stop, shape, strict=True)):
        raise bad(f"has a box of {shown(name)} outside its tensor")
    return HeldBox(name, dtype, tuple(shape), Box(tuple(start), tuple(stop)), offset)


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
