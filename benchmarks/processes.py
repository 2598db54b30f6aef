"""Child processes of a benchmark: their environment, and turns on the machine.

A GPU benchmark that mostly compiles would either leave the GPU idle or, run in parallel, disturb its own timings.
`run_in_turns` starts every measurement as its own process: all prepare at once, and when the last one is ready (or
late) they measure one at a time, in the given order, each alone on the machine.

    run_in_turns(commands, folder, patience=60, seconds=140)    in the process that starts them
    take_turn()                                                 in each of them, between preparing and measuring

Files are the signals (`ready`, `go`), so that a process may die; its output goes to that of the parent.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
VARIABLE = "SHOESTRING_TURN"  # the folder of a process that has to wait for its turn
POLL = 0.05  # seconds


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, in which `python -m benchmarks.NAME` works from any folder."""
    paths = [str(REPO), str(REPO / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def take_turn() -> None:
    """Signal that this process is ready, and wait for its turn; returns at once where there are no turns. Ends this
    process if the one that gives turns was killed: nobody else would free the GPU."""
    place, parent = os.environ.get(VARIABLE), os.getppid()
    if place is None:
        return
    (Path(place) / "ready").touch()
    while not (Path(place) / "go").exists():
        if os.getppid() != parent:
            raise SystemExit("the process that gives turns has ended")
        time.sleep(POLL)


def run_in_turns(
    commands: Sequence[Sequence[str]],
    folder: Path,
    *,
    patience: float,
    seconds: float,
    least: float = 3.0,
    when_ready: Callable[[float], None] | None = None,
) -> list[str]:
    """The outcome of each: "done", "failed", "late" (not ready after `patience` seconds), "no time" (less than `least`
    of the `seconds` left at its turn), "stopped" (not done at their end). `when_ready` is told how many of the seconds
    are left before the first turn.
    """
    began = time.monotonic()
    places = [folder / str(number) for number in range(len(commands))]
    children = []
    for command, place in zip(commands, places, strict=True):
        place.mkdir(parents=True)
        environment = child_environment(**{VARIABLE: str(place)})
        children.append(subprocess.Popen(list(command), env=environment))
    try:
        ready = [place / "ready" for place in places]
        while time.monotonic() - began < patience and not all(
            r.exists() or child.poll() is not None for r, child in zip(ready, children, strict=True)
        ):
            time.sleep(POLL)
        for child, r in zip(children, ready, strict=True):
            if not r.exists():
                child.kill()  # still compiling: it would disturb the others
        if when_ready is not None:
            when_ready(seconds - (time.monotonic() - began))
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
