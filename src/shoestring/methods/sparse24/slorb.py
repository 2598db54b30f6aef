"""Slorb: a pruned weight plus a low-rank branch over block sums of the inputs (SLoRB, from AST).

    W~ = prune(W) + S P        y = prune(W) x + S (P x)

P is [in/k, in] and sums blocks of k inputs: (P x)_j = x_jk + ... + x_jk+k-1. S is [out, in/k] and trained; it starts as
the mean of the pruned weights over each block, the least-squares fit of S P to them. With P frozen the branch costs a
sum over the inputs and 16/k bits per weight (k = 16: 6% of a dense weight's storage), and S P is S with every column
repeated k times.

    projection="sum"       P frozen, not stored
    projection="trained"   P is trained too and stored: in^2/k more values per layer, and a matrix product

Training multiplies with the sum W~ (one product for both terms; the gradient of S is the block sum of dW~), so the
branch is free there. Packed it is a part of its own, `low`, beside the parts of a 2:4 weight; kernels compute the
product and the branch separately. Merged into one dense matrix (`decode`, `unpack`, an export) the weight is no longer
2:4.

    Slorb(Sparse24(hold_mask=True))                                  spelled "sparse24:held+slorb16"
    Slorb(Stacked(Sparse24(), IntAsym(4)), block_inputs=32)          spelled "sparse24+int4:g64+slorb32"

Not supported: pruned output gradients (mvue), and a trained P over tensor-parallel ranks, each of which would have its
own gradient for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError, suggest
from shoestring.formats.base import Aux, Format, Parts
from shoestring.formats.rounding import to_dtype
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.stacked import Stacked

PROJECTIONS = ("sum", "trained")
OWN_NAMES = ("low", "proj")


@dataclass(frozen=True)
class Slorb(Format):
    """`first`: how the weight itself is pruned and stored. `block_inputs`: inputs per column of S."""

    first: Sparse24 | Stacked
    block_inputs: int = 16
    projection: str = "sum"

    name: ClassVar[str] = "slorb"
    nested: ClassVar[tuple[str, ...]] = ("first",)

    def __post_init__(self) -> None:
        if not isinstance(self.first, Sparse24 | Stacked):
            raise UserError(
                f"slorb is a branch beside a pruned weight; {self.first.label} prunes nothing: use "
                "sparse24+slorb16 or sparse24+int4:g64+slorb16."
            )
        if self.pruning.weight_grad != "exact":
            raise UserError(
                f"{self.label} is not possible: the weight gradient feeds the branch as well and has to be exact. "
                "Leave mvue out."
            )
        if self.pruning.precision != "full":
            raise UserError(
                f"{self.label} is not possible: weight and branch are multiplied as one, in full. Leave fp8 out."
            )
        if self.block_inputs < 2:
            raise UserError(f"slorb{self.block_inputs} is not possible: blocks have 2 or more inputs, say 16.")
        if self.projection not in PROJECTIONS:
            raise UserError(
                f"Slorb with projection={self.projection!r} is not possible: use {', '.join(PROJECTIONS)}."
                f"{suggest(self.projection, list(PROJECTIONS))}"
            )

    @property
    def label(self) -> str:
        trained = ":trained" if self.projection == "trained" else ""
        return f"{self.first.label}+slorb{self.block_inputs}{trained}"

    @property
    def pruning(self) -> Sparse24:
        return self.first.first if isinstance(self.first, Stacked) else self.first

    @property
    def whole_parts(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.first.whole_parts, *(["proj"] if self.projection == "trained" else []))

    # -- geometry --------------------------------------------------------------------------------------------
    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        if self.projection == "trained":
            return shape  # never cut
        rows, cols = self.first.block(shape)
        return (rows, math.lcm(cols, self.block_inputs))

    def check(self, shape: tuple[int, int]) -> None:
        self.first.check(shape)
        if shape[1] % self.block_inputs:
            fits = [k for k in range(2, shape[1] + 1) if shape[1] % k == 0]
            near = sorted(sorted(fits, key=lambda k: abs(k - self.block_inputs))[:3])
            raise UserError(
                f"{self.label} cannot cut an input width of {shape[1]} into blocks of {self.block_inputs}: use "
                f"slorb{', slorb'.join(map(str, near))}, or leave this layer out of the rule."
            )

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        rank, bits = shape[1] // self.block_inputs, 8.0 * dtype.itemsize
        stored = shape[0] * rank + (rank * shape[1] if self.projection == "trained" else 0)
        return self.first.bits_per_weight(shape, dtype) + bits * stored / (shape[0] * shape[1])

    # -- meaning ---------------------------------------------------------------------------------------------
    def state(self, w: Tensor) -> dict[str, Aux]:
        state = self.first.state(w)
        used = self.first.fake(w.detach(), {n: aux.tensor for n, aux in state.items()})
        low = block_means(w.float() - used.float(), self.block_inputs)
        state["low"] = Aux(low, "trained", (1, self.block_inputs))
        if self.projection == "trained":
            state["proj"] = Aux(block_sums_matrix(w.shape[1], self.block_inputs, w.device), "trained")
        return state

    def mask(self, w: Tensor, state: Parts) -> Tensor:
        return self.first.mask(w, state)

    def branch(self, parts: Parts) -> Tensor:
        """S P as fp32 [out, in]."""
        low = parts["low"].float()
        if self.projection == "trained":
            return low @ parts["proj"].float()
        return low.repeat_interleave(self.block_inputs, dim=1)

    def encode(self, w: Tensor, state: Parts) -> Parts:
        return {**self.first.encode(w, state), **self.stored_branch(state, w.dtype)}

    def stored_branch(self, state: Parts, dtype: torch.dtype) -> Parts:
        return {n: to_dtype(state[n].detach().float(), dtype) for n in OWN_NAMES if n in state}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return to_dtype(self.first.decode(_split(parts)[0], torch.float32) + self.branch(parts), dtype)

    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        rank = shape[1] // self.block_inputs
        parts = {**self.first.empty_parts(shape, dtype), "low": torch.empty(shape[0], rank, dtype=dtype)}
        if self.projection == "trained":
            parts["proj"] = torch.empty(rank, shape[1], dtype=dtype)
        return parts

    def fake(self, w: Tensor, state: Parts) -> Tensor:
        if isinstance(self.first, Sparse24):  # decode(encode(w)) without packing and unpacking
            branch = self.branch(self.stored_branch(state, w.dtype))
            used = to_dtype(self.first.prune(w.detach(), state).float() + branch, w.dtype)
        else:
            used = self.decode(self.encode(w.detach(), state), w.dtype)
        if self.projection == "trained":
            return _Trained.apply(w, state["low"], state["proj"], used)
        return _Summed.apply(w, state["low"], used)

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        """That of the first Format plus the branch, which also moves kept weights."""
        added = self.branch(self.encode(w, state)).abs()
        slack = torch.finfo(w.dtype).eps * (2 * w.float().abs() + added)
        return self.first.error_bound(w, state) + added + slack

    def cut(self, parts: Parts, shape: tuple[int, int], rows: slice, cols: slice) -> Parts:
        inner, own = _split(parts)
        return {**self.first.cut(inner, shape, rows, cols), **super().cut(own, shape, rows, cols)}

    @property
    def row_wise(self) -> bool:
        return self.projection == "sum" and self.first.row_wise

    def stored(self) -> Slorb:
        return replace(self, first=self.first.stored())

    # -- use ----------------------------------------------------------------------------------------------
    def kernel_parts(self, parts: Parts) -> Parts:
        inner, own = _split(parts)
        laid_out = self.first.kernel_parts(inner)
        return parts if laid_out is inner else {**laid_out, **own}

    def stored_parts(self, parts: Parts, shape: tuple[int, int]) -> Parts:
        inner, own = _split(parts)
        return {**self.first.stored_parts(inner, shape), **own}

    def linear(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        inner, own = _split(parts)
        if "chunks" not in inner:
            return super().linear(x, parts, bias)
        y = self.first.linear(x, inner, bias)
        return y + F.linear(self.project(x, own), own["low"].to(x.dtype))

    def project(self, x: Tensor, own: Parts) -> Tensor:
        """P x."""
        if self.projection == "trained":
            return F.linear(x, own["proj"].to(x.dtype))
        return x.unflatten(-1, (-1, self.block_inputs)).sum(-1)


def _split(parts: Parts) -> tuple[Parts, Parts]:
    """(the first Format's parts, those of the branch)."""
    inner, own = ({n: t for n, t in parts.items() if (n in OWN_NAMES) is wanted} for wanted in (False, True))
    return inner, own


def block_means(t: Tensor, block: int) -> Tensor:
    """Mean over each `block` of consecutive columns: the S for which S P is nearest to t."""
    return t.unflatten(-1, (-1, block)).mean(-1)


def block_sums_matrix(width: int, block: int, device: torch.device | None = None) -> Tensor:
    """P: row j is one on the inputs of block j."""
    return torch.eye(width // block, device=device).repeat_interleave(block, dim=1)


class _Summed(torch.autograd.Function):
    """W~ in the forward pass; dW~ goes to w as it is and, summed over blocks, to S."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, low: Tensor, used: Tensor) -> Tensor:
        ctx.low_shape, ctx.low_dtype = low.shape, low.dtype
        return used.view_as(used)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, low = grads[0], None
        if ctx.needs_input_grad[1]:
            low = grad.float().reshape(*ctx.low_shape, -1).sum(-1).to(ctx.low_dtype)
        return grad, low, None


class _Trained(torch.autograd.Function):
    """As _Summed with P trained: dS = dW~ P^T, dP = S^T dW~."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, low: Tensor, proj: Tensor, used: Tensor) -> Tensor:
        ctx.save_for_backward(low, proj)
        return used.view_as(used)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        low, proj = ctx.saved_tensors
        grad = grads[0]
        d_low = (grad.float() @ proj.float().t()).to(low.dtype) if ctx.needs_input_grad[1] else None
        d_proj = (low.float().t() @ grad.float()).to(proj.dtype) if ctx.needs_input_grad[2] else None
        return grad, d_low, d_proj, None
