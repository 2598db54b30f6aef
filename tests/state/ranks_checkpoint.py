"""Runs on every rank of test_checkpoint_ranks.py: save on four, resume on three, two and one, fail on two.

All in one start of four processes, because starting them costs more than everything they do: each phase
forms a process group of its own from the first ranks.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shoestring.errors import UserError
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.state.boxes import check_cover, local_box
from shoestring.state.checkpoint import load_checkpoint, save_checkpoint, step_folder
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.manifest import read_manifest
from shoestring.state.optimizer import optimizer_state
from shoestring.state.storage import SafeReader, SafeWriter

# name -> (shape, dimension that tensor parallelism cuts); sizes that divide by nothing, few rows.
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "rows": ((7, 6), 0),
    "more_rows": ((5, 3), 0),
    "columns": ((7, 5), 1),
    "short": ((3, 4), 0),
    "whole": ((7,), None),
    "one": ((1, 2), None),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, (shape, _) in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.register_buffer("table", torch.arange(5, dtype=torch.int16))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self) -> Tensor:
        """Any function of the weights: elementwise, so that it works on whatever pieces a rank holds."""
        total = torch.zeros(())
        for name in SHAPES:
            w = getattr(self, name)
            w = w.to_local() if isinstance(w, DTensor) else w
            total = total + (w * w * 0.5 + w).sum()
        return total


def build(mesh: Mesh, perturb: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    if perturb:
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
        model.table.zero_()
        model.flag.fill_(False)
    if mesh.tp > 1:
        for name, (_, dim) in SHAPES.items():
            placement = Replicate() if dim is None else Shard(dim)
            w = distribute_tensor(getattr(model, name).detach(), mesh.axis("tp"), [placement])
            setattr(model, name, nn.Parameter(w))
    if mesh.dp > 1:
        fully_shard(model, mesh=mesh.axis("dp"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5 if perturb else 0.01, betas=(0.8, 0.9))


def fixed_grads(model: nn.Module) -> None:
    """The same gradient on every mesh: the weight itself. The test is about state, not about collectives."""
    for p in model.parameters():
        p.grad = p.detach().clone()


def gather(tree: dict[str, Any]) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tree.items()}


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer_state(model, optimizer)["state"]
    moments = {f"{name}/{key}": t for name, entry in state.items() for key, t in entry.items()}
    return gather({**model.state_dict(), **moments})


class Part:
    """A part of the run with a private tensor and a private value that differ on every rank."""

    def __init__(self, mesh: Mesh, fresh: bool = False) -> None:
        self.mesh, self.fresh = mesh, fresh
        self.loaded: dict[str, Any] = {}
        mark = -1 if fresh else mesh.rank
        self.residual, self.cursor = torch.full((mesh.rank % 2 + 2,), float(mark)), mark

    def state_dict(self) -> dict[str, Any]:
        private = {"residual": self.residual, "cursor": self.cursor}
        return {"epoch": -1 if self.fresh else 4, "private": private}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def save(folder: Path) -> None:
    mesh = open_mesh(MeshConfig(dp=2, tp=2), "cpu")
    model, optimizer = build(mesh)
    for _ in range(3):
        fixed_grads(model)
        optimizer.step()
    optimizer.zero_grad()
    for name, p in model.named_parameters():
        # The box of every shard is where its elements really are, and the shards tile the tensor.
        box, full = local_box(p), p.full_tensor()
        assert torch.equal(p.to_local(), full[box.slices()]), name
        boxes: list[Any] = [None] * 4
        dist.all_gather_object(boxes, box)
        check_cover(name, p.shape, sorted({b for b in boxes if b.size}))
    torch.manual_seed(100 + mesh.rank)
    run = SimpleNamespace(trained_only=False, step=3, model=model, optimizer=optimizer, mesh=mesh, log=None)
    Checkpointer(folder / "run", every=3).after_step(run, {"part": Part(mesh)})
    whole = everything(model, optimizer)
    draw = [None] * 4
    dist.all_gather_object(draw, torch.rand(3))

    # The same through DCP alone, as another trainer would.
    state = {"model": model.state_dict(), "lr": 0.25, "betas": (0.9, 0.95)}
    dcp.save(state, storage_writer=SafeWriter(folder / "native"))
    if mesh.is_main:
        manifest = read_manifest(folder / "run" / "step-00000003")
        assert manifest.world_size == 4 and len(manifest.parts) == 4
        # Replicated tensors are stored once, but not all by the same rank.
        assert len(manifest.tensors["model.whole"].boxes) == 2 and len(manifest.tensors["model.table"].boxes) == 1
        assert len({n for n in manifest.tensors if n.endswith(".residual")}) == 4
        save_checkpoint(folder / "expected", {**whole, "draws": torch.stack([d for d in draw if d is not None])})
    mesh.barrier()
    mesh.close()


def load(folder: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    mesh = open_mesh(MeshConfig(dp=world), "cpu")
    model, optimizer = build(mesh, perturb=True)
    torch.manual_seed(7)
    said: list[str] = []
    run = SimpleNamespace(
        trained_only=False, step=0, model=model, optimizer=optimizer, mesh=mesh, log=SimpleNamespace(say=said.append)
    )
    part = Part(mesh, fresh=True)
    # dp ranks of this mesh sit at tp 0; of the saved 2 x 2 mesh only dp 0 and 1 exist (ranks 0 and 2 there).
    old_rank = {0: 0, 1: 2}.get(mesh.rank)
    if old_rank is not None:
        part.residual = torch.full((old_rank % 2 + 2,), -1.0)
    assert Checkpointer(folder / "run", every=0).resume(run, {"part": part})
    assert run.step == 3 and "resumed" in said[0]
    assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer.param_groups[0]["betas"] == (0.8, 0.9)

    got = everything(model, optimizer)
    want = {n: torch.zeros_like(t) for n, t in got.items()} | {"draws": torch.zeros(4, 3)}
    load_checkpoint(folder / "expected", want)
    draws = want.pop("draws")
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t), name

    assert part.loaded["epoch"] == 4
    private = part.loaded["private"]
    if old_rank is not None:
        assert private["cursor"] == old_rank and private["residual"].tolist() == [float(old_rank)] * len(part.residual)
        assert torch.equal(torch.rand(3), draws[old_rank])
    else:
        assert private["cursor"] == -1 and private["residual"].tolist() == [-1.0] * len(part.residual)
        assert "3 entries private" in said[0]
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(torch.rand(3), expected)

    other = build(mesh, perturb=True)[0]
    state = {"model": other.state_dict(), "lr": 0.0, "betas": ()}
    dcp.load(state, storage_reader=SafeReader(folder / "native"), no_dist=world == 1)
    assert state["lr"] == 0.25 and state["betas"] == (0.9, 0.95)
    for name, t in gather(state["model"]).items():
        assert torch.equal(t, want[name]), name
    mesh.barrier()
    mesh.close()


def expect_error(words: str, action: Any) -> None:
    """Every rank must raise this; a rank that does not would hang or go on alone."""
    try:
        action()
    except UserError as e:
        assert words in str(e), str(e)
        return
    raise AssertionError("no error")


def fail(folder: Path) -> None:
    mesh = open_mesh(MeshConfig(dp=2), "cpu")
    good = {"w": torch.ones(4), "private": {"r": torch.full((2,), float(mesh.rank))}}
    save_checkpoint(step_folder(folder, 1), good, mesh, step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    # One rank cannot write its part.
    if mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    big = {"private": {"r": torch.zeros(2**18)}}
    expect_error("File too large", lambda: save_checkpoint(step_folder(folder, 2), big, mesh, step=2))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    mesh.barrier()
    assert [p.name for p in folder.iterdir()] == ["step-00000001"]

    # One rank has something that cannot be saved; one rank asks for something that is not there.
    odd: dict[str, Any] = {"w": torch.ones(2), "x": {1} if mesh.rank else 1}
    expect_error("holds a set", lambda: save_checkpoint(step_folder(folder, 2), odd, mesh))
    asked = {**good, **({"more": 1} if mesh.rank else {})}
    expect_error("missing in the checkpoint: more", lambda: load_checkpoint(step_folder(folder, 1), asked, mesh))

    # Damage that only one rank meets while it hashes its share.
    part = step_folder(folder, 1) / "part-00001.safetensors"
    if mesh.is_main:
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(bytes(data))
    mesh.barrier()
    expect_error("part-00001.safetensors is damaged", lambda: load_checkpoint(step_folder(folder, 1), good, mesh))
    mesh.barrier()
    mesh.close()


def main(folder: Path) -> None:
    phases = [(4, save, folder), (3, load, folder), (2, load, folder), (1, load, folder), (2, fail, folder / "fail")]
    rank = int(os.environ["RANK"])
    for number, (world, phase, where) in enumerate(phases):
        if rank >= world:
            continue
        os.environ["WORLD_SIZE"] = str(world)
        if world > 1:
            meeting = f"file://{folder}/meeting-{number}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
        phase(where)
        if rank == 0:
            print(f"{phase.__name__} on {world} done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
