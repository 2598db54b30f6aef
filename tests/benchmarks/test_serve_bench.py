"""The bench of the server under load: which lines count."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import results, serve


def test_of_one_load_the_newest_line_counts_whatever_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for rate, seed, value in ((2.0, 0, 1.5), (9.0, 0, 7.5), (2.0, 1, 1.75)):
        config = {"model": "tiny", "rate": rate, "seed": seed}
        results.record(
            bench="serve",
            case="trace",
            metric="goodput",
            unit="requests/s",
            samples=[value],
            baseline="",
            config=config,
        )
    assert [(n["config"]["rate"], n["value"]) for n in serve.loads()] == [(2.0, 1.75), (9.0, 7.5)]
