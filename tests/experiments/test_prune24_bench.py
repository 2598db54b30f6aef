"""The pruning bench on a toy model: every case leaves a line, and the tables show them."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import results
from experiments import prune24
from shoestring.model import Decoder, ModelSpec, save_model
from shoestring.model.parallel import init_weights
from shoestring.model.tokenizer import Tokenizer


@pytest.mark.lab
def test_every_case_leaves_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 5))) for _ in range(60)]
    (tmp_path / "text/wikitext-2").mkdir(parents=True)
    (tmp_path / "eval").mkdir()
    for name in ("text/wikitext-2/test.txt", "text/wikitext-2/valid.txt", "train.txt"):
        (tmp_path / name).write_text(" ".join(draw.choices(words, k=1200)))
    items = [{"context": " ".join(words[i : i + 4]), "continuation": words[i + 4]} for i in range(4)]
    (tmp_path / "eval/lambada_openai.jsonl").write_text("\n".join(map(json.dumps, items)))
    tokenizer = Tokenizer.train([(tmp_path / "train.txt").read_text()], vocab_size=300)
    model = Decoder(ModelSpec(tokenizer.vocab_size, 64, 2, 2, 2, 32, 64, 512))
    init_weights(model, 0)
    save_model(tmp_path / "model", model, tokenizer)

    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    options = {"model": tmp_path / "model", "assets": tmp_path, "text": tmp_path / "train.txt", "tokens": 128}
    options |= {"context": 64, "items": 4, "windows": 2, "steps": 20, "batch": 2, "train-context": 32}
    argv = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    monkeypatch.setattr(sys, "argv", ["prune24", *argv, "--cases", *prune24.CASES])
    prune24.main()
    lines = {n["case"]: n for n in results.newest("prune24")}
    assert tuple(lines) == prune24.CASES
    assert all(n["baseline_value"] == lines["dense"]["value"] for n in lines.values())
    for case in prune24.TRAINED:
        assert lines[case]["quality"]["layers_24"] == 14 and lines[case]["quality"]["kept_share"] <= 0.5
        assert [tokens for tokens, _ in lines[case]["quality"]["curve"]] == [*range(0, 1280, 192), 1280]
    assert lines["ast"]["config"]["train_tokens"] == 1280 and lines["cast"]["config"]["start"] == "dense"
    assert 10 < lines["ast+slorb:trained"]["config"]["bits"] < 12 and lines["ast:dense"]["config"]["bits"] == 9
    assert {lines[case]["config"]["bits"] for case in prune24.CODED} == {3.375}
    page, curve = prune24.table(), prune24.curve()
    assert "| AST + SLoRB | 10 |" in page and "1,280 (" in page and "1,024 tokens of the validation" in page
    assert curve.count("| AST |") == 1 and "0k:" in curve

    # As many steps as the clock allows; what was reached then is a row like the others.
    limits = ["--steps", "90000", "--seconds", "0.5", "--eval-every", "90000"]
    monkeypatch.setattr(sys, "argv", ["prune24", *argv, "--cases", "cast", *limits])
    prune24.main()
    line = results.newest("prune24")[-1]
    assert 1 <= line["config"]["steps"] < 90000 and line["quality"]["kept_share"] <= 0.5
    assert [tokens for tokens, _ in line["quality"]["curve"]] == [0, line["config"]["train_tokens"]]
    monkeypatch.setattr(sys, "argv", ["prune24", "--assets", str(tmp_path), "--cases", "ast"])
    with pytest.raises(SystemExit):
        prune24.main()
    assert torch.is_grad_enabled()
