"""The threads of torch's operators are found where torch has them, and not in a process that was forked."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch

from shoestring.kernels.runtime import openmp

LINUX = sys.platform == "linux" and torch.backends.openmp.is_available()


@pytest.mark.skipif(not LINUX, reason="needs OpenMP on Linux")
def test_the_functions_start_torchs_own_threads() -> None:
    pool = openmp.thread_pool()
    assert pool is not None
    size = ctypes.CFUNCTYPE(ctypes.c_int)(pool.size)
    assert size() == 1  # outside of a parallel part
    torch.randn(300, 300) @ torch.randn(300, 300)
    (path,) = openmp._loaded()
    assert Path(path).name.startswith(openmp.NAMES) and "torch" in path


def test_a_forked_process_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_FIRST", os.getpid() + 1)
    assert openmp.thread_pool() is None


def test_another_librarys_threads_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mapped(*names: str) -> list[str]:
        lines = [f"7f0-7f1 r-xp 00000000 fe:00 {i} {name}\n" for i, name in enumerate(names, 1)]
        monkeypatch.setattr(Path, "read_text", lambda self: "".join(lines))
        return openmp._loaded()

    torchs, sklearns = str(Path(torch.__file__).parent / "lib/libgomp.so.1"), "/x y/sklearn.libs/libgomp-1.so"
    assert mapped(torchs, torchs, sklearns, "/lib/libc.so") == [torchs]
    assert mapped("/usr/lib/libgomp.so.1", "/lib/libc.so") == ["/usr/lib/libgomp.so.1"]
    assert mapped("/usr/lib/libgomp.so.1", sklearns) == [] and mapped("/lib/libc.so") == []
