"""benchmarks/smollm2: its text of novels, and a table of the last line of every format."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import smollm2
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
