"""Arena: a file in tmpfs with two slots, so that one whole copy of a state outlives the process that wrote it.

    page 0          geometry: slot and index sizes, with a checksum; written once, before the file has its name
    page 1, 2       one record per slot: sequence number, step, length and checksum of the index, its own checksum
    index 0, 1      JSON per slot: what lies where, and the checksum of every chunk of the slot
    slot 0, 1       the bytes

Where copies also go to peers there are three slots: one stays with the version that the peers have.

A slot is written in this order: record erased, bytes, index, record. So a process that is killed at any point leaves
the other slot whole, and this one either whole or without a valid record. Readers take the newest valid record.

The file is plain (os.open, ftruncate, mmap), not multiprocessing.shared_memory, whose resource tracker deletes the
segment when the process that made it dies. Whoever reads a slot holds a shared lock on it, whoever writes an exclusive
one; the system drops locks when a process ends. No torch here: the agent that outlives the trainer imports this.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.errors import UserError
from shoestring.host.checksums import ALGORITHM, ALGORITHMS, checksum

PAGE = 4096
ALIGN = 2 << 20  # of slots: whole huge pages
MAGIC, VERSION = b"SHOEAREN", 1
MOST_SLOTS = 8
_GEOMETRY = struct.Struct("<8sIIQQQ")  # magic, version, checksum algorithm, slots, bytes of an index, bytes of a slot
_RECORD = struct.Struct("<8sQQQ16s")  # magic, sequence, step, length of the index, checksum of the index
_SUM = 16  # bytes of a checksum in hexadecimal, padded
MOST_BYTES = 1 << 46  # of a slot; a file that declares more is damaged
POPULATE_WRITE = 23  # madvise: map the pages now (Linux 5.14)
TOUCH_BYTES = 256 << 20
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class SlotVersion:
    """What one slot holds."""

    slot: int
    sequence: int
    step: int
    index: dict[str, Any]


class Arena:
    """One mapped arena file. `create` and `open` make it; `close` unmaps it and leaves the file."""

    def __init__(self, path: Path, fd: int, num_slots: int, index_bytes: int, slot_bytes: int, algorithm: str) -> None:
        self.path, self._fd, self.num_slots = path, fd, num_slots
        self.index_bytes, self.slot_bytes, self.algorithm = index_bytes, slot_bytes, algorithm
        self.map = mmap.mmap(fd, file_bytes(num_slots, index_bytes, slot_bytes))
        self._view = memoryview(self.map)

    @classmethod
    def create(cls, path: Path, index_bytes: int, slot_bytes: int, num_slots: int = 2) -> Arena:
        """A new file in the place of any old one. It has its size and no pages yet: see `touch`."""
        index_bytes, slot_bytes = _round_up(index_bytes, PAGE), _round_up(max(slot_bytes, 1), ALIGN)
        partial = path.with_name(f".{path.name}.partial")
        partial.unlink(missing_ok=True)
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, file_bytes(num_slots, index_bytes, slot_bytes))
            head = _GEOMETRY.pack(MAGIC, VERSION, ALGORITHMS.index(ALGORITHM), num_slots, index_bytes, slot_bytes)
            os.pwrite(fd, head + _padded(checksum(head)), 0)
            partial.rename(path)
            return cls(path, fd, num_slots, index_bytes, slot_bytes, ALGORITHM)
        except BaseException:
            os.close(fd)
            partial.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: Path) -> Arena:
        """An existing file; UserError where it is none of ours, damaged or of another version."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(f"cannot open {path}: {error.strerror}") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise UserError(f"{path} is not a plain file of this user; delete it")
            head = os.pread(fd, _GEOMETRY.size + _SUM, 0)
            if len(head) < _GEOMETRY.size + _SUM or head[:8] != MAGIC:
                raise UserError(f"{path} is not an arena of Shoestring; delete it")
            _, version, algorithm, num_slots, index_bytes, slot_bytes = _GEOMETRY.unpack(head[: _GEOMETRY.size])
            if version != VERSION:
                raise UserError(f"{path} has version {version}, this program reads {VERSION}; update Shoestring")
            if algorithm >= len(ALGORITHMS):
                raise UserError(f"{path} has an unknown kind of checksum; update Shoestring")
            name = ALGORITHMS[algorithm]
            if _padded(checksum(head[: _GEOMETRY.size], name)) != head[_GEOMETRY.size :]:
                raise UserError(f"{path} is damaged: the checksum of its geometry does not fit; delete it")
            if slot_bytes > MOST_BYTES or index_bytes > MOST_BYTES or not 2 <= num_slots <= MOST_SLOTS:
                raise UserError(f"{path} declares {num_slots} slots of {slot_bytes:,} bytes; it is damaged: delete it")
            if status.st_size != file_bytes(num_slots, index_bytes, slot_bytes):
                raise UserError(f"{path} has {status.st_size:,} bytes, its geometry says otherwise; delete it")
            return cls(path, fd, num_slots, index_bytes, slot_bytes, name)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        self._view.release()
        with contextlib.suppress(BufferError):  # a tensor still looks at it: unmapped when that is gone
            self.map.close()
        os.close(self._fd)

    # -- slots -----------------------------------------------------------------------------------------------

    def slot_begin(self, slot: int) -> int:
        """The offset of a slot's bytes in the file."""
        whole = file_bytes(self.num_slots, self.index_bytes, self.slot_bytes)
        return whole - (self.num_slots - slot) * self.slot_bytes

    def slot_view(self, slot: int) -> memoryview:
        begin = self.slot_begin(slot)
        return self._view[begin : begin + self.slot_bytes]

    def touch(self, slot: int, pool: ThreadPoolExecutor) -> None:
        """Give the slot its pages now, in several threads; OSError (ENOSPC) where there are not enough.

        Writing to a page that tmpfs cannot provide would kill the process (SIGBUS); here it is an ordinary error.
        """
        begin = self.slot_begin(slot)
        mapped = ctypes.c_char.from_buffer(self.map)
        address = ctypes.addressof(mapped)

        def touch_piece(at: int) -> None:
            size = min(TOUCH_BYTES, self.slot_bytes - at)
            os.posix_fallocate(self._fd, begin + at, size)
            # Not mmap.madvise, which holds the interpreter's lock, and with it training, for as long as this takes. An
            # older kernel refuses, and maps pages at the first write.
            _LIBC.madvise(ctypes.c_void_p(address + begin + at), ctypes.c_size_t(size), POPULATE_WRITE)

        if slot == 0:
            os.posix_fallocate(self._fd, 0, self.slot_begin(0))
        list(pool.map(touch_piece, range(0, self.slot_bytes, TOUCH_BYTES)))
        del mapped  # or the map could not be closed

    def has_pages(self, slot: int) -> bool:
        """Whether every page of the slot is there."""
        begin = self.slot_begin(slot)
        return os.lseek(self._fd, begin, os.SEEK_HOLE) >= begin + self.slot_bytes

    def read_into(self, slot: int, at: int, buffer: memoryview) -> None:
        """Fill the buffer from byte `at` of a slot, through the file and not through the map: no page faults."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self._fd, [buffer[done:]], self.slot_begin(slot) + at + done)
            if got == 0:
                raise UserError(f"{self.path} ends before its slot {slot} does; delete it")
            done += got

    def versions(self) -> list[SlotVersion]:
        """What the slots hold, newest first. A record or an index that is not whole counts as nothing."""
        found = [v for v in (self._read(slot) for slot in range(self.num_slots)) if v is not None]
        return sorted(found, key=lambda v: -v.sequence)

    def version(self, slot: int) -> SlotVersion | None:
        return self._read(slot)

    def _read(self, slot: int) -> SlotVersion | None:
        raw = bytes(self._view[_record_at(slot) : _record_at(slot) + _RECORD.size + _SUM])
        body = raw[: _RECORD.size]
        if body[:8] != MAGIC or raw[_RECORD.size :] != _padded(checksum(body, self.algorithm)):
            return None
        _, sequence, step, length, index_sum = _RECORD.unpack(body)
        if length > self.index_bytes:
            return None
        begin = self._index_at(slot)
        text = bytes(self._view[begin : begin + length])
        if _padded(checksum(text, self.algorithm)) != index_sum:
            return None
        try:
            index = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return SlotVersion(slot, sequence, step, index) if isinstance(index, dict) else None

    def erase(self, slot: int) -> None:
        """From now on the slot holds nothing."""
        begin = _record_at(slot)
        self._view[begin : begin + PAGE] = bytes(PAGE)

    def commit(self, slot: int, sequence: int, step: int, index: dict[str, Any]) -> None:
        """After the slot's bytes: index, then record. From the last byte of the record on the slot counts."""
        self._commit_text(slot, sequence, step, json.dumps(index, separators=(",", ":")).encode())

    def _commit_text(self, slot: int, sequence: int, step: int, text: bytes) -> None:
        if len(text) > self.index_bytes:
            raise IndexTooLargeError(len(text))
        begin = self._index_at(slot)
        self._view[begin : begin + len(text)] = text
        body = _RECORD.pack(MAGIC, sequence, step, len(text), _padded(checksum(text, self.algorithm)))
        begin = _record_at(slot)
        record = body + _padded(checksum(body, self.algorithm))
        self._view[begin : begin + len(record)] = record

    def _index_at(self, slot: int) -> int:
        return (1 + self.num_slots) * PAGE + slot * self.index_bytes

    # -- locks -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self, slot: int) -> Iterator[bool]:
        """Nobody writes the slot inside; False where somebody is writing it now."""
        with lock_file(self.lock_path(slot), fcntl.LOCK_SH) as held:
            yield held

    def lock_path(self, slot: int) -> Path:
        return self.path.with_name(f"{self.path.name}.slot{slot}")


