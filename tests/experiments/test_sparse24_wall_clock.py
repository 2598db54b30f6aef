"""Equal wall clock: rates and FST's dense finish follow the clock, and a variant says how many tokens it saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments import sparse24_wall_clock
from experiments.python_corpus import open_prepared
from experiments.sparse24_quality import Size
from experiments.sparse24_wall_clock import ENDLESS, evaluate, train_case
from tiny import small_corpus

TINY = Size(
    {"d_model": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "d_ff": 64},
    vocab_size=300, context=32, batch=4, micro=4, steps=ENDLESS, warmup=0, lr=2e-3, refresh=4,
)  # fmt: skip


@pytest.mark.lab
def test_fst_trains_sparse_then_dense_for_the_given_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*args: Any) -> None:
        args[-1]("2:4 product: stays dense")

    monkeypatch.setattr(sparse24_wall_clock, "tune_products", measured)
    corpus = open_prepared(small_corpus(tmp_path).folder)
    config, found = evaluate("FST", TINY, corpus, 0, train_case("FST", TINY, corpus, 0, 0.6))
    assert config["seconds"] == 0.6 and found["tokens"] == found["steps"] * 128
    assert 0.6 <= found["seconds_with_first_step"] < 5
    assert found["sparse_layers"] == 3 and found["dense_steps"] > 0
    assert found["products"] == ["2:4 product: stays dense"]  # which ones ran sparse explains the pace
    assert sum(found["loss_by_part"]) / len(found["loss_by_part"]) == pytest.approx(found["loss"], abs=1e-4)
