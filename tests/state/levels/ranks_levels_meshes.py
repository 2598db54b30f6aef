"""Runs on every rank of test_levels_ranks.py: memory of dp 2 x tp 2 is resumed on 3, 2 and 1 ranks, and back.

One start of four processes; each phase forms a process group of its own from the first ranks. All ranks are one host
here, with arenas of the number of ranks that wrote them. After every resumption the run takes a step and saves.
"""

from __future__ import annotations

import os
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
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig

SETTINGS = CheckpointConfig(checkpoint="auto", levels=LevelsConfig(mttf_hours=1e-9, budget=0.5))
PHASES = [(2, 2), (3, 1), (2, 1), (1, 1), (1, 2), (2, 2)]  # dp, tp
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
os.environ["SHOESTRING_MEMORY_DIR"] = str(folder / "memory")
(folder / "memory").mkdir(exist_ok=True)
HostPlace.start_agent = lambda self: None  # type: ignore[method-assign]


def life(dp: int, tp: int, number: int) -> None:
    mesh = open_mesh(MeshConfig(dp=dp, tp=tp), "cpu")
    first = number == 0
    model, optimizer = build(mesh, perturb=not first)
    said: list[str] = []
    run: Any = SimpleNamespace(
        trained_only=False, step=0, model=model, optimizer=optimizer, mesh=mesh, log=SimpleNamespace(say=said.append)
    )
    parts = {"part": Part(mesh, fresh=not first)}
    parts["part"].residual = torch.zeros(2)  # of one size at every coordinate
    saver = Checkpointer(folder / "run" / "checkpoints", SETTINGS)
    assert saver.resume(run, parts) != first, said
    if not first:
        expected = torch.load(folder / "state.pt", weights_only=True)
        got = everything(model, optimizer)
        assert run.step == expected.pop("step"), said
        assert got.keys() == expected.keys()
        for name, t in expected.items():
            assert got[name].dtype == t.dtype and torch.equal(got[name], t), (dp, tp, name)
        assert "memory" in said[-1], said
        for group in optimizer.param_groups:
            assert group["lr"] == 0.01, group["lr"]
    for _ in range(4):
        fixed_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        run.step += 1
        saver.save_next()
        saver.after_step(run, parts)
        if saver.memory is not None:
            saver.memory.touch_now()
            saver.memory.wait()
    whole = everything(model, optimizer)
    if mesh.is_main:
        torch.save({**whole, "step": run.step}, folder / "state.pt")
    mesh.barrier()
    saver.let_go()
    mesh.barrier()
    if mesh.is_main:
        print(f"dp {dp} x tp {tp}: step {run.step}", flush=True)
    mesh.close()


for number, (dp, tp) in enumerate(PHASES):
    world = dp * tp
    done = folder / f"done-{number}"
    if rank < world:
        os.environ.update(WORLD_SIZE=str(world), RANK=str(rank))
        if world > 1:
            meeting = f"file://{folder}/meeting-{number}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
        life(dp, tp, number)
        if rank == 0:
            done.touch()
    while not done.exists():  # the test ends this process where another one fails
        time.sleep(0.02)
