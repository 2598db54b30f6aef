"""JSON files that nobody vouches for: one bounded reader, and values that are typed and ranged.

Every JSON file that a user can hand over goes through here: model folders, run folders, tasks, corpora, skip sets.
The reader bounds what a file can cost (bytes, nesting, digits of a number) and refuses what breaks later, far from
the file: keys given twice, NaN, half a surrogate pair, a pipe that never ends. `Fields` then takes single values out
of an object, each with its type and its range.

Checkpoint manifests have their own parser (state/manifest.py), because they carry a checksum.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoestring.errors import UserError, shortened, shown

MOST_BYTES = 1 << 24  # of a JSON file; the index of a model with 100,000 tensors has 9 MB
MOST_LINE = 1 << 26  # bytes of one line of a .jsonl file
MOST_TEXT = 1 << 28  # bytes of a file that is read whole
MOST_DEPTH = 64  # of lists and objects inside each other
MOST_DIGITS = 40  # of a whole number; `transformers` writes 31 for "no limit"

MOST_NAME, MOST_PATH = 255, 4095  # bytes, of Linux' file systems
POSITIVE, LARGE = 5e-324, 3e38  # the smallest number above 0; about the largest that fp32 holds

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
REQUIRED: Any = object()
_REMEDIES = {errno.ENOENT: "; check the path", errno.EISDIR: "; give a file", errno.EACCES: "; make it readable to you"}
_NAMES = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}

# -- files -----------------------------------------------------------------------------------------


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of an ordinary file of at most `most` bytes; UserError for everything else."""
    try:
        # Without O_NONBLOCK opening a pipe would wait for somebody to write into it.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path} is a pipe, a socket or a device; give an ordinary file")
            data = file.read(most + 1) if status.st_size <= most else b""
            if status.st_size > most or len(data) > most:
                raise UserError(f"{path} has more than {most:,} bytes, which no file of its kind needs; it is damaged")
            return data
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise UserError(f"cannot read {shortened(str(path), 300)}: {error.strerror or error}{remedy}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{shortened(str(path), 300)} cannot be a path: {error}") from None


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """The text of an ordinary UTF-8 file."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} does not decode; save it as UTF-8") from None


def read_json(path: Path, most: int = MOST_BYTES, remedy: str = "download or save it again") -> Any:
    """Any JSON value."""
    return parse_json(read_text(path, most), str(path), remedy)


def read_object(path: Path, most: int = MOST_BYTES, remedy: str = "download or save it again") -> dict[str, Any]:
    """A JSON object."""
    value = read_json(path, most, remedy)
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {kind_of(value)}; {remedy}")
    return value


def json_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of each line of a .jsonl file that is not empty; a line is bounded, the file is not."""
    if not path.is_file():
        read_bytes(path, 0)  # says why
    offset = 0
    with path.open("rb") as file:
        for number in _counting():
            line = file.readline(MOST_LINE + 1)
            if not line:
                return
            if len(line) > MOST_LINE:
                raise UserError(f"{path}:{number} has more than {MOST_LINE:,} bytes; split it into several lines")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path} is not UTF-8 text: byte {offset + error.start} (line {number}) does not decode; convert "
                    "it, for example with iconv -f latin1 -t utf-8"
                ) from None
            offset += len(line)
            if text.strip():
                yield number, text


def _counting() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def check_path(path: str | Path) -> None:
    """UserError for names that the system would refuse in the middle of the work: too long, or with a NUL in them."""
    text = os.fsencode(path) if _encodes(path) else b"\0"
    if b"\0" in text or len(text) > MOST_PATH or any(len(part) > MOST_NAME for part in text.split(b"/")):
        raise UserError(
            f"{shortened(repr(str(path)), 100)} cannot be a path: names have at most {MOST_NAME} bytes, paths "
            f"{MOST_PATH}, and none a NUL; give another"
        )


def _encodes(path: str | Path) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair that came from no file name
        return False
    return True


# -- values ----------------------------------------------------------------------------------------


def parse_json(text: str, where: str, remedy: str = "download or save it again") -> Any:
    """The value of a JSON text, bounded and without what JSON does not have; `where` begins the error."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        _check(value, surrogates=_SURROGATE.search(text) is not None)
        return value
    except RecursionError:
        raise UserError(f"{where} is nested more than {MOST_DEPTH} levels deep; {remedy}") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({shortened(str(error), 200)}); {remedy}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [k for k, _ in pairs]
        twice = next(k for k in made if keys.count(k) > 1)
        raise ValueError(f"the key {shown(twice)} is given twice")
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: Any, *, surrogates: bool) -> None:
    """Depth, digits, infinities (1e999) and, where the text has such escapes, halves of surrogate pairs."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"nested more than {MOST_DEPTH} levels deep")
        below: list[Any] = []
        for v in level:
            if isinstance(v, dict):
                below += v.values()
                if surrogates:
                    below += v
            elif isinstance(v, list):
                below += v
            elif isinstance(v, float):
                if not math.isfinite(v):
                    raise ValueError("a number is too large for any computer")
            elif isinstance(v, int):
                if abs(v) >= 10**MOST_DIGITS:
                    raise ValueError(f"a number has more than {MOST_DIGITS} digits")
            elif surrogates and isinstance(v, str) and not is_unicode(v):
                raise ValueError(f"{shown(v)} holds half of a surrogate pair, which is no character")
        level = below


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded: not where it holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: Any) -> str:
    """How a JSON value is called to a user."""
    return _NAMES.get(type(value), "a number")


class Fields:
    """The values of an object, each taken with its type and its range; `where` begins the errors.

    A value that is null counts as absent. Without a default the key must be there.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def whole(self, key: str, default: Any = REQUIRED, *, least: int = 1, most: int = 2**53) -> Any:
        """A whole number from `least` to `most`."""
        value = self._look(key, default)
        if value is default and value is not REQUIRED:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            upper = "" if most >= 2**53 else f" to {most:,}"
            kind = "a positive whole number" if least == 1 and not upper else f"a whole number from {least}{upper}"
            raise UserError(f"{self.where}: {key} must be {kind}, not {shown(value)}")
        return value

    def number(self, key: str, default: Any = REQUIRED, *, least: float = POSITIVE, most: float = LARGE) -> float:
        """A number from `least` to `most`."""
        value = self._look(key, default)
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not least <= value <= most:
            plain = (least, most) == (POSITIVE, LARGE)
            bounds = "a positive number" if plain else f"a number from {least:g} to {most:g}"
            raise UserError(f"{self.where}: {key} must be {bounds}, not {shown(value)}")
        return float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        return self._of_type(bool, key, default)

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        return self._of_type(str, key, default)

    def object(self, key: str, default: Any = REQUIRED) -> Any:
        return self._of_type(dict, key, default)

    def list(self, key: str, default: Any = REQUIRED) -> Any:
        return self._of_type(list, key, default)

    def _of_type(self, wanted: type, key: str, default: Any) -> Any:
        value = self._look(key, default)
        if value is not default and not isinstance(value, wanted):
            raise UserError(f"{self.where}: {key} must be {_NAMES[wanted]}, not {shown(value)}")
        return value

    def _look(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None and default is REQUIRED:
            raise UserError(f"{self.where} has no {key!r}, which is needed; add it")
        return default if value is None else value
