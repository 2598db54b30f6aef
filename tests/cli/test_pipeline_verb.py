"""`shoestring pipeline simulate`: the table, the chart, and times that are not possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_simulate_compares_schedules_and_draws_them(command: Callable[..., str], tmp_path: Path) -> None:
    told = command("pipeline", "simulate", "--hop", "0.5", "--html", str(tmp_path))
    times = {line.split()[0]: line.split()[1:] for line in told.splitlines() if line.split()[1:]}
    assert times["eager1f1b"] == ["60.0", "20.0%", "7", "1"]
    assert float(times["1f1b"][0]) > 60 and times["1f1b"][2] == "4"
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5 and "backward, weights, micro-batch 15" in page
    assert "interleaved needs micro-batches in multiples of 4" in command("pipeline", "simulate", "--micros", "6")


def test_times_that_are_not_possible(command: Callable[..., str]) -> None:
    for given in (["--hop", "-1"], ["--forward", "nan"], ["--forward", "0", "--backward", "0"]):
        assert "give a time" in command("pipeline", "simulate", *given, fails=True)
