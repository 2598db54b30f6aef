"""`precision=fp8` of pre-training: which layers multiply in FP8 (formats/fp8_training.py), and what is not possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shoestring.config import option
from shoestring.errors import UserError
from shoestring.formats import Dense, FormatLinear, convert
from shoestring.formats.convert import Rule
from shoestring.formats.fp8_training import Fp8Training
from shoestring.kernels.lowbit.fp8_products import fp8_refusal
from shoestring.mesh import Mesh
from shoestring.model import Decoder, ModelSpec


@dataclass(frozen=True)
class PrecisionConfig:
    precision: Literal["full", "fp8"] = option(
        "full", "operands of the products: in the compute dtype, or FP8 (Ada and Hopper GPUs)", deciding=True
    )
    fp8_layers: str = option(
        "inner",
        "precision=fp8, linear layers of: inner (all blocks but the first and the last), all, none; or a glob",
        advanced=True,
        deciding=True,
    )
    fp8_gradient: Literal["e5m2", "e4m3"] = option(
        "e5m2", "precision=fp8: what gradients are rounded to; e4m3 has more digits and less range", advanced=True,
        deciding=True,
    )  # fmt: skip


def fp8_rules(cfg: PrecisionConfig, spec: ModelSpec) -> list[Rule]:
    """Behind rules of a method, which come first. The head, norms, embeddings and the loop over experts stay as they
    are."""
    if cfg.precision == "full" or cfg.fp8_layers == "none":
        return []
    glob = {"inner": "blocks.*", "all": "blocks.*"}.get(cfg.fp8_layers, cfg.fp8_layers)
    # The numbers of rows of experts change with every step, and products in FP8 need multiples of 16.
    stay = ["*.experts.*"] if spec.experts is not None else []
    if cfg.fp8_layers == "inner":
        if spec.num_layers < 3:
            raise UserError(
                f"fp8_layers=inner leaves the first and the last block out, and the model has {spec.num_layers}: use "
                "fp8_layers=all, or more blocks"
            )
        stay += ["blocks.0.*", f"blocks.{spec.num_layers - 1}.*"]
    return [*((name, Dense()) for name in stay), (glob, Fp8Training(cfg.fp8_gradient))]


def check_precision(
    cfg: PrecisionConfig, spec: ModelSpec, rules: Sequence[Rule], mesh: Mesh, *, graph: bool = False
) -> None:
    """UserError where the products of this model cannot be in FP8 here. `graph`: the setting of this name."""
    if cfg.precision == "full":
        return
    if graph:
        raise UserError("graph=true records a step, and products in FP8 were not tried there; leave graph= out")
    if reason := fp8_refusal(mesh.device):
        raise UserError(f"precision=fp8 is not possible here: {reason}; leave it out")
    tp = mesh.axis("tp")
    if tp is not None and cfg.fp8_layers != "none":
        raise UserError(
            f"precision=fp8 has one scale for a weight, which mesh.tp={tp.size()} would cut; use mesh.dp instead"
        )
    with torch.device("meta"):
        convert(Decoder(spec), rules)


def describe_precision(model: Decoder, device: torch.device) -> str | None:
    """What a run says at its beginning."""
    layers = [m for m in model.modules() if isinstance(m, FormatLinear)]
    count = sum(isinstance(layer.format, Fp8Training) for layer in layers)
    if not count:
        return None
    slow = "" if device.type == "cuda" else "; without FP8 tensor cores here: the same values, slower"
    return f"products in FP8 in {count} of {len(layers)} linear layers{slow}"
