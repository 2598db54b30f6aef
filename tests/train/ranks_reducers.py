"""Runs on four ranks: compressed reducers over real links, against the same exchange inside one process.

ranks_reducers.py FOLDER [all]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_golden import BASE, MaskedRows
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoestring.errors import UserError
from shoestring.formats.linear import local
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant
from shoestring.train.reducers import buckets, demo
from shoestring.train.reducers.build import ReducerConfig, build_reducer
from shoestring.train.reducers.compressed import CompressedReducer, choose
from shoestring.train.reducers.feedback import Compression
from shoestring.train.reducers.hooks import compress_ddp, compress_fsdp
from shoestring.train.reducers.methods import parse_compressor
from shoestring.train.reducers.network import measure_pairs
from shoestring.train.reducers.rounds import emulate
from shoestring.train.step import Hook, Run
from shoestring.train.trainer import train

FOUR, TWO_BY_TWO = MeshConfig(replica=4, timeout_s=120), MeshConfig(replica=2, dp=2, timeout_s=120)


def new_run(mesh: Mesh, folder: Path | None = None, method: str = "") -> Run:
    with torch.device("meta"):
        model = Decoder(ModelSpec(**{**BASE, "qk_norm": True}))
    parallelize(model, mesh, ParallelConfig())
    materialize(model, "cpu")
    init_weights(model, seed=3)
    optimizer: Any = demo.sgd(model, lr=1e-2, weight_decay=0.1) if method == "demo" else adamw(model, lr=1e-2)
    return Run(model, optimizer, mesh, RunLog(folder, main=mesh.is_main, quiet=True))


def fit(run: Run, method: str, steps: int, checkpoints: Path | None = None) -> CompressedReducer:
    """`method` may name a selector, or overlap: topk:0.05+hyper."""
    name, _, extra = method.partition("+")
    chosen_by: Any = {"overlap": True} if extra == "overlap" else {"selector": extra or "uniform"}
    reducer = CompressedReducer(run.model, run.mesh, parse_compressor(name), clip=0.5, compare_every=2, **chosen_by)
    kept = None if checkpoints is None else Checkpointer(checkpoints, every=3)
    rows, rate = MaskedRows(run.mesh), constant(1e-2)
    train(run, rows, CrossEntropy(), steps=steps, schedule=rate, log_every=1, reducer=reducer, checkpointer=kept)
    return reducer


def weights(run: Run) -> list[Tensor]:
    return [local(p).detach().clone() for p in run.model.parameters()]


def random_gradients(run: Run, replica: int, step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(100 * step + replica)
    return {n: torch.randn(p.shape, generator=g) for n, p in run.model.named_parameters()}


def check_against_emulation(mesh: Mesh, method: str) -> None:
    """Sums and residuals equal, bit for bit, those of four replicas in one process; and so does the traffic."""
    run = new_run(mesh)
    reducer = CompressedReducer(run.model, mesh, parse_compressor(method), seed=5)
    chosen = choose(parse_compressor(method), run.model, reducer.params)
    inside = [Compression(chosen, rank=r, size=4, seed=5) for r in range(4)]
    for step in range(2):
        for p, g in zip(run.model.parameters(), random_gradients(run, mesh.rank, step).values(), strict=True):
            p.grad = g.clone()
        before = reducer.link.sent_bytes
        reducer(run.model)
        sent = reducer.link.sent_bytes - before
        want = emulate([c.exchange(random_gradients(run, r, step), step) for r, c in enumerate(inside)])[mesh.rank]
        for name, p in run.model.named_parameters():
            assert p.grad is not None and torch.equal(p.grad, want[name]), (method, name)
        for name, residual in inside[mesh.rank].residuals.items():
            assert torch.equal(residual, local(reducer.residuals[name])), (method, name)
        assert sent == reducer.compression.sent_bytes({n: p.shape for n, p in reducer.params.items()})


def check_resume(mesh: Mesh, folder: Path, method: str) -> None:
    whole = new_run(mesh, folder / f"whole-{method}", method)
    fit(whole, method, 6)
    part = new_run(mesh, folder / method, method)
    fit(part, method, 3, folder / f"{method}-checkpoints")
    again = new_run(mesh, folder / method, method)
    fit(again, method, 6, folder / f"{method}-checkpoints")
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True)), method
    if mesh.is_main:
        lines = [[{k: row[k] for k in ("step", "loss", "sent_mb")} for row in r.log.history] for r in (whole, again)]
        assert lines[0] == lines[1] and len(lines[0]) == 6


def total_residuals(reducer: CompressedReducer) -> dict[str, Tensor]:
    """Over all replicas, whole."""
    sums = {}
    for name, residual in reducer.residuals.items():
        full = residual.full_tensor() if hasattr(residual, "full_tensor") else residual
        sums[name] = full.double().clone()
        dist.all_reduce(sums[name], group=reducer.link.group)
    return sums


def check_other_mesh(four: Mesh, two: Mesh, folder: Path) -> None:
    """Residuals of four replicas go to two that are cut over dp, and back, and keep their sum."""
    saved = total_residuals(fit(new_run(four), "topk:0.05", 3, folder / "moved"))
    run = new_run(two)
    moved = fit(run, "topk:0.05", 3, folder / "moved")
    for name, total in total_residuals(moved).items():
        assert (total - saved[name]).norm() <= 1e-6 * saved[name].norm() + 1e-9, name
    Checkpointer(folder / "back", every=1).save(
        run, {"reducer": moved, "data": MaskedRows(two), "objective": MaskedRows(two)}
    )
    back = total_residuals(fit(new_run(four), "topk:0.05", 3, folder / "back"))
    assert all((back[n] - saved[n]).norm() <= 1e-6 * saved[n].norm() + 1e-9 for n in saved)


def check_other_method(four: Mesh, two: Mesh, folder: Path) -> None:
    """A method without error feedback adds the residuals of the one before to the next sum, once; on any mesh."""
    saved = total_residuals(fit(new_run(four), "topk:0.05", 3, folder / "changed"))
    for mesh in (four, two):
        run, said = new_run(mesh), []
        reducer = CompressedReducer(run.model, mesh, parse_compressor("plain"), say=said.append)
        parts = {"reducer": reducer, "data": MaskedRows(mesh), "objective": CrossEntropy(), "private@skipped": Hook()}
        assert Checkpointer(folder / "changed", every=0).resume(run, parts) and reducer.steps == 3
        assert f"plain has no error feedback for {len(saved)} tensors" in said[-1], said
        kept = reducer.state_dict()["residual"][f"private@replica{reducer.link.rank}"]
        assert kept.keys() == saved.keys()  # in a checkpoint that is made before the next step
        for total in (saved, {}):
            for p in run.model.parameters():
                p.grad = torch.ones_like(p)
            reducer(run.model)
            for name, p in run.model.named_parameters():
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                want = reducer.link.size + total.get(name, torch.zeros(()))
                assert grad is not None and torch.allclose(grad.double(), want.double().expand_as(grad), atol=1e-5)
        assert "residual" not in reducer.state_dict()
    assert any(total.abs().max() > 1e-3 for total in saved.values())


def check_errors(mesh: Mesh) -> None:
    def error_of(change: Any) -> str:
        run = new_run(mesh)
        reducer = CompressedReducer(run.model, mesh, parse_compressor("int8"), compare_every=1)
        for p, g in zip(run.model.parameters(), random_gradients(run, mesh.rank, 0).values(), strict=True):
            p.grad = g
        before = weights(run)
        if mesh.rank == 2:
            change(run.model, reducer)
            before = weights(run)
        try:
            reducer(run.model)
        except UserError as error:
            assert all(torch.equal(a, b) for a, b in zip(before, weights(run), strict=True))
            return str(error)
        return ""

    def spoil(value: float) -> Any:
        return lambda model, reducer: model.blocks[1].mlp.up.weight.grad[3, 3:5].fill_(value)

    def nudge(model: Any, reducer: Any) -> None:
        with torch.no_grad():
            model.blocks[0].mlp.up.weight[0, 0] += 1e-6

    for value in (float("nan"), float("inf")):
        said = error_of(spoil(value))
        assert "blocks.1.mlp.up.weight on rank 2 is NaN or infinite" in said, said
    said = error_of(nudge)
    assert "blocks.0.mlp.up.weight differs between replica 0 and replica 2" in said, said
    said = error_of(lambda model, reducer: setattr(reducer, "steps", 7))
    assert "rank 2 is at step 7 and rank 0 at step 0" in said, said
    said = error_of(lambda model, reducer: setattr(reducer, "compressor", parse_compressor("int4")))
    assert "rank 2 has another model, reducer" in said, said


def check_overlap(mesh: Mesh) -> None:
    """Buckets that are sent during the backward pass of the last micro-batch give the same sums and residuals."""
    assert buckets.BUCKET_BYTES == 4 << 20
    buckets.BUCKET_BYTES = 10_000  # several of them
    one, other = new_run(mesh), new_run(mesh)
    plain = CompressedReducer(one.model, mesh, parse_compressor("int8"))
    early = CompressedReducer(other.model, mesh, parse_compressor("int8"), overlap=True)
    assert early.buckets is not None and len(early.buckets.buckets) > 3
    for step in range(2):
        micros = [m for i in range(2) for m in MaskedRows(mesh).step(2 * step + i)]
        for run, reducer in ((one, plain), (other, early)):
            run.model.zero_grad()
            reducer.expect(len(micros))
            for micro in micros:
                (CrossEntropy()(run.model, micro) / 100).backward()
            if run is other:
                assert len(early.buckets.sent) == len(early.buckets.buckets)  # before the reducer is called
            reducer(run.model)
        for (name, a), b in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad), name
        assert all(torch.equal(local(plain.residuals[n]), local(early.residuals[n])) for n in plain.residuals)
    # A gradient that is far larger than usual is bounded before it is encoded, on every rank by its own history.
    before = float(early.running.norms[early.running.place["embed.weight"]])
    clipped = early.running("embed.weight", torch.full((4,), 1e6))
    assert abs(float(clipped.norm()) - 3 * before) < 1e-3 * before
    buckets.BUCKET_BYTES = 4 << 20


def gradients_of(model: Any, mesh: Mesh) -> None:
    for micro in MaskedRows(mesh).step(0):
        (CrossEntropy()(model, micro) / 100).backward()


def check_ddp_hook(mesh: Mesh) -> None:
    """DDP with our hook has the gradients of the trainer's reducer, divided by the replicas."""
    ours, theirs = new_run(mesh).model, new_run(mesh).model
    reducer = CompressedReducer(ours, mesh, parse_compressor("int8"))
    ddp = DistributedDataParallel(theirs, process_group=mesh.group("replica"))
    kept = compress_ddp(ddp, "int8", clip_ratio=0.0)
    for _ in range(3):  # the third has the buckets that DDP rebuilds
        gradients_of(ours, mesh)
        reducer(ours)
        for micro, last in zip(MaskedRows(mesh).step(0), (True,), strict=True):
            assert last
            (CrossEntropy()(ddp, micro) / 100).backward()
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad / 4, b.grad), name
        ours.zero_grad()
        theirs.zero_grad()
    assert torch.equal(kept.compression.residuals["embed.weight"], local(reducer.residuals["embed.weight"]))


