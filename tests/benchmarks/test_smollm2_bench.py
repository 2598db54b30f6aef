"""benchmarks/smollm2: its text of novels, and a table of the last line of every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import smollm2
from benchmarks.results import record, recorded
from shoestring.model.tokenizer import Tokenizer


def test_novels_are_the_first_tokens_of_the_passages(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["a cat sat on a mat"], vocab_size=260)
    assert smollm2.novels(tmp_path, tokenizer) is None
    (tmp_path / "eval").mkdir()
    passages = [{"context": "a cat", "continuation": " sat"}, {"context": "on a", "continuation": " mat"}]
    (tmp_path / "eval/lambada_openai.jsonl").write_text("\n".join(map(json.dumps, passages)))
    tokens = smollm2.novels(tmp_path, tokenizer)
    assert tokens is not None and tokenizer.decode(tokens.tolist()) == "a cat sat\n\non a mat\n\n"
    some = smollm2.novels(tmp_path, tokenizer, 3)
    assert some is not None and some.tolist() == tokens[:3].tolist()


def test_the_table_shows_the_last_line_of_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "recorded", lambda bench: recorded(bench, tmp_path))
    common: dict[str, Any] = {"bench": "smollm2", "metric": "perplexity", "unit": "", "folder": tmp_path}
    config = {"bits": 4.375, "items": 200}
    quality = {"perplexity": 25.0, "accuracy_LAMBADA": 0.185}
    record(**common, case="int4:g64", samples=[25.0], quality=quality, config=config)
    assert "| int4:g64 | 4.38 | 25.00 |  | 18.5 |" in smollm2.table()
    record(**common, case="int4:g64", samples=[26.0], quality=quality | {"novels": 60.0}, config=config | {"group": 64})
    page = smollm2.table()
    assert page.count("int4:g64") == 1 and "| int4:g64 | 4.38 | 26.00 | 60.00 | 18.5 |" in page
    assert "| perplexity | on novels | LAMBADA, %, 200 items |" in page
