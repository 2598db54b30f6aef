"""What the race makes of its curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import race
from benchmarks.results import newest


def run(case: str, loss: float, *, steps: int = 500, seed: int = 0) -> dict[str, Any]:
    curve = [[10.0, 1.0, loss + 1], [20.0, 2.0, loss]]
    return {"case": case, "steps": steps, "seed": seed, "curve": curve, "final_loss": loss, "width": 8, "layers": 1,
            "lr": 0.1, "recipe": "train/dense", "settings": [], "tokens_per_s": 10, "parameters": 5,
            "peak_gib": 0.0}  # fmt: skip


def test_a_loss_is_reached_on_a_line_between_two_points() -> None:
    curve = [[10.0, 1.0, 4.0], [20.0, 3.0, 2.0], [30.0, 5.0, 2.5]]
    assert race.reached(curve, 3.0) == (15.0, 2.0)
    assert race.reached(curve, 4.5) == (10.0, 1.0)  # not before the first point
    assert race.reached(curve, 1.9) is None


def test_the_best_rate_counts_against_the_best_adamw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path)
    runs = [run("adamw bf16", 3.0), run("adamw bf16", 2.0), run("muon bf16", 1.5), run("fst", 2.2)]
    race.record_races([*runs, run("muon bf16", 3.2, steps=100), run("cosine", 3.5, steps=100)])
    lines = {(n["case"], n["metric"], n["config"]["steps"]): n for n in newest("race")}
    assert lines["adamw bf16", "final_loss", 500]["value"] == 2.0
    muon = lines["muon bf16", "seconds_to_loss", 500]
    assert (muon["value"], muon["baseline_value"], muon["ratio"]) == (1.5, 2.0, 1.3333)
    assert ("fst", "seconds_to_loss", 500) not in lines  # it never gets there
    assert lines["cosine", "final_loss", 100]["baseline"] == "muon bf16"


def test_queries_keys_and_values_as_one_are_moved_by_one_orthogonal_matrix() -> None:
    g = torch.Generator().manual_seed(0)
    square = [torch.randn(8, 8, generator=g) for _ in range(8)]
    moved = race.qkv_as_one(square)
    joined = torch.cat(moved[4:7])
    assert float((torch.linalg.svdvals(joined) / 3**0.5).min()) > 0.5 and len(moved) == 8
    assert torch.allclose(moved[7], race.orthogonalize_all([square[7]])[0], atol=1e-5)
