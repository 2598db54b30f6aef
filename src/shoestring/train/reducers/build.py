"""From settings to a reducer and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shoestring import plugins
from shoestring.config import option
from shoestring.errors import UserError, shown, suggest
from shoestring.formats.linear import local
from shoestring.mesh import Mesh, MeshConfig
from shoestring.report import Section, metric_curves
from shoestring.runlog import read_metrics
from shoestring.train.muon import muon
from shoestring.train.optim import adamw
from shoestring.train.reducers import demo
from shoestring.train.reducers.auto import choose_compressor
from shoestring.train.reducers.compressed import CompressedReducer, choose, trained_parameters
from shoestring.train.reducers.compressor import Compressor
from shoestring.train.reducers.methods import parse_compressor
from shoestring.train.reducers.plain import SumReducer
from shoestring.train.reducers.rounds import Link
from shoestring.train.step import Reducer

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": adamw, "muon": muon}


@dataclass(frozen=True)
class ReducerConfig:
    reducer: str = option(
        "plain",
        "how gradients are summed over mesh.replica: plain, bf16, int8, int4, terngrad, qsgd, topk:0.01, "
        "arc-topk:0.01, powersgd:4 or demo; auto measures the link and takes the fastest",
        advanced=True,
        deciding=True,
    )
    selector: str = option(
        "uniform",
        "which layer is sent how, with reducer=topk: uniform (all alike), round-robin, random (whole layers), l-greco "
        "(by errors), hyper (learned)",
        advanced=True,
        deciding=True,
    )
    budget_mb: float | None = option(
        None,
        "megabytes a replica may send per step for the selected layers; none: what reducer= alone would",
        least=0,
        advanced=True,
    )
    allow: Literal["close", "lossy"] = option(
        "close",
        "what reducer=auto may take: close to the plain loss (plain, bf16, int8, int4), or also topk, powersgd",
        advanced=True,
    )
    overlap: bool = option(
        False,
        "send gradients during the backward pass, each tensor clipped to 3x its running norm; on CPUs",
        advanced=True,
    )


def check_reducer(cfg: ReducerConfig, mesh: MeshConfig) -> None:
    """UserError for settings that cannot work, before anything is read."""
    if cfg.allow != "close" and cfg.reducer != "auto":
        raise UserError(f"allow={cfg.allow} is for reducer=auto; with reducer={cfg.reducer} leave it out")
    known = ["uniform", *plugins.names("selectors")]
    if cfg.selector not in known:
        raise UserError(
            f"selector={shown(cfg.selector)}: allowed are {', '.join(known)}.{suggest(cfg.selector, known)}"
        )
    if cfg.selector != "uniform" and cfg.reducer.partition(":")[0] != "topk":
        raise UserError(
            f"selector={cfg.selector} chooses among shares of Top-K: give reducer=topk:0.01, not {cfg.reducer}"
        )
    if cfg.budget_mb is not None and cfg.selector == "uniform":
        raise UserError(f"budget_mb={cfg.budget_mb:g} is for a selector: give selector=l-greco, or leave it out")
    if cfg.overlap:
        _check_overlap(cfg, mesh)
    if cfg.reducer == "plain":
        return
    if cfg.reducer != "auto":
        parse_compressor(cfg.reducer)
    if mesh.replica == 1:
        raise UserError(
            f"reducer={cfg.reducer} sums gradients over replicas, and mesh.replica is 1: start several processes with "
            "`torchrun --nproc-per-node N -m shoestring run ... mesh.replica=N`, or leave reducer out"
        )


def _check_overlap(cfg: ReducerConfig, mesh: MeshConfig) -> None:
    if cfg.reducer == "plain":
        raise UserError("overlap=true is for compressed sums: give reducer=int8 or another one, or leave it out")
    if cfg.selector != "uniform":
        raise UserError(
            f"selector={cfg.selector} plans all layers of a step at once, so nothing can be sent during the backward "
            "pass; leave overlap out"
        )
    if mesh.dp * mesh.tp > 1:
        raise UserError(
            f"overlap=true needs whole copies of the model, and mesh.dp={mesh.dp} mesh.tp={mesh.tp} cut it: FSDP2 "
            "completes gradients after the backward pass; leave overlap out"
        )


def build_reducer(
    cfg: ReducerConfig,
    model: nn.Module,
    mesh: Mesh,
    *,
    clip: float,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
    folder: Path | None = None,
) -> Reducer:
    """`folder`: of the run, for the plans of a selector."""
    if cfg.reducer == "plain":
        return SumReducer(mesh)
    if cfg.overlap and mesh.device.type != "cpu":
        raise UserError(
            f"overlap=true is for CPUs, and this run is on {mesh.device.type}; leave it out (in a loop of your own, "
            "compress_ddp sends during the backward pass on GPUs too)"
        )
    compressor = _measured(cfg, model, mesh, say) if cfg.reducer == "auto" else parse_compressor(cfg.reducer)
    chosen_by: dict[str, Any] = {"selector": cfg.selector, "folder": folder, "overlap": cfg.overlap}
    if cfg.budget_mb is not None:
        chosen_by["budget"] = cfg.budget_mb * 1e6
    return CompressedReducer(model, mesh, compressor, clip=clip, seed=seed, say=say, **chosen_by)


def _measured(cfg: ReducerConfig, model: nn.Module, mesh: Mesh, say: Callable[[str], None]) -> Compressor:
    params = trained_parameters(model)
    shapes = {name: local(p).shape for name, p in params.items()}
    link = Link(mesh.group("replica"))
    lossy = cfg.allow == "lossy"
    compressor = choose_compressor(
        link, shapes, lambda wanted: choose(wanted, model, params), mesh.device, lossy=lossy, say=say
    )
    # Groups of replicas at different places of dp and tp measure for themselves; the first one decides.
    return parse_compressor(mesh.broadcast_object(compressor.name))


def report_sections(folder: Path) -> list[Section]:
    """Bytes, shares and residuals over the steps; nothing where gradients were summed plainly. And what methods add."""
    metrics = read_metrics(folder / "metrics.jsonl")
    added = [plugins.load("run_reports", name)(folder) for name in plugins.names("run_reports")]
    return [
        metric_curves(metrics, "Gradients sent", "MB per step and replica", "sent_mb"),
        metric_curves(metrics, "Compression", "times fewer bytes than plain", "compression"),
        metric_curves(metrics, "Share of the time spent on summing gradients", "share", "reduce_share"),
        metric_curves(metrics, "Error feedback", "norm of the residual", "residual_norm"),
        *(section for sections in added for section in sections),
    ]


def build_optimizer(
    cfg: ReducerConfig, model: nn.Module, *, lr: float, weight_decay: float, optimizer: str = "adamw"
) -> torch.optim.Optimizer:
    """`optimizer`: adamw or muon; where the reducer is an optimizer itself, the one that it needs."""
    if _is_demo(cfg):
        return demo.sgd(model, lr=lr, weight_decay=weight_decay)
    return OPTIMIZERS[optimizer](model, lr=lr, weight_decay=weight_decay)


def check_optimizer(optimizer: str, cfg: ReducerConfig) -> None:
    if optimizer != "adamw" and _is_demo(cfg):
        raise UserError(
            f"reducer={cfg.reducer} is an optimizer by itself, whose signs optimizer={optimizer} cannot take; give "
            "optimizer=adamw, or another reducer"
        )


def _is_demo(cfg: ReducerConfig) -> bool:
    return cfg.reducer.partition(":")[0] == "demo"
