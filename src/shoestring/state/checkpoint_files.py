"""The files of a checkpoint folder, without torch: parts, JSON with its own checksum, replaced folders.

    PartWriter       one safetensors file, header first, hashed on the way
    seal, is_sealed  JSON whose first line is `{"checksum": "<sha256>",`, the sum of every byte after that line
    manifest_bytes   manifest.json, from plain dicts
    replace_folder   one rename makes a folder visible; `sweep` cleans up after killed processes

Tensors become bytes in files.py; manifest.py reads and checks. The agent of the checkpoint levels, which has no torch,
writes the same files through this module.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT, VERSION = "shoestring-checkpoint", 1
HOST_MANIFEST, HOST_FORMAT = "host.json", "shoestring-host"  # the share of one host
CHUNK = 1 << 24  # bytes hashed and written at a time: a chunk is still in the cache when it is written
# Hidden siblings of a checkpoint: being written, replaced by a newer one of the same name, being deleted, being fetched
# from remote storage.
NEW, OLD, GONE, FETCHED = ".shoestring-new-", ".shoestring-old-", ".shoestring-gone-", ".shoestring-fetch-"
Entry = tuple[str, str, Sequence[int], int]  # key, dtype in safetensors' words, shape, bytes


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


def is_part(path: Path) -> bool:
    """Whether a safetensors file is one of a checkpoint's."""
    return path.name.startswith("part-") and (path.parent / MANIFEST).is_file()


def part_header(entries: Sequence[Entry], metadata: dict[str, str] | None = None) -> bytes:
    """What a safetensors file of these tensors begins with."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for key, dtype, shape, num_bytes in entries:
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return len(text).to_bytes(8, "little") + text


class PartWriter:
    """One safetensors file of `entries`, whose bytes follow in that order. `metadata` goes into the header."""

    def __init__(
        self, path: Path, entries: Sequence[Entry], *, metadata: dict[str, str] | None = None, checksum: bool = True
    ) -> None:
        self._hash = hashlib.sha256() if checksum else None
        self.num_bytes = 0
        self._file = path.open("wb")
        self._write(part_header(entries, metadata))

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self.num_bytes += len(view)
        for at in range(0, len(view), CHUNK):
            if self._hash is not None:
                self._hash.update(view[at : at + CHUNK])
            self._file.write(view[at : at + CHUNK])

    def add_bytes(self, data: memoryview) -> None:
        self._write(data)

    @property
    def sha256(self) -> str:
        assert self._hash is not None
        return self._hash.hexdigest()

    def close(self) -> None:
        """On disk, not only in the page cache: what is renamed next must not be empty after a power cut."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
            self._file.close()


def seal(body: Mapping[str, Any]) -> bytes:
    rest = json.dumps(body, indent=1, allow_nan=False).removeprefix("{").lstrip("\n").encode() + b"\n"
    return f'{{"checksum": "{hashlib.sha256(rest).hexdigest()}",\n'.encode() + rest


def is_sealed(data: bytes) -> bool:
    """Whether the checksum in the first line is that of the rest."""
    first, _, rest = data.partition(b"\n")
    return first == f'{{"checksum": "{hashlib.sha256(rest).hexdigest()}",'.encode()


def manifest_bytes(
    world_size: int,
    step: int | None,
    parts: Mapping[str, tuple[int, str]],
    tensors: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, Any],
    kind: str = FORMAT,
) -> bytes:
    """`parts`: {name: (bytes, sha256)}; `tensors`: {name: dtype, shape and boxes as they stand in the file}."""
    return seal(
        {
            "format": kind,
            "version": VERSION,
            "world_size": world_size,
            "step": step,
            "parts": {n: {"bytes": size, "sha256": digest} for n, (size, digest) in sorted(parts.items())},
            "tensors": dict(sorted(tensors.items())),
            "values": dict(sorted(values.items())),
        }
    )


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable; a file's own fsync does not cover its name."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def hidden(path: Path, prefix: str) -> Path:
    return path.parent / f"{prefix}{path.name}"


def replace_folder(new: Path, target: Path, old: Path) -> None:
    """Put the complete folder `new` in the place of `target`, which is kept as `old` in between.

    A crash between the two renames leaves `old`; a failing rename puts it back.
    """
    sync(new)
    had_old = target.exists()
    if had_old:
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if had_old:
            old.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Clean up after killed saves: put a replaced checkpoint back whose successor never came, drop the rest.

    Only for a folder that belongs to one run, while none of its processes is saving.
    """
    for path in list(folder.glob(".shoestring-*")):
        if path.name.startswith(OLD):
            target = folder / path.name.removeprefix(OLD)
            if not target.exists() and (path / MANIFEST).is_file():
                path.rename(target)
                continue
        if path.name.startswith((NEW, OLD, GONE, FETCHED)):
            shutil.rmtree(path, ignore_errors=True)
