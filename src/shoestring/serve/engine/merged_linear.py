"""Linear layers for serving: one or several layers side by side as one product.

Dense weights of equal input are stacked in one tensor and the layers' own weights become views of it, so nothing is
held twice; packed weights of one Format likewise, part by part (law 5 of formats/base.py: the parts of stacked rows are
the stacked parts). Layers that cannot be merged are applied one after the other. A weight that is trained in a Format
or held in another dtype is copied once, as the forward would multiply with it.

Shapes: T rows, D inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.formats import Dense, FloatAsym, Format, FormatLinear, IntAsym
from shoestring.formats.base import Parts
from shoestring.formats.linear import local
from shoestring.kernels.gemv.row_linear import row_linear
from shoestring.kernels.lowbit.chunk_layout import DENSE, ChunkLayout
from shoestring.kernels.lowbit.few_rows import MOST_ROWS as FEW_ROWS
from shoestring.kernels.lowbit.few_rows import few_rows_cuda
from shoestring.kernels.lowbit.int8_linear import int8_linear, int8_linear_usable
from shoestring.kernels.lowbit.lowbit_linear import dense_rows_usable, lowbit_row_linear


@dataclass(frozen=True)
class MergedLinear:
    """x -> x W^T + b for layers side by side: a dense weight, the parts of a Format, or the layers one by one."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    format: Format | None = None
    parts: Parts | None = None
    separate: tuple[FormatLinear, ...] = ()

    def __call__(self, x_TD: Tensor) -> Tensor:
        if self.has_row_kernel(x_TD.shape[0]):
            return self.row(x_TD)
        if self.weight is not None:
            return F.linear(x_TD, self.weight, self.bias)
        if self.format is not None:
            assert self.parts is not None
            if self._int8_rows and int8_linear_usable(x_TD):
                return int8_linear(x_TD, self.parts["codes"], *self._grid, self.bias)
            return self.format.linear(x_TD, self.parts, self.bias)
        return torch.cat([layer(x_TD) for layer in self.separate], dim=-1)

    def has_row_kernel(self, num_rows: int) -> bool:
        """Whether `row` computes so many rows: one of int8 with one scale a row, one or few of a dense weight, few of
        packed weights in their kernel's layout."""
        if self.weight is not None:
            return num_rows == 1 or dense_rows_usable(num_rows, self.weight)
        if self._int8_rows:
            return num_rows == 1
        return self._chunked and num_rows <= FEW_ROWS

    @property
    def fuses_swiglu(self) -> bool:
        return not self._int8_rows

    @property
    def _int8_rows(self) -> bool:
        format, parts = self.format, self.parts
        return isinstance(format, IntAsym) and format.bits == 8 and parts is not None and one_scale(parts)

    @property
    def _grid(self) -> tuple[Tensor, Tensor]:
        """Scale and zero of each row of int8."""
        assert self.parts is not None
        return self.parts["scale"].flatten(), self.parts["zero"].flatten()

    def chunked(self, width: int) -> tuple[Tensor, Tensor | None, ChunkLayout]:
        """Packed weights in their kernel's layout: chunks, table and layout."""
        assert self._chunked and self.parts is not None and isinstance(self.format, IntAsym | FloatAsym)
        return self.parts["chunks"], self.parts.get("table"), self.format.layout(width)

    def streamed(self, width: int) -> tuple[Tensor | None, ChunkLayout | None]:
        """What the one-kernel step reads: a dense weight, or chunks of integers with their layout; None: neither."""
        if self.weight is not None:
            return self.weight, None
        if not self._chunked or not isinstance(self.format, IntAsym):
            return None, None
        chunks, _, layout = self.chunked(width)
        return chunks, layout

    def rows_of_bytes_or_dense(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As a head of the one-kernel step: 8-bit codes with a scale and a zero for each row, or a dense weight; None:
        neither."""
        if self.bias is None and self._int8_rows and self.parts is not None:
            return self.parts["codes"], *self._grid
        return (self.weight if self.bias is None else None), None, None

    @property
    def _chunked(self) -> bool:
        # 2:4 weights have chunks too, of another kernel.
        low_bits = isinstance(self.format, IntAsym | FloatAsym)
        return low_bits and self.parts is not None and "chunks" in self.parts

    def row(self, x_TD: Tensor, **fused: Any) -> Tensor:
        """The product with the operations `fused` into it: kernels/gemv/row_linear.py, or its packed counterpart."""
        if self.weight is not None:
            if len(x_TD) > 1:
                return few_rows_cuda(x_TD, self.weight, None, self.bias, DENSE, **fused)
            return row_linear(x_TD, self.weight, self.bias, **fused)
        assert self.parts is not None
        if self._chunked:
            chunks, table, layout = self.chunked(x_TD.shape[1])
            return lowbit_row_linear(x_TD, chunks, table, self.bias, layout, **fused)
        scale, zero = self._grid
        return row_linear(x_TD, self.parts["codes"], self.bias, scale_N=scale, zero_N=zero, **fused)

    def overwrite(self, other: MergedLinear) -> None:
        """Take over the values of `other`, made of the same layers, without a change of address."""
        mine, new = self.parts or {}, other.parts or {}
        assert mine.keys() == new.keys() and len(self.separate) == len(other.separate)
        copy_over(self.weight, other.weight)
        copy_over(self.bias, other.bias)
        for name, t in mine.items():
            copy_over(t, new[name])


def copy_over(old: Tensor | None, new: Tensor | None) -> None:
    """The values of `new` in the memory of `old`; most are the same memory."""
    assert (old is None) == (new is None)
    if old is not None and new is not None and old.data_ptr() != new.data_ptr():
        old.copy_(new)


def one_scale(parts: Parts) -> bool:
    return "codes" in parts and parts["scale"].shape[1:].numel() == 1


def merge_linears(layers: Sequence[FormatLinear], dtype: torch.dtype) -> MergedLinear:
    """The layers, which share their input, as one."""
    bias = _stack_biases(layers, dtype)
    first = layers[0]
    if all(x.packed and x.decoded is None for x in layers):
        # Parts stack only where a block of rows ends with its layer.
        whole = all(x.shape[0] % x.format.block(x.shape)[0] == 0 for x in layers[:-1])
        alike = whole and all(x.format == first.format for x in layers) and (bias is not None or first.bias is None)
        parts = _stack_parts(layers) if alike else None
        if parts is None:
            return MergedLinear(separate=tuple(layers))
        return MergedLinear(bias=bias, format=first.format, parts=parts)
    if any(x.packed and x.decoded is None for x in layers):
        return MergedLinear(separate=tuple(layers))
    own = all(isinstance(x.format, Dense) and not x.packed and x.weight.dtype == dtype for x in layers)
    if own and len(layers) == 1:
        return MergedLinear(local(first.weight).detach(), bias)
    weights = [_effective_weight(x, dtype) for x in layers]
    weight = _adjacent(weights) if own else None
    if weight is not None:
        return MergedLinear(weight, bias)
    weight = torch.cat(weights)
    if own:
        for layer, rows in zip(layers, weight.split([x.out_features for x in layers]), strict=True):
            layer.weight.data = rows
    return MergedLinear(weight, bias)


def _effective_weight(layer: FormatLinear, dtype: torch.dtype) -> Tensor:
    """The weight that the layer's forward multiplies with."""
    if layer.decoded is not None:
        return layer.decoded.to(dtype)
    return layer.effective_weight(dtype).detach()


def _stack_biases(layers: Sequence[FormatLinear], dtype: torch.dtype) -> Tensor | None:
    biases = [local(x.bias).detach().to(dtype) for x in layers if x.bias is not None]
    assert len(biases) in (0, len(layers))
    return torch.cat(biases) if biases else None


def _stack_parts(layers: Sequence[FormatLinear]) -> Parts | None:
    """The parts of the stacked rows, of which the layers' own parts become views; None where they do not stack."""
    first = layers[0]
    if len(layers) == 1:
        return first.operands()
    held = [x.operands() for x in layers]
    if any(p.keys() != held[0].keys() for p in held):
        return None
    whole = first.format.whole_parts
    if any(not torch.equal(p[n], held[0][n]) for p in held[1:] for n in whole):
        return None
    parts: Parts = {n: held[0][n] for n in whole}
    for name in held[0]:
        if name in whole:
            continue
        stacked = _adjacent([p[name] for p in held])
        if stacked is not None:
            parts[name] = stacked
            continue
        parts[name] = torch.cat([p[name] for p in held])
        for layer, rows in zip(layers, parts[name].split([len(p[name]) for p in held]), strict=True):
            setattr(layer, f"weight_{name}", rows)
    return parts


def _adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors stacked along their rows, where they are consecutive in one storage already."""
    first = tensors[0]
    end = first.storage_offset()
    for t in tensors:
        same = t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not t.is_contiguous() or t.storage_offset() != end or t.dtype != first.dtype:
            return None
        end += t.numel()
    shape = (sum(t.shape[0] for t in tensors), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())
