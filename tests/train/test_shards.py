"""Tokenised corpora: content, split, cache, and what is left behind by those who are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refusals import refused
from shoestring.model.tokenizer import Tokenizer
from shoestring.runlog import ProgressBar
from shoestring.train import shards
from shoestring.train.corpus import Document, documents
from shoestring.train.shards import in_validation, tokenize_corpus

STORIES = [f"Story {i}: " + "once upon a time there was a fox. " * (i % 7 + 1) for i in range(300)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "stories.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(json.dumps({"text": s}) for s in STORIES))
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(STORIES, 300)


def split_texts(part: Any, tokenizer: Tokenizer) -> list[str]:
    """The documents of a split, decoded again."""
    ids = part.tokens.tolist()
    assert ids[-1] == tokenizer.eos_id
    return tokenizer.decode(ids, skip_special=False).split("<|endoftext|>")[:-1]


def test_every_document_once_split_by_its_hash(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = tokenize_corpus(str(source), tmp_path / "cache", tokenizer=tokenizer, val_fraction=0.1)
    train, val = (split_texts(part, tokenizer) for part in (corpus.train, corpus.val))
    assert sorted(train + val) == sorted(STORIES)
    assert train == [s for s in STORIES if not in_validation(Document(s), 0.1)]  # in the order of the source
    assert val == [s for s in STORIES if in_validation(Document(s), 0.1)]
    assert 10 <= len(val) <= 60
    assert (corpus.train.num_documents, corpus.val.num_documents) == (len(train), len(val))
    assert corpus.train.tokens.dtype == np.dtype("<u2")
    assert corpus.train.mask is None
    assert corpus.train.head(5).tolist() == corpus.train.tokens[:5].tolist()

    # Another order and other neighbours: every document stays on its side.
    source.write_text("\n".join(json.dumps({"text": s}) for s in [*STORIES[::-1], "one more"]))
    again = tokenize_corpus(str(source), tmp_path / "cache", tokenizer=tokenizer, val_fraction=0.1)
    assert set(split_texts(again.val, tokenizer)) - {"one more"} == set(val)
    assert again.train.fingerprint != corpus.train.fingerprint


def test_second_call_reads_the_cache(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    bars: dict[str, list[int]] = {}

    class Bar(ProgressBar):
        def advance(self, n: int = 1, **fields: Any) -> None:
            super().advance(n, **fields)
            bars[self.description].append(n)

    @contextmanager
    def progress(total: int, description: str) -> Any:
        bars[description] = [-total]
        bar = Bar(total, description)
        yield bar
        assert bar.done == bar.total

    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "home"))
    first = tokenize_corpus(str(source), vocab_size=300, progress=progress)
    assert set(bars) == {"tokenizer", "tokenise"}
    assert sum(bars["tokenise"][1:]) == sum(len(s) for s in STORIES)
    assert first.folder.parent == tmp_path / "home"
    before = first.folder.stat().st_mtime_ns
    bars.clear()
    second = tokenize_corpus(str(source), vocab_size=300, progress=progress)
    assert not bars
    assert second.folder.stat().st_mtime_ns == before
    assert second.train.fingerprint == first.train.fingerprint
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint

    # The tokenizer that a run saved finds the corpus that the run was trained on.
    first.tokenizer.save(tmp_path / "model")
    saved = Tokenizer.from_file(tmp_path / "model")
    assert tokenize_corpus(str(source), tokenizer=saved, progress=progress).folder == first.folder
    assert not bars

    # Whatever decides the content makes another corpus.
    others = [
        tokenize_corpus(str(source), vocab_size=280),
        tokenize_corpus(str(source), vocab_size=300, val_fraction=0.5),
        tokenize_corpus(str(source), vocab_size=300, max_bytes=5000),
    ]
    os.utime(source, ns=(1, 1))
    others.append(tokenize_corpus(str(source), vocab_size=300))
    assert len({c.folder for c in [first, *others]}) == 5
    assert others[-1].train.fingerprint == first.train.fingerprint  # the same content all the same


def test_damaged_cache_is_built_again(source: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = tokenize_corpus(str(source), tmp_path / "cache", tokenizer=tokenizer)
    expected = corpus.train.tokens.tolist()
    for name, content in (("train.bin", b"short"), ("index.json", b"{")):
        (corpus.folder / name).write_bytes(content)
        assert tokenize_corpus(str(source), tmp_path / "cache", tokenizer=tokenizer).train.tokens.tolist() == expected


def test_prompts_are_masked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "qa.jsonl"
    rows = [{"text": "plain"}, {"prompt": "fox? ", "completion": "once"}, {"text": "more"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    corpus = tokenize_corpus(str(file), tmp_path / "cache", tokenizer=tokenizer, val_fraction=0)
    pieces = [("plain", 1), ("<|endoftext|>", 1), ("fox? ", 0), ("once", 1), ("<|endoftext|>", 1)]
    pieces += [("more", 1), ("<|endoftext|>", 1)]
    ids = [(i, counted) for text, counted in pieces for i in tokenizer.encode(text)]
    assert corpus.train.mask is not None
    assert list(zip(corpus.train.tokens.tolist(), corpus.train.mask.tolist(), strict=True)) == ids
    assert len(corpus.val) == 0

    # The same ids without the mask are another corpus.
    file.write_text("\n".join(map(json.dumps, [rows[0], {"text": "fox? once"}, rows[2]])))
    unmasked = tokenize_corpus(str(file), tmp_path / "cache", tokenizer=tokenizer, val_fraction=0)
    assert unmasked.train.fingerprint != corpus.train.fingerprint


def test_bos_stands_before_documents_not_inside(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with_bos = Tokenizer.from_file(_with_ends(tokenizer, tmp_path / "bos"))
    bos, eos = with_bos.bos_id, with_bos.eos_id
    file = tmp_path / "qa.jsonl"
    file.write_text('{"text": "fox"}\n{"prompt": "fox", "completion": "once"}')
    corpus = tokenize_corpus(str(file), tmp_path / "cache", tokenizer=with_bos, val_fraction=0)
    fox, once = tokenizer.encode("fox"), tokenizer.encode("once")
    assert corpus.train.tokens.tolist() == [bos, *fox, eos, bos, *fox, *once, eos]


def test_one_eos_stands_behind_a_document_of_a_tokenizer_that_adds_its_own(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with_both = Tokenizer.from_file(_with_ends(tokenizer, tmp_path / "both", add_eos=True))
    bos, eos = with_both.bos_id, with_both.eos_id
    fox, once = tokenizer.encode("fox"), tokenizer.encode("once")
    assert with_both.encode("fox") == [bos, *fox, eos]
    file = tmp_path / "qa.jsonl"
    rows = [{"text": "fox"}, {"prompt": "fox", "completion": "once"}, {"text": "once<|endoftext|>"}]
    for given, want in (
        (rows, [bos, *fox, eos, bos, *fox, *once, eos, bos, *once, eos, eos]),  # the last text has one of its own
        (rows[::2], [bos, *fox, eos, bos, *once, eos, eos]),
    ):
        file.write_text("\n".join(map(json.dumps, given)))
        corpus = tokenize_corpus(str(file), tmp_path / "cache", tokenizer=with_both, val_fraction=0)
        assert corpus.train.tokens.tolist() == want


def _with_ends(tokenizer: Tokenizer, folder: Path, add_eos: bool = False) -> Path:
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    Tokenizer(backend, special=tokenizer.special, add_bos=True, add_eos=add_eos).save(folder)
    return folder


def test_large_vocabularies_use_four_bytes(source: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    wide = Tokenizer(tokenizer.backend, special=tokenizer.special)
    wide.vocab_size = 65537
    corpus = tokenize_corpus(str(source), tmp_path / "wide", tokenizer=wide)
    narrow = tokenize_corpus(str(source), tmp_path / "narrow", tokenizer=tokenizer)
    assert corpus.train.tokens.dtype == np.dtype("<u4")
    assert np.array_equal(corpus.train.tokens, narrow.train.tokens)
    assert corpus.train.fingerprint == narrow.train.fingerprint


def test_batches_do_not_matter(source: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    whole = tokenize_corpus(str(source), tmp_path / "one", tokenizer=tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_BATCH_DOCUMENTS", 7)
        small = tokenize_corpus(str(source), tmp_path / "two", tokenizer=tokenizer)
    assert small.train.fingerprint == whole.train.fingerprint


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_empty_corpora(tmp_path: Path, tokenizer: Tokenizer, with_tokenizer: bool) -> None:
    (tmp_path / "a.txt").write_text("  \n\n ")
    given = tokenizer if with_tokenizer else None
    refused("no text to learn from", tokenize_corpus, str(tmp_path / "a.txt"), tmp_path / "cache", tokenizer=given)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_bad_options(source: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    for options, message in (
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"val_fraction": 0.999999999, "max_bytes": 10}, "all of which fell to the validation split"),
        ({"tokenizer": Tokenizer(tokenizer.backend)}, "no EOS"),
    ):
        refused(message, tokenize_corpus, str(source), tmp_path / "cache", **{"tokenizer": tokenizer, **options})
    (tmp_path / "file").write_text("")
    refused("SHOESTRING_CACHE", tokenize_corpus, str(source), tmp_path / "file", tokenizer=tokenizer)


def test_error_midway_leaves_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": s}) for s in STORIES * 4) + "\nbroken")
    refused(r"a\.jsonl:1201", tokenize_corpus, str(file), tmp_path / "cache", tokenizer=tokenizer)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


WORKER = """
import sys, time
from contextlib import contextmanager
from shoestring.runlog import ProgressBar
from shoestring.train.shards import tokenize_corpus
from shoestring.train import shards
shards._BATCH_DOCUMENTS = 50

