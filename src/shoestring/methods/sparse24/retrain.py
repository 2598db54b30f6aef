"""Retraining a pruned model so that it stays 2:4: AST and CAST as settings of the ordinary trainer.

    student = build_student(folder, rules, mesh)        # weights of a model folder, layers with their Format
    run = retrain(Run(student, ...), teacher, data, Retrain(steps=1000))
    delivered = gather(student)                         # whole, every layer checked to be 2:4

    AST    forward with M * W; new masks by |W| every 10 steps; the decay of masked weights rises over the first
           quarter of the steps and is kept out of the momentum (optim.py)
    CAST   dense forward; masked weights are pulled to zero with rising strength, and pruned at the end
    both   the loss is cross entropy plus KL from the dense model; all weights are trained, not only pruned ones

Published settings: AST 0.33 CE + 0.67 KL at T = 2, pull 1e-4; CAST 2/3 CE + 1/3 KL at T = 1, pull 4e-7. AST's pull has
the unit of a gradient per weight, CAST's that of a gradient, so a constant depends on model and batch; by default both
are set by the gradient of the first step (FirstPull). In short runs the published constants leave AST's masks flipping
and CAST's masked weights far from zero.

Not implemented: CAST's learned scales per row, AST's loss on hidden states (weighted 0 in its code).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shoestring.errors import UserError
from shoestring.formats import Dense, FormatLinear, convert
from shoestring.formats.convert import Rule, resolve
from shoestring.formats.linear import full
from shoestring.mesh import Mesh
from shoestring.methods.sparse24.kernels.masks import GROUP
from shoestring.methods.sparse24.optim import SparseAdam
from shoestring.methods.sparse24.training import (
    FlipMeter,
    MaskRefresh,
    end_dense_phase,
    gradient_ratio,
    gradient_rms,
    pruned_weight,
    pruning_of,
    sparse_layers,
    start_dense_phase,
)
from shoestring.model import Decoder
from shoestring.model.parallel import ParallelConfig
from shoestring.shrink import qat
from shoestring.train.batched_formats import BatchedFormats
from shoestring.train.cuda_graph import GraphedForwardBackward
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy, Distill
from shoestring.train.optim import SCHEDULES
from shoestring.train.step import Hook, Run, StepCheckpointer
from shoestring.train.trainer import train

Rule24 = Literal["ast", "cast"]
# In units of the gradients' root mean square. Below 3 masked weights are not near zero when CAST prunes them, in a
# short run; between 3 and 50 the result is the same (experiments/prune24_toy, experiments/LOG.md).
CAST_PULL = 8.0


@dataclass(frozen=True)
class Retrain:
    steps: int
    rule: Rule24 = "ast"
    lr: float = 2e-4  # the paper's, for 131k tokens a step; works for 16k as well
    warmup: int = 20
    schedule: str = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0
    pull: float | None = None  # on masked weights; None: by the first gradient
    anneal: float | None = None  # share of the steps until the full pull; None: a quarter for AST, all for CAST
    refresh: int = 10  # steps between new masks
    kl: float | None = None  # None: as published for the rule
    ce: float | None = None
    temperature: float | None = None
    flip_every: int = 10

    def __post_init__(self) -> None:
        if self.rule not in ("ast", "cast"):
            raise UserError(f"rule={self.rule!r} is not possible: use ast or cast")
        if self.steps < 1 or self.flip_every < 1:
            raise UserError(f"steps={self.steps}, flip_every={self.flip_every}: both must be at least 1")
        if not self.lr >= 0:
            raise UserError(f"lr={self.lr} is not possible; give 0 or more")
        if self.anneal is not None and not 0 < self.anneal <= 1:
            raise UserError(f"anneal={self.anneal} is not a share of the steps: use more than 0 and at most 1")

    def objective(self, teacher: nn.Module | None) -> CrossEntropy | Distill:
        if teacher is None:
            return CrossEntropy()
        kl, ce, temperature = (0.67, 0.33, 2.0) if self.rule == "ast" else (1 / 3, 2 / 3, 1.0)
        return Distill(
            teacher,
            kl=kl if self.kl is None else self.kl,
            ce=ce if self.ce is None else self.ce,
            temperature=temperature if self.temperature is None else self.temperature,
        )

    @property
    def optimizer_share(self) -> float:
        """The share of the steps until the pull has its full strength."""
        return self.anneal if self.anneal is not None else 0.25 if self.rule == "ast" else 1.0

    def optimizer(self, model: nn.Module) -> SparseAdam:
        pull = 0.0 if self.pull is None else self.pull  # None: FirstPull sets it
        return SparseAdam(
            model, lr=self.lr, rule=self.rule, strength=pull, anneal=max(1, round(self.optimizer_share * self.steps)),
            weight_decay=self.weight_decay,
        )  # fmt: skip


def build_student(
    source: Path | str, rules: Sequence[Rule], mesh: Mesh, parallel: ParallelConfig | None = None
) -> Decoder:
    """qat.build_student for Formats that hold their masks (sparse24:held), which the optimizer and the forward
    share."""
    for glob, format in rules:
        pruning = pruning_of(format)
        if pruning is not None and not pruning.hold_mask:
            raise UserError(f"{glob}: {format.label} does not hold its mask; use sparse24:held")
    return qat.build_student(source, rules, mesh, parallel)


def retrain(
    run: Run,
    teacher: nn.Module | None,
    data: TokenData,
    settings: Retrain,
    *,
    checkpointer: StepCheckpointer | None = None,
    hooks: Sequence[Hook] = (),
    log_every: int = 10,
    evaluate: Callable[[Run], dict[str, float]] | None = None,
    eval_every: int = 0,
    graph: bool = False,
    batched: bool = False,
) -> Run:
    """Train run.model, whose optimizer is settings.optimizer(model); without a teacher on the text alone.

    `batched`: encode the weights of small layers together (train/batched_formats.py); not for compiled models.
    """
    if settings.rule == "cast":
        start_dense_phase(run.model)
    own: list[Hook] = [
        *([FirstPull(settings.rule)] if settings.pull is None else []),
        FlipMeter(settings.flip_every),
        MaskRefresh(settings.refresh, dense_phase=settings.rule == "cast"),
    ]
    objective = settings.objective(teacher)
    train(
        run,
        data,
        BatchedFormats(objective) if batched else objective,
        steps=settings.steps,
        schedule=SCHEDULES[settings.schedule](settings.lr, warmup=settings.warmup, steps=settings.steps),
        hooks=[*own, *hooks],
        clip=settings.clip,
        checkpointer=checkpointer,
        log_every=log_every,
        evaluate=evaluate,
        eval_every=eval_every,
        forward_backward=GraphedForwardBackward() if graph else None,
    )
    settle(run)
    return run


def settle(run: Run) -> None:
    """End the dense phase, and refresh the masks from the final weights."""
    end_dense_phase(run.model)
    MaskRefresh(1).refresh(run)


class FirstPull(Hook):
    """Sets the strength of the pull by the gradient of the pruned layers in the first step.

    AST: |gradient| / |weight|, so that the pull on masked weights equals the average gradient, and a larger gradient
    can bring one back. CAST: the root mean square of the gradients times CAST_PULL.
    """

    def __init__(self, rule: Rule24) -> None:
        self.rule = rule
        self.strength: float | None = None

    def before_step(self, run: Run) -> None:
        if self.strength is None:
            layers = sparse_layers(run.model, dense_phase=True)
            self.strength = gradient_ratio(layers) if self.rule == "ast" else CAST_PULL * gradient_rms(layers)
            run.log.log(run.step, pull=self.strength)
        for group in run.optimizer.param_groups:
            group["strength"] = self.strength

    def state_dict(self) -> dict[str, Any]:
        return {"strength": self.strength}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.strength = state["strength"]


@dataclass(frozen=True)
class Coverage:
    """Counts over the pruned layers of a finished model."""

    layers: int
    weights: int
    kept: int  # not zero

    def to_json(self) -> dict[str, Any]:
        return {
            "layers_24": self.layers,
            "weights": self.weights,
            "kept": self.kept,
            "kept_share": round(self.kept / max(1, self.weights), 6),
        }


@torch.no_grad()
def check_coverage(model: nn.Module, rules: Sequence[Rule], dtype: torch.dtype = torch.float32) -> Coverage:
    """Count every group of four of every layer that a rule converts; UserError names the first that is not 2:4.

    For a whole model (one process); weights are counted as they will be stored, in `dtype`.
    """
    targets, _ = resolve(model, rules, ("head", "lm_head"))
    pruned = {t.name: t.module for t in targets if not isinstance(t.format, Dense)}
    counts = []
    weights = 0
    for linear in pruned.values():
        assert isinstance(linear, FormatLinear)
        used = pruned_weight(linear, dtype).ne(0)
        bad = (used.unflatten(-1, (-1, GROUP)).sum(-1) > GROUP // 2).sum()
        counts.append(torch.stack([bad, used.sum()]))
        weights += used.numel()
    kept = 0
    # One transfer: the host waits for the GPU once.
    for (name, linear), (bad, own) in zip(pruned.items(), torch.stack(counts).tolist() if counts else [], strict=True):
        assert isinstance(linear, FormatLinear)
        if bad:
            raise UserError(
                f"{name}: {bad} of {linear.weight.numel() // GROUP} groups of four have more than two weights after "
                f"training, its format is {linear.format.label}; the run does not deliver a 2:4 model"
            )
        kept += own
    return Coverage(len(pruned), weights, kept)


@torch.no_grad()
def gather(model: Decoder, rules: Sequence[Rule], mesh: Mesh) -> Decoder | None:
    """The whole model with its Formats on the CPU of rank 0, None elsewhere; a collective. A sharded model cannot be
    checked group by group or packed in place."""
    whole: Decoder | None = None
    if mesh.is_main:
        with torch.device("meta"):
            whole = Decoder(model.spec)
            convert(whole, rules)
        whole.to_empty(device="cpu")
        whole.compute_dtype = model.compute_dtype
    places = {} if whole is None else whole.state_dict(keep_vars=True)
    for name, value in model.state_dict(keep_vars=True).items():
        value = full(value)
        if whole is not None:
            places[name].data.copy_(value)
    return whole
