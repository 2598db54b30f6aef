"""Machine code that this machine compiled before: kept on disk, and checked before it is used.

    code = cached_code(key, ".cubin", compile)     # the bytes; `compile()` makes them where there are none to trust

A file begins with the digest of the rest, so that one which a full disk or a crash cut short is compiled anew.
It appears whole or not at all. Processes that want the same code at the same time (the ranks of a host) compile it
once: one of them compiles, the others wait for it and read its file.

A digest does not stop a person who may write here, and machine code that such a person plants runs as this user. So
what belongs to somebody else (root excepted), or what others may write to, is not used, and a warning says why. Such a
file is replaced. Such a folder is neither read nor written: the code is compiled for this process alone.

Callers get bytes, never a path: what was checked is what is loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from shoestring.host.arena import lock_file
from shoestring.paths import cache_folder

DIGEST = hashlib.sha256().digest_size
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MOST_WAIT_S = 150.0  # for another process that compiles; longer than a compiler of cpp.py may take
POLL_S = 0.05


def cached_code(key: str, suffix: str, compile: Callable[[], bytes]) -> bytes:
    """`key` has everything that the code depends on. A folder that cannot be written is no error."""
    path = _path(key, suffix)
    folder = path.parent
    refused = _refusal(folder)
    if refused is not None:
        _warn(
            f"compiled kernels in {folder} are not used because {refused}; they are compiled again in every process. "
            "Remove the folder, make it yours alone (chmod -R go-w), or set SHOESTRING_CACHE to another one"
        )
        return compile()
    kept = _read(path)
    if kept is not None:
        return kept
    with _one_at_a_time(path):
        kept = _read(path)  # another process may have compiled it since
        if kept is not None:
            return kept
        code = compile()
        with contextlib.suppress(OSError):  # kept for this process only
            _write(path, code)
        return code


def has_code(key: str, suffix: str) -> bool:
    """Whether there is a file of it, which is not looked into."""
    return _path(key, suffix).exists()


def _path(key: str, suffix: str) -> Path:
    return cache_folder() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{suffix}"


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Inside, no other process or thread compiles the same code. The system drops the lock of a process that is
    killed. A process that waited for MOST_WAIT_S, or that cannot write a lock, goes on without it: compiling twice is
    harmless."""
    lock = path.with_name(path.name + ".lock")
    deadline = time.monotonic() + MOST_WAIT_S
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            _make_folder(path.parent)
            while not (free := held.enter_context(lock_file(lock, fcntl.LOCK_EX))) and time.monotonic() < deadline:
                held.close()
                time.sleep(POLL_S)
            if free:  # who has opened the old file, or makes a new one, finds the code
                held.callback(_remove, lock)
        yield


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _refusal(folder: Path) -> str | None:
    """Why nothing in the folder may be used; None where it may be, or where there is none yet."""
    try:
        return _distrust(folder.stat())
    except OSError:
        return None


def _read(path: Path) -> bytes | None:
    """The code; None where there is none that is whole and to be trusted."""
    try:
        # A link would lead to a file in a folder that nobody has looked at; a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        refused = _distrust(about) if stat.S_ISREG(about.st_mode) else "it is not a plain file"
        if refused is not None:
            _warn(f"{path} is not used because {refused}; it is compiled again")
            return None
        kept = file.read()
    return kept[DIGEST:] if kept[:DIGEST] == hashlib.sha256(kept[DIGEST:]).digest() else None


def _distrust(about: os.stat_result) -> str | None:
    if about.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {about.st_uid}, and this is user {os.geteuid()}"
    if about.st_mode & OTHERS_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(about.st_mode):o})"
    return None


def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # whatever the umask: the group must not write here


def _write(path: Path, code: bytes) -> None:
    _make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
            file.flush()
            os.fsync(handle)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


@functools.cache  # once for each place and reason
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)
