"""Processes that prepare at once are let through one at a time, in order, and none can hold up the others for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import processes
from shoestring.errors import Interrupted

CHILD = """
import os, sys, time
from benchmarks.processes import take_turn
name, prepare, measure, log = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
time.sleep(prepare)
if name == "broken":
    sys.exit(3)
take_turn()
def say(what):
    with open(log, "a") as f:
        f.write(f"{name} {what}\\n")
say("begins"); time.sleep(measure); say("ends")
"""


def commands(log: Path, *children: tuple[str, float, float]) -> list[list[str]]:
    return [[sys.executable, "-c", CHILD, n, str(p), str(m), str(log)] for n, p, m in children]


def test_all_prepare_at_once_and_measure_one_by_one_in_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    asked = commands(log, ("slow", 0.6, 0.1), ("quick", 0.0, 0.1), ("broken", 0.0, 0.0))
    told = processes.run_in_turns(asked, tmp_path / "turns", patience=20, seconds=30)
    assert told == ["done", "done", "failed"]
    assert log.read_text().split("\n")[:-1] == ["slow begins", "slow ends", "quick begins", "quick ends"]


STOPPED = """
import signal, sys, time
from benchmarks.processes import stop_with_parent, take_turn
name, log = sys.argv[1], sys.argv[2]
def say(what):
    with open(log, "a") as f:
        f.write(f"{name} {what}\\n")
def stop(*_):
    say("recorded")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
stop_with_parent() if name == "orphan" else take_turn()
say("begins")
time.sleep(600)
"""


def test_a_signal_ends_all_and_the_one_in_its_turn_may_record(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def ask() -> None:
        while not log.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    asked = [[sys.executable, "-c", STOPPED, name, str(log)] for name in ("first", "second")]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="by turn: stopped, stopped"):
        processes.run_in_turns(asked, tmp_path / "turns", patience=60, seconds=120)
    asking.join()
    assert log.read_text() == "first begins\nfirst recorded\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_child_is_ended_with_its_parent(tmp_path: Path) -> None:
    """Its parent is killed, and so cannot tell it."""
    log = tmp_path / "log"
    parent = "import sys; from benchmarks.processes import start_child; start_child(sys.argv[1:]).wait()"
    command = [sys.executable, "-c", parent, sys.executable, "-c", STOPPED, "orphan", str(log)]
    started = subprocess.Popen(command, env=processes.child_environment())
    while not log.exists():
        time.sleep(0.02)
    started.kill()
    started.wait()
    ends = time.monotonic() + 60
    while "recorded" not in log.read_text() and time.monotonic() < ends:
        time.sleep(0.05)
    assert log.read_text() == "orphan begins\norphan recorded\n"
