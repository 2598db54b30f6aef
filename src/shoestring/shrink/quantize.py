"""Post-training quantization of a whole decoder: rules, a method, and the statistics of a text.

    report = quantize(model, [("*", parse_format("nf3"))], walk(model, windows(tokens, 16, 512)), Gptq())
    pack(model)

One block after the other: the method chooses grids and weights for the layers that a rule gives a Format with a grid.
They replace the weights at once, so that the walk can pass their error on. At the end every layer gets its Format with
the chosen grid as state; what `pack` then stores decodes to exactly what the method chose. Layers outside the blocks
(an output head or embedding named in a rule) are rounded to nearest: they have no statistics.

With `onload_device`, for a walk with one block on a device at a time (host/block_offload.py), a finished block is
packed before it is offloaded: its grids do not stay on the device, and the model in host memory shrinks on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoestring.errors import UserError, during
from shoestring.formats import ConvertReport, Dense, Format, GridFormat, Parts
from shoestring.formats.convert import Changed, LayerTarget, Left, Rule, check_fits, num_bytes, resolve
from shoestring.formats.linear import all_finite
from shoestring.host.block_offload import on_device
from shoestring.model.blocks import BlocksModel, InputSource, block_prefixes
from shoestring.shrink.awq import Awq
from shoestring.shrink.block_files import BlockFiles, BlockProgress, FinishedBlock, Step, finish_blocks
from shoestring.shrink.calibrate import BlockStep, Inputs, Statistics, block_linears
from shoestring.shrink.chosen_grid import ChosenGrid, LayerError, LayerErrors, round_to_nearest, state_of
from shoestring.shrink.clip import Clip
from shoestring.shrink.gptq import Gptq

HEADS = ("head", "lm_head")  # converted only by a rule that spells the name, as in `convert`


class Method(Protocol):
    """How the weight of one layer is moved onto a grid."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    def choose(self, name: str, w: Tensor, statistics: Statistics, format: GridFormat, state: Parts) -> ChosenGrid: ...


@dataclass(frozen=True)
class Rtn:
    """Round to nearest on the grid that spans each group."""

    name = "rtn"

    def choose(self, name: str, w: Tensor, statistics: Statistics, format: GridFormat, state: Parts) -> ChosenGrid:
        return round_to_nearest(w, format, state)


METHODS: dict[str, Method] = {
    "rtn": Rtn(),
    "clip": Clip(),
    "gptq": Gptq(),
    "gptq+clip": Gptq(clip=Clip()),
    "gptq+cd": Gptq(sweeps=3),
    "gptq+clip+cd": Gptq(clip=Clip(), sweeps=3),
    "awq": Awq(),
}


def usual_inputs(method: Method) -> Inputs:
    """As published: the outputs of quantized blocks for GPTQ, of full ones for the others."""
    return "quantized" if isinstance(method, Gptq) else "full"


@dataclass
class QuantizeReport:
    method: str
    converted: ConvertReport
    layers: list[LayerError] = field(default_factory=list)
    blocks: list[dict[str, float]] = field(default_factory=list)  # the method's notes on each
    masters: Parts = field(default_factory=dict)  # weights before rounding, with keep_masters

    @property
    def bits_per_weight(self) -> float:
        return self.converted.bits_per_weight

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "layers": [asdict(layer) for layer in self.layers],
            **({"blocks": self.blocks} if self.blocks else {}),
        }


def quantize(
    model: BlocksModel,
    rules: Sequence[Rule],
    steps: Iterable[BlockStep],
    method: Method,
    *,
    skip: Sequence[str] = HEADS,
    progress: BlockProgress | None = None,
    files: BlockFiles | None = None,
    onload_device: torch.device | None = None,
) -> QuantizeReport:
    """Quantize in place; the layers end with a fixed grid, ready for `pack`, or packed with `onload_device`.

    `steps`: walk(model, ...), or a list of its steps on the same weights (inputs="full"), which several runs can share.
    progress(blocks done, blocks, mean output error of the block). `files`: where finished blocks are kept; those that
    exist are loaded, with steps = walk(..., start=files.count()). `onload_device`: that of the walk's Calibration.
    """

    def choose(step: BlockStep, block: nn.Module, formats: dict[str, GridFormat], prefix: str) -> FinishedBlock:
        return quantize_block(block, step.statistics, formats, method, prefix, sources=model.input_sources(block))

    options: dict[str, Any] = {"skip": skip, "progress": progress, "files": files, "onload_device": onload_device}
    return quantize_steps(model, rules, steps, choose, method.name, **options)


