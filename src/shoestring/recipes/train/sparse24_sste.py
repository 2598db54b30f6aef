"""Pre-train with 2:4 sparse feed-forward layers to the end (S-STE): the delivered model is 2:4.

Run:     shoestring run train/sparse24_sste data=python steps=2000
         shoestring run train/sparse24_sste method=srste decay=2e-4      the older baseline
         shoestring run train/sparse24_sste weight_grad=exact            without the random pruning of gradients
         shoestring run train/sparse24_sste precision=fp8                with products in FP8
         shoestring run train/sparse24_sste schedule=wsd                 a learning rate that stays, then falls to zero
         shoestring run train/sparse24_sste resume=runs/train-sparse24_sste-...
Needs:   a CPU for size=tiny and small (which computes what the sparse tensor cores would, with dense products); a
         GPU for the others, where products that were measured to gain run sparse (bench/train_sparse24)
Time:    about twice the processor time of train/dense at size=tiny: gradients are pruned in plain torch
Expect:  every feed-forward weight is 2:4, which is checked before packing. GPT-2's small shape, 100M different tokens
         of Python (bench/sparse24_quality), validation loss: 1.7462, method=srste 1.7486, dense 1.6970; with
         schedule=wsd 1.6840, method=srste 1.6760, dense 1.6379
Leaves:  a run folder as train/dense does, with zeros in model/, and packed/ with 9/16 of those layers' bytes;
         metrics.jsonl also has flip_rate, kept_magnitude and masked_magnitude, and the report plots them
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from shoestring.config import option
from shoestring.errors import UserError
from shoestring.formats import Sparse24, convert, pack
from shoestring.formats.convert import Rule
from shoestring.kernels.sparse24 import is_24
from shoestring.measure import pick_device, pick_dtype
from shoestring.mesh import Mesh
from shoestring.model import Decoder, load_model, save_model
from shoestring.recipes.train import dense
from shoestring.recipes.train.sparse24_fst import flip_plots
from shoestring.runlog import RunLog
from shoestring.train.data import TokenData
from shoestring.train.hooks import Hook
from shoestring.train.sparse24 import FlipMeter, MaskedDecay, NoiseClock
from shoestring.train.sparse24_tune import tune_products


@dataclass(frozen=True)
class Config(dense.Config):
    method: Literal["sste", "srste"] = option("sste", "soft threshold, or hard masks with decay (SR-STE)")
    layers: str = option("*.mlp.*", "glob of the layers that are 2:4; the rest stays dense")
    weight_grad: Literal["mvue", "exact"] = option("mvue", "prune the output gradients too, or keep them")
    precision: Literal["full", "fp8"] = option(
        "full", "operands of the 2:4 layers' products: as they are, or FP8"
    )
    decay: float = option(2e-4, "masked decay of method=srste", least=0)
    flip_every: int = option(10, "steps between measurements of the flip rate", least=1)


def main(cfg: Config) -> Path:
    folder = dense.pretrain(
        cfg,
        "train/sparse24_sste",
        rules=make_rules(cfg),
        make_hooks=partial(make_hooks, cfg),
        plots=flip_plots,
    )
    if os.environ.get("RANK", "0") == "0":
        save_packed(folder, cfg.layers, pick_dtype(cfg.dtype, pick_device(cfg.device)))
    return folder


def make_rules(cfg: Config) -> list[Rule]:
    select = "soft" if cfg.method == "sste" else "row"
    return [(cfg.layers, Sparse24(select, weight_grad=cfg.weight_grad, precision=cfg.precision))]


def make_hooks(cfg: Config, model: Decoder, mesh: Mesh, data: TokenData) -> list[Hook]:
    tune_products(model, data.micro * data.context, model.compute_dtype, RunLog(None, main=mesh.is_main).say)
    clock = NoiseClock(model, seed=cfg.seed, tokens_per_step=data.tokens_per_step, mesh=mesh)
    decay = [MaskedDecay(cfg.decay)] if cfg.method == "srste" else []
    return [clock, FlipMeter(cfg.flip_every), *decay]


def save_packed(folder: Path, layers: str, dtype: torch.dtype) -> None:
    """packed/ beside model/: the same weights without their zeros, in the dtype that training multiplied with (16 bits
    have a decoding kernel on a GPU).
    """
    loaded = load_model(folder / "model", dtype=torch.float32)
    report = convert(loaded.model, [(layers, Sparse24())])
    for changed in report.changed:
        weight = loaded.model.get_parameter(f"{changed.name}.weight")
        if not is_24(weight):
            raise UserError(f"{changed.name} is not 2:4 after training; packing it would change the model")
    loaded.model.compute_dtype = dtype
    pack(loaded.model, dtype=dtype)
    save_model(folder / "packed", loaded.model, loaded.tokenizer)
    RunLog(None).say(f"{len(report.changed)} layers are 2:4; packed model in {folder}/packed")
