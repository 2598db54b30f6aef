"""Quantization-aware training as a Format and an objective in the ordinary trainer: the pieces around it.

    clip_weights(model, rules, walk(model, windows))      BitDistiller's start: groups clamped to searched ranges
    build_student(folder, rules, mesh)                    built on meta, cut over the mesh, filled from a folder
    store_states(model, load_grids(path))                 start from the grids that another method found
    relative_adamw(model, rates), FallingRates(...)       learning rates as parts of what they move

The caller trains: train(Run(student, ...), data, CachedCakld(cache), ...). Learning rates are relative, so that they
fit any layer and any model: weights by parts of their root mean square, scales by parts of their mean, zero points by
codes.

Not supported: quantized activations; embeddings and the head keep their 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import Dense, GridFormat, Parts, convert, init_state
from shoestring.formats.convert import Rule, format_linears
from shoestring.formats.groups import split
from shoestring.formats.linear import full
from shoestring.formats.quantized import QuantizedFormat
from shoestring.mesh import Mesh
from shoestring.model import Decoder, load_into
from shoestring.model.blocks import BlocksModel
from shoestring.model.folder import read_spec
from shoestring.model.parallel import ParallelConfig, materialize, parallelize
from shoestring.shrink.block_files import BlockFiles, BlockProgress, FinishedBlock, finish_blocks
from shoestring.shrink.calibrate import BlockStep, Statistics, block_linears
from shoestring.shrink.chosen_grid import state_of
from shoestring.shrink.clip import Clip, clip_ranges
from shoestring.shrink.quantize import plan
from shoestring.train.optim import can_fuse
from shoestring.train.step import Hook, Run

# -- where training starts -----------------------------------------------------------------------------------


@torch.no_grad()
def clip_weights(
    model: BlocksModel,
    rules: Sequence[Rule],
    steps: Iterable[BlockStep],
    settings: Clip | None = None,
    *,
    progress: BlockProgress | None = None,
    files: BlockFiles | None = None,
) -> None:
    """Clamp every group of the layers in `rules` to the range with the least output error, in place.

    steps: walk(model, windows, Calibration(inputs="full")), as published. Query and key stay as they are. `files`:
    where finished blocks are kept; those that exist are loaded, with steps = walk(..., start=files.count()).
    """
    settings = settings or Clip(search="full")

    def clip(step: BlockStep, block: nn.Module, formats: dict[str, GridFormat], prefix: str) -> FinishedBlock:
        clip_block(block, step.statistics, formats, settings)
        return FinishedBlock()

    for _ in finish_blocks(model, plan(model, rules), steps, clip, files, progress):
        pass


@torch.no_grad()
def clip_block(
    block: nn.Module, statistics: dict[str, Statistics], formats: dict[str, GridFormat], settings: Clip
) -> None:
    linears = block_linears(block)
    for name, format in formats.items():
        if name.rsplit(".", 1)[-1] in settings.skip:
            continue
        w = linears[name].weight.float()
        state = state_of(format, w)  # type: ignore[arg-type]
        low, high = clip_ranges(w, statistics[name].hessian, format, state, settings)
        linears[name].weight.copy_(split(w, format.group).clamp(low, high).flatten(-2))


def build_student(
    path: Path | str, rules: Sequence[Rule], mesh: Mesh, parallel: ParallelConfig | None = None
) -> Decoder:
    """fp32 masters from `path` with the Formats of `rules`, on this mesh; a rank reads only its shards."""
    with torch.device("meta"):
        model = Decoder(read_spec(path)[0])
        convert(model, rules)
    parallelize(model, mesh, parallel or ParallelConfig())
    materialize(model, mesh.device)
    load_into(model, path)
    init_state(model)
    return model


def build_teacher(path: Path | str, mesh: Mesh, dtype: torch.dtype) -> Decoder:
    """The full model in `dtype`, frozen, on this mesh."""
    with torch.device("meta"):
        model = Decoder(read_spec(path)[0]).to(dtype)
    model.requires_grad_(False)
    parallelize(model, mesh, ParallelConfig(compute_dtype=dtype))
    materialize(model, mesh.device)
    load_into(model, path)
    return model.eval()


def read_grids(model: nn.Module) -> dict[str, Parts]:
    """The whole grids of layers that keep theirs as state, for `store_states`."""
    return {
        name: {n: full(getattr(layer, f"weight_{n}")).detach().float() for n in ("scale", "zero") if n in names}
        for name, layer in format_linears(model)
        if (names := layer.state_names) and "scale" in names and not layer.packed
    }


def save_grids(path: Path, grids: dict[str, Parts]) -> None:
    flat = {f"{name}:{part}": t.contiguous().cpu() for name, grid in grids.items() for part, t in grid.items()}
    save_file(flat, path)


def load_grids(path: Path) -> dict[str, Parts]:
    grids: dict[str, Parts] = {}
    for key, t in load_file(path).items():
        name, part = key.split(":")
        grids.setdefault(name, {})[part] = t
    return grids


def learned_rules(rules: Sequence[Rule]) -> list[Rule]:
    return [(glob, f.learn_grid() if isinstance(f, GridFormat) else f) for glob, f in rules]  # type: ignore[misc]


# -- learning rates ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Learning rates as parts of what they move; 0 freezes. shrink/lowbit_best takes a quarter of the defaults."""

    weight: float = 5e-3  # of the root mean square of a layer's weights
    scale: float = 3e-4  # of the mean of a layer's scales
    zero: float = 5e-3  # codes
    norm: float = 2e-3  # of the root mean square of a norm or bias
    rest: float = 5e-3  # embeddings and head, of their root mean square

    def __post_init__(self) -> None:
        values = (self.weight, self.scale, self.zero, self.norm, self.rest)
        if any(not 0 <= v <= 1 for v in values) or not any(values):
            raise UserError(
                f"learning rates {values} are not possible: each is a part between 0 and 1 of what it moves, for "
                "example 0.001, and one must be above 0"
            )

    def softer(self, part: float) -> Rates:
        return Rates(**{name: value * part for name, value in asdict(self).items()})


