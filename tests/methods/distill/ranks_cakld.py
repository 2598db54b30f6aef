"""Runs on every rank: gamma, live and cached CAKLD on a mesh; prints the numbers as JSON on rank 0.

ranks_cakld.py FOLDER DP TP
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks_golden import BASE

from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.methods.distill.cakld import CachedCakld, Cakld, teacher_confidence
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.runlog import RunLog
from shoestring.train.data import TokenData
from shoestring.train.optim import adamw
from shoestring.train.shards import TokenShards
from shoestring.train.step import Run
from shoestring.train.teacher_cache import build_cache, one_epoch
from shoestring.train.trainer import train


def make(mesh: Mesh, seed: int) -> Decoder:
    with torch.device("meta"):
        model = Decoder(ModelSpec(**BASE))  # type: ignore[arg-type]
    parallelize(model, mesh, ParallelConfig())
    materialize(model, "cpu")
    init_weights(model, seed=seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(6)  # a teacher with opinions
    return model


def numbers(folder: Path, dp: int, tp: int) -> list[float]:
    mesh = open_mesh(MeshConfig(dp, tp), "cpu")
    gen = np.random.default_rng(5)
    mask = (gen.random(8 * 16 * 3 + 1) > 0.4).astype(np.uint8)
    mask[40:90] = 0
    shards = TokenShards(gen.integers(0, 96, len(mask)).astype("<u2"), mask, "print")
    data = TokenData(shards, context=16, batch=8, micro=2, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
    teacher = make(mesh, 4)
    gamma = teacher_confidence(teacher, one_epoch(data), mesh)
    cache = build_cache(folder, teacher, one_epoch(data), num_targets=len(shards), k=7, identity={"dp": dp}, mesh=mesh)
    found = [gamma, cache.confidence, float(cache.num_filled)]
    objectives: list[Any] = [Cakld(teacher, gamma, chunk=24), CachedCakld(cache, chunk=24)]
    for objective in objectives:
        model = make(mesh, 3)
        run = Run(model, adamw(model, lr=1e-2), mesh, RunLog(None, main=mesh.is_main, quiet=True))
        train(run, data, objective, steps=3, log_every=1)
        found += [value for row in run.log.history for value in (row["loss"], row["grad_norm"])]
    return found


def main() -> None:
    result = numbers(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
