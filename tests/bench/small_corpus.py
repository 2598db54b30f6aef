"""A prepared corpus of a few Python sources with its tokenizer in it, as it is carried to another machine."""

from __future__ import annotations

from pathlib import Path

from shoestring.train.shards import Corpus, prepare


def small_corpus(place: Path) -> Corpus:
    (place / "text").mkdir()
    for number in range(120):
        lines = "\n".join(f"def f{i}(a, b):\n    return a * {i} + b - {number}" for i in range(12))
        (place / "text" / f"{number}.py").write_text(lines)
    made = prepare(str(place / "text"), place / "cache", vocab_size=300, val_fraction=0.3)
    made.tokenizer.save(made.folder)
    return made
