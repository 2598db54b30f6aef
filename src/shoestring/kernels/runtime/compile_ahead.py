"""Kernels compiled by several threads before they are first launched.

    with rehearsal() as missing:
        program()               # no kernel is launched; those that are not compiled yet are noted
    missing.compile()

Triton and NVRTC compile a kernel where it is first launched, one after the other: dozens of kernels for a first text,
each a fraction of a second. Most of that time is spent outside of the interpreter's lock, so threads share it.
SHOESTRING_COMPILE_AHEAD=0 turns it off.

In a rehearsal torch computes from memory that nothing has written. So the program must not let torch index with what a
kernel writes. A kernel that fails to compile here is compiled again, with its message, where it is launched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from shoestring.kernels.runtime.triton_backend import triton_refusal

MOST_THREADS = 16


class Missing:
    """Kernels that a rehearsal met, and how to compile each."""

    def __init__(self) -> None:
        self._compilers: dict[Hashable, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._compilers)

    def note(self, key: Hashable, compiler: Callable[[], object]) -> None:
        self._compilers.setdefault(key, compiler)

    def compile(self) -> bool:
        """All of them, as many at a time as there are processors; whether all could be compiled."""
        if not self._compilers:
            return True
        threads = min(len(self._compilers), MOST_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, initializer=_use_device(), thread_name_prefix="compile") as pool:
            pending = [pool.submit(compiler) for compiler in self._compilers.values()]
            # Waits; a failure is told where the kernel is launched.
            return all(done.exception() is None for done in pending)


_one_at_a_time = threading.Lock()  # a rehearsal changes what a launch of Triton does
_rehearsed: ContextVar[Missing | None] = ContextVar("rehearsed", default=None)  # None in other threads


def compiles_ahead() -> bool:
    return os.environ.get("SHOESTRING_COMPILE_AHEAD") != "0"


def rehearsed() -> Missing | None:
    """Where kernels are noted at present, and not launched; None: they are."""
    return _rehearsed.get()


@contextmanager
def rehearsal() -> Iterator[Missing]:
    missing = Missing()
    with _one_at_a_time:
        token = _rehearsed.set(missing)
        try:
            with _triton_notes():
                yield missing
        finally:
            _rehearsed.reset(token)


@contextmanager
def _triton_notes() -> Iterator[None]:
    if triton_refusal() is not None:
        yield
        return
    import triton
    from triton.runtime.jit import JITFunction

    hook, run = triton.knobs.runtime.jit_cache_hook, JITFunction.run

    def rehearse(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, warmup=warmup or rehearsed() is not None, **options)  # Triton's word for no launch

    triton.knobs.runtime.jit_cache_hook, JITFunction.run = _note_triton, rehearse
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook, JITFunction.run = hook, run


def _note_triton(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
    """Triton's hook before a compilation; True: neither compile nor launch."""
    missing = rehearsed()
    if missing is None:
        return False
    given = compile["specialization_data"]
    # Triton also builds a launcher for every signature with a C compiler: `run`, made when first asked for.
    missing.note((fn.module, fn.name, key), lambda: fn.jit_function.preload(given).run)
    return True


def _use_device() -> Callable[[], None] | None:
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)
