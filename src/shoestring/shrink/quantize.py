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
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoestring.errors import UserError, during
from shoestring.formats import ConvertReport, Dense, Format, FormatHost, GridFormat, Parts
from shoestring.formats.convert import Changed, Rule, assign, check_fits, format_host, tied_names, weight_modules
from shoestring.formats.linear import all_finite
from shoestring.host.block_offload import on_device
from shoestring.model.blocks import BlocksModel, InputSource, block_of, block_prefixes
from shoestring.shrink.awq import Awq
from shoestring.shrink.block_files import BlockFiles, BlockProgress, F, FinishedBlock, Step, finish_blocks
from shoestring.shrink.calibrate import BlockStep, Inputs, Statistics, block_linears
from shoestring.shrink.chosen_grid import ChosenGrid, LayerError, LayerErrors, round_to_nearest, state_of
from shoestring.shrink.clip import Clip
from shoestring.shrink.gptq import Gptq

HEADS = ("head", "lm_head")  # converted only by a rule that spells the name, as in `convert`
ENDS = (*HEADS, "embed")  # rounded to nearest, and counted by themselves


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
        """Of the layers that the method is for: without embedding and head."""
        inner = [c for c in self.converted.changed if c.name not in ENDS]
        return ConvertReport(inner).bits_per_weight

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
    formats = plan(model, rules, skip)
    grids: dict[str, Parts] = {}
    masters: Parts = {}
    layers: list[LayerError] = []
    notes: list[dict[str, float]] = []
    with closing(finish_blocks(model, formats, steps, work, files, progress)) as blocks:
        for own, made in blocks:
            # Masters are kept on the host.
            masters |= {layer: grid.pop("master").cpu() for layer, grid in made.grids.items() if "master" in grid}
            if onload_device is None:
                grids.update(made.grids)
            else:
                pack_block(model, own, made.grids)
            layers.extend(made.errors)
            notes.extend([made.notes] if made.notes else [])
    converted, rounded = set_formats(model, rules, formats, grids, layers, skip, onload_device)
    return QuantizeReport(name, converted, [*layers, *rounded], notes, masters)


@torch.no_grad()
def pack_block(model: BlocksModel, formats: dict[str, GridFormat], grids: dict[str, Parts]) -> None:
    """Pack the layers of a block before it is offloaded; the walk may still run it once."""
    for name, format in formats.items():
        layer = format_host(model, name)
        layer.set_format(format.fix_grid())  # type: ignore[arg-type]
        layer.store_state(grids[name])
        with during(f"packing {name}"):
            layer.pack(model.compute_dtype)
        # Decoded, it gives the results of the dense layer; a kernel for packed weights sums in another order.
        layer.keep_decoded(model.compute_dtype)


@torch.no_grad()
def set_formats(
    model: BlocksModel,
    rules: Sequence[Rule],
    formats: dict[str, GridFormat],
    grids: dict[str, Parts],
    layers: list[LayerError],
    skip: Sequence[str],
    onload_device: torch.device | None,
) -> tuple[ConvertReport, list[LayerError]]:
    """Round the layers outside of all steps, and give every layer its Format with the chosen grid."""
    left = {n: f for n, f in formats.items() if n not in {e.name for e in layers}}
    rounded, errors = round_layers(model, left, onload_device)
    grids = {**grids, **rounded}
    fixed = [(glob, f.fix_grid() if isinstance(f, GridFormat) else f) for glob, f in rules]
    modules = weight_modules(model)
    chosen, left_alone = assign(modules, fixed, skip, tied_names(model))  # type: ignore[arg-type]
    report = ConvertReport(left=left_alone)
    for name, format in chosen.items():
        layer = modules[name]
        assert isinstance(layer, FormatHost)
        if not layer.packed:  # pack_block has done the others
            layer.set_format(format)
            layer.store_state(grids.get(name, {}))
        report.changed.append(Changed(name, layer.shape, Dense().label, format))
    return report, errors


def round_layers(
    model: BlocksModel, formats: dict[str, GridFormat], onload_device: torch.device | None
) -> tuple[dict[str, Parts], list[LayerError]]:
    """Round to nearest, block by block; returns grids (none with onload_device: packed at once) and errors."""
    grids: dict[str, Parts] = {}
    errors = LayerErrors()
    for owner, wanted in by_owner(model, formats).items():
        with on_device(model.get_submodule(owner), onload_device, model.compute_dtype, keep=True):
            made: dict[str, Parts] = {}
            for name, format in wanted.items():
                layer = format_host(model, name)
                choice = round_to_nearest(layer.weight, format, _table(format, layer.weight))
                errors.add(name, format, layer.weight.float(), choice.weight, None)
                layer.weight.copy_(choice.weight)
                made[name] = choice.grid
            if onload_device is None:
                grids.update(made)
            else:
                pack_block(model, wanted, made)
    return grids, errors.read()


def by_owner(model: BlocksModel, formats: dict[str, F]) -> dict[str, dict[str, F]]:
    """{module: its layers}, the modules that move to a device as one: blocks, and layers outside of them."""
    prefixes = block_prefixes(model)
    found: dict[str, dict[str, F]] = {}
    for name, format in formats.items():
        index = block_of(prefixes, name)
        found.setdefault(name if index is None else prefixes[index].removesuffix("."), {})[name] = format
    return found


def plan(model: BlocksModel, rules: Sequence[Rule], skip: Sequence[str] = HEADS) -> dict[str, GridFormat]:
    """{layer: Format} of what will be quantized; raises UserError for every mistake in rules, shapes or weights."""
    found: dict[str, GridFormat] = {}
    for name, format in plan_layers(model, rules, skip, "quantize").items():
        if not isinstance(format, GridFormat):
            raise UserError(
                f"{name}: {format.label} has no grid to choose; use int2..int8, nf2..nf4, fp3 or fp4, or one of these "
                "behind sparse24+; fp8 is for shrink/rtn"
            )
        try:
            format.check_weight(format_host(model, name).weight)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        found[name] = format
    return found


def plan_layers(model: BlocksModel, rules: Sequence[Rule], skip: Sequence[str], verb: str) -> dict[str, Format]:
    """{layer: Format} by the rules; UserError for layers that are not dense, not finite, or of a shape that does not
    fit."""
    modules = weight_modules(model)
    chosen, _ = assign(modules, rules, skip, tied_names(model))
    for name, format in chosen.items():
        layer = modules[name]
        assert isinstance(layer, FormatHost)
        if layer.packed or not isinstance(layer.format, Dense):
            raise UserError(
                f"{name} is {layer.format.label} already: {verb} the model it was made from, or unpack it first"
            )
        check_fits(name, layer, format)
    wanted = {name: format for name, format in chosen.items() if not isinstance(format, Dense)}
    weights = {name: w for name in wanted if not (w := modules[name].weight).is_meta}  # type: ignore[union-attr]
    finite = [all_finite(w) for w in weights.values()]  # type: ignore[arg-type]
    for name, good in zip(weights, torch.stack(finite).tolist() if finite else [], strict=True):
        if not good:
            raise UserError(f"{name}.weight holds NaN or infinite values; check the model")
    return wanted


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
        state = _table(format, w)
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


def _table(format: GridFormat, w: Tensor) -> Parts:
    assert isinstance(format, Format)
    return state_of(format, w)
