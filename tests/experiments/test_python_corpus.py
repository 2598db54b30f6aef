"""The corpus of packages: a mixture of files that are code, each once; what pip cannot get is said."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import python_corpus
from experiments.python_corpus import PACKAGES, fetch, is_code, open_prepared, texts
from shoestring.errors import UserError


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


def test_data_is_no_code() -> None:
    assert is_code(code("f").encode())
    assert not is_code(b"") and not is_code(b"x = 1\n")
    assert not is_code(b"x = '" + b"a" * 1000 + b"'\n") and not is_code(code("f", 9000).encode())


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
    with pytest.raises(UserError, match="is there already"):
        python_corpus.main()


def test_a_package_that_pip_cannot_get_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match="no-such-package==1"):
        fetch("no-such-package==1", tmp_path)


def test_what_was_read_by_half_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = archive(tmp_path / "one-1.0.whl", {"one/a.py": "a = 1\n", "one/b.so": "", "one/c.py": "c = 3\n"})
    whole = wheel.read_bytes()

    def download(command: list[str], **options: object) -> SimpleNamespace:
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(whole)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(python_corpus.subprocess, "run", download)
    folder = tmp_path / "sources"
    folder.mkdir()
    with zipfile.ZipFile(fetch("one==1.0", folder)) as sources:
        assert sources.namelist() == ["one/a.py", "one/c.py"]
    whole = whole.replace(b"c = 3", b"c = 4")  # not what its checksum says
    with pytest.raises(zipfile.BadZipFile):
        fetch("two==1.0", folder)
    assert [path.name for path in folder.iterdir()] == ["one==1.0.zip"]


def test_the_packages_are_pinned() -> None:
    listed = PACKAGES.read_text().split()
    assert len(listed) == len(set(listed)) > 200 and all(len(p.split("==")) == 2 for p in listed)
