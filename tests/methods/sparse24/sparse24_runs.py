"""Tiny 2:4 training runs for the tests; run as a script it prints the losses of one mesh as JSON on rank 0.

sparse24_runs.py DP TP METHOD ...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from ranks_golden import BASE

from shoestring.formats import convert, init_state, parse_format
from shoestring.formats.linear import full
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.methods.sparse24.optim import SparseAdam
from shoestring.methods.sparse24.training import (
    DenseFinish,
    DenseStart,
    FlipController,
    FlipMeter,
    MaskedDecay,
    MaskRefresh,
    NoiseClock,
    sparse_layers,
)
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.runlog import RunLog
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, warmup_cosine
from shoestring.train.step import IGNORED, Hook, Micro, Run
from shoestring.train.trainer import train

METHODS = ("dense", "srste", "fst", "controlled", "sste", "ast", "cast", "stacked", "slorb")
FORMATS = {
    "dense": "sparse24", "srste": "sparse24", "fst": "sparse24:tile:held:mvue",
    "controlled": "sparse24:tile:held:mvue", "sste": "sparse24:soft:mvue", "ast": "sparse24:held",
    "cast": "sparse24:held", "slorb": "sparse24:held+slorb8",
    "stacked": "sparse24:soft:mvue+int4:g8", "cut": "sparse24:tile:held:mvue", "started": "sparse24:tile:held:mvue",
}  # fmt: skip
# "started": FST with a given decay and a dense start. "cut": FST on layers of 12 outputs, whose second row of 4x4 tiles
# two FSDP2 ranks cut in two.
LAYERS = {"cut": "*.attn.[kv]"}
SHAPES = {"cut": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 4}}
TOKENS = 64


class Rows:
    """Four rows a step of 16 tokens, predictable enough to learn; one row is partly masked."""

    def __init__(self, micro: int = 2, mesh: Mesh | None = None) -> None:
        self.micro, self.mesh = micro, mesh

    def step(self, step: int) -> list[Micro]:
        start = torch.randint(0, 60, (4, 1), generator=torch.Generator().manual_seed(step))
        stream = (start + 3 * torch.arange(17)) % 60
        targets = stream[:, 1:].clone()
        targets[1, :5] = IGNORED
        rank, size = (0, 1) if self.mesh is None else (self.mesh.dp_rank, self.mesh.dp_size)
        share = 4 // size
        cuts = range(rank * share, (rank + 1) * share, min(self.micro, share))
        width = min(self.micro, share)
        index = torch.arange(TOKENS).view(4, 16)
        return [
            Micro(stream[i : i + width, :-1].contiguous(), targets[i : i + width], index[i : i + width]) for i in cuts
        ]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def hooks_of(method: str, model: Decoder, mesh: Mesh) -> list[Hook]:
    meter = FlipMeter(every=2)
    clock = NoiseClock(model, seed=5, tokens_per_step=TOKENS, mesh=mesh)
    if method == "srste":
        return [meter, MaskedDecay(2e-3)]
    if method in ("fst", "cut"):
        return [clock, meter, MaskRefresh(4), MaskedDecay(2e-3), DenseFinish(model, at=17)]
    if method == "controlled":
        decay = MaskedDecay(0.0)
        servo = FlipController(model, meter, decay, probe=4)
        return [clock, meter, MaskRefresh(4), decay, servo, DenseFinish(model, at=17, starts_dense=True)]
    if method == "started":
        start, finish = DenseStart(model, MaskedDecay(2e-3), until=4), DenseFinish(model, at=17, starts_dense=True)
        return [clock, meter, MaskRefresh(4), start, finish]
    if method in ("ast", "slorb"):
        return [meter, MaskRefresh(4)]
    if method in ("dense", "cast"):
        for layer in sparse_layers(model):
            layer.linear.start_dense_phase()
    if method == "cast":
        return [meter, MaskRefresh(4, dense_phase=True)]
    return [clock, meter]


def new_run(
    method: str, folder: Path | None = None, mesh: Mesh | None = None, **parallel: Any
) -> tuple[Run, list[Hook]]:
    mesh = mesh or open_mesh(MeshConfig(), "cpu")
    with torch.device("meta"):
        model = Decoder(ModelSpec(**{**BASE, **SHAPES.get(method, {})}))
        convert(model, [(LAYERS.get(method, "*.mlp.*"), parse_format(FORMATS[method]))])
    parallelize(model, mesh, ParallelConfig(**parallel))
    materialize(model, mesh.device)
    init_weights(model, seed=0)
    init_state(model)
    hooks = hooks_of(method, model, mesh)
    optimizer: Any = adamw(model, lr=1e-2)
    if method in ("ast", "cast", "slorb"):
        rule = "cast" if method == "cast" else "ast"
        optimizer = SparseAdam(model, lr=1e-2, rule=rule, strength=1e-2, anneal=8)  # type: ignore[arg-type]
    return Run(model, optimizer, mesh, RunLog(folder, main=mesh.is_main, quiet=True)), hooks


def fit(run: Run, steps: int, hooks: list[Hook], **options: Any) -> list[float]:
    schedule = warmup_cosine(1e-2, warmup=3, steps=20)
    data = options.pop("data", Rows(mesh=run.mesh))
    objective = options.pop("objective", None) or CrossEntropy()
    train(run, data, objective, steps=steps, schedule=schedule, hooks=hooks, log_every=1, **options)
    return [row["loss"] for row in run.log.history if "loss" in row]


def masks_of(run: Run) -> dict[str, str]:
    """The held masks of the whole weights, a letter a weight; every rank takes part."""
    held = {
        x.name: full(x.linear.weight_mask) for x in sparse_layers(run.model, dense_phase=True) if x.pruning.hold_mask
    }  # type: ignore[arg-type]
    return {name: "".join("x" if kept else "." for kept in mask.flatten().tolist()) for name, mask in held.items()}


def main() -> None:
    mesh = open_mesh(MeshConfig(dp=int(sys.argv[1]), tp=int(sys.argv[2])), "cpu")
    results, masks = {}, {}  # masks before and after training
    for method in sys.argv[3:]:
        run, hooks = new_run(method, mesh=mesh)
        masks[method] = [masks_of(run)]
        fit(run, 20, hooks)
        masks[method].append(masks_of(run))
        results[method] = [
            {k: v for k, v in row.items() if k not in ("time", "tokens_per_s")} for row in run.log.history
        ]
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps({"metrics": results, "masks": masks}))


if __name__ == "__main__":
    main()
