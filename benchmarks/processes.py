"""Child processes of a benchmark: their environment, and turns on the machine.

A GPU benchmark that mostly compiles would either leave the GPU idle or, run in parallel, disturb its own timings.
`run_in_turns` starts every measurement as its own process: all prepare at once, and when the last one is ready (or
late) they measure one at a time, in the given order, each alone on the machine.

    run_in_turns(commands, folder, patience=60, seconds=140)    in the process that starts them
    take_turn()                                                 in each of them, between preparing and measuring

Files are the signals (`ready`, `go`), so that a process may die; its output goes to that of the parent.

SIGTERM and Ctrl-C reach the parent alone, which passes one on: `start_child` gives every child a session of its own, so
that none gets the signal twice, once to save what it has and once to end. A child whose parent is gone gets SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shoestring.errors import Interrupted

REPO = Path(__file__).resolve().parents[1]
VARIABLE = "SHOESTRING_TURN"  # the folder of a process that has to wait for its turn
PARENT = "SHOESTRING_PARENT"  # its id, for a child that ends with it
POLL = 0.05  # seconds
ENDING = 20.0  # seconds that a child has after SIGTERM to record what is complete


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, in which `python -m benchmarks.NAME` works from any folder."""
    paths = [str(REPO), str(REPO / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def start_child(command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
    """A process of its own session, with these variables in its environment."""
    environment = child_environment(**{PARENT: str(os.getpid())}, **more)
    return subprocess.Popen(list(command), env=environment, start_new_session=True)


def end_child(child: subprocess.Popen[bytes], seconds: float = ENDING) -> None:
    """SIGTERM, and SIGKILL where it has not ended after these seconds."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def stop_with_parent() -> None:
    """In a child of `start_child`: SIGTERM as soon as its parent is gone, which nobody else would send. Once: a second
    call does nothing."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def take_turn() -> None:
    """Signal that this process is ready, and wait for its turn; returns at once where there are no turns. Ends this
    process if the one that gives turns was killed: nobody else would free the GPU."""
    place, parent = os.environ.get(VARIABLE), os.getppid()
    if place is None:
        return
    stop_with_parent()
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
    are left before the first turn. A signal ends all of them, the one in its turn with time to record what is complete,
    and then the caller with Interrupted.
    """
    began = time.monotonic()
    places = [folder / str(number) for number in range(len(commands))]
    told: list[str] = []
    children: list[subprocess.Popen[bytes]] = []
    try:
        with _signals_raise():
            for command, place in zip(commands, places, strict=True):
                place.mkdir(parents=True)
                children.append(start_child(command, **{VARIABLE: str(place)}))
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
            for child, place in zip(children, places, strict=True):
                told.append(_measure(child, place, seconds - (time.monotonic() - began), least))
        return told
    except _AskedToStop:
        for child, place in zip(children, places, strict=False):
            if (place / "go").exists():
                end_child(child)
        told += ["stopped"] * (len(commands) - len(told))
        raise Interrupted(f"asked to stop; by turn: {', '.join(told)}") from None
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
        end_child(child)
        return "stopped"


class _AskedToStop(Exception):
    pass


@contextmanager
def _signals_raise() -> Iterator[None]:
    """The first SIGINT or SIGTERM inside is an exception; the second has its usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        raise _AskedToStop

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
