"""Runs on every rank of test_levels_ranks.py: three hosts in one XOR set; any one is lost, and comes back computed."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
import torch.distributed as dist
from ranks_checkpoint import Part, build, everything, fixed_grads

from shoestring.mesh import MeshConfig, open_mesh
from shoestring.state.levels.checkpointer import LevelCheckpointer
from shoestring.state.levels.host_folder import arena_files, host_folder
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig

LEVELS = LevelsConfig(peer="xor", xor_set=3, mttf_hours=1e-9, budget=0.5)
SETTINGS = CheckpointConfig(checkpoint="auto", levels=LEVELS)
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
os.environ["SHOESTRING_MEMORY_DIR"] = str(folder / "memory")
os.environ["SHOESTRING_HOST"] = "abc"[rank]
(folder / "memory").mkdir(exist_ok=True)
LevelCheckpointer._start_agent = lambda self, mesh: None  # type: ignore[method-assign]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3)
mesh = open_mesh(MeshConfig(dp=3), "cpu")
own = host_folder(folder / "run")


def life(steps: int, expected: dict[str, torch.Tensor] | None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Resume, compare, and take so many steps, each with a save to memory and to the set; the state at the end."""
    model, optimizer = build(mesh, perturb=expected is not None)
    said: list[str] = []
    run: Any = SimpleNamespace(
        step=0, model=model, optimizer=optimizer, mesh=mesh, log=SimpleNamespace(say=said.append)
    )
    parts = {"part": Part(mesh, fresh=expected is not None)}
    saver = LevelCheckpointer(folder / "run" / "checkpoints", SETTINGS)
    assert saver.resume(run, parts) == (expected is not None), said
    got = everything(model, optimizer)
    for name, t in (expected or {}).items():
        assert torch.equal(got[name], t), name
    end = run.step + steps
    while run.step < end:
        fixed_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        run.step += 1
        if saver.memory is not None:
            saver.save_next(("memory", "peer"))
        saver.after_step(run, parts)
        if saver.memory is not None:
            saver.memory.touch_now()
            saver.memory.wait()
        while saver._peers is not None and saver._peers.busy():
            time.sleep(0.005)
        mesh.barrier()
    assert saver._peers is not None and saver._peers.succeeded, saver._peers.error
    saver.let_go()
    mesh.barrier()
    return everything(model, optimizer), said


state, _ = life(6, None)
assert [p.name.partition("-")[0] for p in arena_files(own)] == ["parity", "rank"]
for lost in (1, 0, 2):
    if rank == lost:
        shutil.rmtree(own)
    mesh.barrier()
    state, said = life(4, state)
    assert any(f"computed from XOR sets: the state of rank {lost}" in line for line in said), said
    assert any("resumed from" in line and "peer memory" in line for line in said) == (rank == lost), said
    assert [p.name.partition("-")[0] for p in arena_files(own)] == ["parity", "rank"]  # the computed one is dropped
mesh.close()
print("xor done", flush=True)
