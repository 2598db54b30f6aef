"""Whether a Triton kernel may run on a tensor.

On a GPU: if triton imports. On a CPU: only under TRITON_INTERPRET=1, which is how kernels are tested without a GPU.
Where triton is missing on a GPU the reference runs, with one warning; SHOESTRING_STRICT=1 makes it an error.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

NOT_INSTALLED = "triton is not installed (pip install 'shoestring[gpu]')"
Answer = TypeVar("Answer", bound=Callable[..., Any])


def of_the_machine(answer: Answer) -> Answer:
    """Marks a function whose result depends on the machine alone as a constant for torch.compile. Same as
    torch.compiler.assume_constant_result, without importing the compiler, which takes seconds.
    """
    answer._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return answer


def triton_usable(t: Tensor) -> bool:
    if t.is_cuda:
        return _has_triton() or fall_back(NOT_INSTALLED)
    # The interpreter's bf16 dot is wrong and fp64 is not supported by every kernel: fp16 and fp32 only.
    return interpreting() and _has_triton() and t.dtype in (torch.float16, torch.float32)


def triton_refusal() -> str | None:
    """Why Triton kernels cannot run on a GPU, or None."""
    return None if _found_triton() else NOT_INSTALLED


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least n: Triton's blocks have such sizes."""
    return 1 << (n - 1).bit_length()


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@of_the_machine
def _has_triton() -> bool:
    return _found_triton()


@functools.cache
def _found_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def fall_back(reason: str) -> bool:
    if os.environ.get("SHOESTRING_STRICT") == "1":
        raise RuntimeError(f"SHOESTRING_STRICT=1 and a kernel cannot run: {reason}")
    warnings.warn(f"using the plain torch reference instead of a kernel: {reason}", stacklevel=3)
    return False
