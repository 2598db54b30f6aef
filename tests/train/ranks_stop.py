"""One rank of two gets SIGTERM in its fifth step, long before the first line of metrics; prints where the run stopped.

ranks_stop.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from ranks_golden import BASE, MaskedRows

from shoestring.errors import Interrupted
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant
from shoestring.train.step import Hook, Run
from shoestring.train.trainer import train


class Preempted(Hook):
    def after_step(self, run: Run) -> None:
        if run.step == 5 and run.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path) -> None:
    mesh = open_mesh(MeshConfig(dp=2), "cpu")
    with torch.device("meta"):
        model = Decoder(ModelSpec(**BASE))
    parallelize(model, mesh, ParallelConfig())
    materialize(model, "cpu")
    init_weights(model, seed=3)
    run = Run(model, adamw(model, lr=1e-2), mesh, RunLog(folder, main=mesh.is_main, quiet=True))
    checkpointer = Checkpointer(folder / "checkpoints", every=0)
    try:
        train(run, MaskedRows(mesh), CrossEntropy(), steps=60, schedule=constant(1e-2), log_every=50,
              checkpointer=checkpointer, hooks=[Preempted()])  # fmt: skip
    except Interrupted as stopped:
        if mesh.is_main:
            print(f"RESULT {run.step} {len(run.log.history)} {stopped}")
    mesh.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
