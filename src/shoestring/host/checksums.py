"""Fast checksums of host memory: xxh3 of every 64 MiB, several chunks at a time.

They tell a torn or damaged copy from a whole one; they are no protection against an attacker (disk and remote copies
have sha256). xxh3 runs at 13 GB/s on one core, sha256 at 1.6. The interpreter's lock is released while a chunk is
hashed. The writer notes the algorithm, so that a copy can be read where another one is the default.
"""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from shoestring.errors import UserError

xxhash: Any = None
with contextlib.suppress(ImportError):  # on a machine with only torch the standard library's own checksum does
    xxhash = importlib.import_module("xxhash")

CHUNK_BYTES = 64 << 20
ALGORITHMS = ("xxh3", "crc32")
ALGORITHM = ALGORITHMS[0 if xxhash is not None else 1]


def checksum(data: memoryview | bytes, algorithm: str = ALGORITHM) -> str:
    """Of these bytes, in hexadecimal digits."""
    if algorithm == "crc32":
        return f"{zlib.crc32(data):08x}"
    if algorithm != "xxh3":
        raise UserError(f"unknown checksum {algorithm!r}: this program knows {', '.join(ALGORITHMS)}; update it")
    if xxhash is None:
        raise UserError("this copy has xxh3 checksums, and the package xxhash is not installed: pip install xxhash")
    return xxhash.xxh3_64_hexdigest(data)


class RunningSum:
    """The checksum of bytes that come one after the other."""

    def __init__(self, algorithm: str = ALGORITHM) -> None:
        checksum(b"", algorithm)  # refuses an algorithm that is not here
        self._xxh3: Any = xxhash.xxh3_64() if algorithm == "xxh3" else None
        self._crc32 = 0

    def add(self, data: memoryview | bytes) -> None:
        if self._xxh3 is not None:
            self._xxh3.update(data)
        else:
            self._crc32 = zlib.crc32(data, self._crc32)

    def digest(self) -> str:
        return f"{self._crc32:08x}" if self._xxh3 is None else self._xxh3.hexdigest()


def chunks_of(num_bytes: int, chunk: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """(begin, end) of every chunk."""
    return [(at, min(at + chunk, num_bytes)) for at in range(0, num_bytes, chunk)]


def checksums(view: memoryview, pool: Executor, chunk: int = CHUNK_BYTES, algorithm: str = ALGORITHM) -> list[str]:
    """Of every chunk of the view, in the threads of the pool."""
    return list(pool.map(lambda span: checksum(view[span[0] : span[1]], algorithm), chunks_of(len(view), chunk)))


def damaged_chunks(
    view: memoryview, expected: Sequence[str], pool: Executor, chunk: int, algorithm: str
) -> list[tuple[int, int]]:
    """(begin, end) of the chunks whose bytes are not those that were summed."""
    found = checksums(view, pool, chunk, algorithm)
    spans = chunks_of(len(view), chunk)
    if len(found) != len(expected):
        return spans
    return [span for span, here, there in zip(spans, found, expected, strict=True) if here != there]
