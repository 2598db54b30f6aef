"""Block-wise training: weights, scales and zero points of one block at a time, against the block's own outputs.

    report = train_blocks(model, [("*", parse_format("int2"))], windows(tokens, 64, 512), Blockwise())
    pack(model)

EfficientQAT's Block-AP (OmniQuant before it). With F the full block, Q the block with its layers on learned grids
(formats, grid="learned"), x the full model's activations before it and x' what the quantized block reads,

    minimise  |Q(x') - F(x)|^2     over the weights, the scales, the zero points and the norms inside the block

x' are the outputs of the finished quantized blocks (inputs="quantized": later blocks compensate the errors of earlier
ones), or x itself (inputs="full"). Training starts from the grid of another method (`init`), with AWQ's folding kept,
and from the weights before rounding. With train="grid" the weights stay as they are: a learned clip, which needs little
text.

loss="token" divides each token's error by the mean square of its target, as the norm that reads it does. Plain squares
(loss="square") are the published loss; a few tokens with huge activations then outweigh all others.

Learning rates are relative, so that they fit any layer and any number of bits: weights move by parts of the layer's
rounding error (root mean square, at the start), scales by parts of their mean, zero points by codes, norms and biases
by parts of their root mean square. The block is measured on held-out windows after every pass over the others, and the
best state is kept, the untrained one included.

Memory: the whole model in its dtype, or with Calibration(onload_device=device) one block of it; one block in fp32 with
gradients and moments; two stores of activations (files beyond `memory_gb`); with keep_masters, on the host, the fp32
weights of all blocks. Finished blocks are written to `files`; a stopped run continues at the next one, bit for bit.

Not supported: several processes.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoestring.errors import UserError, during
from shoestring.formats import Dense, FormatLinear, GridFormat, Parts
from shoestring.formats.convert import Rule
from shoestring.host.block_offload import on_device
from shoestring.model.blocks import BlocksModel, InputSource
from shoestring.runlog import RunLog
from shoestring.shrink.awq import Awq
from shoestring.shrink.block_files import BlockFiles, BlockProgress, FinishedBlock
from shoestring.shrink.calibrate import BlockStep, Calibration, Statistics, block_linears, embed_all, walk
from shoestring.shrink.chosen_grid import LayerErrors
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.quantize import (
    HEADS,
    METHODS,
    Method,
    QuantizeReport,
    Rtn,
    quantize,
    quantize_block,
    quantize_steps,
)
from shoestring.train.cuda_graph import GraphedPasses
from shoestring.train.optim import can_fuse


@dataclass(frozen=True)
class Blockwise:
    init: str = "awq"  # the method whose grid training starts from
    train: Literal["all", "grid"] = "all"  # grid: the weights stay, scales and zero points are trained
    epochs: int = 4
    batch: int = 2  # windows in a step
    lr_weight: float = 0.03  # of the root mean square of the layer's rounding error
    lr_scale: float = 5e-3  # of the mean of the layer's scales
    lr_zero: float = 2e-2  # codes
    lr_norm: float = 1e-3  # of the root mean square of a norm or bias; 0 leaves them
    floor: float = 0.05  # the learning rates fall to this part of themselves, along a cosine
    held_out: float = 0.125  # part of the windows that training does not see
    loss: Literal["token", "square"] = "token"
    keep_masters: bool = False  # report.masters: the trained weights before rounding, to go on training with
    seed: int = 0

    name = "blockwise"

    def __post_init__(self) -> None:
        if self.init not in METHODS:
            raise UserError(f"init={self.init!r} is not possible for blockwise: use one of {', '.join(METHODS)}")
        if self.epochs < 1 or self.batch < 1:
            raise UserError(
                f"blockwise with {self.epochs} epochs in batches of {self.batch} is not possible: use 1 or more"
            )
        rates = (self.lr_weight, self.lr_scale, self.lr_zero, self.lr_norm)
        if any(not 0 <= rate <= 1 for rate in rates):
            raise UserError(
                f"blockwise learning rates {rates} are not possible: they are parts of what is trained, between "
                "0 and 1, for example 0.003"
            )
        if not 0 <= self.held_out <= 0.5:
            raise UserError(f"blockwise cannot hold out {self.held_out} of the windows: use a part between 0 and 0.5")


@dataclass(frozen=True)
class BlockTargets:
    """Inputs `seen` and outputs `target` of one block, both [windows, context, width]."""

    seen: Tensor
    target: Tensor
    args: tuple[Any, ...]  # what the block takes beside the activations
    device: torch.device

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.seen[rows].to(self.device), self.target[rows].to(self.device)


def train_blocks(
    model: BlocksModel,
    rules: Sequence[Rule],
    tokens_NT: Tensor,
    settings: Blockwise | None = None,
    calibration: Calibration | None = None,
    *,
    skip: Sequence[str] = HEADS,
    progress: BlockProgress | None = None,
    files: BlockFiles | None = None,
) -> QuantizeReport:
    """Quantize in place, as `quantize` does; the layers end with a fixed grid, ready for `pack`.

    progress(blocks done, blocks, relative error of the block's outputs). `files`: where finished blocks are kept; those
    that exist are loaded.
    """
    settings, calibration = settings or Blockwise(), calibration or Calibration()
    model.check_inputs(tokens_NT)

    def train(step: TrainingStep, block: nn.Module, formats: dict[str, GridFormat], prefix: str) -> FinishedBlock:
        sources = model.input_sources(block)
        return train_block(block, step.targets, step.statistics, formats, settings, step.index, prefix, sources=sources)

    steps = walk_pairs(model, tokens_NT, calibration, files.count() if files is not None else 0)
    options: dict[str, Any] = {"skip": skip, "progress": progress, "files": files}
    return quantize_steps(model, rules, steps, train, settings.name, **options, onload_device=calibration.onload_device)


@dataclass(frozen=True)
class TrainingStep(BlockStep):
    targets: BlockTargets


def walk_pairs(
    model: BlocksModel, tokens_NT: Tensor, calibration: Calibration, start: int
) -> Generator[TrainingStep, None, None]:
    """One block after the other: its inputs, the full block's outputs, and its layers' statistics on these inputs.

    The caller changes the block between two steps. Blocks before `start` come without statistics.
    """
    with ExitStack() as stack:
        (seen, full), passes = embed_all(model, tokens_NT, calibration, stack, num_stores=2)
        for index, block in enumerate(model.blocks):
            with on_device(block, calibration.onload_device, model.compute_dtype, keep=True):
                statistics: dict[str, Statistics] = {}
                if index >= start:
                    statistics = passes.collect(index, seen, calibration, write=False)
                passes.run(index, full)
                targets = BlockTargets(seen, full, passes.args[index], passes.device)
                yield TrainingStep(index, statistics, targets)
                if calibration.inputs == "full":
                    seen.copy_(full)
                elif index + 1 < len(model.blocks):
                    passes.run(index, seen)


# -- one block -----------------------------------------------------------------------------------------------
def train_block(
    block: nn.Module,
    targets: BlockTargets,
    statistics: dict[str, Statistics],
    formats: dict[str, GridFormat],
    settings: Blockwise,
    index: int = 0,
    prefix: str = "",
    *,
    sources: Sequence[InputSource],
) -> FinishedBlock:
    """Train the (dense) layers that have a Format, and leave them dense with weights on their grids.

    The notes are the block's output error before and after, on the held-out windows.
    """
    dtypes = {name: p.dtype for name, p in block.named_parameters()}
    start = start_grids(block, statistics, formats, METHODS[settings.init], prefix, sources)
    with torch.no_grad():
        block.float()  # masters; layers and norms cast on use
    linears = {n: m for n, m in block_linears(block).items() if n in formats}
    for name, layer in linears.items():
        layer.set_format(formats[name].learn_grid())  # type: ignore[arg-type]
        layer.store_state(start.grids[prefix + name])
    trained = parameter_groups(block, linears, start.rounding, settings)
    before, after = fit(block, targets, trained, settings, index, prefix)
    compute = targets.seen.dtype
    made: dict[str, Parts] = {}
    errors = LayerErrors()
    with torch.no_grad():
        for name, layer in linears.items():
            parts = layer.encode(compute)
            made[prefix + name] = {n: parts[n].float() for n in ("scale", "zero") if n in parts}
            if settings.keep_masters:
                made[prefix + name]["master"] = layer.weight.detach().cpu().clone()
            used = layer.effective_weight(compute)
            layer.set_format(Dense())
            layer.weight.copy_(used)
            old, hessian = start.weights[name].float(), start.statistics[name].hessian
            errors.add(prefix + name, formats[name], old, used.float(), hessian)
        for name, p in block.named_parameters():
            p.grad = None  # as large as the weights
            p.data = p.data.to(dtypes[name])
            p.requires_grad_(True)
    return FinishedBlock(made, errors.read(), {"before": before, "after": after})


@dataclass(frozen=True)
class InitialGrids:
    grids: dict[str, Parts]  # by whole name
    statistics: dict[str, Statistics]  # of the inputs, after AWQ's folding
    weights: dict[str, Tensor]  # before rounding, after folding
    rounding: dict[str, Tensor]  # root mean square of what rounding to the grid changes


@torch.no_grad()
def start_grids(
    block: nn.Module,
    statistics: dict[str, Statistics],
    formats: dict[str, GridFormat],
    method: object,
    prefix: str,
    sources: Sequence[InputSource],
) -> InitialGrids:
    """Grids by `method`. The weights stay unrounded, except GPTQ's, whose compensation is part of them."""
    if isinstance(method, Awq):
        statistics = method.scale_inputs(block, sources, statistics, formats)
        method = method.clip or Rtn()
    linears = block_linears(block)
    before = {name: linears[name].weight.detach().clone() for name in formats}
    made = quantize_block(block, statistics, formats, method, prefix, sources=sources)  # type: ignore[arg-type]
    rounding = {name: root_mean_square(linears[name].weight - w) for name, w in before.items()}
    if not isinstance(method, Gptq):
        for name, w in before.items():
            linears[name].weight.copy_(w)
    return InitialGrids(made.grids, statistics, before, rounding)


def parameter_groups(
    block: nn.Module, linears: dict[str, FormatLinear], rounding: dict[str, Tensor], settings: Blockwise
) -> list[dict[str, object]]:
    """One group per trained tensor, with its learning rate; everything else of the block is frozen."""
    rates: list[tuple[nn.Parameter, Tensor]] = []
    for layer_name, layer in linears.items():
        for name, p in layer.trained_state().items():
            mean = p.detach().float().mean()
            rates.append((p, torch.full_like(mean, settings.lr_zero) if name == "zero" else settings.lr_scale * mean))
        if settings.train == "all":
            assert isinstance(layer.weight, nn.Parameter)
            rates.append((layer.weight, settings.lr_weight * rounding[layer_name]))
    if settings.train == "all":
        small = [p for p in block.parameters() if p.ndim == 1]
        rates.extend((p, settings.lr_norm * root_mean_square(p)) for p in small)
    for p in block.parameters():
        p.requires_grad_(False)
    groups: list[dict[str, object]] = []
    # One transfer: the host waits for the GPU once.
    values = torch.stack([rate.double() for _, rate in rates]).tolist() if rates else []
    for (p, _), rate in zip(rates, values, strict=True):
        if rate > 0:
            p.requires_grad_(True)
            groups.append({"params": [p], "lr": rate, "full_lr": rate})
    return groups


def root_mean_square(t: Tensor) -> Tensor:
    return t.detach().float().square().mean().sqrt()


def fit(
    block: nn.Module,
    targets: BlockTargets,
    groups: list[dict[str, object]],
    settings: Blockwise,
    index: int,
    prefix: str,
) -> tuple[float, float]:
    """Train; returns the error before and after. Deterministic: the order of windows follows (seed, index)."""
    num_windows = targets.seen.shape[0]
    num_held = round(num_windows * settings.held_out)
    order = torch.randperm(num_windows, generator=torch.Generator().manual_seed(settings.seed))
    held, rest = order[:num_held].sort().values, order[num_held:]
    judge = (held if num_held else rest).to(targets.seen.device)
    before = best = measure(block, targets, judge, settings)
    if not math.isfinite(before):
        raise UserError(f"the outputs of {prefix.rstrip('.')} are not finite on the calibration text; check the model")
    if not groups:
        return before, before
    passes = Passes(block, targets, groups, settings)
    fused = can_fuse(passes.params)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-12, fused=fused)
    state = snapshot(groups)
    gen = torch.Generator().manual_seed((settings.seed * 1_000_003 + index) % 2**63)
    steps_per_epoch = math.ceil(len(rest) / settings.batch)
    num_steps, step = settings.epochs * steps_per_epoch, 0
    for _ in range(settings.epochs):
        order = rest[torch.randperm(len(rest), generator=gen)].to(targets.seen.device)
        for rows in order.split(settings.batch):
            for group in optimizer.param_groups:
                fall = 0.5 * (1 + math.cos(math.pi * step / max(1, num_steps - 1)))
                group["lr"] = group["full_lr"] * (settings.floor + (1 - settings.floor) * fall)
            optimizer.zero_grad(set_to_none=True)
            passes(*targets.batch(rows))
            optimizer.step()
            step += 1
        error = measure(block, targets, judge, settings)
        # False for NaN: a run that diverges keeps its best state.
        if error < best:
            best, state = error, snapshot(groups)
    passes.replay = None  # breaks a reference cycle that holds the graph's memory
    restore(groups, state)
    return before, best


