"""The order of the pruning methods on a toy model that has learned something, in half a minute of processor time."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import prune24_toy
from experiments.prune24_toy import Toy, loss
from shoestring.methods.sparse24.prune import PRUNERS


@pytest.mark.slow
@pytest.mark.lab
def test_trained_beats_sparsegpt_beats_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune24_toy, "STEPS", 250)  # of 400 that the table is made with
    toy = Toy(tmp_path)
    losses = {"dense": loss(toy.dense)}
    for method in PRUNERS:
        for name in (method, f"{method}+slorb"):
            losses[name] = toy.one_shot(name)
    for case in ("AST", "AST + SLoRB", "CAST"):
        losses[case], rates = toy.trained(case)
        assert len(rates) == 8 and rates[-1] < max(rates)  # masks move at first and settle
    assert losses["dense"] < 1.1 and losses["AST"] < losses["dense"] + 0.1, losses
    assert max(losses["AST"], losses["CAST"]) < losses["sparsegpt"] - 0.1, losses
    assert losses["sparsegpt"] < min(losses["magnitude"], losses["wanda"]) - 0.1, losses
    assert all(losses[f"{method}+slorb"] < losses[method] for method in PRUNERS), losses
    assert losses["AST + SLoRB"] < losses["sparsegpt+slorb"] - 0.1, losses
