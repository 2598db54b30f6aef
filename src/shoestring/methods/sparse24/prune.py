"""One-shot 2:4 pruning of a whole decoder: rules, a method, and the statistics of a text.

    steps = walk(model, windows(tokens, 16, 512))
    report = prune(model, [("*", parse_format("sparse24"))], steps, SparseGpt())
    pack(model)

    magnitude   keep the two largest |w| of four; needs no text
    wanda       keep the two largest |w_ij| * |x_j|, |x_j| the root of the mean square of input j
    sparsegpt   choose by |w| / U_jj, and compensate each removed weight in the columns behind it

One block after the other: the pruned weights replace the weights at once and the layers get their Format, so that the
next block sees the outputs of the pruned ones (rounded and with their branches, where the Format has those). The mask
of a weight is where it is not 0. A layer with a SLoRB Format also gets its branch, the S that best restores the
outputs,

    min_S |(W - prune(W) - S P) X|^2        S = D H P^T (P H P^T + damping)^-1,  D = W - prune(W)

(the block mean of D where there is no text). Layers outside the blocks (an output head named in a rule) are pruned by
magnitude: they have no statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import Dense, Format, FormatLinear, Parts, convert
from shoestring.formats.convert import LayerTarget, Rule, format_linears, store_states
from shoestring.host.block_offload import on_device
from shoestring.methods.sparse24.kernels.masks import GROUP, is_24, mask24
from shoestring.methods.sparse24.slorb import Slorb, block_means
from shoestring.methods.sparse24.training import count_24, pruning_of
from shoestring.model.blocks import BlocksModel
from shoestring.shrink.block_files import BlockFiles, BlockProgress, FinishedBlock, finish_blocks
from shoestring.shrink.calibrate import BlockStep, Statistics, block_linears
from shoestring.shrink.chosen_grid import LayerError, LayerErrors
from shoestring.shrink.gptq import BLOCK, check_damping, inverse_factor
from shoestring.shrink.graphed_sweep import one_thread, sweep
from shoestring.shrink.quantize import HEADS, QuantizeReport, plan_layers

DAMPING = 0.01  # of the mean of a Hessian's diagonal


class Pruner(Protocol):
    """Chooses which two of four weights stay, and their values."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    @property
    def needs_text(self) -> bool: ...

    def choose(self, w: Tensor, statistics: Statistics | None) -> Tensor:
        """The fp32 2:4 weight. Rows are independent: layers with the same inputs are concatenated."""
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
        check_damping(self.damping, "SparseGPT")

    def choose(self, w: Tensor, statistics: Statistics | None) -> Tensor:
        assert statistics is not None
        return sparsegpt(w, statistics.hessian, self.damping)


PRUNERS: dict[str, Pruner] = {"magnitude": Magnitude(), "wanda": Wanda(), "sparsegpt": SparseGpt()}


def wanda_score(w: Tensor, hessian: Tensor) -> Tensor:
    """|w_ij| * |x_j|, up to a common factor."""
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


# -- SparseGPT ------------------------------------------------------------------------------------------------
@torch.no_grad()
def sparsegpt(w: Tensor, hessian: Tensor, damping: float = 0.01) -> Tensor:
    """SparseGPT: prune one group of columns after the other, and compensate each loss in the columns behind it.

    w [out, in], hessian [in, in] the mean (or sum) of x x^T; returns an fp32 2:4 weight. For the output error of a row,
    w -> (q - w)^T H (q - w), taking column j out (q_j = 0) costs w_j^2 / (H^-1)_jj, and the best correction of the
    columns F behind it is that of GPTQ:

        w_F  <-  w_F - (w_j - q_j) / U_jj * U_jF,      U = the upper Cholesky factor of (H + damping)^-1

    At the first column of each group of four the two with the largest |w_j| / U_jj stay, judged by the weights as
    compensated so far; kept columns are corrected until they are reached. Equal scores keep the lower index.

    Weights of inputs that were always 0 on the calibration text are pruned first (damping alone does not ensure this).
    Where two of them have to stay they keep their values, which another text may use; the published code sets all to 0.
    The factor is computed in fp64, the sweep in fp32, in an order that depends on the shapes alone.
    """
    factor = inverse_factor(hessian, damping)
    # Unused inputs score below all others, and among themselves by weight.
    reach = torch.where(hessian.diagonal() > 0, 1.0, 1e-20).to(factor) / factor.diagonal()
    return sweep("sparsegpt", _sparsegpt_columns, w.float(), factor, reach)[0]


