"""manifest.json: what a checkpoint folder holds. Pure parsing, writing and checking; no tensor is touched.

The first line of the file is `{"checksum": "<sha256>",` and the checksum is that of every byte after this
line; the file as a whole is one JSON object. `read_manifest` trusts nothing: names of parts, dtypes, shapes,
that the boxes of each tensor tile it exactly, that the folder holds the parts in the right sizes and no more.

Left out: the bytes of the parts (storage.py checks them while it loads).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoestring.errors import UserError, shown
from shoestring.json_files import read_bytes
from shoestring.state.boxes import Box, check_cover, check_inside
from shoestring.state.checkpoint_files import FORMAT, MANIFEST, VERSION, is_sealed, manifest_bytes
from shoestring.state.files import DTYPE_NAMES, DTYPES

MOST_BYTES = 1 << 28

_PART = re.compile(r"part-[0-9]{5,}\.safetensors")
_HEX = re.compile(r"[0-9a-f]{64}")
Bad = Callable[[str], UserError]  # the error about one file, from what is wrong with it


@dataclass(frozen=True)
class PartInfo:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredBox:
    box: Box
    part: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class Manifest:
    world_size: int
    step: int | None
    parts: dict[str, PartInfo] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # encoded: see encode_value


# -- values that are not tensors -----------------------------------------------------------------------------


def encode_value(name: str, value: Any) -> Any:
    """The value as plain JSON that decode_value turns back into exactly the same value.

    None, bool, int, float, str, lists and dicts with string keys are themselves. A tuple, a float that JSON does not
    know, and a dict with other keys become an object with the single key `__tuple__`, `__float__` or `__dict__`.
    """
    if value is None or isinstance(value, bool):
        return value
    # Subclasses (numpy's float64, torch.Size, OrderedDict) become the plain type they behave as.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"__float__": repr(float(value))}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [encode_value(name, v) for v in value]
    if isinstance(value, tuple):
        return {"__tuple__": [encode_value(name, v) for v in value]}
    if isinstance(value, dict):
        if all(type(k) is str and not k.startswith("__") for k in value):
            return {k: encode_value(name, v) for k, v in value.items()}
        return {"__dict__": [[encode_value(name, k), encode_value(name, v)] for k, v in value.items()]}
    raise UserError(
        f"{shown(name)} holds a {type(value).__name__}; a checkpoint takes tensors and JSON values (None, bool, "
        "int, float, str, list, tuple, dict): make it one of these in state_dict()"
    )


def decode_value(value: Any) -> Any:
    if isinstance(value, list):
        return [decode_value(v) for v in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"__float__": "nan" | "inf" | "-inf" as text}:
            return float(text)
        case {"__tuple__": list(items)}:
            return tuple(decode_value(v) for v in items)
        case {"__dict__": list(items)}:
            return {decode_value(k): decode_value(v) for k, v in items}
    return {k: decode_value(v) for k, v in value.items()}


# -- writing -------------------------------------------------------------------------------------------------


def dump_manifest(m: Manifest) -> bytes:
    tensors = {
        name: {
            "dtype": DTYPE_NAMES[t.dtype],
            "shape": list(t.shape),
            "boxes": [
                {"start": list(b.box.start), "stop": list(b.box.stop), "part": b.part, "key": b.key} for b in t.boxes
            ],
        }
        for name, t in m.tensors.items()
    }
    parts = {n: (p.bytes, p.sha256) for n, p in m.parts.items()}
    return manifest_bytes(m.world_size, m.step, parts, tensors, m.values)


# -- reading -------------------------------------------------------------------------------------------------


def read_manifest(folder: Path, name: str = MANIFEST, kind: str = FORMAT) -> Manifest:
    """The checked manifest of a checkpoint folder; a UserError names the bad file and what to do."""
    file = folder / name
    if not folder.is_dir():
        raise UserError(f"no checkpoint at {folder}: there is no such folder")
    if not file.is_symlink() and not file.exists():
        raise UserError(f"{folder} is not a checkpoint: it has no {name}; point to a folder such as step-00000100")
    manifest = parse_manifest(read_bytes(file, MOST_BYTES), file, kind=kind)
    _check_files(folder, manifest, name)
    return manifest


def parse_manifest(data: bytes, file: Path, *, kind: str = FORMAT) -> Manifest:
    """Of a whole checkpoint; with the other kind of one host's share, whose boxes need not cover a tensor."""

    def bad(what: str) -> UserError:
        return UserError(f"{file} {what}; do not use this checkpoint, take an earlier one")

    try:
        root = json.loads(data, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as e:
        raise bad(f"is not valid JSON ({e})") from e
    if not isinstance(root, dict) or root.get("format") != kind:
        raise bad("is not a checkpoint manifest of Shoestring")
    if root.get("version") != VERSION:
        raise bad(f"has version {shown(root.get('version'))}, this program reads {VERSION}; update Shoestring")
    if not is_sealed(data):
        raise bad("is damaged: its own checksum does not fit")
    if set(root) != {"checksum", "format", "version", "world_size", "step", "parts", "tensors", "values"}:
        raise bad("has unknown or missing fields")
    if not _is_int(root["world_size"]) or not (root["step"] is None or _is_int(root["step"])):
        raise bad("has a bad world_size or step")
    for field_name in ("parts", "tensors", "values"):
        if not isinstance(root[field_name], dict):
            raise bad(f"has bad {field_name}")
    parts = {name: _part(bad, name, entry) for name, entry in root["parts"].items()}
    whole = kind == FORMAT
    tensors = {name: _tensor(bad, name, entry, parts, whole) for name, entry in root["tensors"].items()}
    keys = [(b.part, b.key) for t in tensors.values() for b in t.boxes]
    if len(set(keys)) != len(keys):
        raise bad("uses the same key of a part for two boxes")
    if both := set(tensors) & set(root["values"]):
        raise bad(f"has {min(both)!r} both as a tensor and as a value")
    try:
        for value in root["values"].values():
            decode_value(value)
    except (ValueError, TypeError, RecursionError) as e:
        raise bad(f"holds a value that cannot be decoded ({e})") from e
    if unused := set(parts) - {b.part for t in tensors.values() for b in t.boxes}:
        raise bad(f"lists {min(unused)}, which no tensor uses")
    return Manifest(root["world_size"], root["step"], parts, tensors, root["values"])


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("the same key twice in one object")
    return result


def _part(bad: Bad, name: str, entry: Any) -> PartInfo:
    if not _PART.fullmatch(name):
        raise bad(f"lists the part {shown(name)}; parts are named part-00000.safetensors and lie in the folder itself")
    if not isinstance(entry, dict) or set(entry) != {"bytes", "sha256"} or not _is_int(entry["bytes"]):
        raise bad(f"has a bad entry for {name}")
    if not isinstance(entry["sha256"], str) or not _HEX.fullmatch(entry["sha256"]):
        raise bad(f"has a bad checksum for {name}")
    return PartInfo(entry["bytes"], entry["sha256"])


def _ints(value: Any) -> bool:
    return isinstance(value, list) and all(_is_int(v) for v in value)


def _tensor(bad: Bad, name: str, entry: Any, parts: dict[str, PartInfo], whole: bool) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "boxes"} or not _ints(entry["shape"]):
        raise bad(f"has a bad entry for tensor {shown(name)}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise bad(f"gives tensor {shown(name)} the unknown dtype {shown(entry['dtype'])}")
    if not isinstance(entry["boxes"], list):
        raise bad(f"has bad boxes for tensor {shown(name)}")
    boxes = tuple(_box(bad, name, b, parts) for b in entry["boxes"])
    shape = tuple(entry["shape"])
    try:
        if whole:
            check_cover(name, shape, [b.box for b in boxes])
        else:
            check_inside(name, shape, [b.box for b in boxes])
    except UserError as e:
        raise bad(f"is inconsistent: {e}") from e
    return StoredTensor(DTYPES[entry["dtype"]], shape, boxes)


def _box(bad: Bad, name: str, entry: Any, parts: dict[str, PartInfo]) -> StoredBox:
    if not isinstance(entry, dict) or set(entry) != {"start", "stop", "part", "key"}:
        raise bad(f"has a bad box for tensor {shown(name)}")
    if not isinstance(entry["part"], str) or entry["part"] not in parts:
        raise bad(f"puts tensor {shown(name)} into the unknown part {shown(entry['part'])}")
    start, stop, key = entry["start"], entry["stop"], entry["key"]
    if not _ints(start) or not _ints(stop) or not isinstance(key, str) or len(start) != len(stop):
        raise bad(f"has a bad box for tensor {shown(name)}")
    if any(a >= b for a, b in zip(start, stop, strict=True)):
        raise bad(f"has an empty box for tensor {shown(name)}")
    return StoredBox(Box(tuple(start), tuple(stop)), entry["part"], key)


def _check_files(folder: Path, manifest: Manifest, listed_in: str) -> None:
    present = {p.name for p in folder.iterdir()}
    if extra := present - set(manifest.parts) - {listed_in}:
        raise UserError(
            f"{folder / min(extra)} does not belong to this checkpoint ({listed_in} does not list it); "
            "move it away if you know it, or do not use this checkpoint"
        )
    for name, info in manifest.parts.items():
        part = folder / name
        if part.is_symlink() or (part.exists() and not part.is_file()):
            raise UserError(f"{part} is not a plain file; do not use this checkpoint, take an earlier one")
        if not part.exists():
            raise UserError(f"{part} is missing; copy the whole folder again, or use an earlier checkpoint")
        if part.stat().st_size != info.bytes:
            raise UserError(
                f"{part} has {part.stat().st_size} bytes instead of {info.bytes}: it is cut off or was "
                "changed; copy the whole folder again, or use an earlier checkpoint"
            )
