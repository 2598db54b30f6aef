"""What the rows of 2:4 pre-training say: how far they are from dense, and flip-rate curves as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from experiments.sparse24_tables import (
    at_rates,
    best_of,
    best_pairs,
    columns,
    curves,
    gap_of,
    rates_of,
    repeated_curves,
    short,
)


def test_curves_are_shown_at_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert curves() == "No row has been finished yet."
    for case, seed, curve in (
        ("FST", 0, [[10, 0.004], [21, 0.002]]),
        ("dense", 0, [[10, 0.003], [20, 0.001]]),
        ("dense", 1, [[10, 0.009], [20, 0.009]]),
    ):
        results.record(
            bench="sparse24_quality", case=case, metric="validation loss", unit="nats per token", samples=[1.0],
            quality={"flip_curve": curve},
            config={"model": "gpt2-124m", "seed": seed, "d_ff": 8, "tokens": 9, "different_tokens": 9},
        )  # fmt: skip
    assert repeated_curves() == "No row has been finished yet."  # every token was seen once
    assert curves().splitlines() == [
        "| flips per thousand weights, at step | 10 | 21 |",
        "| --- | --- | --- |",
        "| dense | 3.00 | 1.00 |",
        "| FST | 4.00 | 2.00 |",
    ]


def test_losses_of_few_seeds_are_not_in_the_table_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for case, seed, loss in (
        *(("dense", seed, 2.0) for seed in range(3)),
        *(("FST", seed, 2.02) for seed in range(3)),
        ("half-width", 0, 2.1),
        ("S-STE", 0, 2.04),
    ):
        results.record(
            bench="sparse24_quality", case=case, metric="validation loss", unit="nats per token", samples=[loss],
            config={"model": "gpt2-124m", "seed": seed, "tokens": 9, "different_tokens": 9, "schedule": "wsd"},
        )  # fmt: skip
    results.record(
        bench="train_sparse24", case="S-STE", metric="ms", unit="ms", samples=[10.0],
        baseline="dense", baseline_value=12.0, ratio=1.2, config={"what": "step", "d_model": 2048},
    )  # fmt: skip
    shown = short().splitlines()
    assert "| FST (MVUE) | dense | 2.0200 | +1.00% (+1.00 to +1.00) | 3 |  |  |" in shown
    assert "| S-STE (MVUE) | 2:4 |  |  |  | 1.20x |  |" in shown  # its speed is no matter of seeds
    assert not any(row.startswith("| dense, half") for row in shown)
    below = (
        "With fewer than 3 seeds, in brackets how many: dense, half the FFN width +5.00% (1); S-STE (MVUE) +2.00% (1)."
    )
    assert below in shown


def test_columns_are_spread_evenly() -> None:
    assert columns([[step, 0.0] for step in range(1, 25)]) == [1, 4, 8, 11, 14, 17, 21, 24]
    assert columns([[3, 0.0], [9, 0.0]]) == [3, 9]


def test_rows_are_compared_part_by_part() -> None:
    def line(parts: list[float]) -> dict[str, Any]:
        return {"value": sum(parts) / len(parts), "quality": {"loss_by_part": parts}}

    dense, even = line([1.0, 2.0, 3.0]), line([1.02, 2.02, 3.02])
    assert gap_of([(even, dense)]) == "+1.00% ± 0.00"  # texts that differ are no doubt about the difference
    uneven = line([1.00, 2.02, 3.04])
    assert gap_of([(uneven, dense)]) == "+1.00% ± 0.58"  # 0.02 / sqrt(3) of 2
    assert gap_of([({"value": 1.98, "quality": {}}, dense)]) == "-1.00%"


def test_methods_are_compared_at_the_best_rate_of_each_seed_by_seed() -> None:
    def line(case: str, lr: float, seed: int, value: float) -> dict[str, Any]:
        config = {"lr": lr, "seed": seed}
        return {"case": case, "config": config, "value": value, "device": "", "versions": {}, "commit": "", "date": ""}

    lines = [
        line("dense", 1e-3, 0, 2.00), line("dense, rate 0.002", 2e-3, 0, 2.10), line("dense", 1e-3, 1, 2.20),
        line("FST exact", 1e-3, 0, 2.50), line("FST exact, rate 0.002", 2e-3, 0, 2.02),
        line("FST exact, rate 0.003", 3e-3, 0, 2.01),  # better in its only seed
        line("FST exact, rate 0.002", 2e-3, 1, 2.20), line("FST exact, rate 0.002", 2e-3, 2, 2.00),
        line("FST exact, rate 0.002, decay 6e-05", 2e-3, 0, 1.00),  # another setting, not another rate
    ]  # fmt: skip
    pairs = best_pairs(at_rates(lines), "FST exact")
    assert [(a["value"], b["value"]) for a, b in pairs] == [(2.02, 2.00), (2.20, 2.20)]  # seed 2 has no dense run
    cells = "2.5000 | **2.0200 (2.0733)** | 2.0100"
    assert f"| FST, exact gradient | {cells} | +0.50% (+0.00 to +1.00) | 2 |" in rates_of(lines)
    more = [line("FST exact, rate 0.003", 3e-3, seed, 2.30) for seed in (1, 2)]
    assert best_of(at_rates([*lines, *more])["FST exact"]) == 2e-3  # 3e-3 is ahead in seed 0 alone
