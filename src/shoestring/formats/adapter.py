"""Adapters: a trained branch of low rank beside a frozen weight in any Format.

    LoRA    y = x W^T + bias + s (x A^T) B^T
    DoRA    y = m / |W + s B A| * (x W^T + s (x A^T) B^T) + bias       |.| of each row, a constant for gradients

A and B are fp32 Parameters of an `Adapter`, which a FormatLinear holds as `adapter`; the weight may be dense or packed,
and its bytes never change. B begins with zeros, so that a new adapter changes nothing.

    add_adapters(model, AdapterConfig(rank=16))     freezes the model and adds new branches
    attach_adapters(model, weights)                 adds branches that exist
    adapter_weights(model)                          what to save

DoRA's row norms need no decoded weight: |W + sBA|^2 = |W|^2 + 2s <W, BA> + s^2 |BA|^2, where |W|^2 is computed once,
<W, BA> is B times (A W^T), a product of r rows, and |BA|^2 is B (A A^T) B^T.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.base import PIECE
from shoestring.formats.convert import format_linear, format_linears, resolve
from shoestring.formats.dense import Dense
from shoestring.formats.frozen import Branch, frozen_product
from shoestring.formats.linear import FormatLinear, compute_dtype, full, local

TARGETS = ("*.attn.*", "*.mlp.*")
HEADS = ("head", "lm_head")  # get an adapter only where a target spells them out
_SPELLING = re.compile(r"(lora|dora)(?::r(\d+))?")


class LoraWeights(NamedTuple):
    """The branch of one layer, in fp32."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float
    magnitude: Tensor | None = None  # DoRA's, [out]


@dataclass(frozen=True)
class AdapterConfig:
    rank: int = 16
    alpha: float = 32.0
    dora: bool = False
    targets: tuple[str, ...] = TARGETS

    @classmethod
    def parse(cls, text: str, *, alpha: float = 32.0, targets: tuple[str, ...] = TARGETS) -> Self | None:
        """lora:r16 or dora:r8; None for `none`."""
        if text == "none":
            return None
        found = _SPELLING.fullmatch(text)
        if found is None or not 1 <= int(found[2] or 16) <= 1024:
            raise UserError(f"adapter={text} is not one; give lora:r16, dora:r16 (any rank up to 1024), or none")
        if not targets:
            raise UserError(f"target names no layer; give globs with commas, such as {','.join(TARGETS)}")
        if not alpha > 0:
            raise UserError(f"alpha={alpha:g} must be positive: the branch is scaled by alpha / rank")
        return cls(int(found[2] or 16), alpha, found[1] == "dora", targets)


@dataclass(frozen=True)
class Shares:
    """How the ranks of tensor parallelism share a branch: each has a part of A or of B, and all of the rest."""

    whole: tuple[str, ...]  # the Parameters that every rank has all of
    copy_to: Callable[[Tensor], Tensor]  # the tensor; its gradient is summed over the ranks
    add_up: Callable[[Tensor], Tensor] | None  # sums over ranks that have a part of every row