def coarsest(formats: Iterable[object]) -> int:
    """The fewest bits of the quantized ones among these Formats; 4 where there are none."""
    return min((f.bits for f in formats if isinstance(f, QuantizedFormat)), default=4)


def relative_adamw(model: nn.Module, rates: Rates) -> torch.optim.AdamW:
    """AdamW without decay, in groups of about equal rate (`full_lr`); parameters with rate 0 are frozen."""
    units: dict[int, Tensor] = {}
    for _, layer in format_linears(model):
        kept = layer.trained_state()
        for name, p in kept.items():
            mean = full(p.detach()).float().mean()
            units[id(p)] = torch.full_like(mean, rates.zero) if name == "zero" else rates.scale * mean
        if not isinstance(layer.format, Dense) and isinstance(layer.weight, nn.Parameter):
            units[id(layer.weight)] = rates.weight * _size(layer.weight)
    for p in model.parameters():
        if id(p) not in units:
            rate = rates.norm if p.ndim == 1 else rates.rest
            units[id(p)] = rate * _size(p) if p.is_floating_point() else torch.zeros((), device=p.device)
    # One transfer: the host waits for the GPU once.
    known = dict(zip(units, torch.stack([u.double() for u in units.values()]).tolist(), strict=True))
    groups: dict[float, list[nn.Parameter]] = {}
    for p in model.parameters():
        lr = known[id(p)]
        if p.is_floating_point():
            p.requires_grad_(lr > 0)
        if lr > 0:
            # Rounded to an eighth of an octave: a few dozen groups instead of hundreds.
            groups.setdefault(2.0 ** (round(8 * math.log2(lr)) / 8), []).append(p)
    if not groups:
        raise UserError("nothing is left to train: all learning rates are 0")
    fused = can_fuse(p for params in groups.values() for p in params)
    made = [{"params": params, "lr": lr, "full_lr": lr} for lr, params in groups.items()]
    return torch.optim.AdamW(made, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-12, fused=fused)


def _size(p: Tensor) -> Tensor:
    return full(p.detach()).float().square().mean().sqrt()


class FallingRates(Hook):
    """Every group's rate: linear warm-up, then a cosine down to `floor` of its full rate at the last step."""

    def __init__(self, steps: int, *, warmup: int = 0, floor: float = 0.05) -> None:
        self.steps, self.warmup, self.floor = steps, warmup, floor

    def before_step(self, run: Run) -> None:
        self.at(run)

    def at(self, run: Run, least: float = 0.0) -> None:
        """Set the rates of this step, or of the part `least` of the schedule where that is later."""
        done = max(least, min(1.0, (run.step - self.warmup) / max(1, self.steps - 1 - self.warmup)))
        part = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
        if run.step < self.warmup:
            part = (run.step + 1) / self.warmup
        for group in run.optimizer.param_groups:
            group["lr"] = group["full_lr"] * part
