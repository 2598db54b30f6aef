"""Free English and what a model writes: sentences are taken, other things are not; beginnings come from everywhere."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from experiments import english_corpus as english
from shoestring.errors import UserError
from shoestring.model import Decoder, ModelSpec, Tokenizer, save_model
from shoestring.model.parallel import init_weights

PROSE = "The committee met in the old town hall, and after a long debate it chose to publish all of its letters."
CODE = 'int main(void) { return printf("%d", 0x1f & (1 << 3)); }  /* [1] {2} <3> = 4; 5 + 6 != 7 */ x++; y--; z **= 2;'


def test_only_sentences_are_taken() -> None:
    text = f"A Heading\n\n{PROSE[:50]}\n{PROSE[50:]}\n\n{CODE}\n\n   \n{PROSE}\n"
    joined = f"{PROSE[:50]} {PROSE[50:]}".split()
    assert english.sentences(text) == " ".join(joined) + "\n\n" + PROSE
    assert english.sentences(CODE) == ""


def test_pages_become_paragraphs() -> None:
    page = f"<p>{PROSE[:9]}<b>{PROSE[9:40]}</b>{PROSE[40:46]}\n  <i>{PROSE[46:]}</i></p><p>x"
    text = english.Paragraphs(f"<head><title>no</title></head><script>no()</script><h1>Town</h1>{page}").text()
    assert "no" not in text.split()
    assert english.sentences(text) == f"{PROSE[:46].rstrip()} {PROSE[46:].lstrip()}"


def test_a_dictionary_is_cut_into_its_entries(tmp_path: Path) -> None:
    folder = tmp_path / "usr/share/dictd"
    folder.mkdir(parents=True)
    entry = f"town hall\n\n   {{{PROSE[:40]}}}{PROSE[40:]}\n\nnumber\n   42\n"
    (folder / "some.dict.dz").write_bytes(gzip.compress(entry.encode()))
    assert list(english.entries(tmp_path)) == [f"town hall\n\n{PROSE}"]


def test_what_a_model_writes_begins_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "speech.txt").write_text("\n".join([PROSE * 6, "short", PROSE * 7]))
    (tmp_path / english.WORDS).write_text("town\nAachen\nBerlin\nletter")
    tokenizer = Tokenizer.train([PROSE], vocab_size=300)
    found = english.beginnings(tmp_path, [], tokenizer, 1000, seed=0)
    assert sum(text.startswith("The committee") for text in found) == 2
    forms = len(english.ABOUT_NAMES) * 2 + len(english.ABOUT_THINGS) * 2
    assert len(found) == len(set(found)) + 1 == 2 + forms  # both paragraphs begin alike
    few = english.beginnings(tmp_path, [], tokenizer, 4, seed=0)
    assert len(few) == 4 and not any("town" in text and "committee" not in text for text in few)  # names come first

    model = Decoder(ModelSpec(tokenizer.vocab_size, 32, 1, 2, 2, 16, 64, 128))
    init_weights(model, 0)
    save_model(tmp_path / "model", model, tokenizer)
    monkeypatch.setattr(english, "SAMPLING", english.SAMPLING.__class__(temperature=1.0, max_tokens=5, seed=0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for part in ("0/2", "1/2"):
        english.write(tmp_path, [], tmp_path / "model", 12, part, requests=4)
    lines = [
        [json.loads(line)["prompt"] for line in (tmp_path / f"self-{n}.jsonl").read_text().splitlines()] for n in (0, 1)
    ]
    wanted = english.beginnings(tmp_path, [], tokenizer, 12, seed=0)
    assert sorted(lines[0] + lines[1]) == sorted(text.rstrip() for text in wanted)
    for bad in ("3/3", "x", "-1/2"):
        with pytest.raises(UserError, match="--part"):
            english.parse_part(bad)
