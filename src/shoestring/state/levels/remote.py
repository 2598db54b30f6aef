"""Remote storage through fsspec: checkpoint folders are uploaded and fetched, every operation under our own deadline.

A storage library's own time-outs are not enough: a server that accepts connections and then says nothing held an
upload for more than a minute in spite of them. So each operation runs in a thread of its own and is given up when its
time is over; the thread is left behind (it is a daemon) and the next try starts with a new connection. Only the agent
and the start of a run come here, so training never waits for it. The manifest is uploaded last: a folder that has one
is complete. No torch here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shoestring.errors import UserError
from shoestring.state.checkpoint_files import HOST_MANIFEST, MANIFEST, is_sealed, replace_folder, sync

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
    return within(timeout_s, f"connecting to {url}", lambda: fsspec.core.url_to_fs(url, skip_instance_cache=True))


def remote_path(base: str, folder: Path, checkpoints: Path) -> str:
    return f"{base.rstrip('/')}/{folder.relative_to(checkpoints)}"


def upload(folder: Path, checkpoints: str, url: str, timeout_s: float) -> int:
    """A checkpoint folder to URL/step-00000100, its manifest last; the bytes sent."""
    fs, base = connect(url, timeout_s)
    target = remote_path(base, folder, Path(checkpoints))
    files = sorted(folder.iterdir(), key=lambda p: (p.name in (MANIFEST, HOST_MANIFEST), p.name))
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


def remote_steps(url: str, timeout_s: float) -> list[tuple[int, str]]:
    """(step, path) of the complete checkpoints there, oldest first."""
    fs, base = connect(url, timeout_s)
    if not within(timeout_s, f"looking at {base}", lambda: fs.exists(base)):
        return []
    found = []
    for path in within(timeout_s, f"listing {base}", lambda: fs.ls(base, detail=False)):
        name = str(path).rstrip("/").rsplit("/", 1)[-1]
        step = name.removeprefix("step-")
        if name.startswith("step-") and step.isdigit():
            place = f"{base.rstrip('/')}/{name}"
            if within(timeout_s, f"looking at {place}", partial(fs.exists, f"{place}/{MANIFEST}")):
                found.append((int(step), place))
    return sorted(found)


def fetch(url: str, place: str, target: Path, timeout_s: float) -> Path:
    """Download one complete checkpoint to `target`, which appears when everything is there. The reader verifies it."""
    fs, _ = connect(url, timeout_s)
    temp = target.parent / f".shoestring-fetch-{target.name}"
    _clear(temp)
    temp.mkdir(parents=True)
    manifest = within(timeout_s, f"reading {place}/{MANIFEST}", lambda: fs.cat_file(f"{place}/{MANIFEST}"))
    if not is_sealed(manifest):
        raise UserError(f"{place}/{MANIFEST} is damaged; use another checkpoint")
    for name, info in json.loads(manifest)["parts"].items():
        if "/" in name or name.startswith("."):
            raise UserError(f"{place}/{MANIFEST} names the part {name!r}; it is not used")
        seconds = timeout_s + float(info["bytes"]) / SLOWEST
        within(seconds, f"fetching {place}/{name}", partial(fs.get_file, f"{place}/{name}", str(temp / name)))
        sync(temp / name)
    (temp / MANIFEST).write_bytes(manifest)
    sync(temp / MANIFEST)
    replace_folder(temp, target, target.parent / f".shoestring-old-{target.name}")
    return target


def _clear(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
