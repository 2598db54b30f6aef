"""Post-training quantization of a whole decoder: rules, a method, and the statistics of a text.

    report = quantize(model, [("*", parse_format("nf3"))], walk(model, windows(tokens, 16, 512)), Gptq())
    pack(model)

Block after block: the method sees the layers that a rule gives a Format with a grid, and chooses weights on
grids; they replace the weights at once, so that the walk can carry their error on. At the end every layer gets
its Format with the chosen grid as state. What `pack` then stores decodes to exactly what the method chose.

Layers outside the blocks (an output head named in a rule) are rounded to nearest: nothing is collected there.

With `visit`, for a walk whose blocks visit a device one at a time (visit.py), a finished block is packed before it
goes home: the grids do not stay on the device, and the model in the host's memory shrinks as the work goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shoestring.errors import UserError, during
from shoestring.formats import ConvertReport, Dense, Format, FormatLinear, GridFormat, Parts, Stacked
from shoestring.formats.convert import Changed, Rule, assign, candidates, tied_names
from shoestring.kernels.sparse24 import is_24
from shoestring.model.transformer import Block, Decoder
from shoestring.shrink.awq import Awq
from shoestring.shrink.calibrate import BlockStep, Inputs, Statistics, block_linears
from shoestring.shrink.clip import Clip
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.grid import Choice, hold, nearest, state_of
from shoestring.shrink.resume import BlockFiles
from shoestring.shrink.visit import visiting

Progress = Callable[[int, int, float], None]
F = TypeVar("F")  # a Format, of one kind or another
HEADS = ("head", "lm_head")  # left alone unless a rule spells the name, as in `convert`


class Method(Protocol):
    """How the weight of one layer is moved onto a grid."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    def choose(
        self, name: str, w: Tensor, statistics: Statistics, format: GridFormat, state: Parts
    ) -> Choice: ...


@dataclass(frozen=True)
class Rtn:
    """Round to nearest on the grid that spans each group."""

    name = "rtn"

    def choose(
        self, name: str, w: Tensor, statistics: Statistics, format: GridFormat, state: Parts
    ) -> Choice:
        return nearest(w, format, state)


METHODS: dict[str, Method] = {
    "rtn": Rtn(),
    "clip": Clip(),
    "gptq": Gptq(),
    "gptq+clip": Gptq(clip=Clip()),
    "awq": Awq(),
}


def usual_inputs(method: Method) -> Inputs:
    """What the method's authors let a block see: GPTQ the quantized blocks before it, the others the full
    ones.
    """
    return "quantized" if isinstance(method, Gptq) else "full"


@dataclass(frozen=True)
class LayerError:
    """How far a layer's weights and its outputs on the calibration text moved, as relative mean squares."""

    name: str
    format: str
    bits_per_weight: float
    weight_error: float
    output_error: float | None


@dataclass
class QuantizeReport:
    method: str
    converted: ConvertReport
    layers: list[LayerError] = field(default_factory=list)
    blocks: list[dict[str, float]] = field(default_factory=list)  # what the method has to say about each
    masters: Parts = field(default_factory=dict)  # weights before rounding, where they were to be kept

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "bits_per_weight": round(self.converted.bits_per_weight, 4),
            "layers": [asdict(layer) for layer in self.layers],
            **({"blocks": self.blocks} if self.blocks else {}),
        }


@torch.no_grad()
def quantize(
    model: Decoder,
    rules: Sequence[Rule],
    steps: Iterable[BlockStep],
    method: Method,
    *,
    skip: Sequence[str] = HEADS,
    progress: Progress | None = None,
    files: BlockFiles | None = None,
    visit: torch.device | None = None,
) -> QuantizeReport:
    """Quantize in place; the layers end with a fixed grid, ready for `pack`, or packed where blocks `visit`.

    `steps`: walk(model, ...), or a list of its steps on the same weights (inputs="full"), which several runs
    can share. progress(blocks done, blocks, mean output error of the block). `files`: where finished blocks
    are kept; those that are there already are taken, and steps = walk(..., start=files.count()). `visit`: as the
    walk's Calibration has it.
    """
    formats = plan(model, rules, skip)
    grids: dict[str, Parts] = {}
    layers: list[LayerError] = []
    num_finished = files.count() if files is not None else 0
    with ended(steps):
        for step in steps:
            block = model.blocks[step.index]
            assert isinstance(block, Block)
            prefix = f"blocks.{step.index}."
            wanted = {n.removeprefix(prefix): f for n, f in formats.items() if n.startswith(prefix)}
            if files is not None and step.index < num_finished:
                made, errors = files.load(step.index, block)
            else:
                with during(f"block {step.index}"):
                    made, errors = quantize_block(block, step.statistics, wanted, method, prefix)
                if files is not None:
                    files.save(step.index, block, made, errors)
            if visit is None:
                grids.update(made)
            else:
                pack_guests(model, {prefix + n: f for n, f in wanted.items()}, made)
            layers.extend(errors)
            if progress is not None:
                known = [e.output_error for e in errors if e.output_error is not None]
                progress(step.index + 1, len(model.blocks), sum(known) / max(1, len(known)))
    return finish(model, rules, formats, grids, layers, method.name, skip, visit)


