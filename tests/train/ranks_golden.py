"""Runs on every rank: trains a tiny decoder on several meshes and prints the losses as JSON on rank 0.

ranks_golden.py '[{"dp": 2, "tp": 2, "compile": "blocks", "recompute": true, "spec": {...}}, ...]'
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from shoestring.formats import convert, init_state, parse_format
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.model.spec import Experts
from shoestring.runlog import RunLog
from shoestring.train.muon import muon
from shoestring.train.objectives import CrossEntropy, Distill
from shoestring.train.optim import adamw, warmup_cosine
from shoestring.train.step import IGNORED, Micro, Run
from shoestring.train.trainer import train

STEPS = 3
BASE = {
    "vocab_size": 96, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "d_ff": 48,
    "max_positions": 32,
}  # fmt: skip


class MaskedRows:
    """8 rows a step in micro-batches of 2; every row has a prompt of its own length, one row is masked whole."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def step(self, step: int) -> list[Micro]:
        g = torch.Generator().manual_seed(1000 + step)
        stream = torch.randint(0, 90, (8, 17), generator=g)
        targets = stream[:, 1:].clone()
        for row in range(8):
            targets[row, : (5 * row + step) % 15] = IGNORED
        targets[3] = IGNORED
        share = 8 // self.mesh.dp_size
        mine = range(self.mesh.dp_rank * share, (self.mesh.dp_rank + 1) * share)
        micro = max(1, min(2, share))
        index = torch.arange(8 * 16).view(8, 16)
        return [
            Micro(stream[lo : lo + micro, :-1].contiguous(), targets[lo : lo + micro], index[lo : lo + micro])
            for lo in mine[::micro]
        ]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def spec_of(case: dict[str, Any]) -> ModelSpec:
    experts = Experts(**case["experts"]) if "experts" in case else None
    return ModelSpec(**{**BASE, **case.get("spec", {})}, experts=experts)


def losses(case: dict[str, Any]) -> list[float]:
    mesh = open_mesh(MeshConfig(case.get("dp", 1), case.get("tp", 1), case.get("replica", 1)), "cpu")
    with torch.device("meta"):
        model = Decoder(spec_of(case))
        if "format" in case:
            convert(model, [("*", parse_format(case["format"]))])
    parallelize(model, mesh, ParallelConfig(recompute=case.get("recompute", False), compile=case.get("compile", "off")))
    materialize(model, "cpu")
    init_weights(model, seed=3)
    init_state(model)
    objective: Any = CrossEntropy(chunk=case.get("chunk", 24))
    if case.get("teacher"):
        with torch.device("meta"):
            teacher = Decoder(spec_of(case))
        parallelize(teacher, mesh, ParallelConfig())
        materialize(teacher, "cpu")
        init_weights(teacher, seed=4)
        objective = Distill(teacher, temperature=2.0, kl=0.5, ce=0.5, chunk=24)
    optimizer = muon(model, lr=1e-2) if case.get("muon") else adamw(model, lr=1e-2)
    run = Run(model, optimizer, mesh, RunLog(None, main=mesh.is_main, quiet=True))
    train(run, MaskedRows(mesh), objective, steps=STEPS, log_every=1, clip=0.5,
          schedule=warmup_cosine(1e-2, warmup=2, steps=STEPS))  # fmt: skip
    # The last number sees the logits path too, gathered over the vocabulary.
    with torch.no_grad():
        logits = model(torch.arange(16)[None])
    return [value for row in run.log.history for value in (row["loss"], row["grad_norm"])] + [
        logits.double().square().mean().item()
    ]


def main() -> None:
    results = [losses(case) for case in json.loads(sys.argv[1])]
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()
