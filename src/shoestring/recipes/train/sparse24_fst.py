"""Pre-train with 2:4 sparse feed-forward layers, then finish densely (FST): the delivered model is dense.

Run:     shoestring run train/sparse24_fst data=python steps=2000
         shoestring run train/sparse24_fst decay=6e-5             a strength of your own, no probe, no controller
         shoestring run train/sparse24_fst weight_grad=exact      without the random pruning of gradients
         shoestring run train/sparse24_fst schedule=wsd           a learning rate that stays until the dense finish
         shoestring run train/sparse24_fst resume=runs/train-sparse24_fst-...
Needs:   a CPU for size=tiny and small (which computes what the sparse tensor cores would, with dense products); a
         GPU for the others, where products that were measured to gain run sparse (bench/train_sparse24)
Time:    about twice the processor time of train/dense at size=tiny: gradients are pruned in plain torch
Expect:  flip_rate falls with the learning rate, mu ends between 0.6 and 0.95. GPT-2's small shape, 100M different
         tokens of Python (bench/sparse24_quality), validation loss: 1.7356, dense 1.6970, half the width 1.7324; with
         schedule=wsd 1.6702 (mean of three seeds), dense 1.6379, half the width 1.6752
Leaves:  a run folder as train/dense does; metrics.jsonl also has flip_rate, mask_change, kept_magnitude,
         masked_magnitude, mu and masked_decay, and the report plots them
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from shoestring.config import option
from shoestring.errors import UserError
from shoestring.formats import Sparse24
from shoestring.formats.convert import Rule
from shoestring.mesh import Mesh
from shoestring.model import Decoder
from shoestring.recipes.train import dense
from shoestring.report import Curves, Section, Series
from shoestring.runlog import RunLog, read_jsonl
from shoestring.train.data import TokenData
from shoestring.train.hooks import Hook
from shoestring.train.sparse24 import (
    DenseFinish,
    FlipController,
    FlipMeter,
    MaskedDecay,
    MaskRefresh,
    NoiseClock,
    check_probe,
)
from shoestring.train.sparse24_tune import tune_products


@dataclass(frozen=True)
class Config(dense.Config):
    layers: str = option("*.mlp.*", "glob of the layers that are 2:4; the rest stays dense")
    weight_grad: Literal["mvue", "exact"] = option("mvue", "prune the output gradients too, or keep them")
    refresh: int = option(40, "steps between new masks", least=1)
    decay: float | None = option(None, "masked decay; none: found by the flip-rate controller", least=0)
    probe: int | None = option(None, "dense steps before the controller starts; none: the warm-up", least=0)
    finish: float = option(1 / 6, "share of the steps at the end that are dense")
    flip_every: int = option(10, "steps between measurements of the flip rate", least=1)


def main(cfg: Config) -> Path:
    if not 0 <= cfg.finish < 1:
        raise UserError(f"finish={cfg.finish} is not a share of the steps; use 0 to 0.99, 1/6 is the paper's")
    if cfg.decay is None and cfg.probe is not None:
        check_probe(cfg.probe, cfg.flip_every)
    return dense.pretrain(
        cfg,
        "train/sparse24_fst",
        rules=make_rules(cfg),
        make_hooks=partial(make_hooks, cfg),
        plots=flip_plots,
    )


def make_rules(cfg: Config) -> list[Rule]:
    return [(cfg.layers, Sparse24("tile", hold_mask=True, weight_grad=cfg.weight_grad))]


def make_hooks(cfg: Config, model: Decoder, mesh: Mesh, data: TokenData) -> list[Hook]:
    tune_products(model, data.micro * data.context, model.compute_dtype, RunLog(None, main=mesh.is_main).say)
    clock = NoiseClock(model, seed=cfg.seed, tokens_per_step=data.tokens_per_step, mesh=mesh)
    meter, decay = FlipMeter(cfg.flip_every), MaskedDecay(cfg.decay or 0.0)
    hooks: list[Hook] = [clock, meter, MaskRefresh(cfg.refresh), decay]
    if cfg.decay is None:
        probe = max(cfg.warmup, 2 * cfg.flip_every) if cfg.probe is None else cfg.probe
        hooks.append(FlipController(model, meter, decay, probe=probe))
    return [*hooks, DenseFinish(model, at=cfg.steps - round(cfg.finish * cfg.steps))]


def flip_plots(folder: Path) -> list[Section]:
    """Flip rate, magnitudes and the controller's mu against the step."""
    rows = read_jsonl(folder / "metrics.jsonl")

    def curves(title: str, label: str, *names: str) -> Curves:
        picked = {n: [r for r in rows if r.get(n) is not None] for n in names}
        series = [Series(n, [r["step"] for r in p], [r[n] for r in p]) for n, p in picked.items()]
        return Curves(title, series, "step", label)

    return [
        curves("Flip rate", "share of the mask that one step changes", "flip_rate"),
        curves("Kept and masked weights", "mean |w|", "kept_magnitude", "masked_magnitude"),
        curves("Flip rate over that of a dense run", "mu", "mu"),
    ]