@contextmanager
def ended(steps: Iterable[BlockStep]) -> Iterator[None]:
    """A walk that an error interrupts ends here and now: its block is at home when the error is seen."""
    try:
        yield
    finally:
        if isinstance(steps, Generator):
            steps.close()


def pack_guests(model: Decoder, formats: dict[str, GridFormat], grids: dict[str, Parts]) -> None:
    """Pack layers of a block that is about to go home; it may run once more before, with the weights it had."""
    for name, format in formats.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, FormatLinear)
        layer.set_format(format.fix_grid())  # type: ignore[arg-type]
        hold(layer, grids[name])
        with during(f"packing {name}"):
            layer.pack(model.compute_dtype)
        # Decoded, it multiplies as the dense one did; a kernel for packed weights sums in another order.
        layer.keep_decoded(model.compute_dtype)


def finish(
    model: Decoder,
    rules: Sequence[Rule],
    formats: dict[str, GridFormat],
    grids: dict[str, Parts],
    layers: list[LayerError],
    method: str,
    skip: Sequence[str],
    visit: torch.device | None = None,
) -> QuantizeReport:
    """Round the layers that no step reached, and give every layer its Format with the chosen grid."""
    left = {n: f for n, f in formats.items() if n not in {e.name for e in layers}}
    rounded, errors = round_layers(model, left, visit)
    grids = {**grids, **rounded}
    fixed = [(glob, f.fix_grid() if isinstance(f, GridFormat) else f) for glob, f in rules]
    modules = candidates(model)
    chosen, left_alone = assign(modules, fixed, skip, tied_names(model))  # type: ignore[arg-type]
    report = ConvertReport(left=left_alone)
    for name, format in chosen.items():
        layer = modules[name]
        assert isinstance(layer, FormatLinear)
        if not layer.packed:  # else it came home so
            layer.set_format(format)
            hold(layer, grids.get(name, {}))
        report.changed.append(Changed(name, layer.shape, Dense().label, format))
    return QuantizeReport(method, report, [*layers, *errors])


def round_layers(
    model: Decoder, formats: dict[str, GridFormat], visit: torch.device | None
) -> tuple[dict[str, Parts], list[LayerError]]:
    """Round to nearest, block by block; returns grids and errors, no grids where the blocks came home packed."""
    grids: dict[str, Parts] = {}
    errors = LayerErrors()
    for owner, wanted in by_owner(formats).items():
        with visiting(model.get_submodule(owner), visit, model.compute_dtype, keep=True):
            made: dict[str, Parts] = {}
            for name, format in wanted.items():
                layer = model.get_submodule(name)
                assert isinstance(layer, FormatLinear)
                choice = nearest(layer.weight, format, _table(format, layer.weight))
                errors.add(name, format, layer.weight.float(), choice.weight, None)
                layer.weight.copy_(choice.weight)
                made[name] = choice.grid
            if visit is None:
                grids.update(made)
            else:
                pack_guests(model, wanted, made)
    return grids, errors.read()


def by_owner(formats: dict[str, F]) -> dict[str, dict[str, F]]:
    """{what visits a device: its layers}: a block, or a layer outside of them."""
    found: dict[str, dict[str, F]] = {}
    for name, format in formats.items():
        owner = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name
        found.setdefault(owner, {})[name] = format
    return found


def plan(model: Decoder, rules: Sequence[Rule], skip: Sequence[str] = HEADS) -> dict[str, GridFormat]:
    """{layer: Format} of what will be quantized; every mistake in rules, shapes or weights is raised here,
    before any work.
    """
    found: dict[str, GridFormat] = {}
    for name, format in plan_layers(model, rules, skip, "quantize").items():
        if not isinstance(format, GridFormat):
            raise UserError(
                f"{name}: {format.label} has no grid to choose; use int2..int8, nf2..nf4, fp3 or fp4, or one of these "
                "behind sparse24+"
            )
        if isinstance(format, Stacked):
            check_pruned(name, format, model.get_submodule(name).weight)  # type: ignore[arg-type]
        found[name] = format
    return found


def check_pruned(name: str, format: Stacked, w: Tensor) -> None:
    """Grids are chosen for the values that pruning has kept."""
    if format.first.select != "row":
        raise UserError(f"{name}: {format.label} has no grid to choose; use sparse24+{format.second.label}")
    if not w.is_meta and not is_24(w):
        raise UserError(
            f"{name}: {format.label} keeps two of every four weights, and this layer has more: prune the model first "
            "(shrink/prune24), and give the pruned one"
        )


