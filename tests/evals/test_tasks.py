from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoestring.errors import UserError
from shoestring.evals import read_task, run_task
from shoestring.evals.tasks import join
from tiny import tiny_llama, tiny_tokenizer


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return path


def log_prob(model: torch.nn.Module, prompt: list[int], continuation: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + continuation]))[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum().item()


def test_cloze_is_what_greedy_decoding_writes(tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    words = [" the", " cat", " sat", " dog", " was", " it"]
    # Find contexts whose greedy next token is one of the words, so that right and wrong answers both occur.
    records, expected = [], 0
    for a in words:
        for b in words:
            context = "the" + a + b
            with torch.no_grad():
                logits = model(torch.tensor([tokenizer.encode(context)]))[0, -1]
            best = tokenizer.decode([int(logits.argmax())])
            right = best.startswith(" ") and best.strip().isalpha() and len(records) % 2 == 0
            records.append({"context": context, "continuation": best.strip() if right else "zebra"})
            expected += right and tokenizer.encode(context + best)[:-1] == tokenizer.encode(context)
    result = run_task(model, tokenizer, write(tmp_path / "words.jsonl", *records))
    assert (result.name, result.kind, result.num, result.correct) == ("words", "cloze", 36, expected)
    assert 0 < expected < 36
    assert result.accuracy == expected / 36


def test_choice_divides_by_characters(tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    query, choices = "the cat", ["sat on the mat and the dog", "it", "was a dog"]
    prompt = tokenizer.encode(query)
    per_char = [log_prob(model, prompt, tokenizer.encode(" " + c)) / len(c) for c in choices]
    plain = [log_prob(model, prompt, tokenizer.encode(" " + c)) for c in choices]
    best = per_char.index(max(per_char))
    assert best != plain.index(max(plain))  # the normalisation decides this one
    path = write(tmp_path / "q.jsonl", *({"query": query, "choices": choices, "gold": g} for g in range(3)))
    seen: list[tuple[int, int]] = []
    result = run_task(model, tokenizer, path, progress=lambda *at: seen.append(at))
    assert (result.kind, result.num, result.correct) == ("choice", 3, 1)
    assert seen[-1] == (3, 3)
    assert run_task(model, tokenizer, path, limit=best + 1).correct == 1
    assert run_task(model, tokenizer, path, limit=best).correct == 0 if best else True


def test_join() -> None:
    assert join("a", "b") == "a b"
    assert join("a\n", "b") == "a\nb"
    assert join("a", " b") == "a b"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not valid JSON"),
        ("[1]", "JSON object"),
        ('{"text": "x"}', "neither"),
        ('{"context": "x"}', "continuation"),
        ('{"context": "", "continuation": "x"}', "context"),
        ('{"query": "x", "choices": ["a"], "gold": 0}', "at least two"),
        ('{"query": "x", "choices": ["a", ""], "gold": 0}', "non-empty"),
        ('{"query": "x", "choices": ["a", "b"], "gold": 2}', "0 to 1"),
        ('{"query": "x", "choices": ["a", "b"], "gold": true}', "gold=True"),
        ('{"query": "x", "choices": ["a", "b"]}', "gold=None"),
        ('{"query": "x", "choices": ["a", "b"], "gold": 0}', "two files"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"context": "fine", "continuation": "x"}, "", line)
    with pytest.raises(UserError, match=reason) as error:
        read_task(path)
    assert f"{path}:3" in str(error.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_task(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="no questions"):
        read_task(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"context": "\xff"}')
    with pytest.raises(UserError, match="UTF-8"):
        read_task(tmp_path / "latin.jsonl")
    with pytest.raises(UserError, match="limit=0"):
        read_task(write(tmp_path / "ok.jsonl", {"context": "a", "continuation": "b"}), limit=0)


@pytest.mark.assets
def test_the_task_files_are_read(assets: Path) -> None:
    sizes = {
        path.stem: (read_task(path).kind, len(read_task(path).questions)) for path in (assets / "eval").glob("*.jsonl")
    }
    assert sizes["lambada_openai"] == ("cloze", 5153)
    assert sizes["arc_easy"] == ("choice", 2376)
    assert sizes["piqa"] == ("choice", 1838)