def quantize_steps(
    model: BlocksModel,
    rules: Sequence[Rule],
    steps: Iterable[Step],
    work: Callable[[Step, nn.Module, dict[str, GridFormat], str], FinishedBlock],
    name: str,
    *,
    skip: Sequence[str],
    progress: BlockProgress | None,
    files: BlockFiles | None,
    onload_device: torch.device | None,
) -> QuantizeReport:
    """`quantize` with any function `work` that chooses grids for the layers of a block."""
    targets, left = plan_layers(model, rules, skip, "quantize")
    wanted = with_grids(targets)
    grids: dict[str, Parts] = {}
    masters: Parts = {}
    layers: list[LayerError] = []
    notes: list[dict[str, float]] = []
    with closing(finish_blocks(model, wanted, steps, work, files, progress)) as blocks:
        for own, made in blocks:
            # Masters are kept on the host.
            masters |= {layer: grid.pop("master").cpu() for layer, grid in made.grids.items() if "master" in grid}
            if onload_device is None:
                grids.update(made.grids)
            else:
                pack_block(own, made.grids, model.compute_dtype)
            layers.extend(made.errors)
            notes.extend([made.notes] if made.notes else [])
    done = {error.name for error in layers}
    rounded, errors = round_layers([t for t in wanted if t.name not in done], onload_device, model.compute_dtype)
    # The dtype of blocks that were on a device has changed since the rules were read.
    left = [replace(x, num_bytes=num_bytes(model.get_submodule(x.name))) for x in left]
    converted = ConvertReport(set_formats(targets, grids | rounded), left)
    return QuantizeReport(name, converted, [*layers, *errors], notes, masters)


@torch.no_grad()
def pack_block(targets: Sequence[LayerTarget[Any]], grids: dict[str, Parts], dtype: torch.dtype) -> None:
    """Pack the layers of a block before it is offloaded; the walk may still run it once."""
    for t in targets:
        set_formats([t], grids)
        with during(f"packing {t.name}"):
            t.host.pack(dtype)
        # Decoded, it gives the results of the dense layer; a kernel for packed weights sums in another order.
        t.host.keep_decoded(dtype)


@torch.no_grad()
def set_formats(targets: Sequence[LayerTarget[Format]], grids: dict[str, Parts]) -> list[Changed]:
    """Give every layer its Format with the chosen grid."""
    changed = []
    for t in targets:
        fixed: Any = t.format.fix_grid() if isinstance(t.format, GridFormat) else t.format
        if not t.host.packed:  # pack_block has done the others
            t.host.set_format(fixed)
            t.host.store_state(grids.get(t.name, {}))
        changed.append(Changed(t.name, t.host.shape, Dense().label, fixed))
    return changed


@torch.no_grad()
def round_layers(
    targets: Sequence[LayerTarget[GridFormat]], onload_device: torch.device | None, dtype: torch.dtype
) -> tuple[dict[str, Parts], list[LayerError]]:
    """Round to nearest, block by block; returns grids (none with onload_device: packed at once) and errors."""
    grids: dict[str, Parts] = {}
    errors = LayerErrors()
    for owner, group in groupby(targets, lambda t: t.owner):
        own = list(group)
        with on_device(owner, onload_device, dtype, keep=True):
            made: dict[str, Parts] = {}
            for t in own:
                choice = round_to_nearest(t.host.weight, t.format, state_of(t.format, t.host.weight))
                errors.add(t.name, t.format, t.host.weight.float(), choice.weight, None)
                t.host.weight.copy_(choice.weight)
                made[t.name] = choice.grid
            if onload_device is None:
                grids.update(made)
            else:
                pack_block(own, made, dtype)
    return grids, errors.read()