def check_fsdp_hook(mesh: Mesh) -> None:
    """FSDP2 with our hook has the gradients of the trainer's reducer; a 2-D mesh is refused."""
    ours, theirs = new_run(mesh).model, new_run(mesh).model
    reducer = CompressedReducer(ours, mesh, parse_compressor("topk:0.1"))
    group = mesh.group("replica")
    assert group is not None
    compress_fsdp(theirs, "topk:0.1", group, average=False, clip_ratio=0.0)
    for _ in range(2):
        gradients_of(ours, mesh)
        reducer(ours)
        gradients_of(theirs, mesh)
        for (name, a), b in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert torch.equal(local(a.grad), local(b[1].grad)), name
        ours.zero_grad()
        theirs.zero_grad()
    assert mesh.device_mesh is not None
    hybrid = fully_shard(torch.nn.Linear(8, 8), mesh=mesh.device_mesh["replica", "dp"])
    try:
        compress_fsdp(hybrid, "int8", group)
    except UserError as error:
        assert "2-D mesh (HSDP)" in str(error)
    else:
        raise AssertionError("a 2-D mesh was taken")


def check_measuring(mesh: Mesh) -> None:
    """Every pair has a latency and a bandwidth, and all ranks make the same choice."""
    pairs = measure_pairs(mesh)
    assert all((pairs.latency_ms[i][j] > 0) == (i != j) == (pairs.mbit[i][j] > 0) for i in range(4) for j in range(4))
    said: list[str] = []
    reducer = build_reducer(
        ReducerConfig("auto", allow="lossy"), new_run(mesh).model, mesh, clip=1.0, seed=0, say=said.append
    )
    assert isinstance(reducer, CompressedReducer)
    names = [None] * 4
    dist.all_gather_object(names, reducer.compressor.name)
    assert len(set(names)) == 1 and f"takes {names[0]}: the link has" in said[0], (names, said)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    four, two = open_mesh(FOUR, "cpu"), open_mesh(TWO_BY_TWO, "cpu")
    more = ("plain", "terngrad", "arc-topk:0.05") if "all" in sys.argv else ()
    for method in ("int8", "topk:0.05", "powersgd:2", "demo", *more):
        check_against_emulation(four, method)
    for method in ("powersgd:2", "topk:0.05+hyper", *(("int8+overlap",) if more else ())):
        check_resume(four, folder, method)
    check_other_mesh(four, two, folder)
    check_other_method(four, two, folder)
    check_errors(four)
    check_overlap(four)
    check_ddp_hook(four)
    check_fsdp_hook(two)
    check_measuring(four)
    if os.environ["RANK"] == "0":
        print("DONE")


if __name__ == "__main__":
    main()
