"""QuantizedFormat: the common part of IntAsym and FloatAsym: groups of codes with a grid each, and their kernels.

A grid is fp32 tensors [..., scales or 1] by name: the scale, and the zero point where there is one. A Format adds its
levels (`find_grid`, `find_codes`, `levels`) and the gradient of a learned grid; codes and levels are [..., group].
The subclasses declare the fields, because their order differs.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shoestring.formats import groups
from shoestring.formats.base import Aux, Format, Parts, straight_through
from shoestring.formats.groups import SCALE_DTYPES, extremes, group_width, split
from shoestring.formats.kernel_layout import apply_parts, from_chunks, to_chunks
from shoestring.formats.rounding import to_dtype
from shoestring.kernels.lowbit.chunk_layout import ChunkLayout, chunk_group
from shoestring.kernels.lowbit.lowbit_linear import decode_chunks
from shoestring.kernels.lowbit.packing import pack_bits, packed_width, unpack_bits


class QuantizedFormat(Format):
    bits: int
    group: int
    scale_dtype: str
    grid: str
    symmetric: Any  # bool; a property of FloatAsym
    scales: int = 1  # per group

    grid_names: ClassVar[tuple[str, ...]] = ("scale",)
    grid_dims: ClassVar[int] = 3  # of a grid tensor as it is kept and stored; 2: [out, groups], without the last dim

    def __post_init__(self) -> None:
        groups.check_settings(self.group, self.scale_dtype, self.grid)

    @property
    def suffix(self) -> str:
        """The end of the label: the group, and what is not the default."""
        scale_dtype = "" if self.scale_dtype == "float16" else f":{self.scale_dtype}"
        return f":g{self.group}{scale_dtype}" + ("" if self.grid == "derived" else f":{self.grid}")

    # -- geometry --------------------------------------------------------------------------------------------
    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (1, group_width(shape[1], self.group))

    def check(self, shape: tuple[int, int]) -> None:
        groups.check_width(shape, self.group)

    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        rows, width = shape
        sizes = (rows, width // group_width(width, self.group), self.scales)[: self.grid_dims]
        grid = {n: torch.empty(sizes, dtype=self._stored_dtype(n)) for n in self.grid_names}
        return {"codes": torch.empty(rows, packed_width(width, self.bits), dtype=torch.uint8), **grid}

    # -- levels ----------------------------------------------------------------------------------------------
    @abstractmethod
    def find_grid(self, low: Tensor, high: Tensor) -> Parts: ...

    @abstractmethod
    def find_codes(self, w_g: Tensor, grid: Parts, state: Parts) -> Tensor: ...

    @abstractmethod
    def levels(self, codes: Tensor, grid: Parts, tables: Parts) -> Tensor:
        """What the codes stand for, fp32; `tables`: the state or the stored parts."""

    @abstractmethod
    def learned(self, w: Tensor, level: Tensor, grid: Parts, state: Parts) -> Tensor:
        """The levels as a weight, with a gradient to w and to the grid's state."""

    # -- meaning ---------------------------------------------------------------------------------------------
    def state(self, w: Tensor) -> dict[str, Aux]:
        if self.grid == "derived":
            return {}
        grid, width = self.find_grid(*extremes(split(w, self.group))), group_width(w.shape[1], self.group)
        kinds = {n: "fixed" if n == "zero" and self.symmetric else self.grid for n in grid}
        return {n: groups.grid_state(self._narrow(t), self.scale_dtype, width, kinds[n]) for n, t in grid.items()}

    def kept_grid(self, state: Parts) -> Parts:
        """The grid out of the state, as it is used and stored."""
        grid = {n: self._widen(state[n].detach().float()) for n in self.grid_names}
        kept = {"scale": groups.storable_scale(grid["scale"], self.scale_dtype)}
        return kept if "zero" not in grid else {**kept, "zero": grid["zero"].round().clamp(0, 2**self.bits - 1)}

    def quantize(self, w: Tensor, state: Parts) -> tuple[Tensor, Parts]:
        """Codes [out, groups, group] and the grid."""
        w_g = split(w, self.group)
        grid = self.find_grid(*extremes(w_g)) if self.grid == "derived" else self.kept_grid(state)
        return self.find_codes(w_g, grid, state), grid

    def snap(self, w_g: Tensor, grid: Parts, state: Parts) -> Tensor:
        return self.levels(self.find_codes(w_g, grid, state), grid, state)

    def encode(self, w: Tensor, state: Parts) -> Parts:
        codes, grid = self.quantize(w, state)
        stored = {n: self._narrow(t).to(self._stored_dtype(n)) for n, t in grid.items()}
        return {"codes": pack_bits(codes.flatten(-2).to(torch.uint8), self.bits), **stored, **self._whole(state)}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        grid = {n: self._widen(parts[n].float()) for n in self.grid_names}
        codes = unpack_bits(parts["codes"], self.bits).unflatten(-1, (grid["scale"].shape[-2], -1))
        return to_dtype(self.levels(codes, grid, parts).flatten(-2), dtype)

    def fake(self, w: Tensor, state: Parts) -> Tensor:
        # decode(encode(w)) without packing the codes and unpacking them again.
        codes, grid = self.quantize(w.detach(), state)
        level = self.levels(codes, grid, state)
        if self.grid == "learned":
            return self.learned(w, level, grid, state)
        return straight_through(w, to_dtype(level.flatten(-2), w.dtype))

    def _narrow(self, t: Tensor) -> Tensor:
        return t.squeeze(-1) if self.grid_dims == 2 else t

    def _widen(self, t: Tensor) -> Tensor:
        return t.unsqueeze(-1) if self.grid_dims == 2 else t

    def _stored_dtype(self, name: str) -> torch.dtype:
        return torch.uint8 if name == "zero" else SCALE_DTYPES[self.scale_dtype]

    def _whole(self, parts: Parts) -> Parts:
        return {n: parts[n] for n in self.whole_parts}

    # -- the grid (GridFormat) -------------------------------------------------------------------------------
    def fix_grid(self) -> Self:
        return self._with_grid("fixed")

    def learn_grid(self) -> Self:
        return self._with_grid("learned")

    def stored(self) -> Format:
        return self._with_grid("derived")

    def _with_grid(self, grid: str) -> Self:
        settings: dict[str, Any] = {"grid": grid}
        return replace(self, **settings)

    row_wise = True

    @property
    def trains_grid(self) -> bool:
        return self.grid == "learned"

    # -- use -------------------------------------------------------------------------------------------------
    def layout(self, width: int) -> ChunkLayout:
        """How the kernels see a weight of `width` inputs."""
        group = chunk_group(group_width(width, self.group))
        return ChunkLayout(self.bits, group, "table" in self.whole_parts, self.scales, self.scale_dtype == "bfloat16")

    def kernel_parts(self, parts: Parts) -> Parts:
        chunks = to_chunks(parts, self.layout(parts["codes"].shape[1] * 8 // self.bits))
        return parts if chunks is None else {"chunks": chunks, **self._whole(parts)}

    def stored_parts(self, parts: Parts, shape: tuple[int, int]) -> Parts:
        if "chunks" not in parts:
            return parts
        stored = from_chunks(parts["chunks"], self.layout(shape[1]), shape, self.group, self.scale_dtype)
        return {**stored, **self._whole(parts)}

    def decode_operands(self, operands: Parts, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        if "chunks" not in operands:
            return self.decode(operands, dtype)
        return decode_chunks(operands["chunks"], operands.get("table"), self.layout(shape[1]), shape[1], dtype)

    def linear(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        y = apply_parts(x, parts, bias, self.layout(x.shape[-1]))
        return super().linear(x, parts, bias) if y is None else y
