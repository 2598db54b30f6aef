"""Sparse24: two of every four weights along the input dim are zero.

The fields decide what the three products of a linear layer see, whatever machine it runs on:

    forward           Z  = X W~^T          W~ = the pruned weight, always 2:4 along the contraction
    input gradient    dX = dZ W~           the same W~; its transpose is 2:4 too when select="tile"
    weight gradient   dW = dZ^T X          weight_grad="exact"
                      dW = MVUE(dZ^T) X    weight_grad="mvue": dZ^T pruned to 2:4 along the tokens, unbiased

    select="row"      W~ = M * W, M the two largest of four
    select="tile"     W~ = M * W, M transposable: two of four in every row and column of a 4x4 tile
    select="soft"     W~ = beta * S(W), S the soft threshold of S-STE, beta = <W, S(W)> / |S(W)|^2 fixed when
                      the state is made (re-estimating it while training makes the masks oscillate)

precision="fp8" rounds the operands of all three to FP8; the stored weight is still W~. dW is the gradient of the dense
weight (straight-through; for "soft" without the factor beta). With hold_mask=True M is state that a hook refreshes
(training.MaskRefresh); otherwise every forward computes it.

The products (sparse24_products.py) are dense over operands with zeros, or sparse with the same result, on a GPU and for
shapes where that was measured to be faster (`tune`). Stored parts: values and meta in the layout of
kernels/masks.py, 9/16 of the bytes at 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError, suggest
from shoestring.formats.base import Aux, Format, Parts, straight_through
from shoestring.formats.groups import rounding_slack
from shoestring.formats.rounding import to_dtype
from shoestring.kernels.lowbit.fp8_products import E4M3
from shoestring.methods.sparse24.chunks import VALUES, values_from_chunks, values_to_chunks
from shoestring.methods.sparse24.kernels import cusparselt, cusparselt_fp8, cusparselt_table
from shoestring.methods.sparse24.kernels.masks import GROUP, GROUPS_PER_BYTE, mask24, pack24, soft_threshold24, unpack24
from shoestring.methods.sparse24.kernels.mvue import CLOCKS, PHILOX_WORDS
from shoestring.methods.sparse24.kernels.sparse24_linear import sparse24_linear
from shoestring.methods.sparse24.kernels.transposable_mask import TILE, transposable_mask
from shoestring.methods.sparse24.products import ALL_DENSE, Fp8Products, ProductPlan, Products

if TYPE_CHECKING:
    from shoestring.formats.linear import FormatLinear

SELECT = ("row", "tile", "soft")
WEIGHT_GRAD = ("exact", "mvue")
PRECISION = ("full", "fp8")
# Every part and state of this Format.
OWN_NAMES = ("values", "meta", "mask", "beta", "row", *CLOCKS)
PRODUCTS = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class Sparse24(Format):
    """`select` row, tile or soft; `hold_mask`: the mask is state; `weight_grad` exact or mvue; `precision` full (the
    dtype of the activations) or fp8."""

    select: str = "row"
    hold_mask: bool = False
    weight_grad: str = "exact"
    precision: str = "full"

    name: ClassVar[str] = "sparse24"

    def __post_init__(self) -> None:
        fields = (("select", SELECT), ("weight_grad", WEIGHT_GRAD), ("precision", PRECISION))
        for field, allowed in fields:
            given = getattr(self, field)
            if given not in allowed:
                raise UserError(
                    f"Sparse24 with {field}={given!r} is not possible: use {', '.join(allowed)}."
                    f"{suggest(str(given), list(allowed))}"
                )
        if self.hold_mask and self.select == "soft":
            raise UserError(
                "Sparse24 with select='soft' has no mask to hold: the threshold moves with the weight. "
                "Use hold_mask=False."
            )

    @classmethod
    def parse(cls, text: str) -> Format:
        from shoestring.methods.sparse24.spelling import parse

        return parse(text)

    @property
    def label(self) -> str:
        options = [
            *([self.select] if self.select != "row" else []),
            *(["held"] if self.hold_mask else []),
            *(["mvue"] if self.weight_grad == "mvue" else []),
            *(["fp8"] if self.precision == "fp8" else []),
        ]
        return ":".join([self.name, *options])

    @property
    def sparse_products(self) -> tuple[str, ...]:
        """Which of the three products have a 2:4 operand along their contraction."""
        return (
            "forward",
            # FP8: the gradient of that product is E5M2, which the sparse ones do not take.
            *(["input_grad"] if self.select == "tile" and self.precision == "full" else []),
            *(["weight_grad"] if self.weight_grad == "mvue" else []),
        )

    # -- geometry --------------------------------------------------------------------------------------------
    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        # Four rows are a tile, or share one draw of random bits; two groups of four share a byte of metadata.
        needs_tiles = self.select == "tile" or self.weight_grad == "mvue"
        return (max(TILE, PHILOX_WORDS) if needs_tiles else 1, GROUP * GROUPS_PER_BYTE)

    def check(self, shape: tuple[int, int]) -> None:
        block = self.block(shape)
        for dim, what in ((1, "input"), (0, "output")):
            if shape[dim] % block[dim]:
                raise UserError(
                    f"{self.label} needs an {what} width that is a multiple of {block[dim]}, not {shape[dim]}: choose "
                    "another width, or leave this layer dense (layers= of a recipe, a Dense() rule before the others)."
                )

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        return 8.0 * dtype.itemsize / 2 + 1

    # -- meaning ---------------------------------------------------------------------------------------------
    def choose(self, w: Tensor) -> Tensor:
        """The bool mask for this weight, without regard to a held one."""
        return transposable_mask(w) if self.select == "tile" else mask24(w)

    def mask(self, w: Tensor, state: Parts) -> Tensor:
        """The mask that training uses now."""
        return state["mask"].bool() if self.hold_mask else self.choose(w)

    def state(self, w: Tensor) -> dict[str, Aux]:
        state: dict[str, Aux] = {}
        if self.hold_mask:
            state["mask"] = Aux(self.choose(w), "rows")
        if self.select == "soft":
            state["beta"] = Aux(fit_scale(w), "whole")
        if self.weight_grad == "mvue":
            rows = torch.arange(w.shape[0], device=w.device, dtype=torch.int32)
            state["row"] = Aux(rows[:, None], "rows", block=(1, w.shape[1]))
            for clock in CLOCKS:
                state[clock] = Aux(torch.zeros((), device=w.device, dtype=torch.int64), "clock")
        return state

    def prune(self, w: Tensor, state: Parts) -> Tensor:
        """W~ in w's dtype, without a gradient."""
        if self.select == "soft":
            return to_dtype(soft_threshold24(w) * state["beta"], w.dtype)
        # where, not a product, which would turn pruned negative weights into -0.0.
        return torch.where(self.mask(w, state), w, torch.zeros((), dtype=w.dtype, device=w.device))

    def encode(self, w: Tensor, state: Parts) -> Parts:
        # S(w) is zero wherever the hard mask is false, so one layout serves both.
        values, meta = pack24(self.prune(w, state), self.mask(w, state))
        return {"values": values, "meta": meta}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return unpack24(to_dtype(parts["values"].float(), dtype), parts["meta"])

    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        rows, width = shape
        return {
            "values": torch.empty(rows, width // 2, dtype=dtype),
            "meta": torch.empty(rows, width // (GROUP * GROUPS_PER_BYTE), dtype=torch.uint8),
        }

    def fake(self, w: Tensor, state: Parts) -> Tensor:
        return straight_through(w, self.prune(w.detach(), state))

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        """|w| where it is pruned; 0 where it is kept, or with "soft" the change by t and beta."""
        magnitude = w.float().abs()
        lost = torch.where(self.mask(w, state), 0.0, magnitude)
        if self.select == "soft":
            used = soft_threshold24(w).abs() * state["beta"]
            lost = (used - magnitude).abs() + 2 * rounding_slack(w, used)
        return lost

    def cut(self, parts: Parts, shape: tuple[int, int], rows: slice, cols: slice) -> Parts:
        uncut = {n: t for n, t in parts.items() if n in ("beta", *CLOCKS)}
        uncut |= {n: t[rows] for n, t in parts.items() if n == "row"}
        rest = {n: t for n, t in parts.items() if n not in uncut}
        return {**uncut, **super().cut(rest, shape, rows, cols)}

    def gated_ffn(self, x: Tensor, gate: FormatLinear, up: FormatLinear, down: FormatLinear, act: str) -> Tensor | None:
        from shoestring.methods.sparse24 import gated_ffn

        return gated_ffn.ffn(x, gate, up, down, act)

    @property
    def row_wise(self) -> bool:
        return (self.select, self.weight_grad, self.precision) == ("row", "exact", "full")

    def stored(self) -> Sparse24:
        return Sparse24()

    # -- use -------------------------------------------------------------------------------------------------
    def kernel_parts(self, parts: Parts) -> Parts:
        chunks = values_to_chunks(parts)
        return parts if chunks is None else {"chunks": chunks}

    def stored_parts(self, parts: Parts, shape: tuple[int, int]) -> Parts:
        return values_from_chunks(parts["chunks"], shape) if "chunks" in parts else parts

    def linear(self, x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
        if "chunks" in parts:
            return sparse24_linear(x, parts["chunks"], bias, VALUES)
        return super().linear(x, parts, bias)

    def train_linear(self, x: Tensor, w: Tensor, state: Parts, bias: Tensor | None) -> Tensor:
        return self.train_with(self.fake(w, state), x, state, bias)

    def train_with(self, used: Tensor, x: Tensor, state: Parts, bias: Tensor | None) -> Tensor:
        """The three products with `used` (its gradient is dW), as the fields say."""
        plan = ALL_DENSE
        if cusparselt.usable(used):
            plan = self.product_plan(x.numel() // x.shape[-1], (used.shape[0], used.shape[1]), used.dtype)
        fp8 = self.precision == "fp8"
        exact = self.weight_grad == "exact" or not torch.is_grad_enabled()
        if exact and not fp8 and not plan.any_sparse():
            return F.linear(x, used, bias)
        rows, clocks = None, None
        if self.weight_grad == "mvue":
            # A copy: the clocks may advance before the backward of this forward.
            rows, clocks = state["row"].flatten(), torch.stack([state[name] for name in CLOCKS])
        products = Fp8Products if fp8 else Products
        return products.apply(x, used, bias, rows, clocks, plan)

    def product_plan(self, num_tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> ProductPlan:
        """Which products of a weight of `shape` run on the sparse tensor cores, by the table of this GPU."""
        shapes, dtype = self.product_shapes(num_tokens, shape), self.operand_dtype(dtype)
        chosen = cusparselt_table.chosen_algorithms
        return ProductPlan(*(chosen(*shapes[p], dtype) if p in shapes else None for p in PRODUCTS))

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the products' operands for activations of `dtype`."""
        return E4M3 if self.precision == "fp8" else dtype

    def product_shapes(self, num_tokens: int, shape: tuple[int, int]) -> dict[str, tuple[int, int, int]]:
        """(m, k, n) of every product with a 2:4 operand [m, k]."""
        out, width = shape
        shapes = {
            "forward": (out, width, num_tokens),
            "input_grad": (width, out, num_tokens),
            "weight_grad": (out, num_tokens, width),
        }
        supports = cusparselt_fp8.supports_fp8 if self.precision == "fp8" else cusparselt.supports
        return {p: shapes[p] for p in self.sparse_products if supports(*shapes[p])}

    def tune(self, num_tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> list[cusparselt_table.Measured]:
        """Measure, once for each GPU, which of the products gain from the sparse tensor cores."""
        dtype = self.operand_dtype(dtype)
        found = [cusparselt_table.tune(*s, dtype) for s in self.product_shapes(num_tokens, shape).values()]
        return [m for m in found if m is not None]


def fit_scale(w: Tensor) -> Tensor:
    """beta = <W, S(W)> / |S(W)|^2 (S-STE, eq. 8), fp32 [1]; 1 where nothing survives."""
    s = soft_threshold24(w)
    square = s.square().sum(dtype=torch.float64)
    beta = (w.float() * s).sum(dtype=torch.float64) / square.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(square > 0, beta, 1.0).float()[None]
