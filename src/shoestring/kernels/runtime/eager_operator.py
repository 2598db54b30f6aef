"""Calls of our own operators that do not import torch's compiler.

The first call of a `torch.library.custom_op` imports torch's compiler, which takes one to three seconds: most of a
start whose kernels are on the disk. It is needed by programs that are compiled, exported or differentiated; all others
can call the operator's function itself. Tracing with plain tensors (`torch.jit.trace`, `make_fx` in real mode) and
`vmap` are taken for such calls: nothing here uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def call_operator(operator: Callable[..., Tensor], function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """`operator(x, *args)`, whose function is `function`."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(x) is not Tensor:  # a fake tensor, say
        return operator(x, *args)
    return function(x, *args)