class IndexTooLargeError(Exception):
    """The index needs more room than the arena has for it: make a new arena."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"an index of {needed} bytes")
        self.needed = needed


@contextlib.contextmanager
def lock_file(path: Path, kind: int) -> Iterator[bool]:
    """Hold a lock on a file inside, without waiting for it; False where somebody else's lock forbids it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Whether some process holds the file exclusively."""
    if not path.exists():
        return False
    with lock_file(path, fcntl.LOCK_SH) as free:
        return not free


def file_bytes(num_slots: int, index_bytes: int, slot_bytes: int) -> int:
    return _round_up((1 + num_slots) * PAGE + num_slots * index_bytes, ALIGN) + num_slots * slot_bytes


def _record_at(slot: int) -> int:
    return (1 + slot) * PAGE


def _padded(digest: str) -> bytes:
    return digest.encode().ljust(_SUM, b"\0")


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to


# -- folders of arenas ---------------------------------------------------------------------------------------


def own_folder(path: Path) -> Path:
    """Make a folder that only this user can enter. In /dev/shm anybody may have made one of that name before."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(
            f"{path} belongs to another user or is not a folder; set SHOESTRING_MEMORY_DIR to another place"
        )
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path


def room_for(folder: Path, num_bytes: int) -> str | None:
    """Why a tmpfs cannot take so many bytes more; None where it can. Its pages are memory, so both must be free."""
    try:
        free = shutil.disk_usage(folder).free
        memory = available_memory()
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror})"
    least = min(free, memory)
    if num_bytes <= least:
        return None
    what = f"{folder} has {free / 2**30:.1f} GiB free" if free <= memory else f"{memory / 2**30:.1f} GiB of memory free"
    return f"{what}, the copies of the state need {num_bytes / 2**30:.1f} GiB"


def available_memory() -> int:
    """Bytes that can be used before the system or the container runs out."""
    import psutil

    least = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # without a limit there is the word "max"
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        least = min(least, limit - used + int(kinds["inactive_file"]))  # cached files give way
    return max(least, 0)
