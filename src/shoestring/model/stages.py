"""A Decoder cut into the stages of a pipeline.

A stage is the Decoder itself with `Elsewhere` in the place of what other stages hold, so that every name of a parameter
stays what it is in the whole model. The first stage holds the embedding, the last one the final norm and the head; a
tied embedding stands on both. Applied on the meta device, after formats and before everything else (parallel.py).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from shoestring.errors import UserError
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Block, Decoder, Elsewhere, Embedding


@dataclass(frozen=True)
class Stages:
    """How many layers each stage has."""

    layers: tuple[int, ...]

    def range_of(self, stage: int) -> range:
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])

    def held_by(self, rank: int, num_ranks: int) -> list[int]:
        """The stages of a process of the axis pp: they are dealt in turns."""
        return list(range(rank, len(self.layers), num_ranks))


def plan_stages(spec: ModelSpec, num: int, layers: str | None = None) -> Stages:
    """`layers`: as the user gave them (9,11,12). Else even by parameters: the head weighs as many layers as it has
    parameters of one, the embedding nothing, because it is not multiplied with."""
    if layers is not None:
        return _given(spec, num, layers)
    if num > spec.num_layers:
        raise UserError(f"{num} stages are more than the model's {spec.num_layers} layers; give a smaller mesh.pp")
    outer = spec.vocab_size * spec.d_model
    per_layer = (spec.num_params() - outer * (1 if spec.tied else 2)) / spec.num_layers
    share = (spec.num_layers + outer / per_layer) / num
    # Each stage ends where its share does, and leaves a layer at least to every stage behind it.
    ends, end = [], 0
    for stage in range(num - 1):
        end = min(max(round(share * (stage + 1)), end + 1), spec.num_layers - (num - 1 - stage))
        ends.append(end)
    bounds = [0, *ends, spec.num_layers]
    return Stages(tuple(b - a for a, b in pairwise(bounds)))


def _given(spec: ModelSpec, num: int, layers: str) -> Stages:
    parts = [part.strip() for part in layers.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= spec.num_layers for part in parts):
        raise UserError(f"mesh.layers={layers} is not possible; give the layers of each stage, such as 9,11,12")
    counts = tuple(map(int, parts))
    if len(counts) != num:
        raise UserError(f"mesh.layers={layers} is for {len(counts)} stages, and there are {num}; give {num} numbers")
    if sum(counts) != spec.num_layers:
        raise UserError(f"mesh.layers={layers} adds up to {sum(counts)}, the model has {spec.num_layers} layers")
    return Stages(counts)


def cut_stages_(model: Decoder, stages: Stages, held: Sequence[int]) -> None:
    """Leave what the stages `held` have."""
    first, last = 0 in held, len(stages.layers) - 1 in held
    mine = {layer for stage in held for layer in stages.range_of(stage)}
    for layer in range(len(model.blocks)):
        if layer not in mine:
            model.blocks[layer] = Elsewhere()
    if not first:
        model.positions = None
    if not (first or (last and model.spec.tied)):
        group, model.embed = model.embed.group, Elsewhere()  # type: ignore[assignment]
        model.embed.group = group  # the head asks the embedding who shares the vocabulary
    elif not first:
        model.embed.copied = True
    if not last:
        model.norm = Elsewhere()  # type: ignore[assignment]
        model.head = None


def view_of_stage(model: Decoder, stages: Stages, stage: int) -> Decoder:
    """One of several stages that a process holds: another Decoder over the same blocks."""
    view = copy.copy(model)
    view._modules = dict(model._modules)
    view.blocks = nn.ModuleList(model.blocks)
    cut_stages_(view, stages, [stage])
    return view


def copies(model: nn.Module) -> frozenset[int]:
    """The ids of parameters that another stage holds as well and counts."""
    return frozenset(id(m.weight) for m in model.modules() if isinstance(m, Embedding) and m.copied)


def own_blocks(model: nn.Module) -> Sequence[Block]:
    """The blocks that this process computes."""
    return [block for block in model.blocks if isinstance(block, Block)]  # type: ignore[union-attr]
