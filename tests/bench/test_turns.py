"""Processes that prepare at once are let through one at a time, in order, and none can hold up the others for long."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from shoestring.bench import turns

CHILD = """
import os, sys, time
from shoestring.bench import turns
name, prepare, measure, log = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
time.sleep(prepare)
if name == "broken":
    sys.exit(3)
turns.take_turn()
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
    told = turns.run(asked, tmp_path / "turns", patience=20, seconds=30)
    assert told == ["done", "done", "failed"]
    assert log.read_text().split("\n")[:-1] == ["slow begins", "slow ends", "quick begins", "quick ends"]


def test_who_is_late_is_left_out_and_who_takes_too_long_is_stopped(tmp_path: Path) -> None:
    log, began = tmp_path / "log", time.monotonic()
    asked = commands(log, ("late", 60.0, 0.0), ("long", 0.0, 60.0), ("never", 0.0, 0.0))
    told = turns.run(asked, tmp_path / "turns", patience=4.0, seconds=5.5, least=0.5)
    assert told == ["late", "stopped", "no time"] and time.monotonic() - began < 12
    assert log.read_text() == "long begins\n"


def test_without_turns_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(turns.VARIABLE, raising=False)
    turns.take_turn()
    assert turns.VARIABLE not in os.environ