class Adapter(nn.Module):
    """The branch of one FormatLinear."""

    square: Tensor | None

    def __init__(self, weights: LoraWeights, square: Tensor | None = None) -> None:
        """`square`: |W|^2 of each row, which DoRA needs."""
        super().__init__()
        self.A = nn.Parameter(weights.a.float())
        self.B = nn.Parameter(weights.b.float())
        self.magnitude = None if weights.magnitude is None else nn.Parameter(weights.magnitude.float())
        self.register_buffer("scale", torch.tensor(weights.scale), persistent=False)
        self.register_buffer("square", square, persistent=False)
        self.scale: Tensor
        self.on = True
        self.shares: Shares | None = None

    def parameter(self, name: str) -> Tensor:
        value = local(getattr(self, name))
        return self.shares.copy_to(value) if self.shares is not None and name in self.shares.whole else value

    def forward(self, host: FormatLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self.on:
            return host.multiply(x, bias)
        dtype = compute_dtype(x)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        a, b = self.parameter("A"), self.parameter("B")
        branch = Branch(a.to(dtype), b.to(dtype), self.scale)
        format, operands = host.frozen_operands(dtype)
        if self.magnitude is None:
            return frozen_product(x, format, operands, bias, branch)
        y = frozen_product(x, format, operands, None, branch)
        y = y * (self.parameter("magnitude") / self.row_norms(host, a, b, dtype)).to(dtype)
        return y if bias is None else y + bias

    @torch.no_grad()
    def row_norms(self, host: FormatLinear, a_RI: Tensor, b_OR: Tensor, dtype: torch.dtype) -> Tensor:
        """|W + sBA| of each row, [out] fp32; `dtype` is that of the product."""
        assert self.square is not None
        aw_RO, aa_RR = host.multiply(a_RI.to(dtype)).float(), a_RI @ a_RI.t()
        if self.shares is not None and self.shares.add_up is not None:
            aw_RO, aa_RR = self.shares.add_up(aw_RO), self.shares.add_up(aa_RR)
        cross_O = (b_OR * aw_RO.t()).sum(1)
        branch_O = ((b_OR @ aa_RR) * b_OR).sum(1)
        total = self.square + 2 * self.scale * cross_O + self.scale**2 * branch_O
        return total.clamp(min=torch.finfo(torch.float32).tiny).sqrt()


@torch.no_grad()
def row_squares(host: FormatLinear) -> Tensor:
    """|W|^2 of each row, [out] fp32; decoded in pieces."""
    rows, width = host.shape
    step = max(1, PIECE // max(1, width))
    if not host.packed or not host.format.row_wise:
        whole = host.effective_weight(torch.float32 if host.packed else host.weight.dtype)
        return torch.cat([w.float().square().sum(1) for w in whole.split(step)])
    index = torch.arange(rows, device=host.device)
    return torch.cat([host.decode_rows(part, torch.float32).square().sum(1) for part in index.split(step)])


# -- on a model ----------------------------------------------------------------------------------------------
def adapter_targets(model: nn.Module, targets: tuple[str, ...]) -> dict[str, FormatLinear]:
    """The linear layers that the globs name; UserError for a glob that names none."""
    found, _ = resolve(model, [(glob, Dense()) for glob in targets], HEADS)
    for t in found:
        if not isinstance(t.module, FormatLinear):
            raise UserError(f"target: {t.name} is an embedding, and adapters are branches of linear layers")
    return {t.name: t.module for t in found if isinstance(t.module, FormatLinear)}


def add_adapters(model: nn.Module, cfg: AdapterConfig, *, seed: int = 0) -> list[str]:
    """Freeze the model and add new branches, in place; returns the names of the layers. A is uniform in
    +-1/sqrt(in), drawn from (seed, name); B is zero."""
    weights = {}
    for name, host in adapter_targets(model, cfg.targets).items():
        out, width = host.shape
        if cfg.rank > min(out, width):
            raise UserError(f"adapter: rank {cfg.rank} is more than {name} has, a weight of {out}x{width}; use less")
        key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
        a = torch.empty(cfg.rank, width).uniform_(-1, 1, generator=torch.Generator().manual_seed(key)) / width**0.5
        magnitude = row_squares(host).sqrt() if cfg.dora else None
        weights[name] = LoraWeights(a, torch.zeros(out, cfg.rank), cfg.alpha / cfg.rank, magnitude)
    attach_adapters(model, weights, trained=True)
    return list(weights)


def attach_adapters(model: nn.Module, weights: Mapping[str, LoraWeights], *, trained: bool = False) -> None:
    """Give the named linear layers these branches, in place of those they have. `trained`: they alone get gradients."""
    if "head" in weights and hasattr(model, "read_head"):
        raise UserError(
            "an adapter of the output head can only be merged: losses and samplers read the head's weight alone; leave "
            "head out of target, or use shoestring export MODEL OUT --adapter DIR"
        )
    model.requires_grad_(False)
    for name, given in weights.items():
        host = format_linear(model, name)
        adapter = Adapter(given, None if given.magnitude is None else row_squares(host))
        host.adapter = adapter.to(host.device).requires_grad_(trained)


def adapted_layers(model: nn.Module) -> dict[str, Adapter]:
    """{module name: its branch}"""
    return {name: m.adapter for name, m in format_linears(model) if isinstance(m.adapter, Adapter)}


def adapter_weights(model: nn.Module) -> dict[str, LoraWeights]:
    """The branches by module name, gathered, on the CPU: what a file holds. All ranks together."""

    def plain(t: Tensor | None) -> Tensor | None:
        return None if t is None else full(t).detach().to("cpu", torch.float32, copy=True)

    found = {}
    for name, held in adapted_layers(model).items():
        a, b = plain(held.A), plain(held.B)
        assert a is not None and b is not None
        found[name] = LoraWeights(a, b, float(held.scale), plain(held.magnitude))
    return found


def remove_adapters(model: nn.Module) -> None:
    for name in adapted_layers(model):
        format_linear(model, name).adapter = None


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as if it had no adapters."""
    layers = adapted_layers(model)
    before = {name: layer.on for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.on = False
        yield
    finally:
        for name, layer in layers.items():
            layer.on = before[name]
