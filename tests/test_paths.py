"""Paths as users write them; the folder of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoestring.cli.inspect import summarize
from shoestring.errors import UserError
from shoestring.paths import cache_folder, expand, find_model


def nobody(*_: object) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_tilde_is_a_home_or_an_ordinary_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("~/x") == tmp_path / "x"
    assert expand("~nobody-of-that-name/x") == Path("~nobody-of-that-name/x")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key in ("SHOESTRING_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/shoestring"
    monkeypatch.setattr(Path, "home", nobody)  # a container's user without a name
    with pytest.raises(UserError, match="set SHOESTRING_CACHE"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/else")
    assert cache_folder() == Path("/else/shoestring")
    monkeypatch.setenv("SHOESTRING_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


@pytest.mark.parametrize("name", ["x" * 256, "ä" * 128, "a/" * 2048, "a\0b", "\ud800"])
def test_paths_that_no_file_system_has(name: str) -> None:
    for use in (expand, find_model):
        with pytest.raises(UserError, match="cannot be a path"):
            use(name)
    assert expand("x" * 255) == Path("x" * 255)


def test_a_checkpoint_is_no_model_and_a_model_may_have_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="is a checkpoint"):
        find_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # as folders of other tools have
    assert find_model(tmp_path) == tmp_path
    assert summarize(tmp_path)  # of the model; the manifest is no checkpoint's
