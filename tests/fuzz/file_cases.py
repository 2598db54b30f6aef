"""One damaged file, one reader, one outcome: in this process, with a time limit and a look at the memory."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from file_damage import damage_bytes, damage_entry, damage_json, damage_lines
from outcomes import Outcome

from shoestring.errors import UserError

SECONDS = 20.0  # for one case, on a busy machine; a good file takes a tenth of one
MOST_GROWTH = 1 << 30  # bytes that the process may grow by for one forged file

# A way to damage a folder: (folder, generator) -> what was done.
Damage = Callable[[Path, random.Random], str]


@dataclass(frozen=True)
class Kind:
    """A kind of file: how a good one is made (once), how it is damaged, who reads it."""

    name: str
    make: Callable[[Path], None]
    damages: tuple[Damage, ...]
    read: Callable[[Path], object]


def on(name: str, *ways: str, head: int | None = None) -> tuple[Damage, ...]:
    """Ways to damage the file `name` of a folder: entry, bytes, json, lines."""
    made: dict[str, Damage] = {
        "entry": lambda folder, rng: f"{name}: {damage_entry(folder / name, rng)}",
        "bytes": lambda folder, rng: f"{name}: {damage_bytes(folder / name, rng, head)}",
        "json": lambda folder, rng: f"{name}: {damage_json(folder / name, rng)}",
        "lines": lambda folder, rng: f"{name}: {damage_lines(folder / name, rng)}",
    }
    return tuple(made[way] for way in ways)


class _TimeUp(BaseException):
    pass


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """_TimeUp inside after so many seconds. An alarm that was set before goes on afterwards."""

    def stop(number: int, frame: object) -> None:
        raise _TimeUp

    began, (left, every) = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, left - (time.monotonic() - began)), every)


def outcome_of(call: Callable[[], Any]) -> tuple[Outcome, str]:
    """What a call of a reader ends in."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with time_limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
        outcome, told = "ok", ""
    except UserError as error:
        outcome, told = "clean", str(error)
        if len(told) > 3000 or (not told.isprintable() and "\n\n" in told):
            outcome, told = "traceback", f"an error that fills the screen: {told[:200]}"
    except _TimeUp:
        return "hang", traceback.format_exc()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return "traceback", traceback.format_exc()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > MOST_GROWTH:
        return "abort", f"took {grown / 1e9:.1f} GB"
    return outcome, told  # type: ignore[return-value]


def run_case(kind: Kind, good: Path, place: Path, seed: int) -> tuple[Outcome, str, str]:
    """(outcome, what was damaged, what was said) of case `seed` of a kind; `good` is what `make` made."""
    rng = random.Random(f"{kind.name} {seed}")
    folder = place / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder, symlinks=True)
    damage = rng.choice(kind.damages)
    try:
        done = damage(folder, rng)
    except (UnicodeDecodeError, ValueError) as error:  # a second way on what the first has left
        done = f"nothing ({type(error).__name__})"
    outcome, told = outcome_of(lambda: kind.read(folder))
    return outcome, f"{kind.name} {seed}: {done}", told
