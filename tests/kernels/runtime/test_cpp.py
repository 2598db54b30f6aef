"""Compiling C++ at the first use: kept on disk, and no error where that is not possible."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest

from shoestring.kernels.runtime import cpp

pytestmark = pytest.mark.skipif(cpp.find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))
    cpp.loaded_library.cache_clear()
    return tmp_path


ANSWER = 'extern "C" int answer() { return 41 + 1; }'


def test_compiled_once_and_kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpp.load_library(ANSWER)
    assert library is not None and library.answer() == 42
    (made,) = empty_cache.glob("kernels/*")
    cpp.loaded_library.cache_clear()
    ran: list[list[str]] = []
    run = cpp._output

    def watched(command: list[str], given: str = "") -> str:
        ran.append(command)
        return run(command, given)

    monkeypatch.setattr(cpp, "_output", watched)
    again = cpp.load_library(ANSWER)
    assert again is not None and again.answer() == 42
    assert [command[1:] for command in ran] == [["--version"]] and made.exists()


def test_sources_that_were_begun_are_compiled_side_by_side_and_once(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [f'extern "C" int answer() {{ return {number}; }}' for number in (1, 2)]
    both, compiled, run = threading.Barrier(2, timeout=30), [], cpp._output

    def together(command: list[str], given: str = "") -> str:
        if given:
            both.wait()
            compiled.append(given)
        return run(command, given)

    monkeypatch.setattr(cpp, "_output", together)
    assert cpp.begin_compiling(*sources)
    libraries = [cpp.load_library(source) for source in sources]
    assert [library and library.answer() for library in libraries] == [1, 2]
    assert sorted(compiled) == sources
    assert not cpp.begin_compiling(*sources)


def test_a_compiler_that_does_not_run_is_told_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = empty_cache / "broken"
    compiler.write_text("#!/bin/sh\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not cpp.begin_compiling(ANSWER)
        assert cpp.load_library(ANSWER) is None and cpp.load_library(ANSWER) is None
    assert len(told) == 1 and "could not compile a kernel" in str(told[0].message)


def test_a_folder_that_cannot_be_written_is_no_error(empty_cache: Path) -> None:
    (empty_cache / "kernels").write_text("a file")
    library = cpp.load_library(ANSWER)
    assert library is not None and library.answer() == 42


def test_what_does_not_compile_is_a_warning(empty_cache: Path) -> None:
    with pytest.warns(UserWarning, match="could not compile a kernel, which costs speed only"):
        assert cpp.load_library("no C++ at all") is None
