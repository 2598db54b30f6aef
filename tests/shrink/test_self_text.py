"""Self-generated text: the engine's samples, in order, resumable, readable as a corpus with masked prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from refusals import refused
from shoestring.model import Decoder, Tokenizer
from shoestring.runlog import read_jsonl
from shoestring.serve.engine.engine import Commit, Engine
from shoestring.serve.engine.sampling import Sampling
from shoestring.shrink.self_text import generate_text, read_prompts
from shoestring.train.shards import tokenize_corpus
from tiny import QWEN2, loud_model

WORDS = "the quick brown fox jumps over a lazy dog and sleeps"
PROMPTS = [" ".join(WORDS.split()[i : i + 3]) + " " for i in range(7)]
SAMPLING = Sampling(temperature=0.7, max_tokens=12, seed=5)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([WORDS * 20], vocab_size=280)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Decoder:
    return loud_model(replace(QWEN2, vocab_size=tokenizer.vocab_size))


def test_lines_are_the_engines_samples_in_order(model: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = generate_text(model, tokenizer, PROMPTS, tmp_path / "self.jsonl", sampling=SAMPLING, max_requests=3)
    rows = read_jsonl(out)
    assert [r["prompt"] for r in rows] == [p.rstrip() for p in PROMPTS]
    engine = Engine(model, tokenizer, max_requests=1)
    for i, row in enumerate(rows):
        alone = engine.generate([row["prompt"]], replace(SAMPLING, seed=5 + i))[0]
        assert row["completion"] == alone.text
    assert len({r["completion"] for r in rows}) > 1
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["self.jsonl", "self.jsonl.settings"]


@pytest.mark.parametrize("stop", [(), ("e",)])
def test_texts_that_end_are_the_engines(tokenizer: Tokenizer, tmp_path: Path, stop: tuple[str, ...]) -> None:
    """By a token, by a stop string, by their length; with characters of which the last bytes are missing."""
    ends = tuple(range(260, 275))
    model = loud_model(replace(QWEN2, vocab_size=tokenizer.vocab_size, extra_eos_ids=ends))
    sampling = replace(SAMPLING, temperature=2.0, max_tokens=20, stop=stop)
    out = generate_text(model, tokenizer, PROMPTS * 6, tmp_path / "self.jsonl", sampling=sampling)
    engine = Engine(model, tokenizer)
    samplings = [replace(sampling, seed=5 + i) for i in range(len(PROMPTS) * 6)]
    alone = engine.generate([p.rstrip() for p in PROMPTS] * 6, samplings)
    assert [row["completion"] for row in read_jsonl(out)] == [a.text for a in alone]
    assert {a.finish_reason for a in alone} == {"stop", "length"}
    assert any(tokenizer.decode(a.token_ids).endswith("\ufffd") for a in alone) or stop


def test_prompts_are_read_in_groups(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, groups = Engine.step, []

    def counts(self: Engine) -> object:
        groups.extend([len(self.waiting)] * bool(self.waiting))
        return step(self)

    monkeypatch.setattr(Engine, "step", counts)
    prompts = [p[:-2] + str(i) for i in range(12) for p in PROMPTS]
    # Texts of many lengths: places become free one by one.
    sampling = replace(SAMPLING, temperature=1.5, max_tokens=40, stop=("e", "a", "o"))
    generate_text(model, tokenizer, prompts, tmp_path / "self.jsonl", sampling=sampling, max_requests=32)
    assert sum(groups) == len(prompts) and groups[0] == 32 and len(groups) > 3
    assert min(groups[:-1]) >= 4, groups


def test_a_killed_run_ends_with_the_same_file(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = generate_text(model, tokenizer, PROMPTS, tmp_path / "whole.jsonl", sampling=SAMPLING)
    step, count = Engine.step, 0

    def dies(self: Engine) -> object:
        nonlocal count
        count += 1
        if count > 25:
            raise KeyboardInterrupt
        return step(self)

    cut = tmp_path / "cut.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", dies)
        with pytest.raises(KeyboardInterrupt):
            generate_text(model, tokenizer, PROMPTS, cut, sampling=SAMPLING, max_requests=2)
    (partial,) = tmp_path.glob("cut.jsonl.*.partial")
    lines = partial.read_bytes().count(b"\n")
    assert 0 < lines < len(PROMPTS) and not cut.exists()
    with partial.open("a") as file:
        file.write('{"prompt": "torn')
    generate_text(model, tokenizer, PROMPTS, cut, sampling=SAMPLING, max_requests=5)
    assert cut.read_bytes() == whole.read_bytes() and not list(tmp_path.glob("*.partial"))


def test_a_finished_file_is_kept_and_another_refused(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = generate_text(model, tokenizer, PROMPTS, tmp_path / "self.jsonl", sampling=SAMPLING)
    before = out.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", lambda self: pytest.fail("nothing is left to do"))
        generate_text(model, tokenizer, PROMPTS, out, sampling=SAMPLING)
    refused("exists already", generate_text, model, tokenizer, PROMPTS, out, sampling=replace(SAMPLING, seed=6))
    other = loud_model(replace(QWEN2, vocab_size=tokenizer.vocab_size))
    with torch.no_grad():
        other.embed.weight.mul_(1.01)
    refused("exists already", generate_text, other, tokenizer, PROMPTS, out, sampling=SAMPLING)
    assert out.read_bytes() == before


def test_the_corpus_counts_completions_only(model: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = generate_text(model, tokenizer, PROMPTS, tmp_path / "self.jsonl", sampling=SAMPLING)
    corpus = tokenize_corpus(str(out), tmp_path / "cache", tokenizer=tokenizer, val_fraction=0)
    train = corpus.train
    assert train.mask is not None
    rows = [r for r in read_jsonl(out) if r["completion"].strip()]
    counted = sum(len(tokenizer.encode(r["completion"], special=False)) + 1 for r in rows)
    assert train.num_documents == len(rows) and int(train.mask.sum()) == counted


def test_bad_input(model: Decoder, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(r"\.jsonl", generate_text, model, tokenizer, PROMPTS, tmp_path / "self.txt")
    refused("no prompts", generate_text, model, tokenizer, ["  "], tmp_path / "self.jsonl")
    # A model that ends every text at once: all mass on EOS.
    monkeypatch.setattr(Commit, "_after_token", lambda *a: "stop")
    refused(
        "ended every text at once", generate_text, model, tokenizer, PROMPTS, tmp_path / "self.jsonl", sampling=SAMPLING
    )
    assert not list(tmp_path.iterdir())


def test_prompts_longer_than_the_context_keep_their_end(model: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = "fox " * 200
    out = generate_text(model, tokenizer, [long, "the quick"], tmp_path / "self.jsonl", sampling=SAMPLING)
    assert all(row["completion"] for row in read_jsonl(out))


def test_read_prompts(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short\n" + "\n".join(f"{i} " + "word " * 120 for i in range(10)) + "\nshort again\n")
    found = read_prompts(str(text))
    assert len(found) == 10 and all(len(p) == 128 for p in found) and found[3].startswith("3 word")
    assert [p[0] for p in read_prompts(str(text), 5)] == ["0", "2", "4", "6", "8"]
    rows = [{"question": "1+1?", "answer": "2"}, {"turns": ["hello", "more"]}, {"text": "x"}]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(str(tmp_path / "q.jsonl")) == ["1+1?", "hello", "x"]

    # Lines that are wrapped at a width: paragraphs end at blank lines.
    text.write_text("\n\n".join("\n".join([f"{i} begins"] + ["words of a line"] * (20 * i)) for i in range(3)))
    assert [prompt[:30] for prompt in read_prompts(str(text))] == [f"{i} begins words of a line words" for i in (1, 2)]
    (tmp_path / "alpaca.json").write_text(json.dumps([{"instruction": "Sum:", "input": "1 2"}, "plain"]))
    assert read_prompts(str(tmp_path / "alpaca.json")) == ["Sum:\n1 2", "plain"]
    (tmp_path / "empty.txt").write_text("a b c\n")
    refused("gives no prompt", read_prompts, str(tmp_path / "empty.txt"))
    (tmp_path / "bad.jsonl").write_text("{")
    refused("is not valid JSON", read_prompts, str(tmp_path / "bad.jsonl"))
