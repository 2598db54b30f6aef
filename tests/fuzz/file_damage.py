"""Damage to files, decided by a random generator alone: the same seed gives the same bytes.

Three ways: to the file as an entry of its folder (missing, empty, a pipe, a link ...), to its bytes, and, for JSON, to
its values. Each returns a few words on what it did.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

LONG_NAME = "n" * 300
DEEP = 5000


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


class Raw:
    """Text that goes into a JSON file as it is: what `json.dumps` would not write."""

    def __init__(self, text: str) -> None:
        self.text = text


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53, 2**63, -(2**63), 10**30, 10**39, 0.0, -0.0, 0.5, -1.5),
    *(1e-300, 1e38, 1e300, -1e300, "", " ", "0", "true", "x" * 5000, LONG_NAME, "\0", "../../etc/passwd", "/dev/zero"),
    *("~", "%s%n", "{{ 7 * 7 }}", "auto", "int4", "F32", "sliding_attention", [], {}, [[]], [0], [None], [1, 2, 3]),
    *({"a": 1}, {"": ""}, {"content": 3}, {"type": "x"}, [{}], ["x"], [-1], [True], [1e300]),
    *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("9" * 60), Raw("9" * 5000), Raw("-0")),
    *(Raw('"\\ud800"'), Raw('{"\\udfff": 1}'), Raw(deep(60)), Raw(deep(200)), Raw(deep(DEEP)), Raw('{"a": 1, "a": 2}')),
    *(Raw("[" * DEEP), Raw(""), Raw('"\\u0000"'), Raw("01"), Raw("'x'"), Raw("1_000")),
)


# -- entries ---------------------------------------------------------------------------------------


def damage_entry(path: Path, rng: random.Random) -> str:
    """Something else in the place of a file."""
    kind = rng.choice(("missing", "empty", "folder", "pipe", "loop", "dangling", "zeros", "huge", "device", "twin"))
    content = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match kind:
        case "empty":
            path.write_bytes(b"")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("nowhere-" + LONG_NAME[:100])
        case "zeros":
            path.write_bytes(bytes(max(1, len(content))))
        case "huge":
            with path.open("wb") as file:
                file.write(content)
                file.truncate(1 << 40)  # a terabyte that takes no room
        case "device":
            path.symlink_to("/dev/zero")
        case "twin":  # a link to a good copy elsewhere is no damage
            other = path.with_name("twin-" + path.name)
            other.write_bytes(content)
            path.symlink_to(other.name)
    return kind


# -- bytes -----------------------------------------------------------------------------------------


def damage_bytes(path: Path, rng: random.Random, head: int | None = None) -> str:
    """Bytes cut off, flipped, repeated or overwritten; `head`: mostly in the first so many."""
    data = bytearray(path.read_bytes())
    size = max(1, len(data))
    reach = min(size, head) if head is not None and rng.random() < 0.8 else size
    kind = rng.choice(("cut", "flip", "flips", "zeros", "ones", "repeat", "insert", "number", "swap", "tail"))
    at = rng.randrange(reach)
    match kind:
        case "cut":
            del data[at:]
        case "flip":
            data[at : at + 1] = bytes(b ^ (1 << rng.randrange(8)) for b in data[at : at + 1])
        case "flips":
            for _ in range(rng.randrange(2, 40)):
                i = rng.randrange(reach)
                data[i : i + 1] = bytes(b ^ (1 << rng.randrange(8)) for b in data[i : i + 1])
        case "zeros" | "ones":
            length = rng.randrange(1, 64)
            data[at : at + length] = (b"\0" if kind == "zeros" else b"\xff") * length
        case "repeat":
            length = rng.randrange(1, 400)
            data[at:at] = data[at : at + length]
        case "insert":
            data[at:at] = rng.randbytes(rng.randrange(1, 64))
        case "number":
            values = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**62, 2**63, 2**64 - 1)
            data[at : at + 8] = rng.choice(values).to_bytes(8, "little")
        case "swap":
            other, length = rng.randrange(reach), rng.randrange(1, 100)
            data[at : at + length], data[other : other + length] = data[other : other + length], data[at : at + length]
        case "tail":
            data += rng.randbytes(rng.randrange(1, 2000))
    path.write_bytes(data)
    return f"{kind} at {at} of {size}"


# -- values ----------------------------------------------------------------------------------------


def damage_json(path: Path, rng: random.Random) -> str:
    """One to three values of a JSON file replaced by hostile ones, removed, doubled or added."""
    value, told = json.loads(path.read_text(encoding="utf-8")), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value, said = damage_value(value, rng)
        told.append(said)
    path.write_text(hostile_json(value), encoding="utf-8")
    return ", ".join(told)


def damage_lines(path: Path, rng: random.Random) -> str:
    """As `damage_json`, for one line of a .jsonl file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    at = rng.randrange(len(lines))
    value, told = damage_value(json.loads(lines[at]), rng)
    lines[at] = hostile_json(value)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"line {at + 1}: {told}"


def damage_value(value: Any, rng: random.Random) -> tuple[Any, str]:
    """A copy with one hostile value somewhere inside (or in its place), and where."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.03:
        new = rng.choice(HOSTILE)
        return new, f"= {describe(new)}"
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys[:200])
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.6:
        inner, told = damage_value(value[key], rng)
        return _with(value, key, inner), f"[{str(key)[:40]!r}]{told}"
    kind = rng.choice(("replace", "replace", "replace", "replace", "remove", "add", "rename"))
    if kind == "remove":
        left = {k: v for k, v in value.items() if k != key} if isinstance(value, dict) else value[:key]
        return left, f"[{str(key)[:40]!r}] removed"
    new = rng.choice(HOSTILE)
    if kind == "add" and isinstance(value, dict):
        name = rng.choice(("", LONG_NAME, "__proto__", "quantization_config", "\n", "0", "added"))
        return {**value, name: new}, f"[{name[:20]!r}] added {describe(new)}"
    if kind == "rename" and isinstance(value, dict):
        return {(k + "_" if k == key else k): v for k, v in value.items()}, f"[{str(key)[:40]!r}] renamed"
    return _with(value, key, new), f"[{str(key)[:40]!r}] = {describe(new)}"


def _with(value: Any, key: Any, new: Any) -> Any:
    if isinstance(value, dict):
        return {k: (new if k == key else v) for k, v in value.items()}
    return [new if i == key else v for i, v in enumerate(value)]


def describe(value: Any) -> str:
    return (value.text if isinstance(value, Raw) else repr(value))[:60]


def hostile_json(value: Any) -> str:
    """`json.dumps` that passes Raw texts through."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {hostile_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(hostile_json, value)) + "]"
    return json.dumps(value)
