"""One-shot 2:4 pruning of a whole decoder: rules, a method, and the statistics of a text.

    steps = walk(model, windows(tokens, 16, 512))
    report = prune(model, [("*", parse_format("sparse24"))], steps, SparseGpt())
    pack(model)

    magnitude   keep the two largest |w| of four; needs no text
    wanda       keep the two largest |w_ij| * |x_j|, |x_j| the root of the mean square of input j
    sparsegpt   choose by |w| / U_jj and let the columns behind make up for what went (sparsegpt.py)

Block after block: the pruned weights replace the weights at once and the layers get their Format, so that the walk
shows the next block what the pruned ones before it put out (rounded and with their branches, where the Format has
those). Masks are those of the weights: what is 0 is pruned. A layer with a SLoRB Format also gets its branch, the S
that makes up best for the outputs' change,

    min_S |(W - prune(W) - S P) X|^2        S = D H P^T (P H P^T + damping)^-1,  D = W - prune(W)

(the plain block mean of D where there is no text).

Layers outside the blocks (an output head named in a rule) are pruned by magnitude: nothing is collected there.

Left out on purpose: unstructured pruning, and training (recipes/shrink/prune24.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import Dense, Format, FormatLinear, Parts, Slorb, convert
from shoestring.formats.convert import Rule
from shoestring.formats.linear import like_weight, local
from shoestring.formats.slorb import block_means
from shoestring.kernels.sparse24 import is_24, mask24
from shoestring.model.transformer import Decoder
from shoestring.shrink.calibrate import BlockStep, Statistics, block_linears
from shoestring.shrink.grid import output_error
from shoestring.shrink.quantize import (
    HEADS,
    LayerError,
    Progress,
    QuantizeReport,
    by_owner,
    ended,
    plan_layers,
)
from shoestring.shrink.resume import BlockFiles
from shoestring.shrink.sparsegpt import sparsegpt
from shoestring.shrink.visit import visiting
from shoestring.train.sparse24 import count_24, pruning_of

DAMPING = 0.01  # of the mean of a Hessian's diagonal


class Pruner(Protocol):
    """Which two of four weights stay, and what becomes of them."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    @property
    def needs_text(self) -> bool: ...

    def choose(self, w: Tensor, statistics: Statistics | None) -> Tensor:
        """fp32 2:4 weight. Rows do not depend on each other: layers with the same inputs come as one."""
        ...


@dataclass(frozen=True)
class Magnitude:
    name = "magnitude"
    needs_text = False

    def choose(self, w: Tensor, statistics: Statistics | None) -> Tensor:
        return keep(w, mask24(w))


@dataclass(frozen=True)
class Wanda:
    name = "wanda"
    needs_text = True

    def choose(self, w: Tensor, statistics: Statistics | None) -> Tensor:
        assert statistics is not None
        return keep(w, mask24(wanda_score(w, statistics.hessian)))


@dataclass(frozen=True)
class SparseGpt:
    damping: float = DAMPING

    name = "sparsegpt"
    needs_text = True

    def __post_init__(self) -> None:
        if self.damping <= 0:
            raise UserError(f"damping={self.damping} is not possible for SparseGPT: use a positive number")

    def choose(self, w: Tensor, statistics: Statistics | None) -> Tensor:
        assert statistics is not None
        return sparsegpt(w, statistics.hessian, self.damping)


PRUNERS: dict[str, Pruner] = {"magnitude": Magnitude(), "wanda": Wanda(), "sparsegpt": SparseGpt()}


def wanda_score(w: Tensor, hessian: Tensor) -> Tensor:
    """|w_ij| * |x_j|; the number of tokens is a common factor and is left out."""
    return w.float().abs() * hessian.diagonal().clamp(min=0).sqrt().float()


def keep(w: Tensor, mask: Tensor) -> Tensor:
    """w where the mask holds, 0.0 elsewhere; a kept -0.0 is 0.0 too."""
    return torch.where(mask, w.float(), 0.0) + 0.0


def fit_branch(lost: Tensor, hessian: Tensor | None, block: int, damping: float = DAMPING) -> Tensor:
    """S [out, in / block], fp32: the branch whose outputs are nearest to those of `lost` on the calibration text."""
    if hessian is None or hessian.diagonal().mean() <= 0:
        return block_means(lost.float(), block)
    h_PT = hessian.double().unflatten(1, (-1, block)).sum(-1)  # H P^T
    gram = h_PT.unflatten(0, (-1, block)).sum(1)
    gram.diagonal().add_(damping * gram.diagonal().mean())
    return torch.linalg.solve(gram, (lost.double() @ h_PT).t()).t().float().contiguous()


