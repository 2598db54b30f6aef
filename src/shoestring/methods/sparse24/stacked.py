"""Stacked: prune first, then store the kept values in another Format.

    Stacked(Sparse24(), IntAsym(bits=4, group=64))          spelled "sparse24+int4:g64"

The second Format sees the kept half of a weight [out, in] as a matrix [out, in/2]: a group of 64 covers 64 kept values,
128 weights. Parts are those of the second Format plus the metadata of the first; at 4 bits a weight takes 2 bits of
codes, 1 of metadata and half the scales of int4, 3.19 bits at group 64.

For methods that choose grids it is a GridFormat of weights [out, in] that are already 2:4: a group is the 128 inputs of
the 64 kept values, and zeros stay, since 0 is a level of every grid.

Gradients are those of the first Format (straight-through, and its choice of weight gradient).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats.base import Aux, Format, Parts
from shoestring.formats.dense import Dense
from shoestring.formats.groups import GridFormat
from shoestring.formats.int_asym import IntAsym
from shoestring.formats.rounding import to_dtype
from shoestring.methods.sparse24.chunks import codes_from_chunks, codes_layout, codes_to_chunks
from shoestring.methods.sparse24.format import OWN_NAMES, Sparse24
from shoestring.methods.sparse24.kernels.chunk_layout24 import ChunkLayout24
from shoestring.methods.sparse24.kernels.masks import is_24, unpack24
from shoestring.methods.sparse24.kernels.sparse24_linear import sparse24_linear


@dataclass(frozen=True)
class Stacked(Format):
    first: Sparse24
    second: Format

    name: ClassVar[str] = "stacked"
    nested: ClassVar[tuple[str, ...]] = ("first", "second")

    def __post_init__(self) -> None:
        if not isinstance(self.first, Sparse24) or isinstance(self.second, Sparse24 | Stacked | Dense):
            raise UserError(
                f"{self.first.label}+{self.second.label} is not possible: stack sparse24 and one of the "
                "int, nf or fp formats, in this order."
            )
        if self.second.trains_grid:
            raise UserError(
                f"{self.first.label}+{self.second.label} is not possible: the gradients here are those of "
                "sparse24, none reaches a learned grid. Use a derived or a fixed one."
            )

    @property
    def label(self) -> str:
        return f"{self.first.label}+{self.second.label}"

    @property
    def whole_parts(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.second.whole_parts

    # -- a grid to choose ------------------------------------------------------------------------------------
    @property
    def keeps_zeros(self) -> bool:
        return True

    def check_weight(self, w: Tensor) -> None:
        """Grids are chosen for the values that pruning has kept."""
        if self.first.select != "row":
            raise UserError(f"{self.label} has no grid to choose; use sparse24+{self.second.label}")
        if not w.is_meta and not is_24(w):
            raise UserError(
                f"{self.label} keeps two of every four weights, and this layer has more: prune the model first "
                "(shrink/prune24), and give the pruned one"
            )

    @property
    def _grid(self) -> GridFormat:
        assert isinstance(self.second, GridFormat)
        return self.second

    @property
    def group(self) -> int:
        return 2 * self._grid.group

    @property
    def symmetric(self) -> bool:
        return self._grid.symmetric

    def find_grid(self, low: Tensor, high: Tensor) -> Parts:
        return self._grid.find_grid(low, high)

    def snap(self, w_g: Tensor, grid: Parts, state: Parts) -> Tensor:
        return self._grid.snap(w_g, grid, state)

    def fix_grid(self) -> Stacked:
        return replace(self, second=self._grid.fix_grid())  # type: ignore[arg-type]

    def learn_grid(self) -> Stacked:
        return replace(self, second=self._grid.learn_grid())  # type: ignore[arg-type]

    # -- geometry --------------------------------------------------------------------------------------------
    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        (r1, c1), (r2, c2) = self.first.block(shape), self.second.block(kept_shape(shape))
        return (math.lcm(r1, r2), math.lcm(c1, 2 * c2))

    def check(self, shape: tuple[int, int]) -> None:
        self.first.check(shape)
        try:
            self.second.check(kept_shape(shape))
        except UserError as error:
            raise UserError(f"{self.label} keeps {shape[1] // 2} of {shape[1]} inputs. {error}") from None

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        return 1 + self.second.bits_per_weight(kept_shape(shape), dtype) / 2

    # -- meaning ---------------------------------------------------------------------------------------------
    def state(self, w: Tensor) -> dict[str, Aux]:
        state = self.first.state(w)
        values = self.first.encode(w.float(), {n: aux.tensor for n, aux in state.items()})["values"]
        return {**state, **self.second.state(values)}

    def mask(self, w: Tensor, state: Parts) -> Tensor:
        return self.first.mask(w, state)

    def encode(self, w: Tensor, state: Parts) -> Parts:
        # fp32 in between: the one rounding to w's dtype is that of decode.
        parts = self.first.encode(w.float(), state)
        return {"meta": parts["meta"], **self.second.encode(parts["values"], state)}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        values = self.second.decode({n: t for n, t in parts.items() if n != "meta"}, torch.float32)
        return unpack24(to_dtype(values, dtype), parts["meta"])

    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        meta = self.first.empty_parts(shape, dtype)["meta"]
        return {"meta": meta, **self.second.empty_parts(kept_shape(shape), dtype)}

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        parts = self.first.encode(w.float(), state)
        rounding = unpack24(self.second.error_bound(parts["values"], state).float(), parts["meta"])
        kept = unpack24(parts["values"], parts["meta"]).abs() + rounding
        return self.first.error_bound(w, state) + rounding + torch.finfo(w.dtype).eps * kept

    def cut(self, parts: Parts, shape: tuple[int, int], rows: slice, cols: slice) -> Parts:
        outer = {n: t for n, t in parts.items() if n in OWN_NAMES}
        inner = {n: t for n, t in parts.items() if n not in OWN_NAMES}
        start, stop, _ = cols.indices(shape[1])
        return {
            **self.first.cut(outer, shape, rows, cols),
            **self.second.cut(inner, kept_shape(shape), rows, slice(start // 2, stop // 2)),
        }

    def stored(self) -> Stacked:
        return Stacked(self.first.stored(), self.second.stored())

    def layout(self, width: int) -> ChunkLayout24 | None:
        """How the kernel sees a weight of `width` inputs; None: it has no kernel."""
        second = self.second
        if not isinstance(second, IntAsym) or second.bits != 4:
            return None
        return codes_layout(second.group, second.scale_dtype, width)

    def kernel_parts(self, parts: Parts) -> Parts:
        chunks = codes_to_chunks(parts, self.layout(parts["meta"].shape[1] * 8))
        return parts if chunks is None else {"chunks": chunks}

    def stored_parts(self, parts: Parts, shape: tuple[int, int]) -> Parts:
        layout, second = self.layout(shape[1]), self.second
        if "chunks" not in parts:
            return parts
        assert layout is not None and isinstance(second, IntAsym)
        return codes_from_chunks(parts["chunks"], layout, shape, second.group, second.scale_dtype)

    def linear(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        layout = self.layout(x.shape[-1])
        if "chunks" in parts and layout is not None:
            return sparse24_linear(x, parts["chunks"], bias, layout)
        return super().linear(x, parts, bias)

    def train_linear(self, x: Tensor, w: Tensor, state: Parts, bias: Tensor | None) -> Tensor:
        return self.first.train_with(self.fake(w, state), x, state, bias)


def kept_shape(shape: tuple[int, int]) -> tuple[int, int]:
    return (shape[0], shape[1] // 2)
