"""Compiled code is checked before it is used: whole, and from nobody else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoestring.kernels.runtime import compiled_cache, cpp
from shoestring.kernels.runtime.compiled_cache import cached_code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    compiled_cache._warn.cache_clear()
    before = os.umask(0o002)  # of systems where every user has a group of their own
    yield tmp_path / "cache" / "kernels"
    os.umask(before)


def the_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def planted(code: bytes) -> bytes:
    return hashlib.sha256(code).digest() + code


def test_made_once_whole_and_for_this_user_alone(folder: Path) -> None:
    assert cached_code("k", ".so", lambda: b"code") == b"code"
    assert cached_code("k", ".so", lambda: pytest.fail("compiled again")) == b"code"
    assert cached_code("other", ".so", lambda: b"more") == b"more"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}
    assert all(p.suffix == ".so" for p in folder.iterdir())


@pytest.mark.parametrize("size", [0, 10, 32, 33, 35])
def test_a_file_that_was_cut_or_changed_is_compiled_anew(folder: Path, size: int) -> None:
    cached_code("k", ".so", lambda: b"code")
    whole = the_file(folder).read_bytes()
    for damaged in (whole[:size], whole[:size] + b"?" + whole[size + 1 :]):
        the_file(folder).write_bytes(damaged)
        assert cached_code("k", ".so", lambda: b"code") == b"code"
        assert the_file(folder).read_bytes() == whole


def test_a_folder_that_others_may_write_to_is_neither_read_nor_written(folder: Path) -> None:
    cached_code("k", ".so", lambda: b"code")
    the_file(folder).write_bytes(planted(b"evil"))
    for mode in (0o777, 0o770, 0o1777):
        folder.chmod(mode)
        with pytest.warns(UserWarning, match=rf"others may write to it \(mode {mode:o}\).*\(chmod -R go-w\)"):
            assert cached_code("k", ".so", lambda: b"code") == b"code"
        with warnings.catch_warnings():  # once for each reason
            warnings.simplefilter("error")
            assert cached_code("k", ".so", lambda: b"code") == b"code"
        assert the_file(folder).read_bytes() == planted(b"evil")


def test_a_file_that_others_may_write_to_is_replaced(folder: Path) -> None:
    cached_code("k", ".so", lambda: b"code")
    for mode in (0o666, 0o620):
        the_file(folder).write_bytes(planted(b"evil"))
        the_file(folder).chmod(mode)
        with pytest.warns(UserWarning, match=rf"{the_file(folder)} is not used because others may .*mode {mode:o}"):
            assert cached_code("k", ".so", lambda: b"code") == b"code"
        assert the_file(folder).read_bytes() == planted(b"code") and the_file(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("given", ["file", "folder"])
def test_what_belongs_to_another_user_is_not_used(folder: Path, given: str) -> None:
    cached_code("k", ".so", lambda: b"code")
    the_file(folder).write_bytes(planted(b"evil"))
    os.chown(the_file(folder) if given == "file" else folder, 4321, 4321)
    with pytest.warns(UserWarning, match="it belongs to user 4321, and this is user 0"):
        assert cached_code("k", ".so", lambda: b"code") == b"code"


def test_links_and_pipes_are_not_followed(folder: Path, tmp_path: Path) -> None:
    cached_code("k", ".so", lambda: b"code")
    path = the_file(folder)
    (tmp_path / "elsewhere").write_bytes(planted(b"evil"))
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert cached_code("k", ".so", lambda: b"code") == b"code"
    assert not path.is_symlink() and (tmp_path / "elsewhere").read_bytes() == planted(b"evil")
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.warns(UserWarning, match="is not a plain file"):
        assert cached_code("k", ".so", lambda: b"code") == b"code"


def test_who_comes_while_another_compiles_waits_for_it_and_reads_its_code(folder: Path) -> None:
    begun, go_on, made = threading.Event(), threading.Event(), []

    def compile() -> bytes:
        made.append(1)
        begun.set()
        assert go_on.wait(30)
        return b"code"

    with ThreadPoolExecutor(4) as pool:  # a lock of files keeps threads apart, too
        first = pool.submit(cached_code, "k", ".so", compile)
        assert begun.wait(30)
        others = [pool.submit(cached_code, "k", ".so", compile) for _ in range(3)]
        assert cached_code("other", ".so", lambda: b"more") == b"more"  # other code does not wait
        time.sleep(3 * compiled_cache.POLL_S)
        assert not any(f.done() for f in (first, *others))
        go_on.set()
        assert [f.result(30) for f in (first, *others)] == [b"code"] * 4
    assert len(made) == 1 and {p.suffix for p in folder.iterdir()} == {".so"}


COMPILE_FOR_EVER = """
import time
from shoestring.kernels.runtime.compiled_cache import cached_code
cached_code("k", ".so", lambda: print("begun", flush=True) or time.sleep(300))
"""


@pytest.mark.usefixtures("warm_python")
def test_who_compiles_and_is_killed_or_stuck_holds_nobody_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = subprocess.Popen([sys.executable, "-c", COMPILE_FOR_EVER], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "begun\n"
        monkeypatch.setattr(compiled_cache, "MOST_WAIT_S", 0.1)
        assert cached_code("k", ".so", lambda: b"code") == b"code"  # it is stuck
        the_code = next(p for p in folder.iterdir() if p.suffix == ".so")
        the_code.unlink()
        monkeypatch.setattr(compiled_cache, "MOST_WAIT_S", 300.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(cached_code, "k", ".so", lambda: b"mine")
            time.sleep(3 * compiled_cache.POLL_S)
            assert not waiting.done()
            other.kill()
            assert waiting.result(30) == b"mine"
        assert the_file(folder) == the_code
    finally:
        other.kill()
        other.communicate()


LOAD = """
from shoestring.kernels.runtime.cpp import load_library
one, two = (load_library('extern "C" int answer() { return %d; }' % n) for n in (42, 43))
print(one.answer(), two.answer())
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.skipif(cpp.find_compiler() is None, reason="needs a C++ compiler")
def test_a_library_that_was_cut_short_does_not_end_the_process(folder: Path) -> None:
    """The loader maps a file and dies with SIGBUS where it ends too soon."""

    def load() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=120)

    assert load().stdout == "42 43\n"
    for path in folder.iterdir():
        os.truncate(path, path.stat().st_size // 2)
    again = load()
    assert (again.returncode, again.stdout) == (0, "42 43\n"), again.stderr