def _sparsegpt_columns(w: Tensor, factor: Tensor, reach: Tensor) -> tuple[Tensor]:
    rest = w.clone()  # compensated weights
    scale, width = factor.diagonal(), w.shape[1]
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        part = rest[:, start:stop]
        errors = torch.zeros_like(part)
        with one_thread():
            for j in range(0, stop - start, GROUP):
                at = start + j
                keep = mask24(part[:, j : j + GROUP] * reach[at : at + GROUP])
                for i in range(GROUP):
                    column = part[:, j + i]
                    # where, not a product, which would turn pruned negative weights into -0.0.
                    error = torch.where(keep[:, i], torch.zeros_like(column), column) / scale[at + i]
                    column.masked_fill_(~keep[:, i], 0.0)
                    errors[:, j + i] = error
                    ahead = factor[at + i, at + i + 1 : stop]
                    part[:, j + i + 1 :].addmm_(error[:, None], ahead[None], alpha=-1)
        rest[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return (rest,)


# -- whole models --------------------------------------------------------------------------------------------
@torch.no_grad()
def prune(
    model: BlocksModel,
    rules: Sequence[Rule],
    steps: Iterable[BlockStep] = (),
    method: Pruner | None = None,
    *,
    skip: Sequence[str] = HEADS,
    progress: BlockProgress | None = None,
    files: BlockFiles | None = None,
    onload_device: torch.device | None = None,
) -> QuantizeReport:
    """Prune in place; the layers end with their Format, ready for `pack` or for training.

    `steps`: walk(model, ...); magnitude needs none. The other arguments are those of `quantize`.
    """
    method = method or SparseGpt()
    targets = plan_pruning(model, rules, skip)
    branches: dict[str, Parts] = {}
    layers: list[LayerError] = []

    def choose(step: BlockStep, block: nn.Module, formats: dict[str, Format], prefix: str) -> FinishedBlock:
        return prune_layers(block_linears(block), step.statistics, formats, method, prefix)

    with closing(finish_blocks(model, targets, steps, choose, files, progress)) as blocks:
        for own, made in blocks:
            # Now, because the walk runs the block again: the next one sees what will be delivered.
            for t in own:
                t.host.set_format(t.format)
            store_states(model, made.grids)
            branches.update(offload_branches(model, made.grids))
            layers.extend(made.errors)
    left = [t for t in targets if t.name not in {e.name for e in layers}]
    if method.needs_text and any(t.owner is not t.module for t in left):
        raise UserError(f"{method.name} needs the statistics of a calibration text: give steps=walk(...)")
    for owner, group in groupby(left, lambda t: t.owner):
        wanted = list(group)
        with on_device(owner, onload_device, model.compute_dtype, keep=True):
            linears: dict[str, Any] = {t.name: t.module for t in wanted}
            made = prune_layers(linears, {}, {t.name: t.format for t in wanted}, Magnitude(), "")
            branches.update(offload_branches(model, made.grids))
            layers.extend(made.errors)
    # The layers have their Formats; the report names the dense ones they had before.
    converted = convert(model, rules, skip=skip)
    converted.changed[:] = [replace(c, before=Dense().label) for c in converted.changed]
    store_states(model, branches)
    counted = count_24(model, model.compute_dtype)
    assert counted["layers_24"] == counted["layers"] == len(targets), counted
    return QuantizeReport(method.name, converted, layers)


def offload_branches(model: BlocksModel, branches: dict[str, Parts]) -> dict[str, Parts]:
    """The branches on the model's own device, so that they do not fill the onload device."""
    return {name: {part: t.to(model.device) for part, t in parts.items()} for name, parts in branches.items()}


def plan_pruning(model: BlocksModel, rules: Sequence[Rule], skip: Sequence[str] = HEADS) -> list[LayerTarget[Format]]:
    """What will be pruned; raises UserError for every mistake in rules, shapes or weights."""
    found = [t for t in plan_layers(model, rules, skip, "prune")[0] if not isinstance(t.format, Dense)]
    for t in found:
        pruning = pruning_of(t.format)
        if pruning is None or pruning.select != "row":
            raise UserError(
                f"{t.name}: {t.format.label} is not what one-shot pruning makes; use sparse24, sparse24:held, "
                "sparse24+int4 or one of these with +slorb16"
            )
    return found


def prune_layers(
    linears: dict[str, FormatLinear],
    statistics: dict[str, Statistics],
    formats: dict[str, Format],
    method: Pruner,
    prefix: str,
) -> FinishedBlock:
    """Write the pruned weights into the (dense) layers; returns branches and errors by full name."""
    together: dict[int, list[str]] = {}
    for name in formats:
        together.setdefault(id(statistics[name]) if name in statistics else id(linears[name]), []).append(name)
    branches: dict[str, Parts] = {}
    errors = LayerErrors()
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
            errors.add(full_name, format, old, used, None if seen is None else seen.hessian)
            linears[name].weight.copy_(new)
    by_name = {error.name: error for error in errors.read()}
    return FinishedBlock(branches, [by_name[prefix + name] for name in formats])


def take_branches(model: BlocksModel) -> dict[str, Parts]:
    """The branches by layer; all layers become dense, with zeros in their weights."""
    found = {
        name: {"low": layer.format_state()["low"].detach()}
        for name, layer in format_linears(model)
        if isinstance(layer.format, Slorb)
    }
    for _, layer in format_linears(model):
        layer.set_format(Dense())
    return found
