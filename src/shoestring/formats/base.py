"""Format: what a weight is.

A Format is a frozen dataclass that is its own config, with pure functions over plain tensors. It defines how a weight
[out, in] is stored (`encode`), what the stored parts mean (`decode`), what training multiplies with (`fake`) and how a
packed weight is applied (`linear`). It sees local, plain tensors only: no modules, process groups or files.
`FormatLinear` hosts every Format.

The laws of every Format are tested in tests/formats/test_laws.py:
 1. decode(encode(w)) stays within `error_bound(w, state)`.
 2. `linear` agrees with F.linear on the decoded weight.
 3. encode, decode and fake take the weight in the compute dtype, compute in fp32 and round once;
    fake(w) equals decode(encode(w)) bit for bit, eager and compiled.
 4. dict and safetensors round trips lose nothing.
 5. encode(shard) equals the shard of encode(w) for every cut on `block` boundaries.
 6. pack encodes weight.to(compute_dtype): the decoded parts equal what the last training forward multiplied with.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError

if TYPE_CHECKING:
    from shoestring.formats.linear import FormatLinear

PIECE = 1 << 20  # weights that are encoded or decoded at a time, where rows are independent

Parts = dict[str, Tensor]
AuxKind = Literal["rows", "trained", "whole", "clock"]


@dataclass(frozen=True)
class Aux:
    """One tensor that a Format keeps beside the weight while training.

    rows: cut like the weight, `block` elements of the weight per element along each dim; a frozen Parameter.
    trained: a Parameter that may get gradients. whole: a replicated buffer. clock: a 0-dim buffer.
    """

    tensor: Tensor
    kind: AuxKind
    block: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Format(ABC):
    """The protocol and its defaults."""

    name: ClassVar[str]
    # Fields that are Formats themselves.
    nested: ClassVar[tuple[str, ...]] = ()
    # Parts that are replicated. Every other part is [rows, cols, ...] with dims 0 and 1 in proportion to the weight's.
    whole_parts: ClassVar[tuple[str, ...]] = ()

    @property
    def label(self) -> str:
        """The short spelling, as `parse_format` reads it."""
        return self.name

    @classmethod
    def parse(cls, text: str) -> Format:
        """The Format that `text` spells; `text` begins with the name of this class's entry point. A Format with options
        of its own reads them here."""
        if text.lower() != cls.name:
            raise UserError(f"Format {text!r}: {cls.name} has no options; write {cls.name}.")
        return cls()

    # -- geometry --------------------------------------------------------------------------------------------
    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(rows, cols): a weight of `shape` may be cut only at multiples of these."""
        return (1, 1)

    def check(self, shape: tuple[int, int]) -> None:
        """Raise UserError for an [out, in] shape that this Format cannot hold, saying what would fit."""
        return

    @abstractmethod
    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        """Stored bits per weight including scales, zeros and tables; `dtype` is that of weights stored unquantized."""

    # -- meaning ---------------------------------------------------------------------------------------------
    def state(self, w: Tensor) -> dict[str, Aux]:
        """What to keep beside the weight while training; `w` is the logical weight, never a shard."""
        return {}

    @abstractmethod
    def encode(self, w: Tensor, state: Parts) -> Parts: ...

    @abstractmethod
    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        """Uninitialised parts of the right names, shapes and dtypes, for loading a packed weight into."""

    def fake(self, w: Tensor, state: Parts) -> Tensor:
        """decode(encode(w)) with an identity gradient."""
        return straight_through(w, self.decode(self.encode(w.detach(), state), w.dtype))

    @abstractmethod
    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        """Elementwise bound on |decode(encode(w)) - w|."""

    def cut(self, parts: Parts, shape: tuple[int, int], rows: slice, cols: slice) -> Parts:
        """The parts of w[rows, cols], out of the parts of a w of `shape`; cuts must be at `block` boundaries."""
        return {
            n: t
            if n in self.whole_parts
            else t[scale_slice(rows, shape[0], t.shape[0]), scale_slice(cols, shape[1], t.shape[1])]
            for n, t in parts.items()
        }

    def stored(self) -> Format:
        """The Format of the packed parts: this one without its training settings."""
        return self

    @property
    def trains_grid(self) -> bool:
        """Whether scales or zero points are trained Parameters."""
        return False

    @property
    def keeps_zeros(self) -> bool:
        """Whether a method that chooses grids leaves the zeros of a weight zero: they were pruned."""
        return False

    def check_weight(self, w: Tensor) -> None:
        """Raise UserError for a weight that no grid can be chosen for; it may be on the meta device."""
        return

    @property
    def row_wise(self) -> bool:
        """Whether a row of fake(w) depends on that row of w and of the state alone (and on whole parts), so that layers
        of one width can be encoded as one taller layer."""
        return False

    # -- use -------------------------------------------------------------------------------------------------
    def kernel_parts(self, parts: Parts) -> Parts:
        """The parts in the order that a kernel on their device reads; `parts` itself where there is none. `linear`
        takes either."""
        return parts

    def stored_parts(self, parts: Parts, shape: tuple[int, int]) -> Parts:
        """The inverse of kernel_parts, bit for bit, for a (local) weight of `shape`."""
        return parts

    def decode_operands(self, operands: Parts, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """decode, of stored parts or kernel parts of a (local) weight of `shape`."""
        return self.decode(self.stored_parts(operands, shape), dtype)

    def train_linear(self, x: Tensor, w: Tensor, state: Parts, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.fake_in_pieces(w, state), bias)

    def fake_in_pieces(self, w: Tensor, state: Parts) -> Tensor:
        """`fake`, which takes several times the memory of its weight: of one that is not trained now in pieces."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or w.device.type != "cpu":
            return self.fake(w, state)
        pieces, at = self.pieces(w, state), 0
        if len(pieces) == 1:
            return self.fake(w, state)
        made = torch.empty_like(w)
        for rows, own in pieces:
            made[at : at + len(rows)] = self.fake(rows, own)
            at += len(rows)
        return made

    def pieces(self, w: Tensor, state: Parts) -> list[tuple[Tensor, Parts]]:
        """Rows of the weight and of the state that belong together, where every row is by itself."""
        step = rows_at_a_time(w.shape[1])
        if not self.row_wise or len(w) <= step:
            return [(w, state)]
        cuts = [slice(start, start + step) for start in range(0, len(w), step)]
        return [(w[cut], {n: t if n in self.whole_parts else t[cut] for n, t in state.items()}) for cut in cuts]

    def linear(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.decode(parts, x.dtype), bias)

    def gated_ffn(self, x: Tensor, gate: FormatLinear, up: FormatLinear, down: FormatLinear, act: str) -> Tensor | None:
        """down(act(gate(x)) * up(x)) as one function, where this Format of `gate` has one that applies; `act` is a name
        of kernels/activation/glu.py. None: layer by layer."""
        return None

    # -- config ----------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"name": self.name, **{n: v.to_json() if isinstance(v, Format) else v for n, v in settings.items()}}


def scale_slice(s: slice, size: int, part_size: int) -> slice:
    """The slice of a part's dim that belongs to slice `s` of a weight's dim of `size`."""
    start, stop, _ = s.indices(size)
    assert start * part_size % size == 0 and stop * part_size % size == 0, f"{s} cuts a part of {part_size} for {size}"
    return slice(start * part_size // size, stop * part_size // size)


class _StraightThrough(torch.autograd.Function):
    # `w + (q - w).detach()` does not return q bit for bit; an autograd.Function does.
    @staticmethod
    def forward(ctx: Any, w: Tensor, q: Tensor) -> Tensor:
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(w: Tensor, q: Tensor) -> Tensor:
    """q in the forward pass, identity to w in the backward pass."""
    return _StraightThrough.apply(w, q)


def rows_at_a_time(width: int) -> int:
    return max(1, PIECE // max(1, width))
