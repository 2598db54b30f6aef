"""From settings to a reducer and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shoestring.config import option
from shoestring.errors import UserError
from shoestring.mesh import Mesh, MeshConfig
from shoestring.train.optim import adamw
from shoestring.train.reducers import demo
from shoestring.train.reducers.compressed import CompressedReducer
from shoestring.train.reducers.methods import parse_compressor
from shoestring.train.reducers.plain import SumReducer
from shoestring.train.step import Reducer


@dataclass(frozen=True)
class ReducerConfig:
    reducer: str = option(
        "plain",
        "how gradients are summed over mesh.replica: plain, bf16, int8, int4, terngrad, qsgd, topk:0.01, "
        "arc-topk:0.01, powersgd:4 or demo",
    )


def check_reducer(cfg: ReducerConfig, mesh: MeshConfig) -> None:
    """UserError for settings that cannot work, before anything is read."""
    if cfg.reducer == "plain":
        return
    parse_compressor(cfg.reducer)
    if mesh.replica == 1:
        raise UserError(
            f"reducer={cfg.reducer} sums gradients over replicas, and mesh.replica is 1: start several processes with "
            "`torchrun --nproc-per-node N -m shoestring run ... mesh.replica=N`, or leave reducer out"
        )


def build_reducer(
    cfg: ReducerConfig,
    model: nn.Module,
    mesh: Mesh,
    *,
    clip: float,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
) -> Reducer:
    if cfg.reducer == "plain":
        return SumReducer(mesh)
    return CompressedReducer(model, mesh, parse_compressor(cfg.reducer), clip=clip, seed=seed, say=say)


def build_optimizer(cfg: ReducerConfig, model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW; where the reducer is an optimizer itself, the one that it needs."""
    if cfg.reducer.partition(":")[0] == "demo":
        return demo.sgd(model, lr=lr, weight_decay=weight_decay)
    return adamw(model, lr=lr, weight_decay=weight_decay)
