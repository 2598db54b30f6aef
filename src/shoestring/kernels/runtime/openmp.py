"""The threads of torch's own operators, for C++ that is called between them.

    pool = thread_pool()   # to be passed to C++ as a pointer; None: it takes threads of its own

OpenMP's threads spin for some milliseconds after an operator, in case there is another one. Threads of our own would
wait for them: with two cores prompts took twice as long as with one. So the functions with which a compiler's code
starts OpenMP's threads are looked up in the library that torch has loaded; the C++ itself needs no OpenMP.

Left out: systems other than Linux; processes that were forked after the library was used, where its threads are
missing.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

NAMES = ("libgomp", "libiomp5", "libomp")  # GNU's, and two that have its functions, too
_FIRST = os.getpid()


class ThreadPool(ctypes.Structure):
    """`Pool` of kernels/lowbit/tiles.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("parallel", "rank", "size")]


def thread_pool() -> ThreadPool | None:
    return _found() if os.getpid() == _FIRST else None


@functools.cache
def _found() -> ThreadPool | None:
    for path in _loaded():
        try:
            library = ctypes.CDLL(path)
            functions = (library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads)
        except (OSError, AttributeError):
            continue
        return ThreadPool(*(ctypes.cast(f, ctypes.c_void_p).value for f in functions))
    return None


def _loaded() -> list[str]:
    """OpenMP's libraries in this process that came with torch (others have threads of their own), or the only one."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    found = sorted(p for p in paths if Path(p).name.startswith(NAMES))
    of_torch = Path(torch.__file__).parent
    with_torch = [p for p in found if Path(p).is_relative_to(of_torch) or f"{of_torch}.libs" in p]
    return with_torch or (found if len(found) == 1 else [])