class Passes:
    """Forward and backward of a batch. On a GPU full batches replay a CUDA graph: launches would take most of the
    time."""

    def __init__(
        self, block: nn.Module, targets: BlockTargets, groups: list[dict[str, object]], settings: Blockwise
    ) -> None:
        self.block, self.targets, self.settings = block, targets, settings
        self.params = [p for g in groups for p in g["params"]]  # type: ignore[attr-defined]
        self.replay: GraphedPasses | None = None
        self.held: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, y: Tensor) -> None:
        if not x.is_cuda or len(x) != self.settings.batch:
            self._run(x, y)
            return
        if self.replay is None:
            self.held = (x.clone(), y.clone())
            self.replay = GraphedPasses(lambda: self._run(*self.held), self.params)
        for held, new in zip(self.held, (x, y), strict=True):
            held.copy_(new)
        self.replay()

    def _run(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = block_loss(self.block(x, *self.targets.args), y, self.settings.loss)
        loss.backward()
        return loss.detach()


def block_loss(out: Tensor, target: Tensor, kind: str) -> Tensor:
    """Mean over tokens of the squared error, relative to the token's target, or to the mean of all targets."""
    out, target = out.float(), target.float()
    error, size = (out - target).square().mean(-1), target.square().mean(-1)
    if kind == "square":
        return error.mean() / size.mean().clamp(min=1e-20)
    return (error / size.clamp(min=1e-20)).mean()


@torch.no_grad()
def measure(block: nn.Module, targets: BlockTargets, rows: Tensor, settings: Blockwise) -> float:
    """The loss over the given windows."""
    total = torch.zeros((), dtype=torch.float64, device=targets.device)
    for part in rows.split(max(settings.batch, 4)):
        x, y = targets.batch(part)
        total += block_loss(block(x, *targets.args), y, settings.loss) * len(part)
    return float(total) / len(rows)


def snapshot(groups: list[dict[str, object]]) -> list[Tensor]:
    return [p.detach().clone() for g in groups for p in g["params"]]  # type: ignore[attr-defined]


@torch.no_grad()
def restore(groups: list[dict[str, object]], state: list[Tensor]) -> None:
    for p, kept in zip((p for g in groups for p in g["params"]), state, strict=True):  # type: ignore[attr-defined]
        p.copy_(kept)


# -- as a stage of a run -------------------------------------------------------------------------------------
def quantize_blocks(
    model: BlocksModel,
    rules: Sequence[Rule],
    method: Method | Blockwise,
    calib_NT: Tensor | None,
    calibration: Calibration,
    files: BlockFiles,
    log: RunLog,
) -> QuantizeReport:
    """`quantize` or `train_blocks`, with a progress bar and the error of each block in the log."""
    num_steps = 0 if calib_NT is None else len(model.blocks)  # without a text all layers are rounded at once
    with during(method.name), log.progress(num_steps, f"{method.name} by block") as bar:

        def progress(done: int, total: int, error: float) -> None:
            log.log(done, output_error=error)
            bar.advance(1, error=error)

        if isinstance(method, Blockwise):
            assert calib_NT is not None
            return train_blocks(model, rules, calib_NT, method, calibration, progress=progress, files=files)
        steps: Iterable[BlockStep] = ()
        if calib_NT is not None:
            steps = walk(model, calib_NT, calibration, start=files.count())
        return quantize(
            model, rules, steps, method, progress=progress, files=files, onload_device=calibration.onload_device
        )
