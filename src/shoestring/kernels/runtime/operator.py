"""How a kernel becomes an operator.

    @operator(add_norm_ref_)                    a call goes to the kernel below where it can, else to the reference
    def add_norm_(x_TD, delta_TD, ...):         the same arguments; their defaults stand in the reference alone

    @registered("tiled_linear", fake)           also torch.ops.shoestring.tiled_linear, for programs that are compiled,
    def _tiled_linear(x_TK, codes, ...):        exported or differentiated; `fake` gives the shape of its result

The first call of a `torch.library.custom_op` imports torch's compiler, which takes one to three seconds: most of a
start whose kernels are on the disk. So a registered operator that nothing compiles or differentiates calls its function
itself. Tracing with plain tensors (`torch.jit.trace`, `make_fx` in real mode) and `vmap` are taken for such calls:
nothing here uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from shoestring.kernels.runtime.triton_backend import triton_usable

P = ParamSpec("P")
R = TypeVar("R")


def operator(
    reference: Callable[P, R], *, usable: Callable[[Any], bool] = triton_usable
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """The decorated function launches the kernel of `reference`. `usable`: of the first argument."""

    def decorate(kernel: Callable[..., R]) -> Callable[P, R]:
        kernel.__defaults__ = reference.__defaults__  # type: ignore[attr-defined]
        kernel.__kwdefaults__ = reference.__kwdefaults__  # type: ignore[attr-defined]

        @functools.wraps(kernel)
        def choose(*args: P.args, **kwargs: P.kwargs) -> R:
            return (kernel if usable(args[0]) else reference)(*args, **kwargs)

        return choose

    return decorate


def registered(
    name: str, fake: Callable[..., Any], *, mutates: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers the decorated function as torch.ops.shoestring.`name`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        made = torch.library.custom_op(f"shoestring::{name}", function, mutates_args=mutates)
        made.register_fake(fake)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(args[0]) is not Tensor:
                return made(*args, **kwargs)  # type: ignore[no-any-return]  # a fake tensor, say
            return function(*args, **kwargs)

        return call

    return decorate
