"""Equal wall clock: rates and FST's dense finish follow the clock, and a variant says how many tokens it saw."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from experiments import sparse24_wall_clock
from experiments.python_corpus import open_prepared
from experiments.sparse24_quality import Size
from experiments.sparse24_wall_clock import ENDLESS, evaluate, rate_at, share_of, train_case
from shoestring.errors import Interrupted
from tiny import small_corpus

TINY = Size(
    {"d_model": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "d_ff": 64},
    vocab_size=300, context=32, batch=4, micro=4, steps=ENDLESS, warmup=0, lr=2e-3, refresh=4,
)  # fmt: skip


def test_the_rate_rises_stays_and_ends_at_zero() -> None:
    rates = [rate_at(spent, 1.0) for spent in (0.0, 0.025, 0.05, 0.5, 5 / 6, 11 / 12, 1.0)]
    assert rates == pytest.approx([0.02, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0])


def test_what_is_left_is_divided_among_the_variants() -> None:
    assert share_of(268.0, 2, 140.0) == 127.0 and share_of(268.0, 2, 38.0) == 38.0
    assert share_of(math.inf, 2, 38.0) == 38.0


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


def test_a_signal_lets_an_evaluation_be_recorded_and_ends_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = small_corpus(tmp_path).folder
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(sparse24_wall_clock.SIZES, "tiny", TINY)
    given = ["x", "--size", "tiny", "--cases", "dense", "--seconds", "0.3", "--corpus", str(corpus)]
    monkeypatch.setattr(sys, "argv", given)
    validate, follow = sparse24_wall_clock.validation_losses, sparse24_wall_clock.set_lr

    def asked_meanwhile(*args: Any) -> list[float]:
        signal.raise_signal(signal.SIGTERM)
        return validate(*args)

    with monkeypatch.context() as asked:
        asked.setattr(sparse24_wall_clock, "validation_losses", asked_meanwhile)
        sparse24_wall_clock.main()
    (line,) = results.recorded("sparse24_wall_clock")
    assert line["case"] == "dense" and line["config"]["seconds"] == 0.3

    def asked_in_training(*args: Any) -> None:
        follow(*args)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(sparse24_wall_clock, "set_lr", asked_in_training)
    with pytest.raises(Interrupted, match="dense was cut off after 0 of 0 s; nothing of it is recorded"):
        sparse24_wall_clock.main()
    assert len(results.recorded("sparse24_wall_clock")) == 1
