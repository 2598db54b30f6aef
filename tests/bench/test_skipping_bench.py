"""The skipping bench on a tiny model: every part runs, lines are whole, tables lay them out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shoestring.bench import results, skipping, skipping_sets
from shoestring.model import Decoder, ModelSpec, Tokenizer, save_model
from shoestring.model.parallel import init_weights

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs.\n" * 40


def test_every_part_runs_and_its_table_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.train([TEXT], 300)
    model = Decoder(ModelSpec(tokenizer.vocab_size, 32, 6, 4, 2, 8, 64, 128, eos_id=tokenizer.eos_id))
    init_weights(model, 0)
    save_model(tmp_path / "model", model, tokenizer)
    for name in ("valid", "test"):
        path = tmp_path / f"text/wikitext-2/{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT)
    (tmp_path / "eval").mkdir()
    item = {"context": "pack my box with five dozen liquor", "continuation": " jugs"}
    (tmp_path / "eval/lambada_openai.jsonl").write_text((json.dumps(item) + "\n") * 4)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(skipping, "CONTEXTS", (32, 64))
    monkeypatch.setattr(skipping, "measure_speed", lambda args: None)
    options = (
        "--windows 2 --window 32 --rows 32 --lookahead 2 --tokens 64 --items 2 --new 6 --context-sets 32 64"
    )
    paths = ["--model", str(tmp_path / "model"), "--assets", str(tmp_path), "--sets", str(tmp_path / "sets")]
    argv = ["x", "sets", "quality", "draft-set", "drafts", "online", *paths, *options.split()]
    monkeypatch.setattr(sys, "argv", argv)
    skipping.main()
    lines = [n for n in results.newest("skipping") if n["metric"] == "decode_speedup"]
    assert len(lines) == 2 * (1 + 4 * 2)
    assert {n["case"] for n in lines} == {"whole model", *skipping_sets.METHODS}
    assert all(n["quality"]["perplexity"] > 1 for n in lines)
    assert skipping.table().count("\n| CPU |") == 18
    assert "| lossless |" in skipping.drafts() and "12 of 12" in skipping.drafts()
    assert skipping.costs().count("attention") == 2
    assert (
        len([n for n in results.newest("skipping") if n["metric"] == "online_ffns"]) == 1
    )  # 16 of 12 is too many
    before = len((tmp_path / "results/skipping.jsonl").read_text().splitlines())
    monkeypatch.setattr(sys, "argv", ["x", "quality", *argv[6:]])
    skipping.main()  # goes on where it was stopped: nothing is left
    assert len((tmp_path / "results/skipping.jsonl").read_text().splitlines()) == before
    # The same apart: sets by given costs, quality without a clock, decode steps later.
    monkeypatch.setattr(results, "RESULTS", tmp_path / "apart")
    given = ["--window", "0", "--costs", "32:1000:50:40", "64:1000:60:40", "--no-speed", "--items", "0"]
    paths[-1] = str(tmp_path / "sets2")
    monkeypatch.setattr(sys, "argv", ["x", "sets", "quality", *paths, *options.split(), *given])
    skipping.main()
    assert {n["metric"] for n in results.newest("skipping")} == {"perplexity"}
    assert skipping_sets.read_costs(6, "64:1000:60:40").speedup(
        skipping_sets.early_exit(6, 2)
    ) == pytest.approx(1 / 0.9)
    monkeypatch.setattr(sys, "argv", ["x", "times", *paths, "--repeats", "3", "--context-sets", "32", "64"])
    skipping.main()
    assert skipping.table().count("\n| CPU |") == 18