def plan_layers(model: Decoder, rules: Sequence[Rule], skip: Sequence[str], verb: str) -> dict[str, Format]:
    """{layer: Format} of dense layers with finite weights that are to get another Format and can hold it."""
    modules = candidates(model)
    chosen, _ = assign(modules, rules, skip, tied_names(model))
    for name, format in chosen.items():
        layer = modules[name]
        assert isinstance(layer, FormatLinear)
        if layer.packed or not isinstance(layer.format, Dense):
            raise UserError(
                f"{name} is {layer.format.label} already: {verb} the model it was made from, or unpack it first"
            )
        try:
            format.check(layer.shape)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    wanted = {name: format for name, format in chosen.items() if not isinstance(format, Dense)}
    weights = {name: w for name in wanted if not (w := modules[name].weight).is_meta}  # type: ignore[union-attr]
    finite = [w.isfinite().all() for w in weights.values()]  # type: ignore[operator]
    for name, good in zip(weights, torch.stack(finite).tolist() if finite else [], strict=True):
        if not good:
            raise UserError(f"{name}.weight holds NaN or infinite values; check the model")
    return wanted


def quantize_block(
    block: Block,
    statistics: dict[str, Statistics],
    formats: dict[str, GridFormat],
    method: Method,
    prefix: str = "",
) -> tuple[dict[str, Parts], list[LayerError]]:
    """Write the chosen weights into the (dense) layers of one block; returns their grids and errors."""
    if isinstance(method, Awq):
        statistics = method.prepare(block, statistics, formats)
    linears = block_linears(block)
    grids: dict[str, Parts] = {}
    errors = LayerErrors()
    for names in shared(statistics, formats):
        w = torch.cat([linears[n].weight.float() for n in names])
        format, seen = formats[names[0]], statistics[names[0]]
        state = _table(format, w)
        # Rows do not depend on each other: layers that share inputs and Format are one taller layer, and the
        # factorisation of their Hessian is done once. Only methods that look at names need them apart.
        if isinstance(method, Gptq | Rtn):
            whole = method.choose(prefix + names[0], w, seen, format, state)
            made = _split(whole, [linears[n].out_features for n in names])
        else:
            parts = w.split([linears[n].out_features for n in names])
            made = [
                method.choose(prefix + n, p, seen, format, state) for n, p in zip(names, parts, strict=True)
            ]
        for name, choice in zip(names, made, strict=True):
            old = linears[name].weight.float()
            errors.add(prefix + name, format, old, choice.weight, seen.hessian)
            linears[name].weight.copy_(choice.weight)
            grids[prefix + name] = choice.grid
    return grids, errors.read()


def shared(statistics: dict[str, Statistics], formats: dict[str, GridFormat]) -> list[list[str]]:
    """The layers to quantize, those with the same inputs and Format together."""
    together: dict[tuple[int, GridFormat], list[str]] = {}
    for name, format in formats.items():
        together.setdefault((id(statistics[name]), format), []).append(name)
    return list(together.values())


def _split(choice: Choice, heights: list[int]) -> list[Choice]:
    stops = torch.tensor(heights).cumsum(0).tolist()
    return [choice.rows(slice(stop - h, stop)) for h, stop in zip(heights, stops, strict=True)]


def _table(format: GridFormat, w: Tensor) -> Parts:
    assert isinstance(format, Format)
    return state_of(format, w)


class LayerErrors:
    """The errors of several layers, measured one by one and read together: a GPU is waited for once."""

    def __init__(self) -> None:
        self.layers: list[tuple[str, GridFormat, tuple[int, int], bool]] = []
        self.sums: list[Tensor] = []

    def add(self, name: str, format: GridFormat, old: Tensor, new: Tensor, hessian: Tensor | None) -> None:
        """`old` and `new` may change after this."""
        d, old = (new - old).float(), old.float()
        pairs = [(d, d), (old, old)]
        if hessian is not None:
            h = hessian.float()
            pairs += [(d @ h, d), (old @ h, old)]
        sums = [(a * b).sum() for a, b in pairs]
        self.layers.append((name, format, (old.shape[0], old.shape[1]), hessian is not None))
        self.sums.append(torch.stack([*sums, *[torch.zeros_like(sums[0])] * (4 - len(sums))]))

    def read(self) -> list[LayerError]:
        rows = torch.stack(self.sums).tolist() if self.sums else []
        found = []
        for (name, format, shape, has_inputs), (lost, size, lost_out, size_out) in zip(
            self.layers, rows, strict=True
        ):
            assert isinstance(format, Format)
            bits = round(format.bits_per_weight(shape), 4)
            output = _part(lost_out, size_out) if has_inputs else None
            found.append(LayerError(name, format.label, bits, _part(lost, size), output))
        return found


def _part(lost: float, size: float) -> float:
    return lost / size if size > 0 else 0.0
