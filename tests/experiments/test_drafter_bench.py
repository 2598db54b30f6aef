"""The drafter bench on a tiny model, in its three calls: what one leaves the next goes on with; tables are whole."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import drafter_speed, results
from experiments import drafter, drafter_target
from shoestring.methods.drafter.model import first_layers
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import init_weights
from tiny import tiny_llama

SHAPE = {"d_model": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "d_ff": 64}
TINY = drafter_target.Size(
    SHAPE, 300, 0.8, 32, 4, 0.3, 1, 2e-3, 1, 0, 12, 32, 4, 2, 1e-3, 8, 3, 8, 6, 2, 1,
    small_layers=2, small_width=64, small_batch=4, small_seconds=0.2, small_lr=2e-3,
)  # fmt: skip


@pytest.fixture
def tiny_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--size smoke in seconds, with results of its own."""
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(drafter_target.SIZES, "smoke", TINY)
    corpus = tmp_path / "corpus.jsonl"
    texts = [{"text": f"the {i}. fox and the {i % 7} dogs\n" * 9} for i in range(300)]
    corpus.write_text("".join(json.dumps(text) + "\n" for text in texts))
    tokenize = drafter_target.tokenize_corpus
    monkeypatch.setattr(
        drafter_target,
        "tokenize_corpus",
        lambda source, *args, **kw: tokenize(str(corpus) if source == "python" else source, *args, **kw),
    )


@pytest.mark.lab
@pytest.mark.usefixtures("tiny_text")
def test_prepared_trained_and_timed_by_three_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drafter_speed.QUEUES, 1, 1)

    def call(main: object, *args: str) -> None:
        monkeypatch.setattr(sys, "argv", ["x", "--keep", str(tmp_path / "kept"), *args])
        main()  # type: ignore[operator]

    size = ["--size", "smoke"]
    with pytest.raises(SystemExit, match="not prepared within"):
        call(drafter.main, *size, "--wait", "0.1")
    call(drafter.main, *size, "--prepare")
    assert not results.newest("drafter") and (tmp_path / "kept/ready.json").is_file()
    monkeypatch.setattr(drafter, "train_target", None)  # it is there
    call(
        drafter.main, *size, "--no-speed", "--cases", "AdaSPEC", "AdaSPEC, 2.5x batch", "LK", "--longer", "LK",
        "--longer-steps", "3",
    )  # fmt: skip
    lines = results.newest("drafter")
    budgets = {(n["case"], n["config"]["budget"]) for n in lines}
    assert budgets == {
        ("n-gram lookup", "no training"), ("first layers, untrained", "no training"),
        ("small model, not distilled", "no training"), ("LK", "equal steps"), ("AdaSPEC", "equal steps"),
        ("AdaSPEC", "equal compute"), ("AdaSPEC, 2.5x batch", "equal steps"),
        ("AdaSPEC, 2.5x batch", "equal compute"), ("LK", "more steps"), ("n-gram, then LK", "more steps"),
        ("n-gram of 4, then LK", "more steps"),
    }  # fmt: skip
    assert all(n["ratio"] is None and 0 <= n["quality"]["sampled_acceptance"] <= 1 for n in lines)
    assert drafter.table().count("\n| AdaSPEC |") == 2 and drafter.batches() == "Not measured yet."

    call(drafter_speed.main, "--repeats", "1", "--batches", "1", "2")
    lines = results.newest("drafter")
    timed = [n for n in lines if n["metric"] == "tokens_per_s" and n["config"]["budget"] != "batches"]
    assert len(timed) == 10 and all(n["ratio"] > 0 and n["quality"]["sampled_ratio"] > 0 for n in timed)
    many = [
        (n["config"]["batch"], n["config"]["drafter"], n["config"]["text"]) for n in lines if "batch" in n["config"]
    ]
    assert len(many) == 2 * (3 + 3) + 2  # one controller for all loads with greedy texts only
    loads = [n for n in lines if "batch" in n["config"]]
    assert all(n["quality"]["ratio_sum"] > 0 and n["config"]["load"] == "refilled" for n in loads)
    chosen = [n for n in loads if n["config"]["drafter"] != drafter_speed.PLAIN_AGAIN]
    assert all(set(n["quality"]["steps"]) <= {"plain", "drafted", "probe"} for n in chosen)
    assert any(n["quality"]["steps"].get("plain") for n in chosen)
    again = [n for n in loads if n not in chosen]  # two runs that do the same; nobody chose anything
    assert [n["config"]["batch"] for n in again] == [2, 2] and not any("steps" in n["quality"] for n in again)
    assert all(0 < share < 1 for n in loads for share in n["quality"]["reading"])
    assert {n["config"]["drafter"] for n in chosen} == {"LK", "n-gram, then LK", "first layers, untrained"}
    rows = drafter.table().splitlines()
    assert sum(row.startswith("| LK |") for row in rows) == 2, "the timed line stands for both"
    assert drafter.batches().count(" to ") == 14 + 1  # a row a load, and the header

    before = len(results.newest("drafter"))
    call(
        drafter_speed.main, "--repeats", "1", "--batches", "1", "--sampled-only", "--temperatures", "0.7", "--rules",
        "coupled", "block",
    )  # fmt: skip
    added = results.newest("drafter")[before:]
    assert {(n["config"]["batch"], n["config"]["text"]) for n in added} == {(1, "drawn at 0.7")}
    assert [n["config"].get("rule") for n in added] == [None] * 3 + ["block"] * 3


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.lab
def test_a_drafter_written_into_a_running_engine_is_measured_as_one_of_its_own(
    trimmed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the programs that a GPU captures."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(drafter, "DraftModel", partial(drafter.DraftModel, graphs=True))
    target, others = tiny_llama(), [first_layers(tiny_llama(seed=seed), 1) for seed in (1, 2, 0)]
    bench = object.__new__(drafter.Bench)
    bench.target, bench.folder, bench.seed, bench.name, bench.layers = target, tmp_path, 1, "tiny", 1
    bench.size, bench.prompts = replace(TINY, new_tokens=24), [[1, 2, 3, 4], [9, 8, 7, 6]]
    bench.vocab_ids = [*range(0, 300, 2), 9] if trimmed else None
    bench.seconds = drafter.Seconds(tmp_path / "seconds.json")

    def measured(model: Decoder) -> dict[str, Any]:
        row = bench.keep("LK", "equal steps", copy.deepcopy(model), steps=2)
        bench.measure(row)
        return row.told["quality"]

    bench.engine, bench.served = None, {}
    shared = [measured(model) for model in others]
    (served,) = bench.served.values()
    assert served.runner.num_graphs > 0
    for model, found in zip(others, shared, strict=True):
        bench.engine, bench.served = None, {}
        assert measured(model) == found
    assert len({json.dumps(found) for found in shared}) == 3, "they differ"


def test_expanded_blocks_add_nothing_yet() -> None:
    spec = ModelSpec(50, 32, 2, 4, 2, 8, 64, 16)
    small, large = Decoder(spec), Decoder(replace(spec, num_layers=6))
    for seed, model in enumerate((small, large)):
        init_weights(model, seed)
    tokens = torch.arange(12)[None]
    want = small(tokens)
    assert not torch.allclose(large(tokens), want)
    assert torch.allclose(drafter_target.expand(small, large)(tokens), want, atol=1e-6)
    large(tokens).sum().backward()
    assert large.blocks[1].mlp.down.weight.grad.abs().sum() > 0  # type: ignore[union-attr, operator]
