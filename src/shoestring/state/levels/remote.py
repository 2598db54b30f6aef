"""Remote storage through fsspec: checkpoint folders are uploaded and fetched, every operation under our own deadline.

A storage library's own time-outs are not enough: a server that accepts connections and then says nothing held an
upload for more than a minute in spite of them. So each operation runs in a thread of its own and is given up when its
time is over; the thread is left behind (it is a daemon) and the next try starts with a new connection. Only the agent
and the start of a run come here, so training never waits for it. The manifest is uploaded last: a folder that has one
is complete. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shoestring.errors import UserError
from shoestring.state.checkpoint_files import (
    FETCHED,
    HOST_MANIFEST,
    MANIFEST,
    OLD,
    hidden,
    is_sealed,
    replace_folder,
    sync,
)
from shoestring.state.levels.drain import HOSTS, share_copy
from shoestring.state.levels.version import HeldCopy, missing_of

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")  # of hosts and steps; anything else is not ours
SLOWEST = 4e6  # bytes a second that a transfer must reach beyond its time-out


class DeadlineError(UserError):
    """An operation did not end in time."""


def within(seconds: float, what: str, action: Callable[[], Any]) -> Any:
    """The result of the action, or DeadlineError; the action may go on in its thread and is not waited for."""
    result: list[Any] = []
    error: list[BaseException] = []

    def call() -> None:
        try:
            result.append(action())
        except BaseException as e:
            error.append(e)

    thread = threading.Thread(target=call, daemon=True, name=f"shoestring-{what}")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise DeadlineError(f"{what} did not end within {seconds:.0f} s")
    if error:
        raise error[0]
    return result[0]


def connect(url: str, timeout_s: float) -> tuple[Any, str]:
    """(file system, path) of an fsspec URL."""
    import fsspec

    # A connection that hung is not used again.
    make = partial(fsspec.core.url_to_fs, url, skip_instance_cache=True)
    fs, base = within(timeout_s, f"connecting to {url}", make)
    return fs, str(base).rstrip("/")


def remote_path(base: str, folder: Path, checkpoints: Path) -> str:
    return f"{base.rstrip('/')}/{folder.relative_to(checkpoints)}"


def upload(folder: Path, checkpoints: str, url: str, timeout_s: float) -> int:
    """A checkpoint folder to URL/step-00000100, its manifest last; the bytes sent."""
    fs, base = connect(url, timeout_s)
    target = remote_path(base, folder, Path(checkpoints))
    files = sorted(folder.iterdir(), key=lambda p: (p.name in (MANIFEST, HOST_MANIFEST), p.name))
    # Another version of this step that is there must not be complete with parts of both.
    within(timeout_s, f"looking at {target}", partial(_take_manifest, fs, target, files[-1].read_bytes()))
    within(timeout_s, f"making {target}", lambda: fs.makedirs(target, exist_ok=True))
    total = 0
    for file in files:
        size = file.stat().st_size
        place = f"{target}/{file.name}"
        within(timeout_s + size / SLOWEST, f"uploading {place}", partial(fs.put_file, str(file), place))
        there = within(timeout_s, f"looking at {place}", partial(fs.info, place))["size"]
        if there != size:
            raise UserError(f"{place} has {there} bytes after its upload, and {file} has {size}")
        total += size
    return total


def _take_manifest(fs: Any, folder: str, new: bytes | None = None) -> None:
    """From now on the folder is not complete; it stays as it is where its manifest is the new one."""
    for place in (f"{folder}/{name}" for name in (MANIFEST, HOST_MANIFEST)):
        if fs.exists(place) and (new is None or fs.cat_file(place) != new):
            fs.mv(place, f"{place}.set-aside")


def set_aside_from(url: str, step: int, timeout_s: float) -> None:
    """Versions of this step and later ones, and shares of them, are not taken any more; no part is deleted."""
    fs, base = connect(url, timeout_s)
    for place in [base, *(f"{base}/{HOSTS}/{host}" for host in _names_in(fs, f"{base}/{HOSTS}", timeout_s))]:
        for number, name in _steps_in(fs, place, timeout_s).items():
            if number >= step:
                within(timeout_s, f"setting {name} aside", partial(_take_manifest, fs, f"{place}/{name}"))


def _names_in(fs: Any, place: str, timeout_s: float) -> list[str]:
    if not within(timeout_s, f"looking at {place}", partial(fs.exists, place)):
        return []
    listed = within(timeout_s, f"listing {place}", partial(fs.ls, place, detail=False))
    names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed)
    return sorted(name for name in names if _NAME.fullmatch(name))


def _steps_in(fs: Any, place: str, timeout_s: float) -> dict[int, str]:
    names = _names_in(fs, place, timeout_s)
    return {int(name[5:]): name for name in names if name.startswith("step-") and name[5:].isdigit()}


def remote_steps(url: str, timeout_s: float) -> list[tuple[int, tuple[str, ...]]]:
    """(step, its folders below the URL) of the complete checkpoints there, oldest first.

    One folder holds everything, or each host has uploaded its share and the shares together are everything.
    """
    fs, base = connect(url, timeout_s)

    found: list[tuple[int, tuple[str, ...]]] = []
    for step, name in _steps_in(fs, base, timeout_s).items():
        if within(timeout_s, f"looking at {name}", partial(fs.exists, f"{base}/{name}/{MANIFEST}")):
            found.append((step, (name,)))
    shares: dict[int, list[str]] = {}
    for host in _names_in(fs, f"{base}/{HOSTS}", timeout_s):
        for step, name in _steps_in(fs, f"{base}/{HOSTS}/{host}", timeout_s).items():
            shares.setdefault(step, []).append(f"{HOSTS}/{host}/{name}")
    for step, folders in shares.items():
        lives: dict[str, list[tuple[str, HeldCopy]]] = {}  # two futures of one step are never mixed
        for folder in folders:
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                text = within(timeout_s, f"reading {folder}", partial(fs.cat_file, f"{base}/{folder}/{HOST_MANIFEST}"))
                copy = share_copy(json.loads(text))
                lives.setdefault(copy.life, []).append((folder, copy))
        for some in lives.values():
            if missing_of(copy for _, copy in some) is None:
                found.append((step, tuple(folder for folder, _ in some)))
    return sorted(found)


def fetch(url: str, folder: str, checkpoints: Path, timeout_s: float) -> Path:
    """Download one folder of a checkpoint; it appears when everything is there. The reader verifies it."""
    fs, base = connect(url, timeout_s)
    place, target = f"{base}/{folder}", checkpoints / folder
    listed_in = HOST_MANIFEST if folder.startswith(f"{HOSTS}/") else MANIFEST
    temp = hidden(target, FETCHED)
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    try:
        _fetch_into(temp, fs, place, listed_in, timeout_s)
        replace_folder(temp, target, hidden(target, OLD))
    except BaseException:  # what came does not keep its room
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return target


def _fetch_into(temp: Path, fs: Any, place: str, listed_in: str, timeout_s: float) -> None:
    manifest = within(timeout_s, f"reading {place}/{listed_in}", partial(fs.cat_file, f"{place}/{listed_in}"))
    if not is_sealed(manifest):
        raise UserError(f"{place}/{listed_in} is damaged; use another checkpoint")
    for name, info in json.loads(manifest)["parts"].items():
        if "/" in name or name.startswith("."):
            raise UserError(f"{place}/{listed_in} names the part {name!r}; it is not used")
        seconds = timeout_s + float(info["bytes"]) / SLOWEST
        within(seconds, f"fetching {place}/{name}", partial(fs.get_file, f"{place}/{name}", str(temp / name)))
        sync(temp / name)
    (temp / listed_in).write_bytes(manifest)
    sync(temp / listed_in)
