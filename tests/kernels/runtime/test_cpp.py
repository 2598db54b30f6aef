"""Compiling C++ at the first use: kept on disk, and no error where that is not possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoestring.kernels.runtime import cpp

pytestmark = pytest.mark.skipif(cpp.find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))
    cpp.load_library.cache_clear()
    return tmp_path


ANSWER = 'extern "C" int answer() { return 41 + 1; }'


def test_compiled_once_and_kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpp.load_library(ANSWER)
    assert library is not None and library.answer() == 42
    (made,) = empty_cache.glob("kernels/*")
    cpp.load_library.cache_clear()
    ran: list[list[str]] = []
    run = cpp._output

    def watched(command: list[str], given: str = "") -> str:
        ran.append(command)
        return run(command, given)

    monkeypatch.setattr(cpp, "_output", watched)
    again = cpp.load_library(ANSWER)
    assert again is not None and again.answer() == 42
    assert [command[1:] for command in ran] == [["--version"]] and made.exists()


def test_a_folder_that_cannot_be_written_is_no_error(empty_cache: Path) -> None:
    (empty_cache / "kernels").write_text("a file")
    library = cpp.load_library(ANSWER)
    assert library is not None and library.answer() == 42


def test_what_does_not_compile_is_a_warning(empty_cache: Path) -> None:
    with pytest.warns(UserWarning, match="could not compile a kernel, which costs speed only"):
        assert cpp.load_library("no C++ at all") is None
