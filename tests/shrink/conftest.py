"""A folder with a tiny model and a few texts, and the command line in it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shoestring.model import save_model
from shoestring.model.tokenizer import Tokenizer
from tiny import QWEN2, loud_model


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of made-up words, and a model with a tokenizer of them. Copied, never written to."""
    folder = tmp_path_factory.mktemp("home")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 5))) for _ in range(60)]
    for name in ("calib.txt", "test.txt"):
        (folder / name).write_text(" ".join(draw.choices(words, k=800)))
    (folder / "prompts.txt").write_text("\n".join(" ".join(draw.choices(words, k=160)) for _ in range(12)))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": w}) for w in words[:12]))
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=60))}) for _ in range(120)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    tokenizer = Tokenizer.train([(folder / "calib.txt").read_text()], vocab_size=300)
    save_model(folder / "model", loud_model(replace(QWEN2, vocab_size=tokenizer.vocab_size)), tokenizer)
    return folder


@pytest.fixture(scope="module")
def here(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it that the tests of a file share."""
    return Path(shutil.copytree(home, tmp_path_factory.mktemp("here"), dirs_exist_ok=True))


@pytest.fixture
def own_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that one test has to itself, and that it works in."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def cli(command: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(here)
    monkeypatch.setenv("SHOESTRING_CACHE", str(here / "cache"))
    return command
