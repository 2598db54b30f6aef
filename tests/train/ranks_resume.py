"""Trains to step 6 on one mesh, or resumes there on another and trains to step 12; prints losses on rank 0.

ranks_resume.py FOLDER STEPS DP TP
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ranks_golden import MaskedRows
from ranks_reducers import new_run

from shoestring.mesh import MeshConfig, open_mesh
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import constant
from shoestring.train.trainer import train


def losses(folder: Path, steps: int, dp: int, tp: int) -> list[float]:
    mesh = open_mesh(MeshConfig(dp, tp), "cpu")
    run = new_run(mesh, folder)
    checkpointer = Checkpointer(folder / "checkpoints", every=6)
    train(run, MaskedRows(mesh), CrossEntropy(), steps=steps, schedule=constant(1e-2), log_every=1,
          checkpointer=checkpointer)  # fmt: skip
    return [row["loss"] for row in run.log.history]


if __name__ == "__main__":
    result = losses(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps(result))
