"""The corpus of packages: a mixture of files that are code, each once; what pip cannot get is said."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from experiments import python_corpus
from experiments.python_corpus import open_prepared, texts
from refusals import refused


def code(name: str, lines: int = 20) -> str:
    return "".join(f"def {name}_{i}(x):\n    return x + {i}\n" for i in range(lines))


def archive(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as sources:
        for name, text in files.items():
            sources.writestr(name, text)
    return path


def test_files_come_once_mixed_and_within_limits(tmp_path: Path) -> None:
    one = archive(tmp_path / "one.zip", {f"one/{i}.py": code(f"one{i}") for i in range(30)})
    two = archive(
        tmp_path / "two.zip",
        {
            **{f"two/{i}.py": code(f"two{i}") for i in range(30)},
            "two/vendored.py": code("one3"),
            "two/table.py": "TABLE = [" + "1, " * 400 + "]\n",
            "two/__init__.py": "",
            "two-1.0.data/scripts/run.py": code("script"),
        },
    )
    found = list(texts([one, two], 10**9, 10**9))
    assert sorted(found) == sorted(code(f"{p}{i}") for p in ("one", "two") for i in range(30))
    first = found[:20]
    assert 4 <= sum("one" in text for text in first) <= 16  # not one package after the other
    assert list(texts([one, two], 10**9, 10**9)) == found
    size = len(found[0])
    part = list(texts([one, two], 9 * size, 10**9))
    assert part == found[: len(part)] and 8 <= len(part) <= 10
    few = list(texts([one, two], 10**9, 5 * size))
    assert {sum(p in text for text in few) for p in ("one", "two")} <= {4, 5}


def test_archives_that_are_there_become_a_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.txt").write_text("one==1.0\n")
    (tmp_path / "sources").mkdir()
    archive(tmp_path / "sources" / "one==1.0.zip", {f"one/{i}.py": code(f"one{i}") for i in range(90)})
    call = ["python_corpus", str(tmp_path / "corpus"), "--sources", str(tmp_path / "sources")]
    monkeypatch.setattr(sys, "argv", [*call, "--packages", str(tmp_path / "list.txt"), "--vocab-size", "300"])
    python_corpus.main()
    corpus = open_prepared(tmp_path / "corpus")
    assert f"{len(corpus.train):,} training" in capsys.readouterr().out
    assert len(corpus.train) > len(corpus.val) > 0 and 256 < corpus.tokenizer.vocab_size <= 300
    refused("is there already", python_corpus.main)
