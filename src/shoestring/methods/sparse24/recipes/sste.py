"""Pre-train with 2:4 sparse feed-forward layers to the end (S-STE): the delivered model is 2:4.

Run:     shoestring run train/sparse24_sste data=python steps=2000
         shoestring run train/sparse24_sste method=srste decay=2e-4      the older baseline
         shoestring run train/sparse24_sste weight_grad=mvue             gradients pruned at random at any width
         shoestring run train/sparse24_sste precision=fp8                with products in FP8
         shoestring run train/sparse24_sste precision=fp8 fp8_layers=inner       those of attention, too
         shoestring run train/sparse24_sste schedule=cosine              instead of a constant rate, then linear decay
         shoestring run train/sparse24_sste resume=runs/train-sparse24_sste-...
Needs:   a CPU for size=tiny and small (which computes what the sparse tensor cores would, with dense products); a
         GPU for the others, where products that were measured to gain run sparse (benchmarks/train_sparse24)
Time:    as train/dense at size=tiny on a CPU; twice that with weight_grad=mvue, which is plain torch there
Expect:  every feed-forward weight is 2:4, which is checked before packing. GPT-2's small shape, 100M different tokens
         of Python (experiments/sparse24_quality), validation loss: 1.6699, and method=srste 1.6626, train/dense
         schedule=wsd 1.6411; with weight_grad=mvue 1.6840, and method=srste 1.6760; with weight_grad=mvue
         schedule=cosine 1.7462, and method=srste 1.7486, train/dense 1.6970 (all of seed 0; seeds 1 and 2: 1.6631 and
         1.6625, dense 1.6325 and 1.6402)
Leaves:  a run folder as train/dense does, with zeros in model/, and packed/ with 9/16 of those layers' bytes;
         metrics.jsonl also has flip_rate, kept_magnitude and masked_magnitude, and the report plots them; on a GPU
         cusparselt-*.json, the algorithms of a resumed run
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from shoestring.config import option
from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.recipes.fst import SparseConfig, deliver_packed, with_weight_grad
from shoestring.methods.sparse24.training import FlipMeter, MaskedDecay, check_torch, flip_plots
from shoestring.methods.sparse24.tune import tuned_noise_clock
from shoestring.model import Decoder
from shoestring.recipes.train import dense
from shoestring.train.data import TokenData
from shoestring.train.step import Hook


@dataclass(frozen=True)
class Config(SparseConfig):
    method: Literal["sste", "srste"] = option(
        "sste", "soft threshold, or hard masks with decay (SR-STE)", deciding=True
    )
    decay: float | None = option(None, "masked decay of method=srste; none: 2e-4", least=0, advanced=True)


def main(cfg: Config) -> Path:
    cfg = with_weight_grad(cfg)
    check_torch(pruning(cfg), cfg.mesh.num_processes)
    if cfg.method == "sste" and cfg.decay is not None and cfg.resume is None:
        raise UserError(f"decay={cfg.decay} only applies to method=srste; leave it out, or give method=srste")
    return dense.pretrain(
        cfg,
        "train/sparse24_sste",
        rules=[(cfg.layers, pruning(cfg))],
        make_hooks=partial(make_hooks, cfg),
        plots=flip_plots,
        deliver=lambda folder: deliver_packed(cfg, folder),
    )


def pruning(cfg: Config) -> Sparse24:
    assert cfg.weight_grad != "auto"
    select = "soft" if cfg.method == "sste" else "row"
    return Sparse24(select, weight_grad=cfg.weight_grad, precision=cfg.precision)


def make_hooks(cfg: Config, model: Decoder, mesh: Mesh, data: TokenData) -> list[Hook]:
    decay = [MaskedDecay(2e-4 if cfg.decay is None else cfg.decay)] if cfg.method == "srste" else []
    clock = tuned_noise_clock(model, data, mesh, seed=cfg.seed, resume=cfg.resume)
    return [clock, FlipMeter(cfg.flip_every), *decay]