def plan(model: BlocksModel, rules: Sequence[Rule], skip: Sequence[str] = HEADS) -> list[LayerTarget[GridFormat]]:
    """What will be quantized; raises UserError for every mistake in rules, shapes or weights."""
    return with_grids(plan_layers(model, rules, skip, "quantize")[0])


def with_grids(targets: Sequence[LayerTarget[Format]]) -> list[LayerTarget[GridFormat]]:
    """Those that are not dense; UserError for a Format without a grid, or a weight that it cannot hold."""
    found = [t for t in targets if not isinstance(t.format, Dense)]
    for t in found:
        if not isinstance(t.format, GridFormat):
            raise UserError(
                f"{t.name}: {t.format.label} has no grid to choose; use int2..int8, nf2..nf4, fp3 or fp4, or one of "
                "these behind sparse24+; fp8 is for shrink/rtn"
            )
        try:
            t.format.check_weight(t.host.weight)
        except UserError as error:
            raise UserError(f"{t.name}: {error}") from None
    return found  # type: ignore[return-value]


def plan_layers(
    model: BlocksModel, rules: Sequence[Rule], skip: Sequence[str], verb: str
) -> tuple[list[LayerTarget[Format]], list[Left]]:
    """The rules, resolved; UserError for layers that are not dense, not finite, or of a shape that does not fit."""
    blocks = dict(zip(block_prefixes(model), model.blocks, strict=True))
    targets, left = resolve(model, rules, skip, blocks)
    for t in targets:
        if t.host.packed or not isinstance(t.host.format, Dense):
            raise UserError(
                f"{t.name} is {t.host.format.label} already: {verb} the model it was made from, or unpack it first"
            )
        check_fits(t.name, t.module, t.format)
    weights = {t.name: t.host.weight for t in targets if not (isinstance(t.format, Dense) or t.host.weight.is_meta)}
    finite = [all_finite(w) for w in weights.values()]
    for name, good in zip(weights, torch.stack(finite).tolist() if finite else [], strict=True):
        if not good:
            raise UserError(f"{name}.weight holds NaN or infinite values; check the model")
    return targets, left


@torch.no_grad()
def quantize_block(
    block: nn.Module,
    statistics: dict[str, Statistics],
    formats: dict[str, GridFormat],
    method: Method,
    prefix: str = "",
    *,
    sources: Sequence[InputSource],
) -> FinishedBlock:
    """Write the chosen weights into the (dense) layers of one block; returns their grids and errors."""
    if isinstance(method, Awq):
        statistics = method.scale_inputs(block, sources, statistics, formats)
    linears = block_linears(block)
    grids: dict[str, Parts] = {}
    errors = LayerErrors()
    for names in shared(statistics, formats):
        w = torch.cat([linears[n].weight.float() for n in names])
        format, seen = formats[names[0]], statistics[names[0]]
        state = state_of(format, w)
        # Rows are independent: layers with the same inputs and Format are one taller layer, whose Hessian is factorised
        # once. Methods that look at names get them one by one.
        if isinstance(method, Gptq | Rtn):
            whole = method.choose(prefix + names[0], w, seen, format, state)
            made = _split(whole, [linears[n].out_features for n in names])
        else:
            parts = w.split([linears[n].out_features for n in names])
            made = [method.choose(prefix + n, p, seen, format, state) for n, p in zip(names, parts, strict=True)]
        for name, choice in zip(names, made, strict=True):
            old = linears[name].weight.float()
            errors.add(prefix + name, format, old, choice.weight, seen.hessian)
            linears[name].weight.copy_(choice.weight)
            grids[prefix + name] = choice.grid
    return FinishedBlock(grids, errors.read())


def shared(statistics: dict[str, Statistics], formats: dict[str, GridFormat]) -> list[list[str]]:
    """The layers to quantize, those with the same inputs and Format together."""
    together: dict[tuple[int, GridFormat], list[str]] = {}
    for name, format in formats.items():
        together.setdefault((id(statistics[name]), format), []).append(name)
    return list(together.values())


def _split(choice: ChosenGrid, heights: list[int]) -> list[ChosenGrid]:
    stops = torch.tensor(heights).cumsum(0).tolist()
    return [choice.rows(slice(stop - h, stop)) for h, stop in zip(heights, stops, strict=True)]
