"""The programs of docs/start/python.md run as they stand, and its names are what the package exports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import shoestring
import tiny
from shoestring import plugins

REPO = Path(__file__).resolve().parents[1]
PAGE = (REPO / "docs" / "start" / "python.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^## (.+?)$.*?^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page supposes: a model and some texts in the working folder."""
    place = tmp_path_factory.mktemp("python_page")
    tokenizer = tiny.chat_tokenizer()
    shoestring.save_model(place / "my-model", tiny.served_model(tokenizer.vocab_size, 256), tokenizer)
    (place / "texts").mkdir()
    for number in range(60):
        (place / "texts" / f"{number}.txt").write_text(f"Text {number}. {tiny.CAT_TEXT * 20}")
    return place


def test_there_are_five_programs() -> None:
    assert len(PROGRAMS) == 5


@pytest.mark.parametrize("title", PROGRAMS)
def test_a_program_runs(title: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)
    exec(compile(PROGRAMS[title], f"docs/start/python.md, {title}", "exec"), {"__name__": "__main__"})


def test_the_table_names_what_is_exported() -> None:
    table = PAGE.partition("## What is exported")[2]
    named = {
        name for row in re.findall(r"^\| (`.+?) \|", table, flags=re.MULTILINE) for name in re.findall(r"\w+", row)
    }
    assert named == set(shoestring.__all__) - {"__version__"}


def test_every_exported_name_is_there_and_known_to_type_checkers() -> None:
    stub = ast.parse((REPO / "src" / "shoestring" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    declared = {alias.name: node.module for node in imports for alias in node.names}
    of_methods = {name: plugins.module_name(*entry) for name, entry in shoestring._OF_METHODS.items()}
    assert declared == shoestring._PUBLIC | of_methods
    assert all(getattr(shoestring, name) is not None for name in shoestring.__all__)
