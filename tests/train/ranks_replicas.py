"""Runs on any number of ranks: residuals of a checkpoint of another number of replicas keep their sum.

ranks_replicas.py FOLDER FROM TO REPLICAS

Trains three steps into FOLDER/TO where FROM is "". Else resumes FOLDER/FROM, compares the sum of the residuals with the
one that was saved beside it, and saves again into FOLDER/TO.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from ranks_golden import MaskedRows
from ranks_reducers import fit, new_run, total_residuals
from safetensors.torch import load_file, save_file

from shoestring.mesh import MeshConfig, open_mesh
from shoestring.state.checkpointer import Checkpointer

torch.set_num_threads(1)
folder, source, target = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
mesh = open_mesh(MeshConfig(replica=int(sys.argv[4]), timeout_s=120), "cpu")
run = new_run(mesh)
reducer = fit(run, "topk:0.05", 3, folder / (source or target))
totals = total_residuals(reducer)
if source:
    for name, saved in load_file(folder / f"{source}.safetensors").items():
        assert float(saved.norm()) > 0
        assert (totals[name] - saved).norm() <= 1e-6 * saved.norm(), name
    Checkpointer(folder / target, every=1).save(
        run, {"reducer": reducer, "data": MaskedRows(mesh), "objective": MaskedRows(mesh)}
    )
if mesh.is_main:
    save_file(totals, folder / f"{target}.safetensors")
    print("DONE")
