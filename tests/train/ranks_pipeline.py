"""Runs on every rank: gradients, norm and loss of a pipeline against one process; prints what differs on rank 0.

ranks_pipeline.py '[{"mesh": {"pp": 2, "dp": 2}, "schedules": ["1f1b"], "tied": true, "format": null}, ...]'
ranks_pipeline.py '[{"mesh": {"pp": 4}, "steps": 4}, {"mesh": {"pp": 2, "tp": 2}, "steps": 8}, ...]' FOLDER

With a folder: one run, saved at the end of each stretch and resumed on the next one's mesh; prints its losses.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoestring.formats import parse_format
from shoestring.formats.linear import full
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.model import ModelSpec, save_model
from shoestring.model.parallel import ParallelConfig
from shoestring.model.stages import copies
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.gradients import clip_gradients
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant
from shoestring.train.pipeline import StagePipeline, stages_of
from shoestring.train.pretraining import build_model
from shoestring.train.step import IGNORED, Micro, PlainForwardBackward, Run
from shoestring.train.trainer import train

SPEC = ModelSpec(
    vocab_size=64, d_model=32, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, max_positions=32
)  # fmt: skip
ALONE = Mesh(0, 1, torch.device("cpu"))
MICROS = 4


def micros_of(share: int) -> list[Micro]:
    """Prompts of unequal lengths are masked, so that micro-batches count unequal numbers of targets."""
    g = torch.Generator().manual_seed(share)
    found = []
    for i in range(MICROS):
        tokens = torch.randint(0, SPEC.vocab_size, (2, 17), generator=g)
        targets = tokens[:, 1:].clone()
        targets[0, : 3 * i] = IGNORED
        found.append(Micro(tokens[:, :-1].contiguous(), targets, torch.zeros_like(targets)))
    return found


def rules_of(case: dict[str, Any]) -> list[tuple[str, Any]]:
    return [("blocks.*", parse_format(case["format"]))] if case.get("format") else []


def check(case: dict[str, Any], schedule: str, cfg: MeshConfig, mesh: Mesh) -> dict[str, Any]:
    spec = replace(SPEC, tied=bool(case.get("tied")))
    parallel = ParallelConfig(recompute=bool(case.get("recompute")), compile=case.get("compile", "off"))
    shares = [micros_of(i) for i in range(mesh.dp_size)]
    total = float(sum(m.num_counted for micros in shares for m in micros))
    alone = build_model(spec, ALONE, parallel, rules=rules_of(case))
    loss = PlainForwardBackward()(alone, CrossEntropy(), [m for micros in shares for m in micros], total)
    grads = {n: p.grad.clone() for n, p in alone.named_parameters() if p.grad is not None}
    norm = clip_gradients(alone.parameters(), 0.5)

    stages = stages_of(spec, cfg, schedule)
    assert stages is not None
    model = build_model(spec, mesh, parallel, rules=rules_of(case), stages=stages)
    pipeline = StagePipeline(model, mesh, stages, schedule)
    mine = shares[mesh.dp_rank]
    for _ in range(3 if schedule == "auto" else 2):  # buffers and connections of the first step are used again
        model.zero_grad()
        summed = mesh.sum(pipeline(model, CrossEntropy(), mine, total))
    evaluated = mesh.sum(pipeline.losses(model, CrossEntropy(), mine))
    held = {n: p for n, p in model.named_parameters() if p.requires_grad}
    got = {n: full(p.grad).clone() for n, p in held.items()}  # fails for a gradient that is None
    clipped = clip_gradients(model.parameters(), 0.5, mesh=mesh, copies=copies(model))
    differences = {n: float((got[n] - grads[n]).abs().max() / grads[n].abs().max().clamp(min=1e-12)) for n in got}
    names: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(names, differences)
    everywhere = {n: max(d.get(n, 0.0) for d in names) for n in set().union(*names)}
    return {
        "case": case,
        "schedule": schedule,
        "gradient": max(everywhere.values()),
        "missing": sorted(set(grads) - set(everywhere)),
        "norm": abs(float(clipped) / float(norm) - 1),
        "loss": abs(float(summed) / float(loss) - 1),
        "evaluated": abs(float(evaluated) / float(loss) - 1),
    }


class Rows:
    """A step's micro-batches of this share; other ones in every step."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def step(self, step: int) -> list[Micro]:
        rows = [m for share in range(4) for m in micros_of(100 * step + share)]
        return rows[self.mesh.dp_rank :: self.mesh.dp_size]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def stretch(case: dict[str, Any], folder: Path) -> list[float]:
    cfg = MeshConfig(**case["mesh"])
    mesh = open_mesh(cfg, "cpu", stages=True)
    spec = replace(SPEC, tied=True)
    stages = stages_of(spec, cfg, "1f1b")
    model = build_model(spec, mesh, ParallelConfig(), rules=rules_of(case), stages=stages)
    pipeline = None if stages is None else StagePipeline(model, mesh, stages, "1f1b")
    run = Run(model, adamw(model, lr=1e-3), mesh, RunLog(folder, main=mesh.is_main, quiet=True))
    train(run, Rows(mesh), CrossEntropy(), steps=case["steps"], schedule=constant(1e-3), log_every=1, clip=0.5,
          checkpointer=Checkpointer(folder / "checkpoints", every=1), forward_backward=pipeline)  # fmt: skip
    save_model(folder / "model", model, mesh=mesh)
    return [row["loss"] for row in run.log.history] + [row["grad_norm"] for row in run.log.history]


def main(cases: list[dict[str, Any]], folder: str | None = None) -> None:
    for case in cases:
        cfg = MeshConfig(**case["mesh"])
        mesh = open_mesh(cfg, "cpu", stages=True)
        if folder is not None:
            losses = stretch(case, Path(folder))
            if mesh.is_main:
                print("FOUND " + json.dumps(losses), flush=True)
            continue
        for schedule in case["schedules"]:
            found = check(case, schedule, cfg, mesh)
            if mesh.is_main:
                print("FOUND " + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
