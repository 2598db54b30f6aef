"""Runs on every rank of test_levels_ranks.py: save on dp 2 in memory; resume on tp 2, on one rank, without one host.

All in one start of the processes, because starting them costs more than everything they do. The ranks are two hosts of
their own names, on one machine.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
import torch.distributed as dist
from ranks_checkpoint import Part, build, everything, fixed_grads

from shoestring.errors import UserError
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.host_folder import arena_files, host_folder, list_copies
from shoestring.state.levels.pace import NUM_MEASURED
from shoestring.state.levels.peers import PIECE_BYTES, RateLimit, holders
from shoestring.state.levels.place import HostPlace
from shoestring.state.levels.restore import choose, offers_here
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig

SETTINGS = CheckpointConfig(checkpoint="auto", levels=LevelsConfig(peer="replica", mttf_hours=1e-9, budget=0.5))
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
os.environ["SHOESTRING_MEMORY_DIR"] = str(folder / "memory")
HostPlace.start_agent = lambda self: None  # type: ignore[method-assign]
run_folder = folder / "run"


def make(mesh: Any, perturb: bool) -> tuple[Any, dict[str, Any], list[str]]:
    model, optimizer = build(mesh, perturb)
    said: list[str] = []
    run = SimpleNamespace(
        trained_only=False, step=0, model=model, optimizer=optimizer, mesh=mesh, log=SimpleNamespace(say=said.append)
    )
    return run, {"part": Part(mesh, fresh=perturb)}, said


def saver_on(host: str, settings: CheckpointConfig = SETTINGS) -> Checkpointer:
    os.environ["SHOESTRING_HOST"] = host
    return Checkpointer(run_folder / "checkpoints", settings)


def train(run: Any, parts: dict[str, Any], saver: Checkpointer, steps: int, levels: tuple[str, ...]) -> None:
    while run.step < steps:
        fixed_grads(run.model)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.step += 1
        if saver.memory is not None:
            saver.save_next(levels)
        saver.after_step(run, parts)
        if saver.memory is not None:
            saver.memory.touch_now()
            saver.memory.wait()
        while saver.measured.peers.rounds is not None and saver.measured.peers.rounds.busy():
            time.sleep(0.005)
        run.mesh.barrier()


def same(run: Any, expected: dict[str, torch.Tensor]) -> None:
    got = everything(run.model, run.optimizer)
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t), name


# -- save on dp 2, each rank a host of its own ----------------------------------------------------------------
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
mesh = open_mesh(MeshConfig(dp=2), "cpu")
(folder / "memory").mkdir(exist_ok=True)
run, parts, said = make(mesh, perturb=False)
torch.manual_seed(100 + rank)
host = "ab"[rank]
saver = saver_on(host)
assert not saver.resume(run, parts)
train(run, parts, saver, 5, ("memory", "peer"))
history = {run.step: everything(run.model, run.optimizer)}
assert saver.measured.peers.rounds is not None and saver.measured.peers.rounds.succeeded, (
    saver.measured.peers.rounds.error
)
train(run, parts, saver, 6, ("memory",))
assert saver.memory is not None and saver.memory.num_slots == 4  # of which one is spare
history[6] = everything(run.model, run.optimizer)
saver.let_go()
mesh.barrier()
mine = sorted(p.name for p in arena_files(host_folder(run_folder)))
assert mine == [f"rank-0000{rank}-of-00002.arena", f"replica-0000{1 - rank}-of-00002.arena"], mine
assert sorted({c.copy.step for c in list_copies(host_folder(run_folder))[0]}) == [3, 4, 5, 6]
assert holders(["a", "b"]) == [1, 0] and holders(["a", "a", "b"]) == [2, 2, 0]
limit = RateLimit(None)
limit.measured(PIECE_BYTES, 1.0)  # the peer made room for its slot
limit.measured(PIECE_BYTES, 0.01)
assert limit.rate == PIECE_BYTES / 0.02

# -- a copy to peers that is due while the last one is on its way starts when that one is over, without a new save ----
first_folder, run_folder = run_folder, folder / "late"
run, parts, said = make(mesh, perturb=False)
saver = saver_on(host)
assert not saver.resume(run, parts)
train(run, parts, saver, 5, ("memory", "peer"))
peers, sends = saver.measured.peers.rounds, threading.Event()
assert peers is not None and saver.measured.pace.plan is not None and saver.measured.peers.replicating is not None
peers.wait()  # step 5 must not be the one that is held
mesh.barrier()
exchange, started = peers._round, []


def slow(link: Any, copy: Any, kept: Any) -> bool:
    started.append(copy.copy.step)
    assert sends.wait(60)
    return exchange(link, copy, kept)


def one_step(levels: tuple[str, ...] = ()) -> None:
    run.step += 1
    if levels:
        saver.save_next(levels)
    else:
        assert saver.measured.pace.next_step is not None
        saver.measured.pace.next_step += 1000  # no save in between
    saver.after_step(run, parts)
    saver.wait_copied()
    assert saver.memory is not None
    saver.memory.wait()
    mesh.barrier()


peers._round = slow
one_step(("memory", "peer"))  # step 6 starts to travel
one_step(("memory", "peer"))  # step 7 is due, too
look = saver.measured.peers.look_at
assert look is not None
# A meeting after one of the first saves that only takes note of step 7 does not put its copy off to the next save.
with (
    mock.patch.object(saver.measured.pace, "saves", NUM_MEASURED),
    mock.patch.object(type(saver.measured.pace.plan), "period", 1000),
):
    saver.measured.pace.next_step = run.step = 8
    saver.after_step(run, parts)
assert saver.memory is not None and not saver.memory.has_pending
assert (saver.measured.pace.last_of["memory"], saver.measured.peers.look_at) == (7, look)
while saver.measured.peers.look_at == look:
    one_step()
assert saver.measured.peers.look_at is not None and saver.measured.peers.look_at > look  # one look was in vain
assert saver.measured.peers.replicating[1][0] == 6 and peers.busy()
sends.set()
peers.wait()
mesh.barrier()
while saver.measured.peers.replicating[1][0] == 6:
    assert run.step < 5000
    one_step()
peers.wait()
mesh.barrier()
assert started == [6, 7] and peers.succeeded and saver.measured.peers.look_at is None
assert saver.measured.pace.last_of["peer"] == 7
found = {c.copy.step for c in list_copies(host_folder(run_folder))[0] if c.copy.rank != rank}
assert found == {6, 7}, found
saver.let_go()
mesh.barrier()
run_folder = first_folder

# -- all hosts alive, another mesh: the newest version, and each rank reads what it needs from both hosts -------
tp_mesh = open_mesh(MeshConfig(tp=2), "cpu")
run, parts, said = make(tp_mesh, perturb=True)
other = saver_on(host)
if rank:  # at dp 0, tp 1: what is private there was not saved
    parts["part"].residual = torch.full((3,), -1.0)
assert other.resume(run, parts) and run.step == 6, said
same(run, history[6])
assert "resumed from" in said[-1] and "memory" in said[-1], said
other.let_go()
mesh.barrier()

# -- host b is wiped: its version 6 is gone, 5 is on its peer -------------------------------------------------
if rank == 1:
    shutil.rmtree(host_folder(run_folder))
mesh.barrier()
run, parts, said = make(mesh, perturb=True)
other = saver_on(host)
assert other.resume(run, parts) and run.step == 5, said
same(run, history[5])
assert parts["part"].loaded["private"]["cursor"] == rank
assert any("step 6 is not complete" in line for line in said), said
assert ("peer memory" in said[-1]) == (rank == 1), said
other.let_go()
mesh.barrier()

# -- one rank alone, on the host that survived ----------------------------------------------------------------
if rank == 0:
    from shoestring.mesh import Mesh

    alone = Mesh(0, 1, torch.device("cpu"))
    run, parts, said = make(alone, perturb=True)
    other = saver_on("a")
    assert other.resume(run, parts) and run.step == 5, said
    same(run, history[5])
    other.let_go()
    offers = offers_here(host_folder(run_folder), [run_folder / "checkpoints"], "a")[0]
    older = choose(offers, before=5)
    assert older is not None and older.step == 4 and choose(offers, before=4) is None
mesh.barrier()

# -- a replica that is damaged: refused with its name, on every rank --------------------------------------------
if rank == 0:
    replica = next(p for p in arena_files(host_folder(run_folder)) if p.name.startswith("replica"))
    from shoestring.host.arena import Arena

    arena = Arena.open(replica)
    for version in arena.versions():
        arena.slot_view(version.slot)[3] ^= 1
    arena.close()
mesh.barrier()
run, parts, said = make(mesh, perturb=True)
other = saver_on(host)
try:
    other.resume(run, parts)
    raise AssertionError("a damaged version was loaded")
except UserError as error:
    assert "replica-00001-of-00002.arena is damaged" in str(error), error
other.let_go()
mesh.barrier()

# -- tmpfs of host b is full when its pages are wanted: both hosts begin again on disk ----------------------------
run_folder = folder / "full"
allocate = os.posix_fallocate


def full(fd: int, begin: int, size: int) -> None:
    if rank == 1 and Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(folder / "memory"):
        raise OSError(errno.ENOSPC, "No space left on device")
    allocate(fd, begin, size)


os.posix_fallocate = full
run, parts, said = make(mesh, perturb=False)
saver = saver_on(host)
assert not saver.resume(run, parts)
while run.step < 8:
    fixed_grads(run.model)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1
    saver.save_next(("memory", "peer"))
    saver.after_step(run, parts)
    if saver.memory is not None:
        saver.memory.wait_touched()
        saver.memory.wait()
    if saver.measured.peers.rounds is not None:
        saver.measured.peers.rounds.wait()
    mesh.barrier()
saver.let_go()
why = "No space left on device" if rank else "tmpfs is full on another rank"
assert [why in line for line in said if "instead" in line] == [True], said
assert not arena_files(host_folder(run_folder))
kept = {p.name for p in arena_files(host_folder(run_folder, saver.place.disk_base))}
assert kept == {f"rank-0000{rank}-of-00002.arena", f"replica-0000{1 - rank}-of-00002.arena"}, kept
expected = everything(run.model, run.optimizer)
run, parts, said = make(mesh, perturb=True)
other = saver_on(host)
assert other.resume(run, parts) and run.step == 8, said
same(run, expected)
other.let_go()
mesh.barrier()
mesh.close()
print("levels done", flush=True)
