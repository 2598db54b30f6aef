"""Pre-train with 2:4 sparse feed-forward layers, then finish densely (FST): the delivered model is dense.

Run:     shoestring run train/sparse24_fst data=python steps=2000
         shoestring run train/sparse24_fst decay=6e-5             a fixed strength, no controller; dense warm-up as well
         shoestring run train/sparse24_fst weight_grad=mvue       gradients pruned at random at any width, as published
         shoestring run train/sparse24_fst schedule=cosine        instead of a constant rate until the dense finish
         shoestring run train/sparse24_fst finish=0               sparse to the end: the delivered model is 2:4
         shoestring run train/sparse24_fst resume=runs/train-sparse24_fst-...
Needs:   a CPU for size=tiny and small (which computes what the sparse tensor cores would, with dense products); a
         GPU for the others, where products that were measured to gain run sparse (benchmarks/train_sparse24)
Time:    as train/dense at size=tiny on a CPU; twice that in sparse steps with weight_grad=mvue, plain torch there
Expect:  flip_rate falls with the learning rate, mu ends between 0.6 and 0.95. GPT-2's small shape, 100M different
         tokens of Python (experiments/sparse24_quality), validation loss: 1.6604, with weight_grad=mvue 1.6720, and
         train/dense 1.6411, half the width 1.6752; with schedule=cosine and weight_grad=mvue 1.7356, train/dense with
         schedule=cosine 1.6970, half the width 1.7324 (all of seed 0; seeds 1 and 2: 1.6573 and 1.6582, dense 1.6325
         and 1.6402)
Leaves:  a run folder as train/dense does; metrics.jsonl also has flip_rate, kept_magnitude, masked_magnitude and mu,
         which the report plots, mask_change and masked_decay; on a GPU cusparselt-*.json, the algorithms
         of a resumed run. With finish=0 every feed-forward weight is 2:4, with the masks of the last steps,
         which is checked before packing: zeros in model/, and packed/ with 9/16 of those layers' bytes
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from shoestring.config import option
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.methods.sparse24 import training
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.tune import tuned_noise_clock
from shoestring.model import Decoder
from shoestring.recipes.train import dense
from shoestring.runlog import read_config
from shoestring.state.checkpoint import latest_step
from shoestring.train.data import TokenData
from shoestring.train.pretraining import expected_spec
from shoestring.train.step import Hook

# Products of narrower layers did not gain from pruned gradients (benchmarks/train_sparse24: 768 and 1280, with 16k
# tokens a step), which cost up to 0.8% of the loss (experiments/sparse24_quality).
PRUNED_GRADIENTS_FROM = 2048


@dataclass(frozen=True)
class SparseConfig(dense.Config):
    layers: str = option("*.mlp.*", "glob of the layers that are 2:4; the rest stays dense", deciding=True)
    weight_grad: Literal["auto", "mvue", "exact"] = option(
        "auto",
        f"prune output gradients too (mvue) or not; auto: from d_model={PRUNED_GRADIENTS_FROM} on",
        advanced=True,
        deciding=True,
    )
    flip_every: int = option(10, "steps between measurements of the flip rate", least=1, advanced=True)
    fp8_layers: str = option(
        "none", "precision=fp8, dense linear layers of: inner, all, none; or a glob", advanced=True, deciding=True
    )


AnyConfig = TypeVar("AnyConfig", bound=SparseConfig)


@dataclass(frozen=True)
class Config(SparseConfig):
    refresh: int = option(40, "steps between new masks", least=1, advanced=True)
    decay: float | None = option(
        None, "masked decay; none: found by the flip-rate controller", least=0, advanced=True, deciding=True
    )
    decay_on: Literal["gradient", "weight"] = option(
        "gradient",
        "where masked decay acts: before the optimizer, so that Muon orthogonalizes it too, or on the weight",
        advanced=True,
        deciding=True,
    )
    probe: int | None = option(
        None, "dense steps at the start; none: the warm-up; 0 only with decay=", least=0, advanced=True
    )
    finish: float = option(
        1 / 6, "share of the steps at the end that are dense; 0: none, the delivered model is 2:4", deciding=True
    )


def main(cfg: Config) -> Path:
    cfg = with_weight_grad(cfg)
    check(cfg)
    return dense.pretrain(
        cfg,
        "train/sparse24_fst",
        rules=[(cfg.layers, pruning(cfg))],
        make_hooks=partial(make_hooks, cfg),
        plots=training.flip_plots,
        deliver=partial(deliver_packed, cfg) if cfg.finish == 0 else lambda folder: [],
    )


def check(cfg: Config) -> None:
    if not 0 <= cfg.finish < 1:
        raise UserError(f"finish={cfg.finish} is not a share of the steps; use 0 to 0.99, 1/6 is the paper's")
    if cfg.decay is None and cfg.probe is not None:
        training.check_probe(cfg.probe, cfg.flip_every)
    if probe_steps(cfg) >= cfg.steps - dense_steps(cfg):
        raise UserError(
            f"no step would be sparse: of steps={cfg.steps} the first {probe_steps(cfg)} and the last "
            f"{dense_steps(cfg)} are dense; use more steps, or a smaller warmup= or probe="
        )
    if cfg.resume is not None:
        check_new_end(cfg, Path(cfg.resume))
    training.check_torch(pruning(cfg), cfg.mesh.num_processes)


def check_new_end(cfg: Config, folder: Path) -> None:
    """UserError for another number of steps in a run that is in its dense finish, which would move."""
    old, step = read_config(folder).get("config", {}).get("steps"), latest_step(folder / "checkpoints")
    if not old or old == cfg.steps or step is None or cfg.finish == 0:
        return
    became_dense, begins = old - dense_steps(replace(cfg, steps=old)), cfg.steps - dense_steps(cfg)
    if became_dense <= step < begins:
        raise UserError(
            f"steps={cfg.steps} has its dense finish from step {begins} on, and {folder} is dense since step "
            f"{became_dense}; leave steps out, or start a new run with init_from={folder}"
        )


def pruning(cfg: Config) -> Sparse24:
    assert cfg.weight_grad != "auto"
    return Sparse24("tile", hold_mask=True, weight_grad=cfg.weight_grad, precision=cfg.precision)


def make_hooks(cfg: Config, model: Decoder, mesh: Mesh, data: TokenData) -> list[Hook]:
    meter, decay = training.FlipMeter(cfg.flip_every), training.MaskedDecay(cfg.decay or 0.0, cfg.decay_on)
    refresh = training.MaskRefresh(cfg.refresh, until=cfg.steps)
    hooks: list[Hook] = [tuned_noise_clock(model, data, mesh, seed=cfg.seed, resume=cfg.resume), meter, refresh, decay]
    if cfg.decay is None:
        hooks.append(training.FlipController(model, meter, decay, probe=probe_steps(cfg)))
    elif probe_steps(cfg) > 0:
        hooks[-1] = training.DenseStart(model, decay, until=probe_steps(cfg))
    if cfg.finish > 0:
        hooks.append(training.DenseFinish(model, cfg.steps - dense_steps(cfg), starts_dense=probe_steps(cfg) > 0))
    return hooks


def probe_steps(cfg: Config) -> int:
    """Dense steps at the start, in which the controller measures, where there is one."""
    if cfg.probe is not None:
        return cfg.probe
    return max(cfg.warmup, 2 * cfg.flip_every) if cfg.decay is None else cfg.warmup


def dense_steps(cfg: Config) -> int:
    """At least one where a finish is requested: dense weights need a step of training."""
    return max(1, round(cfg.finish * cfg.steps)) if cfg.finish else 0


# -- what both 2:4 recipes do --------------------------------------------------------------------------------
def with_weight_grad(cfg: AnyConfig) -> AnyConfig:
    """Resolve `auto`; the run folder keeps the result for a resumed run."""
    if cfg.weight_grad != "auto":
        return cfg
    spec = expected_spec(cfg, vocab_size=cfg.vocab_size, context=cfg.context)
    return replace(cfg, weight_grad="mvue" if spec.d_model >= PRUNED_GRADIENTS_FROM else "exact")


def deliver_packed(cfg: SparseConfig, folder: Path) -> list[str]:
    """packed/ in the dtype that training multiplied with; returns a command to try."""
    training.save_packed(folder, cfg.layers, pick_dtype(cfg.dtype, pick_device(cfg.device)))
    return [f'shoestring generate {folder}/packed "def main("']
