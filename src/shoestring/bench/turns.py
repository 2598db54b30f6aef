"""Several measurements that each compile first: compile at the same time, then measure one by one.

A GPU bench that compiles for most of its time would either leave the GPU idle or, run side by side, disturb its own
timings. Here every measurement is a process of its own: all prepare at once, and when the last one is ready (or late)
they are let through one at a time, in the order in which they were named, each alone on the machine.

    run(commands, folder, patience=60, seconds=140)     the one that starts them
    take_turn()                                         in each of them, between preparing and measuring

Files are the signals (`ready`, `go`): nothing is lost when a process dies, and its output goes where the parent's goes.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "SHOESTRING_TURN"  # the folder of a process that has to wait for its turn
POLL = 0.05


def take_turn() -> None:
    """Say that this process is ready, and wait until it may measure; at once where nobody asked for turns."""
    place = os.environ.get(VARIABLE)
    if place is None:
        return
    (Path(place) / "ready").touch()
    while not (Path(place) / "go").exists():
        time.sleep(POLL)


def run(
    commands: Sequence[Sequence[str]], folder: Path, *, patience: float, seconds: float, least: float = 3.0
) -> list[str]:
    """What became of each: "done", "failed", "late" (not ready after `patience` seconds), "no time" (its turn came with
    less than `least` seconds left of `seconds`), "stopped" (not done when they were over).
    """
    began = time.monotonic()
    places = [folder / str(number) for number in range(len(commands))]
    children = []
    for command, place in zip(commands, places, strict=True):
        place.mkdir(parents=True)
        children.append(subprocess.Popen(list(command), env={**os.environ, VARIABLE: str(place)}))
    try:
        ready = [place / "ready" for place in places]
        while time.monotonic() - began < patience and not all(
            r.exists() or child.poll() is not None for r, child in zip(ready, children, strict=True)
        ):
            time.sleep(POLL)
        for child, r in zip(children, ready, strict=True):
            if not r.exists():
                child.kill()  # still compiling: it would disturb the others
        return [
            _measure(child, place, seconds - (time.monotonic() - began), least)
            for child, place in zip(children, places, strict=True)
        ]
    finally:
        for child in children:
            child.kill()
            child.wait()


def _measure(child: subprocess.Popen[bytes], place: Path, left: float, least: float) -> str:
    if not (place / "ready").exists():
        return "failed" if child.poll() not in (None, -9) else "late"
    if left < least:
        return "no time"
    (place / "go").touch()
    try:
        return "failed" if child.wait(timeout=left) else "done"
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return "stopped"