# -- whole models --------------------------------------------------------------------------------------------
@torch.no_grad()
def prune(
    model: Decoder,
    rules: Sequence[Rule],
    steps: Iterable[BlockStep] = (),
    method: Pruner | None = None,
    *,
    skip: Sequence[str] = HEADS,
    progress: Progress | None = None,
    files: BlockFiles | None = None,
    visit: torch.device | None = None,
) -> QuantizeReport:
    """Prune in place; the layers end with their Format, ready for `pack` or for training.

    `steps`: walk(model, ...); magnitude needs none. progress(blocks done, blocks, mean output error of the block).
    `files`: where finished blocks are kept; those that are there already are taken, and steps = walk(...,
    start=files.count()). `visit`: as the walk's Calibration has it; the model stays at home.
    """
    method = method or SparseGpt()
    formats = plan_pruning(model, rules, skip)
    before = {n: m.format.label for n, m in model.named_modules() if isinstance(m, FormatLinear)}
    branches: dict[str, Parts] = {}
    layers: list[LayerError] = []
    num_finished = files.count() if files is not None else 0
    with ended(steps):
        for step in steps:
            block, prefix = model.blocks[step.index], f"blocks.{step.index}."
            wanted = {n.removeprefix(prefix): f for n, f in formats.items() if n.startswith(prefix)}
            if files is not None and step.index < num_finished:
                made, errors = files.load(step.index, block)
            else:
                made, errors = prune_layers(block_linears(block), step.statistics, wanted, method, prefix)
                if files is not None:
                    files.save(step.index, block, made, errors)
            # At once: the walk runs the block again, and the next one should see what will be delivered.
            for name, format in wanted.items():
                block_linears(block)[name].set_format(format)
            hold_branches(model, made)
            branches.update(at_home(model, made))
            layers.extend(errors)
            if progress is not None:
                known = [e.output_error for e in errors if e.output_error is not None]
                progress(step.index + 1, len(model.blocks), sum(known) / max(1, len(known)))
    left = {n: f for n, f in formats.items() if n not in {e.name for e in layers}}
    if method.needs_text and any(n.startswith("blocks.") for n in left):
        raise UserError(f"{method.name} needs the statistics of a calibration text: give steps=walk(...)")
    for owner, wanted in by_owner(left).items():
        with visiting(model.get_submodule(owner), visit, model.compute_dtype, keep=True):
            linears = {n: m for n in wanted if isinstance(m := model.get_submodule(n), FormatLinear)}
            made, errors = prune_layers(linears, {}, wanted, Magnitude(), "")
            branches.update(at_home(model, made))
            layers.extend(errors)
    # All have their Formats already: the report tells what they had before.
    converted = convert(model, rules, skip=skip)
    converted.changed[:] = [replace(c, before=before.get(c.name, c.before)) for c in converted.changed]
    hold_branches(model, branches)
    counted = count_24(model, model.compute_dtype)
    assert counted["layers_24"] == counted["layers"] == len(formats), counted
    return QuantizeReport(method.name, converted, layers)


def at_home(model: Decoder, branches: dict[str, Parts]) -> dict[str, Parts]:
    """Where the model lies: a device that its blocks only visit does not keep their branches."""
    home = model.embed.weight.device
    return {name: {part: t.to(home) for part, t in parts.items()} for name, parts in branches.items()}


def plan_pruning(model: Decoder, rules: Sequence[Rule], skip: Sequence[str] = HEADS) -> dict[str, Format]:
    """{layer: Format} of what will be pruned; every mistake in rules, shapes or weights is raised here."""
    found = plan_layers(model, rules, skip, "prune")
    for name, format in found.items():
        pruning = pruning_of(format)
        if pruning is None or pruning.select != "row":
            raise UserError(
                f"{name}: {format.label} is not what one-shot pruning makes; use sparse24, sparse24:held, "
                "sparse24+int4 or one of these with +slorb16"
            )
    return found


def prune_layers(
    linears: dict[str, FormatLinear],
    statistics: dict[str, Statistics],
    formats: dict[str, Format],
    method: Pruner,
    prefix: str,
) -> tuple[dict[str, Parts], list[LayerError]]:
    """Write the pruned weights into the (dense) layers; returns branches and errors by full name."""
    together: dict[int, list[str]] = {}
    for name in formats:
        together.setdefault(id(statistics[name]) if name in statistics else id(linears[name]), []).append(
            name
        )
    branches: dict[str, Parts] = {}
    errors: dict[str, LayerError] = {}
    for names in together.values():
        seen = statistics.get(names[0])
        whole = torch.cat([linears[n].weight.float() for n in names])
        pruned = method.choose(whole, seen)
        assert is_24(pruned), names
        heights = [linears[n].out_features for n in names]
        for name, old, new in zip(names, whole.split(heights), pruned.split(heights), strict=True):
            full_name, format, used = prefix + name, formats[name], new
            if isinstance(format, Slorb):
                low = fit_branch(old - new, None if seen is None else seen.hessian, format.block_inputs)
                branches[full_name] = {"low": low}
                used = new + low.repeat_interleave(format.block_inputs, dim=1)
            errors[name] = _layer_error(full_name, format, old, used, seen)
            linears[name].weight.copy_(new)
    return branches, [errors[n] for n in formats]


@torch.no_grad()
def hold_branches(model: Decoder, branches: dict[str, Parts]) -> None:
    """Put fitted branches into layers that have their Format already; a sharded model takes its share."""
    for name, parts in branches.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, FormatLinear)
        for part, value in parts.items():
            held = getattr(layer, f"weight_{part}")
            local(held).copy_(local(like_weight(value.to(local(held).device), layer.weight)))


def take_branches(model: Decoder) -> dict[str, Parts]:
    """The branches by layer; the layers become dense ones whose weights hold zeros."""
    found = {
        name: {"low": layer.weight_low.detach()}  # type: ignore[operator]
        for name, layer in model.named_modules()
        if isinstance(layer, FormatLinear) and isinstance(layer.format, Slorb)
    }
    for layer in model.modules():
        if isinstance(layer, FormatLinear):
            layer.set_format(Dense())
    return found


def _layer_error(name: str, format: Format, old: Tensor, new: Tensor, seen: Statistics | None) -> LayerError:
    scale = float(old.square().sum())
    return LayerError(
        name,
        format.label,
        round(format.bits_per_weight((old.shape[0], old.shape[1])), 4),
        float((new - old).square().sum()) / scale if scale > 0 else 0.0,
        None if seen is None else output_error(old, new, seen.hessian),
    )