@contextmanager
def progress(total, description):
    class Bar(ProgressBar):
        def advance(self, n):
            super().advance(n)
            if description == "tokenise":
                print(description, flush=True)
                time.sleep(float(sys.argv[3]))
    yield Bar(total, description)

corpus = tokenize_corpus(sys.argv[1], sys.argv[2], vocab_size=300, progress=progress)
print("done", corpus.train.fingerprint, flush=True)
"""


@pytest.mark.usefixtures("warm_python")
def test_killed_and_concurrent_builders(source: Path, tmp_path: Path) -> None:
    def start(pause: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, str(source), str(tmp_path / "cache"), pause]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    killed = start("5")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "tokenise\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert list((tmp_path / "cache").glob("corpus-*.tmp-*"))  # it was in the middle of it

    both = [start("0.05"), start("0.05")]
    outputs = [p.communicate(timeout=120)[0].split() for p in both]
    assert [o[-2] for o in outputs] == ["done", "done"]
    assert outputs[0][-1] == outputs[1][-1]
    builders = [("tokenise" in o) for o in outputs]
    assert sum(builders) == 1  # the other waited and read
    assert not list((tmp_path / "cache").glob("*.tmp-*"))
    corpus = tokenize_corpus(str(source), tmp_path / "cache", vocab_size=300)
    assert corpus.train.fingerprint == outputs[0][-1]
    assert corpus.train.num_documents + corpus.val.num_documents == len(list(documents(str(source))))


@pytest.mark.parametrize("long", ["ACGT" * 5000, "=" * 20_000, "_" * 20_000, " \n" * 10_000, "Ω" * 20_000])
def test_a_tokenizer_is_not_trained_on_words_without_end(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, long: str
) -> None:
    """The time of a word grows with the square of its length: one of 3 MB would take hours."""
    seen: list[str] = []
    monkeypatch.setattr(Tokenizer, "train", lambda texts, size: seen.extend(texts) or tokenizer)
    usual = "a word " + "w" * shards.MAX_WORD + " 12,5 = " + "=" * shards.MAX_WORD
    text = f"before 1 {long} after 2"
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in (usual, text)))
    tokenize_corpus(str(tmp_path / "a.jsonl"), tmp_path / "cache", val_fraction=0)
    assert seen[0] == usual and "".join(seen[1:]) == text
    assert len(seen) > 19 and all(len(piece) <= shards.MAX_WORD + len("before 1  after 2") for piece in seen[1:])
